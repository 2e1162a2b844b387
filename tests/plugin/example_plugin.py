"""One plugin of each kind that a training can be made of, and some that are none, to be refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers.normalizers import Lowercase
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

A_NUMBER = 3


def repeated(path: Path, purpose: str, times: int) -> Any:
    """Each row of the file so many times."""
    for line in path.read_text().splitlines():
        for _ in range(times):
            yield json.loads(line)


def quiet_head(load: Any, scale: float) -> PreTrainedModel:
    """The model as it is configured, with smaller weights in its head."""
    network: PreTrainedModel = load()
    with torch.no_grad():
        network.get_output_embeddings().weight.mul_(scale)
    return network


class SlowSign(torch.optim.Optimizer):
    """Steps by the sign of a slow average of the gradients; the average is its state."""

    def __init__(self, groups: Any, lr: float, memory: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "memory": memory})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].lerp_(parameter.grad, 1 - group["memory"])
                parameter.mul_(1 - group["lr"] * group.get("weight_decay", 0.0)).sub_(
                    group["lr"] * state["average"].sign()
                )


def stairs(optimizer: Any, num_training_steps: int, num_warmup_steps: int, height: float) -> StepLR:
    """Lower by a factor at each third of the steps; no `LambdaLR`, and its state is a count."""
    return StepLR(optimizer, max(num_training_steps // 3, 1), height)


class SecondFolder:
    """Copies of checkpoints in a folder of another disk."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def save(self, folder: Path, name: str) -> None:
        shutil.copytree(folder, self.root / name)

    def fetch(self, name: str, folder: Path) -> bool:
        if not (self.root / name).is_dir():
            return False
        shutil.copytree(self.root / name, folder, dirs_exist_ok=True)
        return True


class Brevity:
    """More for shorter completions."""

    def __init__(self, best: int) -> None:
        self.best = best

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0 / (1 + abs(len(completion) - self.best)) for completion in completions]


def lower_case(load: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the base model, for which all texts are lower case."""
    tokenizer: PreTrainedTokenizerBase = load()
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    return tokenizer


def late_labels(collate: Any, tokenizer: Any, first: int) -> Any:
    """Batches of the method in which the first tokens are not learned."""

    def collate_late(examples: Any) -> Any:
        batch = collate(examples)
        batch["labels"][:, :first] = -100
        return batch

    return collate_late


def no_labels(collate: Any, tokenizer: Any) -> Any:
    return lambda examples: {name: column for name, column in collate(examples).items() if name != "labels"}


def loud(tokenizer: PreTrainedTokenizerBase) -> str:
    """A template that the tokenizer's own end of a text ends."""
    return "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}" + (
        f"{tokenizer.eos_token}\n{{% endfor %}}"
    )


class Tally(TrainerCallback):
    """Counts what it is called for, asks for a checkpoint, ends training after some steps, or fails."""

    def __init__(self, save_at: int = 0, end_at: int = 0, fail_at: int = 0, report_as: str | None = None) -> None:
        self.report_as = report_as
        self.count = {"starts": 0, "ends": 0, "metrics": 0}
        self.seen: list[float] = []
        self.at = {"save": save_at, "end": end_at, "fail": fail_at}

    def on_step_start(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.count["starts"] += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.count["ends"] += 1
        if state.global_step == self.at["fail"]:
            raise ValueError("the tally is full")
        control.should_save = state.global_step == self.at["save"]
        control.should_training_stop = state.global_step == self.at["end"]

    def report_metrics(self) -> dict[str, Any]:
        return {} if self.report_as is None else {self.report_as: torch.tensor(self.count["ends"])}

    def on_metrics(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.count["metrics"] += 1
        self.seen.append(metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.seen = state["count"], state["seen"]


def returns_a_dict(*arguments: Any, **named: Any) -> dict[str, Any]:
    return {}


def returns_a_text(path: Path, purpose: str) -> str:
    return "rows"


def returns_texts(path: Path, purpose: str) -> list[str]:
    return ["row"]


def returns_nothing(path: Path, purpose: str) -> list[Any]:
    return []


def breaks_at_the_third_row(path: Path, purpose: str) -> Any:
    yield from ({"text": "a"}, {"text": "b"})
    raise KeyError("c")


def forgetful(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([groups[0]["params"][0]], lr=lr)


def plateau(optimizer: Any, num_training_steps: int, num_warmup_steps: int) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer)


def too_few() -> Any:
    return lambda prompts, completions, **columns: [1.0]


def text_rewards() -> Any:
    return lambda prompts, completions, **columns: ["good" for _ in completions]
