"""Server behind `tiny.Forks`: a copy for each connection reads jobs, forks a child for each, and reports its end."""

import gc
import importlib
import json
import os
import resource
import socket
import sys
from typing import Any

gc.disable()  # imports create a million objects and hardly any garbage
from tests import fork_server  # noqa: E402
from tests.worker.training import counted_device, disk, half_attention, troubles  # noqa: E402
from tests.worker.training.cuda_autocast import cuda_autocast  # noqa: E402
from tests.worker.training.warm import warm_libraries  # noqa: E402
from worker.training.__main__ import main  # noqa: E402

# Modules that transformers and peft import with the first model, of a kind that most tests train.
for _name in (
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.bitsandbytes",
    "peft.tuners.lora.bnb",
):
    importlib.import_module(_name)


def _child(request: dict[str, Any]) -> None:
    code = 70
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644), descriptor)
        if "file_bytes" in request:
            limit = int(str(request["file_bytes"]))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        arguments = [str(request["job"]), *request.get("arguments", [])]
        os.environ.update(request.get("variables", {}))
        sys.path[:0] = request.get("folders", [])
        if "disk" in request:
            troubles.begin(json.loads(str(request["disk"])))
        if "course" in request:
            troubles.follow(request["course"])
        if "half_attention" in request:
            half_attention.begin()
        if "counted_device" in request:
            counted_device.begin(request["counted_device"])
        if "cuda_autocast" in request:
            cuda_autocast().__enter__()
        if "control" in request:
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control.connect(str(request["control"]))
            arguments += ["--control-fd", str(control.detach())]
        code = disk.main(main, arguments) if "watch_disk" in request else main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: socket.socket) -> None:
    """Read jobs from the connection, fork a child for each, and report its start and end."""
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                _child(json.loads(line))
            print(json.dumps({"pid": child}), file=lines, flush=True)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps({"code": code}), file=lines, flush=True)


warm_libraries()
# A collection in a child would write to, and so copy, every page of what the imports have created.
gc.collect()
gc.freeze()
gc.enable()
_serve(fork_server.serve(sys.argv[1]))
