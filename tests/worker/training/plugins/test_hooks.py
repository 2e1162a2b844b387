"""Parts of a training that an operator has installed: each does its part, and what is none is refused by name."""

import json
import math
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from anneal.contracts.plugins import PLUGINS
from anneal.contracts.rewards import PluginReward
from anneal.contracts.training_config.fields import TrainingConfig
from tests.jobs import make_spec
from tests.plugin import install
from tests.worker.training.tiny import Forks, Outcome, make_job, make_prompts
from worker.presence.registration import installed_plugins
from worker.training.failures import TrainingFailure
from worker.training.plugins import hooks
from worker.training.plugins.callbacks import PluginCallbacks
from worker.training.plugins.checkpoint_engines import restore_replica, store_replica
from worker.training.ranks import Ranks
from worker.wire.reporter import Reporter

STEPS = 8
CONFIG: dict[str, Any] = {
    "method": "full", "max_seq_length": 64, "max_steps": STEPS, "save_steps": 4, "batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "save_total_limit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def forks(forks: Forks, site: Path) -> Forks:
    """Training processes that have the package beside the worker's own."""
    return forks.beside(site)


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


def completed(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, (outcome.records[-1], outcome.stderr[-3000:])
    assert outcome.result["outcome"] == "completed", outcome.result
    return outcome


def rates(outcome: Outcome) -> list[float]:
    return [record["learning_rate"] for record in outcome.of("metric")]


class TestARunMadeOfPlugins:
    """Everything between the file and the checkpoint by plugins, once through and once resumed."""

    @pytest.fixture(scope="class")
    def extra(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return {
            "data_source": {"type": "repeated", "times": 2},
            "model_factory": {"type": "quiet-head", "scale": 0.0},
            "optimizer": {"type": "slow-sign", "memory": 0.8},
            "scheduler": {"type": "stairs", "height": 0.5},
            "checkpoint_engine": {"type": "second-folder", "root": str(tmp_path_factory.mktemp("copies"))},
            "tokenizer": {"type": "lower-case"},
            "collator": {"type": "late-labels", "first": 4},
            "callbacks": [{"type": "tally", "save_at": 2}],
        }

    @pytest.fixture(scope="class")
    def done(
        self, forks: Forks, tiny_model: Path, chats: Path, extra: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> Outcome:
        folder = tmp_path_factory.mktemp("run_made")
        requests = [("set_learning_rate", {"learning_rate": 0.1}), ("extend", {"max_steps": 20})]
        actions = [{"id": f"act_{name}", "action": name, "parameters": of, "step": 3} for name, of in requests]
        job = make_job(folder, tiny_model, chats, run_id=folder.name, extra=extra, chat_template="loud", **CONFIG)
        return completed(forks.run(job | {"replayed_actions": actions}))

    def test_what_would_change_rates_that_a_plugin_makes_is_refused_and_training_goes_on(self, done: Outcome) -> None:
        answers = done.of("action")
        assert [(one["action"], one["status"]) for one in answers] == [
            ("set_learning_rate", "refused"), ("extend", "refused"),
        ]  # fmt: skip
        assert all("optimizer or scheduler is a plugin" in one["message"] for one in answers)
        assert done.result["step"] == STEPS

    def test_every_configured_plugin_was_used(self, done: Outcome, extra: Any) -> None:
        (config,) = done.of("config")
        assert config["facts"]["rows"] == 80  # forty, twice
        # A head of zeros gives every token the same chance.
        vocabulary = json.loads((done.output / "config.json").read_text())["vocab_size"]
        assert float.fromhex(done.steps[1][0]) == pytest.approx(math.log(vocabulary), rel=1e-5)
        assert rates(done) == pytest.approx([1e-3] * 2 + [5e-4] * 2 + [2.5e-4] * 2 + [1.25e-4] * 2, rel=1e-6)
        state = torch.load(done.folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
        assert {"average"} == {name for one in state["state"].values() for name in one}
        copies = Path(extra["checkpoint_engine"]["root"]) / done.folder.parent.name / "a1"
        assert sorted(path.name for path in copies.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]
        tokenizer = AutoTokenizer.from_pretrained(str(done.output))
        chat = [{"role": "user", "content": "A Word"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "USER: A Word<|end|>\n"
        assert tokenizer("A Word").input_ids == tokenizer("a word").input_ids
        assert not list(done.folder.glob("rows-*"))

    def test_it_goes_on_exactly_from_a_checkpoint_whose_folder_is_gone(
        self, done: Outcome, forks: Forks, tiny_model: Path, chats: Path, extra: Any, tmp_path: Path
    ) -> None:
        point = done.checkpoint(4)
        shutil.rmtree(point["path"])
        job = make_job(
            tmp_path, tiny_model, chats, run_id="other", resume_from=point, extra=extra, chat_template="loud", **CONFIG
        )
        again = completed(forks.run(job))
        # The callback goes on with its state, so at the end it is that of a run without an interruption.
        losses = [record["loss"] for record in done.of("metric")]
        expected = {"0.tally": {"count": dict.fromkeys(("starts", "ends", "metrics"), STEPS), "seen": losses}}
        for outcome in (done, again):
            state = json.loads((Path(outcome.checkpoint(8)["path"]) / "anneal_state.json").read_text())
            assert state["callbacks"] == expected
        assert again.steps == {step: reported for step, reported in done.steps.items() if step > 4}
        assert rates(again) == rates(done)[4:]
        (config,) = again.of("config")
        assert config["facts"]["fidelity"] == "exact", config["facts"]["fidelity_reasons"]
        for name in ("model.safetensors", "config.json"):
            assert (again.output / name).read_bytes() == (done.output / name).read_bytes()
        assert any("restored from the replica of `second-folder`" in record["line"] for record in again.of("message"))

    def test_another_learning_rate_cannot_be_given_to_a_scheduler_that_does_not_say_what_it_makes_of_it(
        self, done: Outcome, forks: Forks, tiny_model: Path, chats: Path, extra: Any, tmp_path: Path
    ) -> None:
        point = done.checkpoint(8)
        config = {**CONFIG, "learning_rate": 5e-4, "max_steps": 9}
        job = make_job(tmp_path, tiny_model, chats, resume_from=point, extra=extra, chat_template="loud", **config)
        ended = forks.run(job)
        assert ended.result["error"]["code"] == "config_error"
        assert "`learning_rate` cannot change" in ended.result["error"]["message"]


def test_a_callback_ends_training_as_early_stopping_does_and_the_output_is_pruned_as_asked(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    tallies = [{"type": "tally", "end_at": 3}, {"type": "tally"}]
    extra = {"callbacks": tallies, "prune_fraction": 0.75}
    done = completed(forks.run(make_job(tmp_path, tiny_model, chats, extra=extra, **CONFIG)))
    assert (done.result["why"], done.result["step"]) == ("callback", 3)
    assert (done.output / "model.safetensors").is_file()
    assert [record["step"] for record in done.of("checkpoint")] == [3]
    saved, out = (load_file(folder / "model.safetensors") for folder in (done.folder / "checkpoint-3", done.output))
    assert {float((out[name] == 0).float().mean()) for name in out if "_proj" in name} == {0.75}
    assert all(((out[name] == saved[name]) | (out[name] == 0) & ("_proj" in name)).all() for name in out)
    assert any("The output is pruned" in record["line"] for record in done.of("message"))


def test_an_error_of_a_callback_ends_the_run_and_names_it(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    tally = {"type": "tally", "fail_at": 1}
    ended = forks.run(make_job(tmp_path, tiny_model, chats, extra={"callbacks": [tally]}, **CONFIG))
    message = "`anneal.callbacks` entry `tally` failed: ValueError('the tally is full')."
    assert ended.result["error"] == {"code": "config_error", "message": message}


def test_metrics_that_a_callback_reports_are_part_of_each_metric(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    callbacks = [{"type": "tally", "report_as": "steps_seen"}]
    config = CONFIG | {"max_steps": 4, "logging_steps": 2}
    done = completed(forks.run(make_job(tmp_path, tiny_model, chats, extra={"callbacks": callbacks}, **config)))
    assert [(metric["step"], metric["extra"]["steps_seen"]) for metric in done.of("metric")] == [(2, 2.0), (4, 4.0)]


@pytest.mark.parametrize(
    ("report_as", "expected"),
    [
        ("tokens", "returned `tokens` from `report_metrics`, but metrics already have that: use another name"),
        ("loss", "returned `loss` from `report_metrics`, but metrics already have that: use another name"),
    ],
)
def test_metric_of_a_callback_with_a_name_in_use_ends_the_run_and_names_it(
    report_as: str, expected: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    callbacks = [{"type": "tally", "report_as": report_as}]
    ended = forks.run(make_job(tmp_path, tiny_model, chats, extra={"callbacks": callbacks}, **CONFIG))
    message = f"`anneal.callbacks` entry `tally` {expected}."
    assert ended.result["error"] == {"code": "config_error", "message": message}


def test_a_reward_is_learned_from_and_reported_under_its_name(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    prompts = make_prompts(tmp_path / "prompts.jsonl", 8)
    rewards = [{"type": "plugin", "name": "brevity", "options": {"best": 5}}]
    rlhf = {"num_generations": 2, "max_completion_length": 8, "rewards": rewards}
    config = {**CONFIG, "method": "rlhf", "lora_r": 4, "load_in_4bit": False, "max_steps": 1, "rlhf": rlhf}
    done = completed(forks.run(make_job(tmp_path, tiny_model, prompts, data_format="prompt", **config)))
    (metric,) = done.of("metric")
    assert 0 < metric["extra"]["reward_plugin_brevity"] <= 1
    assert metric["extra"]["reward"] == pytest.approx(metric["extra"]["reward_plugin_brevity"])


def stub(tmp_path: Path, **extra: Any) -> Any:
    """As much of a run and its trainer as plugins see."""
    config = TrainingConfig(base_model="tiny", extra=extra)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "a"}) + "\n")
    dataset = {"id": "ds_x", "path": data, "format": "text", "rows": 1, "sha256": None}
    gone = {"path": tmp_path / "gone" / "checkpoint-1", "step": 1, "manifest_sha256": ""}
    job = make_spec(tmp_path, dataset=dataset, resume_from=gone)
    run = types.SimpleNamespace(
        is_inference=False, raise_if_stopped=lambda: None, report=Reporter(None), ranks=Ranks(),
        config=config, folder=tmp_path, job=job, dataset=job.dataset, resume_from=job.resume_from,
    )  # fmt: skip
    arguments = types.SimpleNamespace(learning_rate=0.1, weight_decay=0.01, get_warmup_steps=lambda steps: 0)
    return types.SimpleNamespace(run=run, args=arguments, get_decay_parameter_names=lambda model: ["weight"])


@pytest.mark.usefixtures("here")
def test_a_data_source_makes_the_rows_of_each_evaluation_set(tmp_path: Path) -> None:
    run = stub(tmp_path, data_source={"type": "repeated", "times": 3}).run
    run.job = run.job.model_copy(update={"extra_eval_datasets": dict.fromkeys(("one", "two"), run.job.dataset)})
    hooks.write_source_rows(run)
    sources = [run.job.dataset, *run.job.extra_eval_datasets.values()]
    assert [one.path.name for one in sources] == [
        "rows-training.jsonl", "rows-evaluation-one.jsonl", "rows-evaluation-two.jsonl",
    ]  # fmt: skip
    assert [len(one.path.read_text().splitlines()) for one in sources] == [one.rows for one in sources] == [3, 3, 3]
    hooks.delete_source_rows(run)
    assert not any(one.path.exists() for one in sources)


NETWORK = torch.nn.Linear(2, 2)
PLAIN = torch.optim.SGD(NETWORK.parameters(), lr=0.1)


@pytest.mark.usefixtures("here")
class TestWhatIsNone:
    @pytest.mark.parametrize(
        ("kind", "name", "says"),
        [
            ("data_source", "a-text", "returned a str, not rows to iterate over"),
            ("data_source", "texts", "returned a str as row 0, not a dict"),
            ("data_source", "breaks", r"failed at row 2: KeyError\('c'\)"),
            ("data_source", "empty", "returned no rows of the training data"),
            ("data_source", "repeated", "does not accept its arguments: missing a required argument: 'times'"),
            ("model_factory", "a-dict", "returned a dict, not a transformers.PreTrainedModel"),
            ("optimizer", "a-dict", "returned a dict, not a torch.optim.Optimizer"),
            ("optimizer", "forgetful", "leaves out 1 trained parameters, bias among them"),
            ("optimizer", "a-number", "is a int, but must be a callable"),
            ("optimizer", "gone", "cannot be imported: ModuleNotFoundError"),
            ("scheduler", "a-dict", "returned a dict, not a torch.optim.lr_scheduler.LRScheduler"),
            ("scheduler", "plateau", "depends on a metric and not on steps"),
            ("checkpoint_engine", "a-dict", "returned a dict, which has no method save and no fetch"),
            ("tokenizer", "a-dict", "returned a dict, not a transformers.PreTrainedTokenizerBase"),
            ("collator", "a-dict", "returned a dict, not a function"),
            ("collator", "no-labels", "returned a batch without labels"),
            ("callback", "a-dict", "returned a dict, not a transformers.TrainerCallback"),
            ("chat_template", "a-dict", "returned a dict, not a str with a Jinja template"),
        ],
    )
    def test_is_refused_by_group_and_name(self, kind: str, name: str, says: str, tmp_path: Path) -> None:
        extra = {"callbacks": [{"type": name}]} if kind == "callback" else {kind: {"type": name}}
        trainer = stub(tmp_path, **({} if kind == "chat_template" else extra))
        named = types.SimpleNamespace(config=types.SimpleNamespace(chat_template=name))
        own = lambda examples: {"input_ids": examples, "labels": examples}  # noqa: E731
        use = {
            "data_source": lambda: hooks.write_source_rows(trainer.run),
            "model_factory": lambda: hooks.load_model(trainer.run, lambda: None),  # type: ignore[arg-type,return-value]
            "optimizer": lambda: hooks.create_optimizer(trainer, NETWORK),
            "scheduler": lambda: hooks.create_scheduler(trainer, 10, PLAIN),
            "checkpoint_engine": lambda: restore_replica(trainer.run),
            "tokenizer": lambda: hooks.load_tokenizer(trainer.run, lambda: None),  # type: ignore[arg-type,return-value]
            "collator": lambda: hooks.build_collator(trainer.run, own, None)([]),
            "callback": lambda: PluginCallbacks(trainer),
            "chat_template": lambda: hooks.chat_template(named, None),  # type: ignore[arg-type]
        }[kind]
        with pytest.raises(TrainingFailure, match=f"`{PLUGINS[kind]}` entry `{name}` .*{says}") as refused:
            use()
        assert refused.value.code == "config_error"

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("a-dict", "returned a dict, not a function"),
            ("too-few", "returned 1 numbers, not one for each of 2"),
            ("texts", "returned a str among its numbers"),
            ("brevity", "does not accept its arguments"),
        ],
    )
    def test_a_reward_too(self, name: str, says: str) -> None:
        with pytest.raises(TrainingFailure, match=f"`anneal.rewards` entry `{name}` {says}"):
            hooks.Reward(PluginReward(type="plugin", name=name), name)(["p", "p"], ["a", "b"])

    def test_an_unknown_name_comes_with_those_there_are(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailure, match="no scheduler `stares`; installed are: a-dict, plateau, stairs"):
            hooks.load_plugins(stub(tmp_path, scheduler={"type": "stares"}).run.config)

    def test_classes_of_torch_are_optimizers_as_they_are(self, tmp_path: Path) -> None:
        optimizer = hooks.create_optimizer(stub(tmp_path, optimizer={"type": "sgd", "momentum": 0.9}), NETWORK)
        assert optimizer is not None and [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["momentum"] == 0.9

    def test_a_copy_that_cannot_be_made_costs_nothing_but_the_copy(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        run = stub(tmp_path, checkpoint_engine={"type": "second-folder", "root": str(tmp_path / "file")}).run
        store_replica(run, tmp_path)
        assert "`second-folder` could not keep" in capfd.readouterr().out

    def test_a_worker_reports_what_there_is(self) -> None:
        installed = installed_plugins()
        assert installed["optimizer"] == ["a-dict", "a-number", "forgetful", "gone", "sgd", "slow-sign"]
        assert installed.keys() == PLUGINS.keys()


def test_an_unknown_one_ends_a_run_before_anything_is_loaded(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    ended = forks.run(make_job(tmp_path, tiny_model, chats, **CONFIG, extra={"optimizer": {"type": "absent"}}))
    assert "no optimizer `absent`" in ended.result["error"]["message"]
    assert ended.of("phase") == []
