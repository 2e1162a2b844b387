"""Driver of a Ray job: reserves devices of the cluster for one run and starts Anneal's worker on them.

The API submits `python -m worker.ray_node <run> <lease epoch>`, which needs neither the database nor the storage. The
worker (`worker.single_run`) has the environment of its Ray node. SIGTERM, which Ray sends to a job that is stopped, has
the worker save and release its run.
"""

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

from app.config import placed_worker_environment
from app.infra.errors import EXIT_TRY_LATER, SetupError, TryLater
from app.infra.process.children import start_child

_LOOK_SECONDS = 1.0
_PLACE_SECONDS = 3600.0
"""Most time without a place. The API submits another job; if it is gone, an autoscaler is not to add nodes for ever."""
_START_SECONDS = 300.0
"""Most time from the place to a worker: the node may have been lost, or its disk may hang."""
_FORWARD_SECONDS = 0.5
"""Time for the last lines of the worker to arrive, which no call of Ray waits for; Ray's own wait at an exit."""


class Bundle:
    """Actor on the node of a bundle: starts the worker there, and ends it.

    Ray calls its methods one after the other in the main thread, which the worker's death signal requires.
    """

    def start(self, run: str, lease_epoch: int, kind: str, devices: int, labels: list[str]) -> str:
        """Start the worker, whose other settings are those of the node; return the name of the node."""
        environment = placed_worker_environment(kind, devices, labels)
        command = [sys.executable, "-m", "worker.single_run", run, str(lease_epoch)]
        # SIGTERM, not SIGKILL: if only this actor dies, the worker saves and releases its run.
        self._worker = start_child(command, environment=environment, death_signal=signal.SIGTERM, pipe=True)
        self._last_line = ""
        self._reader = threading.Thread(target=self._copy_output, args=[self._worker.stdout], daemon=True)
        self._reader.start()
        return socket.gethostname()

    def wait(self, seconds: float) -> tuple[int, str] | None:
        """Return the exit code of the worker and the last line that it has printed; None if it still runs."""
        try:
            code = self._worker.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(_LOOK_SECONDS)
        return code, self._last_line

    def stop(self) -> None:
        """Have the worker save and release its run."""
        if self._worker.poll() is None:
            self._worker.send_signal(signal.SIGTERM)

    def _copy_output(self, output: IO[bytes]) -> None:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            self._last_line = text or self._last_line
            with suppress(OSError):  # the disk is full: the worker must never wait for a reader
                print(text, file=sys.stderr, flush=True)  # noqa: T201  # Ray forwards it to the log of the job


class Driver:
    """The job: a placement group with a bundle for each node, and an actor in each of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._is_stopping = False

    def request_stop(self, *_: object) -> None:
        """Handle SIGTERM."""
        self._is_stopping = True

    def run(self) -> None:
        """Return if the worker has ended by itself or was stopped.

        Raise `SetupError` if the worker or its settings are wrong, and `TryLater` if another job may succeed.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise TryLater(f"the cluster does not respond: {error}") from error
        signal.signal(signal.SIGTERM, self.request_stop)  # Ray has set its own handler, which exits
        arguments = self._arguments
        bundle = {"GPU" if arguments.kind == "cuda" else "CPU": float(arguments.devices)}
        selector = dict(label.split("=", 1) for label in arguments.label)
        group = placement_group([bundle], bundle_label_selector=[selector] if selector else None)
        print(f"waiting for a node with {bundle} {selector or ''}", flush=True)  # noqa: T201
        try:
            if self._is_placed(ray, group):
                self._train_run(ray, self._create_actor(ray, group, bundle))
        except ray.exceptions.RayTaskError:  # of this file, on the node
            raise
        except ray.exceptions.RayError as error:
            # Whether its worker still trains is not known here: the lease of the run decides.
            why = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise TryLater(f"the worker was not started, or its node is lost: {why[-1]}") from error
        finally:
            remove_placement_group(group)
            time.sleep(_FORWARD_SECONDS)
            ray.shutdown()

    def _is_placed(self, ray: Any, group: Any) -> bool:
        """Wait for the cluster; return False if the job is stopped before."""
        ready = group.ready()
        if not self._is_done(ray, ready, _PLACE_SECONDS, "no node had room"):
            return False
        ray.get(ready)
        return True

    def _is_done(self, ray: Any, pending: Any, seconds: float, otherwise: str) -> bool:
        """Wait for a call; return False if the job is stopped before, and raise `TryLater` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._is_stopping:
            if ray.wait([pending], timeout=_LOOK_SECONDS)[0]:
                return True
            if time.monotonic() > deadline:
                raise TryLater(f"{otherwise} for {seconds / 60:.0f} minutes")
        return False

    def _create_actor(self, ray: Any, group: Any, bundle: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = ray.remote(Bundle).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # a run goes on by another claim, with a job of its own
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return options.remote()

    def _train_run(self, ray: Any, bundle: Any) -> None:
        """Start the worker and wait for its end; pass a request to stop on."""
        arguments = self._arguments
        started = bundle.start.remote(
            arguments.run, arguments.lease_epoch, arguments.kind, arguments.devices, arguments.label
        )
        if not self._is_done(ray, started, _START_SECONDS, "the node with the place started no worker"):
            return  # the actor ends with its place, and the worker with the actor
        node = ray.get(started)
        print(f"the worker is on {node}", flush=True)  # noqa: T201
        was_asked = False
        while True:
            if self._is_stopping and not was_asked:
                bundle.stop.remote()
                was_asked = True
            try:
                ended = ray.get(bundle.wait.remote(_LOOK_SECONDS))
            except ray.exceptions.ActorUnavailableError:  # for a moment, or it is declared dead later
                time.sleep(_LOOK_SECONDS)
                continue
            if ended is not None:
                break
        code, last_line = ended
        if code != 0 and not was_asked:
            kind = TryLater if code == EXIT_TRY_LATER else SetupError
            raise kind(f"the worker on {node} ended with {code}: {last_line}")


def main() -> int:
    """Run the job with the arguments of the command line; the last line says what failed.

    It is printed without a connection to Ray, which prints what an actor says as it is killed until then.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("lease_epoch", type=int)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cuda", help="kind of the devices")
    parser.add_argument("--label", action="append", default=[], help="label of the node, key=value")
    try:
        Driver(parser.parse_args()).run()
    except SetupError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return EXIT_TRY_LATER if isinstance(error, TryLater) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
