"""Program that starts and ends training processes, on a system that refuses pidfds, and prints how each ended."""

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.waiting import eventually
from tests.worker.process.launching import Said, is_alive, launch, start_launcher


def main(home: Path) -> dict[str, Any]:
    """Return the exits by mode and case, and whether descriptors are left open."""
    exits: dict[str, Any] = {}
    for mode in ("zygote", "cold"):
        launcher = start_launcher(home / mode, mode)
        Said(launch(launcher, home / mode / "first", "quick")).to_the_end()
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        finished = Said(launch(launcher, home / mode / "finished", "quick", code=3)).to_the_end()
        said = Said(process := launch(launcher, home / mode / "killed", "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        os.kill(process.pid, signal.SIGKILL)
        killed = said.to_the_end()
        process = launch(launcher, home / mode / "ended", "wait_for_stop")
        Said(process).until(lambda said: said.has("message"))
        ended = [process.kill() == [process.pid], asdict(process.close()), is_alive(process.pid)]
        eventually(lambda before=before: len(os.listdir("/proc/self/fd")) == before)  # noqa: PTH208
        exits[mode] = {"launched": process.launched, "finished": asdict(finished), "killed": asdict(killed)}
        exits[mode]["ended"] = ended
        if mode == "zygote":
            said = Said(process := launch(launcher, home / mode / "lost", "wait_for_stop"))
            said.until(lambda said: said.has("message"))
            os.kill(launcher.zygote_pid or 0, signal.SIGKILL)
            exits[mode]["lost"] = [asdict(said.to_the_end()), is_alive(process.pid)]
        launcher.stop()
    return exits


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(main(Path(sys.argv[1]))))
