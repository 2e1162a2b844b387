"""The lines of docs/guides/distillation.md, with the test as the worker; tests/e2e/test_distillation.py trains."""

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import Engine

from anneal.contracts.methods import GkdOptions
from app.infra.storage import Storage
from tests.app.cli.runs.test_predict import ROWS, answer
from tests.conftest import Anneal
from tests.factories import Trainer, make_model
from tests.nodes import ROOT
from tests.server import ApiServer

GUIDE = (ROOT / "docs" / "guides" / "distillation.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"(?:(?P<variable>[A-Z]+)=\$\()?anneal (?P<command>.*?)\)?")


def test_every_command_of_the_guide_works(emptied_api: ApiServer, engine: Engine, anneal: Anneal) -> None:
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"):
        make_model(emptied_api.settings, name)
    for file in ("chats.jsonl", "heldout.jsonl"):
        Path(file).write_text(ROWS)
    ((language, block),) = BLOCKS
    assert language == "bash"
    values: dict[str, str] = {}
    with ThreadPoolExecutor(1) as pool:
        for line in block.splitlines():
            match = _LINE.fullmatch(line)
            assert match is not None, line
            command = shlex.split(re.sub(r"\$(\w+)", lambda variable: values[variable[1]], match["command"]))
            if command[:2] == ["runs", "watch"]:
                trainer = Trainer(engine, command[2]).begin().complete()
                trainer.write_output(Storage(emptied_api.settings))
            done = pool.submit(anneal, *command)
            if command[0] == "predict":
                answer(emptied_api, engine)
            output = done.result().stdout
            if match["variable"]:
                values[match["variable"]] = output.strip()
    student = emptied_api.client.get(f"/v1/runs/{values['STUDENT']}").json()
    assert (student["config"]["method"], student["config"]["gkd"]["teacher"]) == ("gkd", values["TEACHER"])
    assert all(f"answers of the {who}" in output for who in ("teacher", "student"))


def test_defaults_of_the_guide_are_those_of_the_options() -> None:
    options = GkdOptions()
    assert f'| `"lmbda": {options.lmbda:g}` (default) |' in GUIDE
    assert f"and {options.beta:g} (default) the Jensen-Shannon divergence" in GUIDE
