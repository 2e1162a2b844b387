"""Answers are those of plain transformers and peft, whatever is answered beside them."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MistralConfig,
    Phi3Config,
)

from anneal.contracts.attempt.answers import AnswerPiece, Question
from tests.worker.training.serving.asking import (
    NEW_TOKENS,
    PROMPTS,
    QLORA,
    Answers,
    adapted_answers,
    ask,
    load_model,
    load_tokenizer,
    make_adapter,
    new_question,
    plain_answers,
)
from tests.worker.training.tiny import make_tiny_model
from worker.training.serving import engine as engine_module
from worker.training.serving import prompts
from worker.training.serving.engine import AnswerEngine, EngineLimits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden=64, layers=2)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return load_tokenizer(base)


@pytest.fixture(scope="module")
def expected(base: Path, tokenizer: Any) -> list[str]:
    """Answers of the base to `PROMPTS`."""
    return plain_answers(load_model(base), tokenizer, PROMPTS)


def new_engine(base: Path, limits: EngineLimits | None = None, **options: Any) -> AnswerEngine:
    return AnswerEngine(load_model(base, **options), load_tokenizer(base), limits)


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "whole_head": {"modules_to_save": ["lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [40, 41]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    folders = {name: make_adapter(base, root / name, at, **ADAPTERS[name]) for at, name in enumerate(ADAPTERS)}
    return folders | {"lora_2": make_adapter(base, root / "lora_2", 7)}


@pytest.mark.parametrize(
    ("names", "loading"),
    [
        (["lora", "rslora", "lora_2", "dora", "whole_head", "embeddings"], {}),
        (["lora", "rslora", "lora_2"], QLORA),
    ],
    ids=["several", "qlora"],
)
def test_greedy_answers_of_adapters_beside_each_other_are_those_of_transformers_and_peft_alone(
    names: list[str], loading: dict[str, Any], base: Path, adapters: dict[str, Path], tokenizer: Any
) -> None:
    engine = new_engine(base, **loading)
    questions = [
        new_question(f"{name} {at}", prompt, adapter=name)
        for at, prompt in enumerate(PROMPTS)
        for name in [None, *names]
    ]
    answers = ask(engine, questions, adapters, every=1)
    different = set()
    for name in [None, *names]:
        plain = (
            adapted_answers(base, adapters[name], PROMPTS, **loading)
            if name
            else plain_answers(load_model(base, **loading), tokenizer, PROMPTS)
        )
        assert [answers.text(f"{name} {at}") for at in range(len(PROMPTS))] == plain, name
        different.add(tuple(plain))
    assert len(different) == len(names) + 1


def test_model_with_an_adapter_answers_as_in_peft_and_takes_no_other(base: Path, adapters: dict[str, Path]) -> None:
    model = PeftModel.from_pretrained(load_model(base), str(adapters["rows"]))
    questions = [new_question(at, text) for at, text in enumerate(PROMPTS)]
    answers = ask(
        AnswerEngine(model, load_tokenizer(base)), [*questions, new_question("other", "a", adapter="lora")], adapters
    )
    assert [answers.text(at) for at in range(len(PROMPTS))] == adapted_answers(base, adapters["rows"], PROMPTS)
    assert answers.error("other").code == "unusable_model"
    alone = ask(new_engine(base), [new_question("rows", "a", adapter="rows")], adapters).error("rows")
    assert alone.code == "unusable_model" and "single tokens" in alone.message


def test_lone_answer_of_a_4_bit_base_in_16_bits_is_that_of_transformers_and_peft(
    base: Path, adapters: dict[str, Path]
) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    plain = adapted_answers(base, adapters["lora"], PROMPTS, quantization_config=config)
    engine = new_engine(base, quantization_config=config)
    for at, text in enumerate(PROMPTS):
        assert ask(engine, [new_question(at, text, adapter="lora")], adapters).text(at) == plain[at]


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip
MIXED_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sliding windows": (MistralConfig, {**SIZES, "sliding_window": 6}),
    "some sliding windows": (Gemma3TextConfig, {**SIZES, **MIXED_LAYERS}),
    "sinks and experts": (GptOssConfig, {**SIZES, **MIXED_LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "learned positions": (GPT2Config, {"n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.3}),
    "no positions": (BloomConfig, {"n_layer": 2, "n_head": 2, "hidden_size": 32, "initializer_range": 0.3}),
    "positions that change with the length": (
        Phi3Config,
        {
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "a state": (Lfm2Config, {**SIZES, "layer_types": ["conv", "full_attention"]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_answers_of_other_architectures_are_those_of_transformers_alone(kind: str, tokenizer: Any) -> None:
    config, fields = ARCHITECTURES[kind]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer), **fields, **ends)).eval()
    plain = plain_answers(model, tokenizer, PROMPTS)
    engine = AnswerEngine(model, tokenizer, EngineLimits(prefill_tokens=8))
    answers = ask(engine, [new_question(at, text) for at, text in enumerate(PROMPTS)], every=2)
    assert [answers.text(at) for at in range(len(PROMPTS))] == plain
    assert len(set(plain)) > 2


def test_answers_go_on_while_a_long_prompt_is_read_in_parts(base: Path, tokenizer: Any) -> None:
    long = " ".join(PROMPTS * 4)
    engine = new_engine(base, EngineLimits(prefill_tokens=4))
    answers = Answers(engine)
    engine.submit(new_question("short", "a"), None)
    answers.step()
    engine.submit(new_question("long", long), None)
    for _ in range(NEW_TOKENS - 1):
        answers.step()
    assert answers.pieces["short"][-1].finish_reason == "length" and "long" not in answers.pieces
    plain = plain_answers(load_model(base), tokenizer, ["a", long])
    assert [answers.finish().text(name) for name in ("short", "long")] == plain


def test_answers_go_on_while_many_prompts_are_converted_to_tokens(
    base: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_READING_SECONDS", 0.0)  # each prompt takes all of it
    engine = new_engine(base)
    answers = Answers(engine)
    engine.submit(new_question("begun", "a"), None)
    answers.step()
    for number in range(4):
        engine.submit(new_question(number, "word " * 2000), None)
    engine.cancel("0")
    for number in range(1, 4):
        assert [piece.question_id for piece in answers.step() if piece.error] == [str(number)]
    assert answers.finish().text("begun") == plain_answers(load_model(base), tokenizer, ["a"])[0]


def test_questions_beyond_the_rows_wait(base: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(base, EngineLimits(rows=2))
    shapes = shapes_of_passes(engine, monkeypatch)
    answers = ask(engine, [new_question(at, text) for at, text in enumerate(PROMPTS)])
    assert [answers.text(at) for at in range(len(PROMPTS))] == expected
    assert max(rows for rows, _ in shapes) == 2


def shapes_of_passes(engine: AnswerEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Numbers of rows and tokens of the forward passes that an engine computes from here on."""
    shapes: list[tuple[int, int]] = []
    model = engine._adapters.model
    forward = model.forward

    def record(**inputs: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", record)
    return shapes


class TestMemory:
    def test_youngest_questions_wait_while_the_memory_is_too_small_for_all(
        self, base: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = ["a", "the", "it", "rows", "a"]
        plain = plain_answers(load_model(base), tokenizer, prompts, new_tokens=90)
        engine = new_engine(base, EngineLimits(cache_tokens=266))
        shapes = shapes_of_passes(engine, monkeypatch)
        answers = ask(engine, [new_question(at, text, max_tokens=90) for at, text in enumerate(prompts)])
        assert [answers.text(at) for at in range(len(prompts))] == plain
        assert 2 <= max(rows for rows, _ in shapes) < len(prompts)
        assert max(tokens for _, tokens in shapes) > 60, "no answer was read again with its prompt"

    def test_batches_of_several_adapters_share_a_memory_that_is_too_small_for_all(
        self, base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names, prompts = ["dora", "lora"], ["a", "the"]
        engine = new_engine(base, EngineLimits(cache_tokens=266))
        shapes = shapes_of_passes(engine, monkeypatch)
        questions = [
            new_question(f"{name} {at}", text, adapter=name, max_tokens=90)
            for at, text in enumerate(prompts)
            for name in names
        ]
        answers = ask(engine, questions, adapters)
        for name in names:
            plain = adapted_answers(base, adapters[name], prompts, new_tokens=90)
            assert [answers.text(f"{name} {at}") for at in range(len(prompts))] == plain, name
        assert max(tokens for _, tokens in shapes) > 60, "no answer was read again with its prompt"

    def test_answers_are_complete_after_a_device_had_no_memory_for_a_pass(
        self, base: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = new_engine(base)
        failures = fail_passes(engine, monkeypatch, lambda rows, count: rows > 2 and count == 0)
        answers = ask(engine, [new_question(at, text) for at, text in enumerate(PROMPTS)])
        assert [answers.text(at) for at in range(len(PROMPTS))] == expected
        assert len(failures) == 1

    def test_question_that_never_fits_ends_with_an_error_and_others_are_answered(
        self, base: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = new_engine(base)
        with monkeypatch.context() as patch:
            fail_passes(engine, patch, lambda rows, count: True)
            assert ask(engine, [new_question(1, PROMPTS[0])]).error(1).code == "out_of_memory"
        assert ask(engine, [new_question(2, PROMPTS[1])]).text(2) == expected[1]

    def test_prompt_beyond_the_memory_ends_with_an_error_and_answer_ends_at_it(self, base: Path) -> None:
        engine = new_engine(base, EngineLimits(cache_tokens=60))
        long = [5] * 60
        answers = ask(engine, [new_question(1, long), new_question(2, [5] * 20, max_tokens=None)])
        assert answers.error(1).code == "context_length_exceeded" and "memory" in answers.error(1).message
        assert answers.pieces["2"][-1].finish_reason == "length"
        assert sum(piece.tokens for piece in answers.pieces["2"]) == 40


def fail_passes(engine: AnswerEngine, monkeypatch: pytest.MonkeyPatch, fails: Any) -> list[int]:
    """Let passes run out of memory in their last layer if `fails` says so for their rows and the failures so far."""
    failures: list[int] = []
    layer = engine._adapters.model.model.layers[-1].mlp
    forward = layer.forward

    def fail(states: torch.Tensor) -> torch.Tensor:
        if fails(len(states), len(failures)):
            failures.append(len(states))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        result: torch.Tensor = forward(states)
        return result

    monkeypatch.setattr(layer, "forward", fail)
    return failures


class TestSampling:
    def test_answer_with_a_seed_is_the_same_alone_and_beside_others(self, base: Path) -> None:
        options = {"temperature": 1.3, "top_p": 0.9, "seed": 5}
        alone = ask(new_engine(base), [new_question(1, PROMPTS[2], **options)]).text(1)
        others = [new_question(f"other {at}", text, temperature=1.0) for at, text in enumerate(PROMPTS)]
        beside = ask(new_engine(base), [*others, new_question(1, PROMPTS[2], **options)], every=1)
        assert beside.text(1) == alone
        small = EngineLimits(cache_tokens=200)
        assert ask(new_engine(base, small), [*others, new_question(1, PROMPTS[2], **options)]).text(1) == alone

    def test_choices_and_seeds_differ_and_repeat(self, base: Path) -> None:
        engine = new_engine(base)
        options = {"temperature": 1.0, "n": 3}
        questions = [new_question(f"{seed} {at}", "a", seed=seed, **options) for seed in (1, 2) for at in (1, 2)]
        answers = ask(
            engine, [*questions, new_question("none 1", "a", **options), new_question("none 2", "a", **options)]
        )
        texts = {name: tuple(answers.text(name, choice) for choice in range(3)) for name in answers.pieces}
        assert texts["1 1"] == texts["1 2"] and texts["2 1"] == texts["2 2"]
        different = {texts[name] for name in ("1 1", "2 1", "none 1", "none 2")}
        assert len(different) == 4 and all(len(set(choices)) == 3 for choices in different)

    def test_tokens_have_the_frequencies_of_their_probabilities(self, base: Path, tokenizer: Any) -> None:
        ids = tokenizer("a", return_tensors="pt")["input_ids"]
        model = load_model(base)
        with torch.no_grad():
            model.lm_head.weight *= 8
            logits = model(ids).logits[0, -1].double()
        engine = AnswerEngine(model, tokenizer, EngineLimits(rows=64))
        options = {"max_tokens": 1, "n": 128}
        questions = [new_question(at, "a", seed=at, temperature=0.7, top_p=0.8, **options) for at in range(16)]
        answers = ask(engine, questions)
        counts = Counter(answers.text(at, choice) for at in range(16) for choice in range(128))
        probabilities, tokens = torch.softmax(logits / 0.7, dim=-1).sort(descending=True)
        likely = int((probabilities.cumsum(0) < 0.8).sum()) + 1
        frequencies: dict[str, float] = defaultdict(float)
        for token, probability in zip(tokens[:likely].tolist(), probabilities[:likely].tolist(), strict=True):
            text = tokenizer.decode([token], skip_special_tokens=True)
            frequencies[text] += probability / float(probabilities[:likely].sum())
        assert counts.keys() <= frequencies.keys() and len(counts) > 2
        for text, frequency in frequencies.items():
            assert counts[text] / 2048 == pytest.approx(frequency, abs=0.05)

    def test_choices_share_the_pass_over_their_prompt(
        self, base: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = new_engine(base)
        shapes = shapes_of_passes(engine, monkeypatch)
        answers = ask(engine, [new_question(1, PROMPTS[2], n=4)])
        assert [answers.text(1, choice) for choice in range(4)] == [expected[2]] * 4
        assert [rows for rows, _ in shapes] == [1] + [4] * (NEW_TOKENS - 1)
        assert [piece.prompt_tokens for piece in answers.pieces["1"]].count(None) == len(answers.pieces["1"]) - 1


class TestEnds:
    def test_answer_ends_before_a_stop_text_of_which_no_part_is_sent(self, base: Path, expected: list[str]) -> None:
        engine = new_engine(base)
        for at, whole in enumerate(expected):
            stop = whole[3:7]
            answers = ask(engine, [new_question(at, PROMPTS[at], stop=["never in it", stop])])
            assert answers.text(at) == whole[: whole.index(stop)]
            last = answers.pieces[str(at)][-1]
            assert last.finish_reason == "stop" and last.error is None

    def test_answer_ends_at_tokens_of_the_model_and_at_special_tokens_among_its_stop_texts(
        self, base: Path, tokenizer: Any
    ) -> None:
        ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        model = load_model(base)
        written = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
        special = load_tokenizer(base)
        special.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(written[2])]})
        stop = str(special.convert_ids_to_tokens(written[2]))
        count = written.index(written[2]) + 1
        answers = ask(AnswerEngine(model, special), [new_question(1, ids[0].tolist(), stop=[stop])])
        assert answers.pieces["1"][-1].finish_reason == "stop"
        assert sum(piece.tokens for piece in answers.pieces["1"]) == count
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, written[2]]
        answers = ask(AnswerEngine(model, tokenizer), [new_question(1, ids[0].tolist())])
        assert answers.pieces["1"][-1].finish_reason == "stop"
        assert sum(piece.tokens for piece in answers.pieces["1"]) == count

    def test_tokens_that_the_model_suppresses_are_left_out_as_in_generate(
        self, base: Path, tokenizer: Any, expected: list[str]
    ) -> None:
        model = load_model(base)
        model.generation_config.suppress_tokens = tokenizer("".join(expected))["input_ids"]
        plain = plain_answers(model, tokenizer, PROMPTS)
        answers = ask(AnswerEngine(model, tokenizer), [new_question(at, text) for at, text in enumerate(PROMPTS)])
        assert [answers.text(at) for at in range(len(PROMPTS))] == plain
        assert not set(plain) & set(expected)

    def test_answer_without_a_limit_fills_the_context_and_longer_prompts_end_with_an_error(self, base: Path) -> None:
        engine = new_engine(base)
        answers = ask(
            engine,
            [
                new_question("short", [5] * 200, max_tokens=None),
                new_question("limited", [5] * 250, max_tokens=1_000),
                new_question("longest", [5] * 255, max_tokens=None),
                new_question("too long", [5] * 256, max_tokens=1),
            ],
        )
        counts = {name: sum(piece.tokens for piece in answers.pieces[name]) for name in ("short", "limited", "longest")}
        assert counts == {"short": 56, "limited": 6, "longest": 1}
        assert all(answers.pieces[name][-1].finish_reason == "length" for name in counts)
        assert answers.error("too long").code == "context_length_exceeded"

    def test_cancelled_question_leaves_its_place_and_has_no_further_piece(
        self, base: Path, expected: list[str]
    ) -> None:
        engine = new_engine(base, EngineLimits(rows=2))
        answers = Answers(engine)
        for at, text in enumerate(PROMPTS):
            engine.submit(new_question(at, text), None)
        for _ in range(3):
            answers.step()
        before = len(answers.pieces["0"])
        for name in ("0", "3", "unknown"):
            engine.cancel(name)
        assert engine.open_questions == 3
        answers.finish()
        assert len(answers.pieces["0"]) == before and "3" not in answers.pieces
        assert [answers.text(at) for at in (1, 2, 4)] == [expected[at] for at in (1, 2, 4)]


class TestErrors:
    """A question that fails ends with an error, and the others are answered."""

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"prompt": [5, 1_000_000]}, "token ids"),
            ({"prompt": [-1]}, "token ids"),
            ({"prompt": []}, "no tokens"),
            ({"prompt": ""}, "no tokens"),
            ({"messages": []}, "no messages"),
            ({"messages": [{"content": "who"}]}, "role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ],
    )
    def test_question_that_cannot_be_read_ends_with_an_error(
        self, fields: dict[str, Any], word: str, base: Path, expected: list[str]
    ) -> None:
        answers = ask(new_engine(base), [new_question("bad", **fields), new_question("good", PROMPTS[0])])
        assert answers.error("bad").code == "invalid_prompt" and word in answers.error("bad").message
        assert answers.text("good") == expected[0]

    def test_tools_that_the_template_leaves_out_are_an_error(self, base: Path, tokenizer: Any) -> None:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        chat = [{"role": "user", "content": "what"}]
        questions = [new_question("tools", messages=chat, tools=tools), new_question("none", messages=chat)]
        answers = ask(new_engine(base), questions)
        with_tools, without = (answers.pieces[name][0].prompt_tokens or 0 for name in ("tools", "none"))
        assert with_tools > without + len("look")
        simple = load_tokenizer(base)
        simple.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        answers = ask(AnswerEngine(load_model(base), simple), questions)
        assert answers.error("tools").code == "tools_not_supported"
        assert answers.text("none") == plain_answers(load_model(base), tokenizer, ["what"])[0]

    def test_adapter_that_cannot_be_loaded_is_an_error_with_the_reason(
        self, base: Path, expected: list[str], tmp_path: Path
    ) -> None:
        other = make_tiny_model(tmp_path / "other", hidden=32)
        folders = {
            "other modules": make_adapter(base, tmp_path / "modules", 1, target_modules=["q_proj"]),
            "missing": tmp_path / "missing",
            "other size": make_adapter(other, tmp_path / "of_other", 1),
            "changed base": make_adapter(base, tmp_path / "changed", 1),
            "damaged": make_adapter(base, tmp_path / "damaged", 1),
        }
        path = folders["other modules"] / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ["nothing"]}))
        (folders["changed base"] / "initial_adapter.safetensors").write_bytes(b"")
        (folders["damaged"] / "adapter_model.safetensors").write_bytes(b"damaged")
        good = make_adapter(base, tmp_path / "good", 1)
        questions = [new_question(name, PROMPTS[0], adapter=name) for name in [*folders, "good"]]
        answers = ask(new_engine(base), [*questions, new_question("base", PROMPTS[0])], {**folders, "good": good})
        for name in folders:
            assert answers.error(name).code == "unusable_model", name
        assert "size" in answers.error("other size").message and "nothing" in answers.error("other modules").message
        assert answers.text("base") == expected[0]
        assert answers.text("good") == adapted_answers(base, good, PROMPTS[:1])[0]

    def test_model_that_computes_nan_is_an_error_of_the_rows_that_it_is_in(
        self, base: Path, expected: list[str], tmp_path: Path
    ) -> None:
        broken = make_adapter(base, tmp_path / "broken", 1)
        model = load_model(base)
        engine = AnswerEngine(model, load_tokenizer(base))
        answers = Answers(engine)
        engine.submit(new_question("good", PROMPTS[0]), None)
        engine.submit(new_question("broken", PROMPTS[1], adapter="broken"), broken)
        answers.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(torch.nan)
        answers.finish()
        assert answers.error("broken").code == "unusable_model" and "NaN" in answers.error("broken").message
        assert answers.text("good") == expected[0]


