"""Methods that learn from preferences and rewards: each learns, equals plain TRL, and what it writes is usable."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.methods.plain_trl import plain_losses
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    load_output,
    make_job,
    make_pairs,
    make_prompts,
    make_rated,
    make_tiny_model,
    write_rows,
)

STEPS = 6
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"lora_r": None},
    "lora": {"load_in_4bit": False},
    "qlora": {},
    "8bit": {"load_in_8bit": True},
}
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "logging_steps": 1, "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "optim": "adamw_torch", "max_seq_length": 128,
}  # fmt: skip
LENGTH = {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30}
RLHF: dict[str, Any] = {"num_generations": 4, "max_completion_length": 12, "rewards": [LENGTH]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template, whose tokenizer begins every text with a token of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=CHATML, bos=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 40)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 40)


def completed(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert outcome.result["outcome"] == "completed", outcome.result
    return outcome


def losses(outcome: Outcome) -> list[float]:
    return [float.fromhex(loss) for loss, _ in completed(outcome).steps.values()]


def measured(outcome: Outcome, name: str) -> list[float]:
    return [record["extra"][name] for record in outcome.of("metric")]


REFERENCE_FREE: dict[str, dict[str, Any]] = {
    "orpo": {"beta": 2.0}, "simpo": {"beta": 2.0, "gamma": 0.7},
}  # fmt: skip
REFERENCE_FREE_USUAL = [("simpo", "qlora")]
RLHF_USUAL = [("full", "grpo"), ("8bit", "rloo")]


def every_adapter(usual: str) -> Any:
    """Parametrize with all adapters; `make test` runs the `usual` one, `make test-all` each."""
    return pytest.mark.parametrize(
        "adapter", [name if name == usual else pytest.param(name, marks=pytest.mark.full) for name in ADAPTERS]
    )


class TestEveryAdapter:
    @every_adapter("qlora")
    def test_dpo_comes_to_prefer_what_was_chosen(
        self, adapter: str, forks: Forks, model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        config = COMMON | ADAPTERS[adapter] | {"eval_split": 0.2, "eval_steps": 3}
        done = completed(forks.run(make_job(tmp_path, model, pairs, data_format="preference", method="dpo", **config)))
        # Before the first step the model is its own reference.
        # Layers of 8 bits compute a little differently where no gradients are wanted, as for the reference.
        assert losses(done)[0] == pytest.approx(0.6931472, abs=1e-3 if adapter == "8bit" else 1e-6)
        assert measured(done, "preference_accuracy")[-1] > 0.9
        assert measured(done, "reward_margin")[-1] > 0.1
        evaluated = [record["metrics"] for record in done.of("eval")]
        assert evaluated[-1]["eval_preference_accuracy"] > 0.7
        assert done.result["metrics"]["best_eval_loss"] == min(one["eval_loss"] for one in evaluated)
        load_output(done.output, model)

    @every_adapter("lora")
    def test_kto_comes_to_prefer_what_is_desirable(
        self, adapter: str, forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        data = make_rated(tmp_path / "rated.jsonl", 40)
        config = COMMON | ADAPTERS[adapter] | {"eval_split": 0.2, "eval_steps": 3}
        done = completed(forks.run(make_job(tmp_path, model, data, data_format="rated", method="kto", **config)))
        # Before the first step the model is its own reference.
        assert losses(done)[0] == pytest.approx(0.5, abs=1e-3 if adapter == "8bit" else 1e-6)
        assert losses(done)[-1] < 0.49
        assert measured(done, "reward_desirable")[-1] > measured(done, "reward_undesirable")[-1]
        assert measured(done, "reward_margin")[-1] > 0.05 and "kl" in done.of("metric")[0]["extra"]
        evaluated = [record["metrics"] for record in done.of("eval")]
        assert evaluated[-1]["eval_reward_margin"] > 0.02
        assert done.of("config")[0]["facts"]["flops_not_counted"] == "forward passes that estimate the KL term"

    @pytest.mark.parametrize(
        ("method", "adapter"),
        [
            pytest.param(method, adapter, marks=[] if (method, adapter) in REFERENCE_FREE_USUAL else pytest.mark.full)
            for method in REFERENCE_FREE
            for adapter in ADAPTERS
        ],
    )
    def test_methods_without_a_reference_come_to_prefer_what_was_chosen(
        self, method: str, adapter: str, forks: Forks, model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        config = COMMON | ADAPTERS[adapter] | {"eval_split": 0.2, "eval_steps": 3, method: REFERENCE_FREE[method]}
        done = completed(forks.run(make_job(tmp_path, model, pairs, data_format="preference", method=method, **config)))
        assert not any("reference" in record["line"] for record in done.of("message"))
        assert losses(done)[-1] < losses(done)[0]
        assert measured(done, "preference_accuracy")[-1] > 0.7
        assert measured(done, "reward_margin")[-1] > measured(done, "reward_margin")[0]
        evaluated = [record["metrics"] for record in done.of("eval")]
        assert evaluated[-1]["eval_preference_accuracy"] > 0.7
        assert done.result["metrics"]["best_eval_loss"] == min(one["eval_loss"] for one in evaluated)
        load_output(done.output, model)

    @every_adapter("lora")
    def test_a_reward_model_gives_the_better_answer_the_higher_number_and_rewards_with_it(
        self, adapter: str, forks: Forks, model: Path, pairs: Path, prompts: Path, tmp_path: Path
    ) -> None:
        config = COMMON | ADAPTERS[adapter] | {"max_steps": 20, "learning_rate": 5e-3}
        job = make_job(tmp_path / "1", model, pairs, data_format="preference", method="reward", **config)
        done = completed(forks.run(job))
        assert measured(done, "preference_accuracy")[-1] > 0.8
        card = (done.output / "README.md").read_text()
        assert "SequenceClassification" in card and "text-classification" in card

        judge = load_output(done.output, model, "SequenceClassification", num_labels=1)
        tokenizer = AutoTokenizer.from_pretrained(str(done.output))
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]

        def score(row: dict[str, str], answer: str) -> float:
            batch = tokenizer(row["prompt"] + row[answer] + tokenizer.eos_token, return_tensors="pt")
            with torch.inference_mode():
                return float(judge(**batch).logits[0, 0])

        assert sum(score(row, "chosen") > score(row, "rejected") for row in rows) > 0.8 * len(rows)

        job = make_job(
            tmp_path / "2", model, prompts, data_format="prompt", method="rlhf", **COMMON,
            rlhf=RLHF | {"rewards": [LENGTH, {"type": "model", "model": "run_judge", "weight": 0.5}]},
        )  # fmt: skip
        base = {"name": "tiny", "path": str(model), "hub": None, "revision": None}
        judged = {"name": "run_judge", "path": str(done.output), "hub": None, "revision": None, "base": base}
        job["reward_models"] = [judged]
        rewarded = completed(forks.run(job))
        points = [record["extra"] for record in rewarded.of("metric")]
        assert [point["reward"] for point in points] == pytest.approx(
            [point["reward_length"] + 0.5 * point["reward_model"] for point in points], abs=1e-5
        )
        sample = rewarded.of("sample")[0]
        if adapter in ("full", "lora"):  # a quantised base is merged unquantised where it judges
            expected = score({"prompt": sample["prompt"], "text": sample["completion"]}, "text")
            assert sample["rewards"]["model"] == pytest.approx(expected, abs=1e-3)

    @pytest.mark.parametrize(
        ("adapter", "algorithm"),
        [
            pytest.param(adapter, algorithm, marks=[] if (adapter, algorithm) in RLHF_USUAL else pytest.mark.full)
            for adapter in ADAPTERS
            for algorithm in ("grpo", "rloo")
        ],
    )
    def test_rlhf_is_paid_more_and_more(
        self, adapter: str, algorithm: str, forks: Forks, model: Path, prompts: Path, tmp_path: Path
    ) -> None:
        learns = (adapter, algorithm) == ("full", "grpo")
        steps = 12 if learns else 4
        rate = 1e-2 if adapter == "full" else 2e-2
        evaluation = {"eval_split": 0.1, "eval_steps": steps // 2}
        config = COMMON | ADAPTERS[adapter] | {"max_steps": steps, "learning_rate": rate, **evaluation}
        job = make_job(
            tmp_path, model, prompts, data_format="prompt", method="rlhf", **config,
            rlhf=RLHF | {"algorithm": algorithm, "beta": 0.01 if adapter == "lora" else 0.0},
        )  # fmt: skip
        done = completed(forks.run(job))
        rewards = measured(done, "reward")
        assert all(0 <= reward <= 1 for reward in rewards)
        assert {"reward_std", "entropy", "completion_length", "reward_length"} <= done.of("metric")[0]["extra"].keys()
        assert ("kl" in done.of("metric")[0]["extra"]) is (adapter == "lora")
        assert {record["step"] for record in done.of("sample")} == {*range(1, steps + 1)}
        evaluated = [record["metrics"]["eval_reward"] for record in done.of("eval")]
        assert done.result["metrics"]["best_eval_reward"] == max(evaluated)
        if learns:
            assert sum(rewards[-4:]) > sum(rewards[:4])


plain = partial(plain_losses, steps=STEPS, batch_size=4)


def near_eight(completions: list[Any], **_: Any) -> list[float]:
    """The reward `LENGTH`, written anew."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    outside = [max(4 - len(text), len(text) - 8, 0) for text in texts]
    return [max(0.0, 1 - away / 30) for away in outside]


