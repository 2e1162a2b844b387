"""The worker that the actor on a node starts has the settings of that node."""

import json
import os
import subprocess
import sys

import pytest

_ACTOR = """
import json, os
from app.config import placed_worker_environment
os.environ["OMP_NUM_THREADS"] = "2"  # as Ray does in an actor with two CPUs
print(json.dumps(placed_worker_environment("cpu", 2, ["zone=a"])))
"""
_NODE = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"


@pytest.mark.parametrize("threads", [None, "7"])
def test_threads_are_those_of_the_node_and_not_those_that_ray_sets(threads: str | None) -> None:
    """Otherwise each of two trainers, or one on a GPU, would compute with a number that Ray has chosen."""
    node = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    node |= {"ANNEAL_WORKER_LABELS": "site-b"} | ({} if threads is None else {"OMP_NUM_THREADS": threads})
    done = subprocess.run([sys.executable, "-c", _NODE, _ACTOR], env=node, capture_output=True, text=True, check=True)
    environment = json.loads(done.stdout)
    assert environment.get("OMP_NUM_THREADS") == threads
    assert (environment["ANNEAL_SLOTS"], environment["ANNEAL_WORKER_LABELS"]) == ("2", "site-b,zone=a")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
