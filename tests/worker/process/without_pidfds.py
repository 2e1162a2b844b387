"""Program that starts and ends training processes, on a system that refuses pidfds, and prints how each ended."""

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.worker.process.launching import Said, is_alive, launch, start_launcher
from worker.process.child import open_descriptors


def main(home: Path) -> dict[str, Any]:
    """Return the exits by mode and case, and the descriptors that closed processes and a killed zygote left open."""
    exits: dict[str, Any] = {}
    for mode in ("zygote", "cold"):
        without_launcher = open_descriptors()
        launcher = start_launcher(home / mode, mode)
        Said(launch(launcher, home / mode / "first", "quick")).to_the_end()
        before = open_descriptors()
        finished = Said(launch(launcher, home / mode / "finished", "quick", code=3)).to_the_end()
        said = Said(process := launch(launcher, home / mode / "killed", "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        os.kill(process.pid, signal.SIGKILL)
        killed = said.to_the_end()
        process = launch(launcher, home / mode / "ended", "wait_for_stop")
        Said(process).until(lambda said: said.has("message"))
        ended = [process.kill() == [process.pid], asdict(process.close()), is_alive(process.pid)]
        exits[mode] = {"launched": process.launched, "finished": asdict(finished), "killed": asdict(killed)}
        exits[mode] |= {"ended": ended, "left": sorted(open_descriptors() - before)}
        if mode == "zygote":
            said = Said(process := launch(launcher, home / mode / "lost", "wait_for_stop"))
            said.until(lambda said: said.has("message"))
            os.kill(launcher.zygote_pid or 0, signal.SIGKILL)
            exits[mode]["lost"] = [asdict(said.to_the_end()), is_alive(process.pid)]
        launcher.stop()
        wake_pipe = {launcher._wake_reading, launcher._wake_writing}
        exits[mode]["left"] += sorted(open_descriptors() - without_launcher - wake_pipe)
    return exits


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(main(Path(sys.argv[1]))))
