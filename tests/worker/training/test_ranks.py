"""Promises about a run on two devices: it trains as one with twice the batch does, and resumes exactly."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch.distributed as dist
from transformers import AutoConfig

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_rated,
    make_tiny_model,
)
from tests.worker.training.two_ranks import TwoRanks
from worker.checkpoint_files import resume_fidelity
from worker.training.methods import preparation
from worker.training.ranks import Ranks, is_peer_lost
from worker.wire.rank_place import EXIT_PEER_LOST, EXIT_RANK_ZERO_UNREACHABLE, RankPlace

Train = Callable[..., Outcome]

METHODS = (
    "lora",
    "dpo",
    *(pytest.param(one, marks=pytest.mark.full) for one in ("full", "qlora", "kto", "orpo", "simpo", "reward")),
)
_TOLERANCE = 1e-5
_COMMON: dict[str, Any] = {
    "learning_rate": 1e-2, "max_seq_length": 64, "max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 2,
    "save_steps": 2, "eval_split": 0.2, "eval_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """Tiny models by their dropout."""
    return make_models(tmp_path_factory.mktemp("models"))


def make_models(folder: Path, layers: int = 1) -> Callable[[float], Path]:
    """Make tiny models without and with dropout, and return a function that finds them by it."""
    paths = {
        dropout: make_tiny_model(folder / f"dropout-{dropout}", layers=layers, dropout=dropout)
        for dropout in (0.0, 0.1)
    }
    return paths.__getitem__


def make_data(folder: Path, method: str, count: int) -> tuple[Path, str]:
    """Write rows for a method; return their file and its format."""
    make, data_format = {
        "dpo": (make_pairs, "preference"), "reward": (make_pairs, "preference"), "kto": (make_rated, "rated"),
        "orpo": (make_pairs, "preference"), "simpo": (make_pairs, "preference"),
    }.get(method, (make_chat_dataset, "chat"))  # fmt: skip
    return make(folder / f"{method}-{count}.jsonl", count), data_format


@pytest.fixture
def train(
    forks: Forks,
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
) -> Train:
    return make_train(forks, two_ranks, models, tmp_path)


def make_train(forks: Forks, two_ranks: TwoRanks, models: Callable[[float], Path], folder: Path) -> Train:
    """Return a function that trains a run on one or two devices, with or without dropout.

    Of 30 rows, 6 are held out and 24 are three steps.
    """
    number = 0

    def run(
        method: str, devices: int, *, dropout: float = 0.0, count: int = 30, sharded: bool = False, **config: Any
    ) -> Outcome:
        nonlocal number
        number += 1
        rows, data_format = make_data(folder, method, count)
        adapter = {} if method == "full" or "lora_r" in config else {"lora_r": 4, "lora_dropout": dropout}
        config = {**_COMMON, "method": method, "batch_size": 4 // devices, **adapter, **config}
        job = make_job(folder / str(number), models(dropout), rows, data_format=data_format, **config)
        job["sharded"] = sharded
        outcome = forks.run(job) if devices == 1 else two_ranks.run(job)
        assert outcome.code == 0, outcome.stderr[-3000:]
        return outcome

    return run


def losses(outcome: Outcome) -> dict[int, float]:
    return {step: float.fromhex(loss) for step, (loss, _) in outcome.steps.items()}


def rows(outcome: Outcome) -> dict[int, list[int]]:
    """The rows of each step; ranks report theirs one after another."""
    return {step: sorted(trained) for step, (_, trained) in outcome.steps.items()}


@pytest.mark.parametrize("method", METHODS)
def test_two_devices_train_as_one_with_twice_the_batch(train: Train, method: str) -> None:
    count = 40 if method == "kto" else 30  # KTO pairs the rows of a batch: only whole ones are the same on two devices
    one_device, two_devices = (train(method, devices, count=count) for devices in (1, 2))
    assert rows(two_devices) == rows(one_device) and len(rows(two_devices)) == 4
    assert losses(two_devices) == pytest.approx(losses(one_device), abs=_TOLERANCE)
    if method == "kto":  # both pair each row with the same answer
        kls = [[record["extra"]["kl"] for record in run.of("metric")] for run in (one_device, two_devices)]
        assert kls[1] == pytest.approx(kls[0], abs=1e-4)
    evaluations = [[record["metrics"]["eval_loss"] for record in run.of("eval")] for run in (one_device, two_devices)]
    tolerance = 1e-3 if method == "orpo" else _TOLERANCE  # a batch of an evaluation is a mean over its tokens
    assert evaluations[1] == pytest.approx(evaluations[0], abs=tolerance), "each held-out row counts once"
    facts = two_devices.of("config")[-1]["facts"]
    assert (
        facts["total_steps"] == 4 and two_devices.result["metrics"]["tokens"] == one_device.result["metrics"]["tokens"]
    )
    assert sorted(path.name for path in two_devices.output.iterdir()) == sorted(
        path.name for path in one_device.output.iterdir()
    )


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        pytest.param(method, rest, marks=() if (method, rest) == ("dpo", 3) else pytest.mark.full)
        for method in ("qlora", "dpo", "kto", "orpo", "simpo", "reward")
        for rest in (1, 3, 5)
    ],
)
def test_the_last_rows_of_an_epoch_are_trained_once(train: Train, method: str, rest: int) -> None:
    """The last batch is small: with one row the first device has none, with three it has fewer than the second."""
    config = {"count": 8 + rest, "eval_split": 0, "eval_steps": None}
    one_device, two_devices = train(method, 1, **config), train(method, 2, **config)
    assert [len(trained) for trained in rows(two_devices).values()] == [8, rest] * 2
    assert rows(two_devices) == rows(one_device)
    assert losses(two_devices) == pytest.approx(losses(one_device), abs=_TOLERANCE)


@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(one, marks=pytest.mark.full) for one in ("full", "qlora", "dpo"))]
)
def test_two_devices_resume_exactly_with_dropout(train: Train, method: str) -> None:
    whole = train(method, 2, dropout=0.1)
    first = train(method, 2, dropout=0.1, stop_at_step=2)
    rest = train(method, 2, dropout=0.1, resume_from=first.checkpoint(2), attempt=2)
    assert {**first.steps, **rest.steps} == whole.steps
    assert rest.of("config")[-1]["facts"]["fidelity"] == "exact"


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.full), (1, 2)])
def test_another_number_of_devices_resumes_with_the_same_rows(train: Train, before: int, after: int) -> None:
    whole = train("lora", before)
    rest = train("lora", after, resume_from=whole.checkpoint(2), attempt=2)
    assert rows(rest) == {step: trained for step, trained in rows(whole).items() if step > 2}
    assert losses(rest) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, abs=_TOLERANCE)
    facts = rest.of("config")[-1]["facts"]
    assert facts["fidelity"] == "approximate"
    reason = f"The number of devices was {before} at the checkpoint and is {after} now."
    assert reason in facts["fidelity_reasons"]


def test_a_skipped_step_names_the_rows_of_both_devices(
    two_ranks: TwoRanks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    path, data_format = make_data(tmp_path, "lora", 40)
    config = _COMMON | {"method": "lora", "batch_size": 2, "max_steps": 2, "save_steps": 2}
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **config)
    repair = {"kind": "non_finite", "step": 1, "rows": [], "singled_out": [], "reason": "a bad step"}
    done = two_ranks.run(job | {"attempt": 2, "auto_repairs": [repair]})
    assert done.result["outcome"] == "completed", done.result
    lines = [json.loads(line) for line in Path(job["journal"]).read_text().splitlines()]
    (skipped,) = [line for line in lines if line["event"] == "skip_step"]
    assert (skipped["step"], len(set(skipped["samples"]))) == (1, 8)


def test_the_libraries_use_no_interface_whose_name_only_begins_like_the_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    Ranks.join(replace(RankPlace.on_one_host(0, 1, tmp_path), interface="eth1"), "cpu")
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")


def test_ranks_with_other_base_models_do_not_train_together(
    two_ranks: TwoRanks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """Each host may have a folder of its own at the same path."""
    path, data_format = make_data(tmp_path, "lora", 40)
    config = {**_COMMON, "method": "lora", "batch_size": 2, "lora_r": 4}
    jobs = [
        make_job(tmp_path / str(rank), models(dropout), path, data_format=data_format, **config)
        for rank, dropout in enumerate((0.0, 0.1))
    ]
    outcome, other = two_ranks.run_each(jobs)
    identities = [resume_fidelity.model_fingerprint(models(dropout)) for dropout in (0.0, 0.1)]
    message = (
        f"The processes of the run have different base models: {identities[0]} on rank 0; {identities[1]} on rank 1. "
        "Give every host the same files of these, and resume the run."
    )
    assert outcome.result["error"] == other.result["error"] == {"code": "config_error", "message": message}


@pytest.mark.parametrize("is_adapter", [False, True])
def test_all_ranks_use_the_commit_of_the_hub_that_the_first_one_found(
    models: Callable[[float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adapter: bool
) -> None:
    """The caches of two hosts may have filled at different times, so that a branch is another commit in each."""

    class Second(Ranks):
        def broadcast_value(self, value: Any) -> Any:
            return "theirs"

    def download(source: str, name: str, revision: str | None, **_: Any) -> str:
        return f"cache/{revision or 'ours'}/{name}"

    config_of = AutoConfig.from_pretrained(models(0.0))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config_of)
    named = {"name": "owner/m", "path": None, "hub": "owner/m", "revision": None}
    if is_adapter:
        described = {"peft_type": "LORA", "base_model_name_or_path": "owner/m", "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(described))
        (tmp_path / "adapter_model.safetensors").touch()
        named |= {"path": str(tmp_path), "hub": None}
    job = JobSpec.model_validate(make_job(tmp_path / "run", "", "") | {"base_model": named})
    run: Any = SimpleNamespace(job=job, config=TrainingConfig(base_model="owner/m"), ranks=Second(1, 2))
    base = preparation._find_base(run)
    assert base.revision == base.options["revision"] == "theirs" and base.identity.endswith("commit theirs")


def test_ranks_of_other_versions_do_not_train_together(
    two_ranks: TwoRanks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """While workers are updated one after another, the exchanges of one version may not be those of the next."""
    path, data_format = make_data(tmp_path, "lora", 40)
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **_COMMON, method="lora", lora_r=4)
    metadata = tmp_path / "anneal-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: anneal\nVersion: 99.0\n")
    ended = two_ranks.run_to_end_of_first(job, second={"folders": [str(tmp_path)]})
    error = ended.result["error"]
    assert error["code"] == "config_error"
    assert error["message"].startswith("The processes of the run have different versions of anneal: ")
    assert "99.0 on rank 1. Install the same versions on every worker" in error["message"]


def test_a_rank_that_loses_the_other_reports_no_failure_of_its_own(
    two_ranks: TwoRanks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """The supervisor knows how the other one ended, and that is the cause."""
    path, data_format = make_data(tmp_path, "lora", 40)
    config = {**_COMMON, "method": "lora", "batch_size": 2, "lora_r": 4}
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **config)
    broken = make_job(tmp_path / "broken", tmp_path / "nowhere", path, data_format=data_format, **config)
    outcome, other = two_ranks.run_each([job, broken])
    assert (other.code, other.result["error"]["code"]) == (1, "model_not_found")
    assert outcome.code == EXIT_PEER_LOST and outcome.of("result") == []
    assert "the connection to another process of the run was lost: " in outcome.stderr


def test_a_rank_whose_plugin_exits_reports_that(
    two_ranks: TwoRanks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """With code 0 and no word, nothing would say which process the others have lost."""
    path, data_format = make_data(tmp_path, "lora", 40)
    config = {**_COMMON, "method": "lora", "batch_size": 2, "lora_r": 4, "extra": {"metrics": ["ending"]}}
    jobs = []
    for name, created in (("stays", "return Ending"), ("exits", "raise SystemExit")):
        described = tmp_path / name / "ending-1.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: ending\nVersion: 1\n")
        (described / "entry_points.txt").write_text("[anneal.metrics]\nending = ending:new\n")
        code = f"class Ending:\n    update = result = dict\n\ndef new():\n    {created}()\n"
        (tmp_path / name / "ending.py").write_text(code)
        jobs.append(make_job(tmp_path / f"{name}-run", models(0.0), path, data_format=data_format, **config))
    first, second = two_ranks.first.beside(tmp_path / "stays"), two_ranks.second.beside(tmp_path / "exits")
    outcome, other = TwoRanks(first, second).run_each(jobs)
    assert (other.code, other.result["error"]["message"]) == (1, "SystemExit: ")
    assert (outcome.code, outcome.of("result")) == (EXIT_PEER_LOST, [])


def test_a_rank_whose_own_interface_has_no_address_reports_that(
    forks: Forks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """The library names the place in its code, as it does in the error of a lost connection."""
    path, data_format = make_data(tmp_path, "lora", 40)
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **_COMMON, method="lora", lora_r=4)
    place = replace(RankPlace.on_one_host(0, 1, tmp_path), interface="none0")
    forks.start(job, arguments=place.arguments())
    outcome = forks.wait()
    assert outcome.code == 1
    assert "Unable to find address for: none0" in outcome.result["error"]["message"]


def test_a_rank_of_another_host_whose_interface_has_no_address_could_not_reach_rank_0(
    forks: Forks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    """The run is then retried: the interface may be back soon."""
    path, data_format = make_data(tmp_path, "lora", 40)
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **_COMMON, method="lora", lora_r=4)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = RankPlace(1, 2, f"tcp://127.0.0.1:{store.port}", 0, 1, "none0")
    forks.start(job, arguments=place.arguments())
    outcome = forks.wait()
    assert outcome.code == EXIT_RANK_ZERO_UNREACHABLE
    assert "interface none0: " in outcome.stderr and outcome.of("result") == []


def test_rank_0_of_several_hosts_whose_interface_has_no_address_reports_that(
    forks: Forks, models: Callable[[float], Path], tmp_path: Path
) -> None:
    path, data_format = make_data(tmp_path, "lora", 40)
    job = make_job(tmp_path / "run", models(0.0), path, data_format=data_format, **_COMMON, method="lora", lora_r=4)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    place = RankPlace(0, 2, f"tcp://127.0.0.1:{port}", 0, 1, "none0")
    forks.start(job, arguments=place.arguments())
    outcome = forks.wait()
    assert outcome.code == 1
    message = outcome.result["error"]["message"]
    assert "Unable to find address for: none0" in message and "RankZeroUnreachable" not in message


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("unhandled cuda error\nncclUnhandledCudaError: Cuda failure 2 'out of memory'"), False),
        (dist.DistBackendError("invalid usage\nncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0"), False),
        (
            dist.DistBackendError(
                "unhandled system error\nncclSystemError: System call failed.\nLast error:\nError "
                "while creating shared memory segment /dev/shm/nccl-yKWO8Y (size 33030528), error: No space left (28)"
            ),
            False,
        ),
        (dist.DistStoreError("No such file or directory"), False),
    ],
)
def test_only_errors_caused_by_the_end_of_another_rank_count_as_lost_connection(
    error: Exception, is_lost: bool
) -> None:
    assert is_peer_lost(error) == is_lost
