"""C16: answers of the engine, to one client and to sixteen at a time, beside bare `generate` of transformers.

Both use the same Llama of 37 million parameters with random weights, in one process that alternates. A client sends a
prompt of 64 tokens and gets 64 tokens, greedy; the sixteen come at once. The engine also converts every token to text.
Sixteen clients of four adapters are compared with `generate` of peft with one adapter.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ratios import Lane, Ratio, Turns
from tests.worker.training.serving.asking import make_adapter

BLOCKS, PROMPT_TOKENS, NEW_TOKENS, CLIENTS = 7, 64, 64, 16
VOCABULARY, HIDDEN, LAYERS = 8192, 512, 8
FIRST_TOKEN, ONE_CLIENT, ALL_CLIENTS = 1.2, 0.9, 4.0
"""Goals: seconds to the first token, and tokens a second, as multiples of those of `generate`."""
GENERATE, ADAPTED, ENGINE = "generate", "generate, adapter", "engine"


def main(scale: float = 1.0) -> bool:
    """Print medians and ratios; return True if the goals are reached."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as place:
        model, tokenizer = _make_model(Path(place) / "model")
        adapters = {
            f"adapter {number}": make_adapter(Path(place) / "model", Path(place) / f"adapter_{number}", number)
            for number in range(4)
        }
        turns = Turns("C16", max(round(BLOCKS * scale), 1))
        turns.take(_lanes(model, tokenizer, adapters))
    for name in turns.seconds:
        turns.show(name)
    rates = {
        "first token": turns.ratio(f"{ENGINE}, first token", f"{GENERATE}, first token"),
        "tokens a second, one client": turns.ratio(GENERATE, f"{ENGINE}, one client"),
        f"tokens a second, {CLIENTS} clients": _times(CLIENTS, turns.ratio(GENERATE, f"{ENGINE}, all clients")),
        "… of 4 adapters": _times(CLIENTS, turns.ratio(ADAPTED, f"{ENGINE}, all clients, 4 adapters")),
    }
    for name, ratio in rates.items():
        print(f"C16 {name} of {ENGINE} / {GENERATE} {ratio}")
    first_token, single, many, _ = rates.values()
    return first_token.median <= FIRST_TOKEN and single.median >= ONE_CLIENT and many.median >= ALL_CLIENTS


def _times(factor: int, ratio: Ratio) -> Ratio:
    return Ratio([factor * block for block in ratio.blocks])


def _make_model(folder: Path) -> tuple[Any, Any]:
    """Write a model with a tokenizer of texts of this repository, and return both as loaded."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    root = Path(__file__).parents[1]
    bpe.train([str(path) for path in sorted((root / "docs").rglob("*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def _lanes(model: Any, tokenizer: Any, adapters: dict[str, Path]) -> dict[str, Lane]:
    import torch
    from peft import PeftModel

    from anneal.contracts.attempt.answers import Question
    from worker.training.serving.engine import AnswerEngine

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(300, VOCABULARY - 300, (CLIENTS, PROMPT_TOKENS), generator=generator).tolist()
    plain = AnswerEngine(model, tokenizer)
    # Adapters are added to the model that they are loaded for.
    folder = model.config._name_or_path
    adapted = AnswerEngine(type(model).from_pretrained(folder), tokenizer)
    peft_model = PeftModel.from_pretrained(type(model).from_pretrained(folder), str(adapters["adapter 0"])).eval()
    numbers = itertools.count()

    def generate(network: Any, new_tokens: int) -> int:
        ids = torch.tensor(prompts[:1])
        written = network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return int(written.shape[1]) - PROMPT_TOKENS

    def answer(engine: AnswerEngine, clients: int, new_tokens: int, names: list[str | None]) -> int:
        for client in range(clients):
            adapter = names[client % len(names)]
            question = Question(
                id=str(next(numbers)), created_at=0, prompt=prompts[client], max_tokens=new_tokens, temperature=0,
                adapter=adapter,
            )  # fmt: skip
            engine.submit(question, adapters.get(adapter or ""))
        tokens = 0
        while engine.open_questions:
            tokens += sum(piece.tokens for piece in engine.step())
        return tokens

    def check(expected: int) -> Callable[[int], None]:
        def compare(tokens: int) -> None:
            if tokens != expected:
                raise SystemExit(f"C16: {tokens} tokens instead of {expected}: an answer has ended early.")

        return compare

    of_all, names = CLIENTS * NEW_TOKENS, list(adapters)
    return {
        f"{GENERATE}, first token": Lane(lambda: generate(model, 1), 5, check=check(1)),
        f"{ENGINE}, first token": Lane(lambda: answer(plain, 1, 1, [None]), 5, check=check(1)),
        GENERATE: Lane(lambda: generate(model, NEW_TOKENS), 3, check=check(NEW_TOKENS)),
        f"{ENGINE}, one client": Lane(lambda: answer(plain, 1, NEW_TOKENS, [None]), 3, check=check(NEW_TOKENS)),
        f"{ENGINE}, all clients": Lane(lambda: answer(plain, CLIENTS, NEW_TOKENS, [None]), 1, check=check(of_all)),
        ADAPTED: Lane(lambda: generate(peft_model, NEW_TOKENS), 3, check=check(NEW_TOKENS)),
        f"{ENGINE}, all clients, 4 adapters": Lane(
            lambda: answer(adapted, CLIENTS, NEW_TOKENS, list(names)), 1, check=check(of_all)
        ),
    }
