"""Promises about learning from rewards on two devices: prompts are divided, and the weights stay the same."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worker.training.output.outputs import weights
from tests.worker.training.tiny import Forks, Outcome, make_job, make_prompts, make_tiny_model
from tests.worker.training.two_ranks import TwoRanks

Train = Callable[..., Outcome]

PLUGIN = '''
import hashlib, json, os
from pathlib import Path

def noted(folder):
    """A reward that notes whose completions it was given."""
    def judge(prompts, completions, rows, trainer_state, **columns):
        with Path(folder, f"rewards-{os.environ.get('RANK', 0)}").open("a") as file:
            file.write(json.dumps([trainer_state.global_step, [row for each in rows for row in each]]) + "\\n")
        return [float(len(one)) for one in completions]
    return judge

def watched(load, folder):
    """A model that notes each of its trained states."""
    network, seen = load(), []
    def note(module, args):
        digest = hashlib.sha256()
        for name, one in sorted(network.named_parameters()):
            digest.update(one.detach().numpy().tobytes())
        if digest.hexdigest() not in seen:
            seen.append(digest.hexdigest())
            Path(folder, f"weights-{os.environ.get('RANK', 0)}").write_text(" ".join(seen))
    network.get_input_embeddings().register_forward_pre_hook(note)
    return network

def broken(load, rank):
    """A model whose output is not finite on one device."""
    network = load()
    if os.environ["RANK"] == str(rank):
        network.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits * float("nan"))
    return network
'''
ENTRY_POINTS = """
[anneal.rewards]
noted = noting:noted