class TestAdapters:
    def test_more_adapters_than_places_are_answered_by_turns(
        self, base: Path, adapters: dict[str, Path], expected: list[str]
    ) -> None:
        engine = new_engine(base, EngineLimits(adapters=1))
        names = ["lora", "lora_2", "dora", "lora", None, "lora_2"]
        answers = ask(engine, [new_question(at, PROMPTS[0], adapter=name) for at, name in enumerate(names)], adapters)
        plain = {name: adapted_answers(base, adapters[name], PROMPTS[:1])[0] for name in names if name}
        assert [answers.text(at) for at in range(len(names))] == [plain.get(name or "", expected[0]) for name in names]
        assert len(engine._adapters._loaded) == 1

    def test_tokenizer_in_the_folder_of_an_adapter_renders_its_chats(
        self, base: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        folder = make_adapter(base, tmp_path / "adapter", 3)
        own = load_tokenizer(base)
        own.chat_template = "{% for message in messages %}<<{{ message['content'] }}>>{% endfor %}"
        own.save_pretrained(folder)
        chat = [{"role": "user", "content": "what is row 7"}]
        answers = ask(new_engine(base), [new_question(1, messages=chat, adapter="own")], {"own": folder})
        assert answers.text(1) == adapted_answers(base, folder, ["<<what is row 7>>"])[0]
        count = len(tokenizer("<<what is row 7>>")["input_ids"])
        assert answers.pieces["1"][0].prompt_tokens == count

    @pytest.mark.parametrize(
        ("template", "code", "says"),
        [
            (
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                "invalid_prompt",
                "takes more than 0.2 s",
            ),
            ("{{ 'word ' * 2000 }}", "context_length_exceeded", "makes 10,000 characters"),
        ],
        ids=["slow", "long"],
    )
    def test_chat_template_of_an_adapter_that_takes_too_much_costs_no_other_question(
        self, template: str, code: str, says: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        expected: list[str],
    ) -> None:  # fmt: skip
        monkeypatch.setattr(prompts, "_MOST_SECONDS", 0.2)
        monkeypatch.setattr(prompts, "_MOST_CHARACTERS", 9_999)
        folder, own = make_adapter(base, tmp_path / "adapter", 3), load_tokenizer(base)
        # As it can be written so that the short chat, with which it is checked before a training, costs nothing.
        own.chat_template = "{% if messages | length > 2 %}" + template + "{% endif %}"
        own.save_pretrained(folder)
        chat = [{"role": "user", "content": "a"}] * 3
        questions = [new_question("chat", messages=chat, adapter="own"), new_question("text", PROMPTS[0])]
        answers = ask(new_engine(base), questions, {"own": folder})
        assert answers.error("chat").code == code and says in answers.error("chat").message
        assert answers.text("text") == expected[0]


def test_chat_has_the_answer_to_its_rendered_text(base: Path, tokenizer: Any) -> None:
    chat = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "what is row 7"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "<|assistant|>" in rendered
    answers = ask(new_engine(base), [new_question(1, messages=chat)])
    as_system = [{**chat[0], "role": "system"}, chat[1]]
    rendered = tokenizer.apply_chat_template(as_system, tokenize=False, add_generation_prompt=True)
    assert answers.text(1) == plain_answers(load_model(base), tokenizer, [rendered])[0]


def test_piece_and_question_are_the_same_after_json() -> None:
    piece = AnswerPiece(question_id="q", text="é", tokens=1, prompt_tokens=3, finish_reason="stop")
    question = new_question(1, [1, 2], temperature=1, seed=-3, stop=["\n"])
    assert AnswerPiece.model_validate_json(piece.model_dump_json()) == piece
    assert Question.model_validate_json(question.model_dump_json()) == question


def test_question_has_either_messages_or_a_prompt() -> None:
    for fields in ({}, {"prompt": "a", "messages": []}):
        with pytest.raises(ValueError, match="either"):
            new_question(1, **fields)