def every_pair(name: str, values: list[Any], usual: tuple[str, Any], ids: Any = str) -> Any:
    """Parametrize with the product of adapters and `values`; `make test` runs the `usual` pair alone."""
    return pytest.mark.parametrize(
        ("adapter", name),
        [
            pytest.param(
                adapter,
                value,
                id=f"{adapter}-{ids(value)}",
                marks=[] if (adapter, value) == usual else pytest.mark.full,
            )
            for adapter in ("full", "lora", "qlora")
            for value in values
        ],
    )


def texts_or_chats(usual: tuple[str, bool]) -> Any:
    """Parametrize `chat`."""
    return every_pair("chat", [False, True], usual, lambda chat: "chats" if chat else "texts")


class TestParity:
    @pytest.fixture
    def ours(self, adapter: str) -> dict[str, Any]:
        return COMMON | ADAPTERS[adapter] | ({} if adapter == "full" else {"lora_dropout": 0.0})

    @texts_or_chats(usual=("qlora", True))
    def test_losses_of_dpo_equal_plain_trls(
        self, adapter: str, chat: bool, ours: dict[str, Any], forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        data = make_pairs(tmp_path / "pairs.jsonl", 40, chat=chat)
        config = ours | {"dpo": {"beta": 0.2, "loss_type": "hinge" if chat else "sigmoid"}, "max_seq_length": 64}
        job = make_job(tmp_path, model, data, data_format="preference", method="dpo", **config)
        theirs = plain(
            "dpo", model, data, tmp_path / "plain", adapter, beta=0.2,
            loss_type=["hinge" if chat else "sigmoid"], max_length=64, precompute_ref_log_probs=True,
        )  # fmt: skip
        assert losses(forks.run(job)) == pytest.approx(theirs, rel=1e-6)

    @pytest.mark.parametrize(
        ("adapter", "method"),
        [
            pytest.param(adapter, method, marks=[] if adapter == "full" else pytest.mark.full)
            for adapter in ("full", "lora", "qlora")
            for method in REFERENCE_FREE
        ],
    )
    def test_losses_of_methods_without_a_reference_equal_plain_trls(
        self, adapter: str, method: str, ours: dict[str, Any], forks: Forks, pairs: Path, tmp_path: Path
    ) -> None:
        """Some pairs are cut. These trainers of TRL add no token at the beginning of a text."""
        model = make_tiny_model(tmp_path / "model")
        options = REFERENCE_FREE[method]
        config = ours | {method: options, "max_seq_length": 48}
        job = make_job(tmp_path, model, pairs, data_format="preference", method=method, **config)
        if method == "simpo":
            options = {"beta": options["beta"], "simpo_gamma": options["gamma"]}
        theirs = plain(method, model, pairs, tmp_path / "plain", adapter, max_length=48, **options)
        assert losses(forks.run(job)) == pytest.approx(theirs, rel=1e-5)

    @texts_or_chats(usual=("lora", False))
    def test_losses_of_kto_equal_plain_trls(
        self, adapter: str, chat: bool, ours: dict[str, Any], forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        """Of 42 rows the last micro-batch of an epoch has two, and some are cut."""
        data = make_rated(tmp_path / "rated.jsonl", 42, chat=chat)
        loss = "apo_zero_unpaired" if chat and adapter == "full" else "kto"
        options = {"beta": 0.2, "loss_type": loss, "desirable_weight": 1.2, "undesirable_weight": 0.8}
        longest = 96 if chat else 48
        config = ours | {"kto": options, "max_seq_length": longest}
        job = make_job(tmp_path, model, data, data_format="rated", method="kto", **config)
        theirs = plain(
            "kto", model, data, tmp_path / "plain", adapter, max_length=longest,
            precompute_ref_log_probs=adapter == "full", **options,
        )  # fmt: skip
        assert losses(forks.run(job)) == pytest.approx(theirs, rel=1e-6)

    @texts_or_chats(usual=("full", False))
    def test_losses_of_reward_models_equal_plain_trls(
        self, adapter: str, chat: bool, ours: dict[str, Any], forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        data = make_pairs(tmp_path / "pairs.jsonl", 40, chat=chat)
        in_trl = data
        if not chat:  # some with a margin, which TRL takes from all rows or from none
            margins = [0.5 * (number % 4) for number in range(40)]
            rows = [json.loads(line) for line in data.read_text().splitlines()]
            with_margins = [row | {"margin": margin} for row, margin in zip(rows, margins, strict=True)]
            in_trl = write_rows(tmp_path / "all.jsonl", with_margins)
            data = write_rows(
                tmp_path / "some.jsonl", [row | {"margin": row["margin"] or None} for row in with_margins]
            )
        longest = 240 if chat else 52
        config = ours | {"max_seq_length": longest}
        job = make_job(tmp_path, model, data, data_format="preference", method="reward", **config)
        theirs = plain("reward", model, in_trl, tmp_path / "plain", adapter, max_length=longest)
        # Fused layers of adapters add in another order.
        assert losses(forks.run(job)) == pytest.approx(theirs, rel=1e-6 if adapter == "full" else 3e-6)

    @every_pair("algorithm", ["grpo", "rloo"], usual=("lora", "grpo"))
    def test_losses_of_rlhf_equal_plain_trls(
        self, adapter: str, algorithm: str, ours: dict[str, Any], forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        chat = adapter == "lora"
        data = make_prompts(tmp_path / "prompts.jsonl", 40, chat=chat)
        beta = 0.05 if adapter != "qlora" else 0.0
        rlhf = RLHF | {"algorithm": algorithm, "beta": beta, "temperature": 0.9}
        job = make_job(tmp_path, model, data, data_format="prompt", method="rlhf", **ours, rlhf=rlhf)
        more = {"normalize_advantages": True} if algorithm == "rloo" else {}
        theirs = plain(
            algorithm, model, data, tmp_path / "plain", adapter, num_generations=4,
            max_completion_length=12, temperature=0.9, beta=beta, reward_funcs=[near_eight], **more,
        )  # fmt: skip
        our_losses = losses(forks.run(job))
        assert our_losses == pytest.approx(theirs, rel=1e-6, abs=1e-8 if adapter == "full" else 1e-7)
        assert any(abs(loss) > 1e-4 for loss in our_losses) or algorithm == "rloo"


class TestData:
    def test_rows_that_cannot_be_used_are_named(
        self, forks: Forks, model: Path, tmp_path: Path, refused: Callable[..., str]
    ) -> None:
        rows: list[dict[str, Any]] = [{"prompt": "p", "chosen": "a", "rejected": "b"} for _ in range(4)]
        rows[1] = {"prompt": "p", "chosen": "a"}
        rows[3] = {"prompt": "p", "chosen": 3, "rejected": "b"}
        assert refused("dpo", "preference", rows) == (
            "Rows of the training data cannot be used: line 2: field 'rejected' is missing; line 4: its text is not a "
            "string"
        )

    def test_rated_rows_that_cannot_be_used_are_named(self, refused: Callable[..., str]) -> None:
        rows: list[dict[str, Any]] = [{"prompt": "p", "completion": "c", "label": True} for _ in range(4)]
        rows[1] = {"prompt": "p", "completion": "c", "label": "true"}
        rows[2] = {"prompt": "p", "label": True}
        assert refused("kto", "rated", rows) == (
            "Rows of the training data cannot be used: line 2: its `label` is neither true nor false; line 3: field "
            "'completion' is missing"
        )

    @pytest.mark.parametrize(("label", "only", "other"), [(True, "true", "false"), (False, "false", "true")])
    def test_kto_needs_rows_of_both_labels(
        self, label: bool, only: str, other: str, refused: Callable[..., str]
    ) -> None:
        reported = refused("kto", "rated", [{"prompt": "p", "completion": "c", "label": label}] * 5)
        assert reported.startswith(f"All 5 rows of the training data have the label {only};")
        assert reported.endswith(f"so add rows with the label {other}.")

    def test_a_reward_that_compares_needs_an_answer_in_every_row(self, refused: Callable[..., str]) -> None:
        rows = [{"prompt": "p", "answer": "1"}, {"prompt": "q"}]
        reported = refused("rlhf", "prompt", rows, rlhf=RLHF | {"rewards": [{"type": "exact_match"}]})
        assert "line 2: it has no `answer`, but a reward compares with it" in reported

    def test_tools_that_the_model_would_not_see_are_refused(self, refused: Callable[..., str]) -> None:
        rows = [{"prompt": "p"}] * 3 + [{"prompt": "p", "tools": [{"name": "clock"}]}]
        assert "line 4: it has `tools`" in refused("rlhf", "prompt", rows, rlhf=RLHF)

    def test_a_reward_model_that_takes_fewer_tokens_than_are_judged_is_refused(
        self, forks: Forks, model: Path, prompts: Path, tmp_path: Path
    ) -> None:
        judge = tmp_path / "judge"
        shutil.copytree(model, judge)
        config = json.loads((judge / "config.json").read_text())
        (judge / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64, "num_labels": 1}))
        rewards = [{"type": "model", "model": "judge"}]
        job = make_job(
            tmp_path, model, prompts, data_format="prompt", method="rlhf", **COMMON, rlhf=RLHF | {"rewards": rewards}
        )
        job["reward_models"] = [{"name": "judge", "path": str(judge), "hub": None, "revision": None}]
        reported = forks.run(job).result["error"]["message"]
        assert reported.startswith(
            "The reward model judge takes at most 64 tokens, but prompt and completion may have 128"
        )

    def test_an_answer_without_a_number_is_named_where_numbers_are_compared(self, refused: Callable[..., str]) -> None:
        rows = [{"prompt": "p", "answer": "about 7"}, {"prompt": "q", "answer": "unknown"}]
        reported = refused("rlhf", "prompt", rows, rlhf=RLHF | {"rewards": [{"type": "numeric_match"}]})
        assert "line 2: its `answer` 'unknown' does not contain a number" in reported and "line 1" not in reported

    def test_fewer_prompts_than_a_step_takes_are_refused(self, refused: Callable[..., str]) -> None:
        reported = refused("rlhf", "prompt", [{"prompt": "p"}], rlhf=RLHF)
        assert reported.startswith("A step takes 2 prompts, but there are only 1: lower `batch_size`")

    def test_prompts_and_completions_have_to_fit_into_the_model(self, refused: Callable[..., str]) -> None:
        rlhf = RLHF | {"max_completion_length": 256}
        assert "lower it" in refused("rlhf", "prompt", [{"prompt": "p"}] * 9, rlhf=rlhf, max_seq_length=None)

    def test_what_is_left_out_is_reported(self, forks: Forks, model: Path, tmp_path: Path) -> None:
        data = make_pairs(tmp_path / "pairs.jsonl", 40)
        config = COMMON | {"max_seq_length": 45, "max_steps": 1}
        job = make_job(tmp_path / "1", model, data, data_format="preference", method="reward", **config)
        done = completed(forks.run(job))
        (remark,) = (line for record in done.of("message") if "left out" in (line := record["line"]))
        assert remark.endswith(" of 40 rows were left out: one of the two is longer than 45 tokens.")
        assert done.of("config")[0]["facts"]["rows"] == 40 - int(remark.split()[0])
        (skipped,) = done.of("skipped_rows")
        assert (skipped["data"], skipped["count"], skipped["total"]) == ("training", int(remark.split()[0]), 40)
        assert skipped["reason"] == remark and skipped["examples"] == sorted(skipped["examples"])
        assert len(skipped["examples"]) == min(skipped["count"], 10) and set(skipped["examples"]) <= set(range(40))

    @pytest.mark.parametrize(
        "method", ["dpo", *(pytest.param(one, marks=pytest.mark.full) for one in ("kto", "reward"))]
    )
    def test_a_second_run_on_the_same_rows_does_not_tokenise(
        self, method: str, forks: Forks, model: Path, pairs: Path, tmp_path: Path
    ) -> None:
        data = make_rated(tmp_path / "rated.jsonl", 40) if method == "kto" else pairs
        data_format = "rated" if method == "kto" else "preference"
        cache = tmp_path / "cache"
        cache.mkdir(mode=0o700)

        def run(name: str, **more: Any) -> Outcome:
            config = COMMON | {"max_steps": 2, "eval_split": 0.2, "eval_steps": 1} | more
            job = make_job(tmp_path / name, model, data, data_format=data_format, method=method, **config)
            job["dataset"]["sha256"] = "a" * 64
            job["token_cache"] = {"folder": str(cache), "limit_bytes": 2**20}
            return completed(forks.run(job))

        first, second, other = run("1"), run("2"), run("3", max_seq_length=100)
        reported = [one.of("config")[0]["facts"]["tokenized"] for one in (first, second, other)]
        assert reported == ["now", "cached", "now"]
        assert second.steps == first.steps
        assert any("its tokens are reused" in record["line"] for record in second.of("message"))

    @pytest.fixture
    def refused(self, forks: Forks, model: Path, tmp_path: Path) -> Callable[..., str]:
        """What a run on these rows is refused with."""

        def run(method: str, data_format: str, rows: list[Any], **more: Any) -> str:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            config = COMMON | {"max_seq_length": 200} | more
            done = forks.run(make_job(tmp_path, model, path, data_format=data_format, method=method, **config))
            assert done.result["outcome"] == "failed", done.result
            message: str = done.result["error"]["message"]
            return message

        return run