[anneal.model_factories]
watched = noting:watched
broken = noting:broken
"""
COMMON: dict[str, Any] = {
    "method": "rlhf", "learning_rate": 1e-2, "max_seq_length": 64, "max_steps": 6, "gradient_accumulation_steps": 2,
    "logging_steps": 2, "save_steps": 3, "eval_steps": 3, "eval_split": 0.25, "export": "last",
    "warmup_ratio": 0,
}  # fmt: skip
GENERATIONS = 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a reward and a model factory, as an operator installs one."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "noting-1.0.dist-info").mkdir()
    (folder / "noting.py").write_text(PLUGIN)
    (folder / "noting-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: noting\nVersion: 1.0\n")
    (folder / "noting-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with dropout."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", dropout=0.1)


@pytest.fixture
def train(forks: Forks, two_ranks: TwoRanks, site: Path, model: Path, tmp_path: Path) -> Train:
    """Train a run on one or two devices; of 13 prompts 3 are held out, and a step takes 4 of the other 10."""
    number = 0

    def run(
        devices: int, algorithm: str = "grpo", beta: float = 0.05, course: dict[str, Any] | None = None, **config: Any
    ) -> Outcome:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        rewards = [{"type": "plugin", "name": "noted", "options": {"folder": str(folder)}}]
        rlhf = {
            "algorithm": algorithm, "beta": beta, "num_generations": GENERATIONS, "max_completion_length": 4,
            "rewards": rewards,
        }  # fmt: skip
        config = {**COMMON, "batch_size": 4 // devices, "rlhf": rlhf, **config}
        data = make_prompts(tmp_path / "prompts.jsonl", 13)
        job = make_job(folder, model, data, data_format="prompt", **config) | {"reward_models": []}
        ranks = forks.beside(site) if devices == 1 else two_ranks.beside(site)
        outcome = ranks.run(job, **({"course": course} if course else {}))
        assert outcome.result["outcome"] in ("completed", "stopped"), (outcome.result, outcome.stderr[-3000:])
        return outcome

    return run


def rows(outcome: Outcome) -> dict[int, list[int]]:
    """The prompts of each step."""
    return {step: trained for step, (_, trained) in outcome.steps.items()}


def rewarded(outcome: Outcome, rank: int) -> list[tuple[int, list[int]]]:
    """Steps, and the prompts of the completions that were rewarded on a device: in training, then in evaluations."""
    lines = (outcome.folder.parent / f"rewards-{rank}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        pytest.param("grpo", {"lora_r": None}, marks=pytest.mark.full),
        ("rloo", {"lora_r": None, "max_eval_rows": 1, "extra": {"eval_batch_size": 2}}),
    ],
)
def test_a_step_takes_the_prompts_of_one_device_with_twice_the_batch(
    train: Train, tmp_path: Path, algorithm: str, config: dict[str, Any]
) -> None:
    """An epoch has two steps and leaves two prompts over, and the three held-out prompts cannot be halved."""
    watched = {**config.pop("extra", {}), "model_factory": {"type": "watched", "folder": str(tmp_path)}}
    one_device, two_devices = train(1, algorithm, **config), train(2, algorithm, **config, extra=watched)
    assert rows(two_devices) == rows(one_device) and all(
        len(set(trained)) == 4 for trained in rows(two_devices).values()
    )
    facts = two_devices.of("config")[-1]["facts"]
    assert (facts["total_steps"], facts["eval_rows"]) == (6, config.get("max_eval_rows", 3))
    rounds: dict[int, Counter[int]] = {}
    held_out: dict[int, Counter[int]] = {}
    for rank in (0, 1):
        for step, prompts in rewarded(two_devices, rank):
            assert len(prompts) % GENERATIONS == 0, "groups are whole on each device"
            is_training = set(prompts) <= set(rows(two_devices).get(step + 1, ()))
            (rounds if is_training else held_out).setdefault(step, Counter()).update(prompts)
    assert rounds == {step - 1: Counter(trained * GENERATIONS) for step, trained in rows(two_devices).items()}
    assert held_out.keys() == {3, 6} and all(set(found.values()) == {GENERATIONS} for found in held_out.values())
    assert {len(found) for found in held_out.values()} == {facts["eval_rows"]}
    states = [(tmp_path / f"weights-{rank}").read_text().split() for rank in (0, 1)]
    # The base model and the weights after each step, the last of which only an evaluation sees.
    assert states[0][:6] == states[1][:6] and len(states[0]) == 7
    assert all("reward" in record["extra"] for record in two_devices.of("metric")) and two_devices.of("sample")
    assert all("eval_reward" in record["metrics"] for record in two_devices.of("eval"))


def test_two_devices_resume_exactly_with_dropout_and_one_with_the_same_prompts(train: Train) -> None:
    adapter = {"lora_r": 4, "load_in_4bit": False, "lora_dropout": 0.1}
    whole = train(2, **adapter)
    first = train(2, **adapter, course={"drain_at_evaluation": 1})
    assert (first.result["why"], first.of("eval")) == ("drain", []), "it ends within the evaluation after step 3"
    rest, alone = (train(devices, **adapter, resume_from=first.checkpoint(3), attempt=2) for devices in (2, 1))
    assert {**first.steps, **rest.steps} == whole.steps
    assert weights(rest) == weights(whole)
    assert rest.of("config")[-1]["facts"]["fidelity"] == "exact"
    assert rows(alone) == {step: trained for step, trained in rows(whole).items() if step > 3}
    assert alone.of("config")[-1]["facts"]["fidelity"] == "approximate"


@pytest.mark.full
def test_devices_with_other_reward_models_do_not_train_together(
    two_ranks: TwoRanks, model: Path, tmp_path: Path
) -> None:
    rlhf = {
        "num_generations": GENERATIONS,
        "max_completion_length": 8,
        "rewards": [{"type": "model", "model": "judge"}],
    }
    data = make_prompts(tmp_path / "prompts.jsonl", 13)
    jobs: list[dict[str, Any]] = []
    for rank in (0, 1):
        judge = Path(shutil.copytree(model, tmp_path / f"judge-{rank}"))
        described = json.loads((judge / "config.json").read_text()) | {"num_labels": 1, "attention_dropout": rank / 10}
        (judge / "config.json").write_text(json.dumps(described))
        config = {**COMMON, "batch_size": 2, "rlhf": rlhf}
        job = make_job(tmp_path / str(rank), model, data, data_format="prompt", **config)
        jobs.append(job | {"reward_models": [{"name": "judge", "path": str(judge), "hub": None, "revision": None}]})
    for outcome in two_ranks.run_each(jobs):
        message = outcome.result["error"]["message"]
        assert message.startswith("The processes of the run have different reward models: sha256:"), message


def test_an_output_that_is_not_finite_on_one_device_is_reported_with_the_prompts_of_both(
    two_ranks: TwoRanks, site: Path, model: Path, tmp_path: Path
) -> None:
    length = {"type": "length", "max": 8}
    rlhf = {"num_generations": GENERATIONS, "max_completion_length": 8, "rewards": [length]}
    config = {**COMMON, "batch_size": 2, "lora_r": None, "rlhf": rlhf}
    extra = {"model_factory": {"type": "broken", "rank": 1}}
    data = make_prompts(tmp_path / "prompts.jsonl", 13)
    job = make_job(tmp_path, model, data, data_format="prompt", on_non_finite="rewind", extra=extra, **config)
    job |= {"reward_models": []}
    ended = two_ranks.beside(site).run_to_end_of_first(job)
    error = ended.result["error"]
    assert error["code"] == "non_finite_loss" and "while it generated completions" in error["message"]
    assert len(ended.result["repair"]["rows"]) == 4
