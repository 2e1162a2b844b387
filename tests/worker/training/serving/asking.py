"""Tiny models with adapters, the answers of plain `generate` to compare with, and questions to an engine."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from anneal.contracts.attempt.answers import AnswerError, AnswerPiece, Question
from worker.training.data.chat_template import ensure_template
from worker.training.model.loader import keep_evaluation_neutral
from worker.training.serving.engine import AnswerEngine

NEW_TOKENS = 12
PROMPTS = ["what is row 7", "a", "the model learns from rows of text and tells what it saw", "rows of", "it saw two"]
QLORA = {
    "quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
}


def load_model(folder: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    keep_evaluation_neutral(model)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ensure_template(tokenizer)
    return tokenizer


def make_adapter(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """Write an adapter with random values of which all matter."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(str(folder))
    return folder


def plain_answers(model: Any, tokenizer: Any, prompts: Iterable[str], new_tokens: int = NEW_TOKENS) -> list[str]:
    """Return the answer of `generate` to each prompt alone."""
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        texts.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def adapted_answers(
    base: Path, adapter: Path, prompts: Iterable[str], new_tokens: int = NEW_TOKENS, **options: Any
) -> list[str]:
    """Return the answers of plain transformers and peft."""
    model = PeftModel.from_pretrained(load_model(base, **options), str(adapter)).eval()
    return plain_answers(model, load_tokenizer(base), prompts, new_tokens)


def new_question(number: int | str, prompt: str | list[int] | None = None, **options: Any) -> Question:
    """A question that is greedy unless it says otherwise."""
    defaults: dict[str, Any] = {"created_at": 0.0, "max_tokens": NEW_TOKENS, "temperature": 0.0}
    return Question.model_validate(defaults | {"id": str(number), "prompt": prompt} | options)


class Answers:
    """Pieces of an engine by question and choice."""

    def __init__(self, engine: AnswerEngine) -> None:
        self.engine = engine
        self.pieces: dict[str, list[AnswerPiece]] = defaultdict(list)

    def step(self) -> list[AnswerPiece]:
        pieces = self.engine.step()
        for piece in pieces:
            self.pieces[piece.question_id].append(piece)
        return pieces

    def finish(self, most_steps: int = 2_000) -> "Answers":
        for _ in range(most_steps):
            if self.engine.open_questions == 0:
                return self
            self.step()
        raise AssertionError(f"{self.engine.open_questions} questions are open after {most_steps} steps")

    def text(self, number: int | str, choice: int = 0) -> str:
        """Text of a choice, which has ended once, after all of its pieces."""
        pieces = [piece for piece in self.pieces[str(number)] if piece.choice == choice]
        errors = [piece.error.message for piece in pieces if piece.error]
        assert errors == [], errors
        assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        return "".join(piece.text for piece in pieces)

    def error(self, number: int | str) -> AnswerError:
        """Error that ended a question."""
        last = self.pieces[str(number)][-1]
        assert last.error is not None and [piece.error for piece in self.pieces[str(number)][:-1] if piece.error] == []
        return last.error


def ask(
    engine: AnswerEngine, questions: Sequence[Question], folders: dict[str, Path] | None = None, every: int = 0
) -> Answers:
    """Ask questions, the next one after `every` steps, and return their answers."""
    answers = Answers(engine)
    for question in questions:
        engine.submit(question, (folders or {}).get(question.adapter or ""))
        for _ in range(every):
            answers.step()
    return answers.finish()


def scripted_model(tokenizer: Any, start: int, text: str) -> Any:
    """A model that writes `text` and ends, whatever its prompt of `start` tokens says: a token for each position."""
    script = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    positions = start + len(script)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_layer=1, n_head=1, n_embd=positions, n_positions=positions,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.transformer.ln_f.weight.fill_(1)
        for at, token in enumerate(script):
            model.lm_head.weight[token, start - 1 + at] = 1
    return model
