"""Completions of the same prompts without and with the adapter, with transformers and peft only.

The service is not involved: this shows that the output of a run loads anywhere.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from app.cli.demo.errors import DemoError
from app.config import Settings

_SECONDS = 900

LOADING = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {adapter!r})
tokenizer = AutoTokenizer.from_pretrained({adapter!r})
"""
_COMPLETING = """
import json, sys
def complete(messages):
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, no_repeat_ngram_size=2)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip()
for messages in json.load(sys.stdin):
    with model.disable_adapter():
        before = complete(messages)
    print("COMPLETED " + json.dumps({"before": before, "after": complete(messages)}), flush=True)
"""


@dataclass(frozen=True)
class Completion:
    """Completion of one prompt without and with the adapter."""

    before: str
    after: str


def complete(
    settings: Settings, base: str, adapter: str, prompts: list[list[dict[str, str]]], offline: bool
) -> list[Completion]:
    """Load the base model and the adapter in a separate process on the CPU and complete each prompt twice.

    Raises:
        DemoError: the adapter does not load, or loading and completing timed out.
    """
    environment = settings.trainer_environment() | {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", LOADING.format(base=base, adapter=adapter) + _COMPLETING],
            input=json.dumps(prompts),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"Loading and testing the adapter in {adapter} took longer than {_SECONDS} s.") from None
    found = [_parsed(line) for line in done.stdout.splitlines() if line.startswith("COMPLETED ")]
    if done.returncode or len(found) != len(prompts):
        said = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise DemoError(f"The adapter in {adapter} does not load with plain peft: {said}")
    return found


def _parsed(line: str) -> Completion:
    value: dict[str, Any] = json.loads(line.removeprefix("COMPLETED "))
    return Completion(before=value["before"], after=value["after"])
