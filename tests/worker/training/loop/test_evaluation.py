"""Promises about evaluations within training."""

from pathlib import Path
from typing import Any

from tests.worker.training.output.outputs import weights
from tests.worker.training.tiny import Forks, make_job, make_prompts

PLUGIN = '''
import os, random, signal
import numpy

def drawn(stop_file):
    """A reward of random numbers; the process is asked to stop at the call whose number is in the file."""
    calls = 0
    def judge(prompts, completions, **columns):
        nonlocal calls
        calls += 1
        if os.path.exists(stop_file) and open(stop_file).read() == str(calls):
            os.kill(os.getpid(), signal.SIGTERM)
        return [random.random() + numpy.random.random() for _ in completions]
    return judge
'''
CONFIG: dict[str, Any] = {
    "method": "rlhf", "lora_r": 4, "load_in_4bit": False, "learning_rate": 1e-2, "max_seq_length": 64, "max_steps": 4,
    "batch_size": 4, "gradient_accumulation_steps": 1, "logging_steps": 1, "save_steps": 2, "eval_steps": 2,
    "eval_split": 0.5, "export": "last", "extra": {"eval_batch_size": 2},
}  # fmt: skip


def install(site: Path) -> Path:
    """Install the reward as an operator's package."""
    metadata = site / "drawing-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "drawing.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: drawing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anneal.rewards]\ndrawn = drawing:drawn\n")
    return site


def test_evaluation_of_rlhf_that_a_stop_interrupts_leaves_every_generator_as_it_was(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data, stop_file = make_prompts(tmp_path / "prompts.jsonl", 12), tmp_path / "stop"
    reward = {"type": "plugin", "name": "drawn", "options": {"stop_file": str(stop_file)}}
    rlhf = {"num_generations": 2, "max_completion_length": 8, "rewards": [reward]}
    with_reward = forks.beside(install(tmp_path / "site"))

    def train(folder: str, **more: Any) -> Any:
        job = make_job(tmp_path / folder, tiny_model, data, data_format="prompt", **CONFIG, rlhf=rlhf, **more)
        return with_reward.run(job | {"reward_models": []})

    whole = train("whole")
    assert whole.result["outcome"] == "completed", (whole.result, whole.stderr[-3000:])
    stop_file.write_text("3")  # the first batch of the evaluation after step 2
    first = train("stopped")
    stop_file.unlink()
    assert (first.result["why"], first.result["step"], first.of("eval")) == ("drain", 2, [])
    rest = train("stopped", attempt=2, resume_from=first.checkpoint(2))
    assert first.steps | rest.steps == whole.steps
    assert weights(rest) == weights(whole)
    metrics = [{name: value for name, value in record["metrics"].items() if "second" not in name}
               for outcome in (rest, whole) for record in outcome.of("eval")]  # fmt: skip
    assert metrics[:2] == metrics[2:]
