"""All faults of a campaign, with the windows that each has to hit."""

from collections.abc import Callable

from tests.chaos.faults_of_hosts import lose_host
from tests.chaos.faults_of_moments import (
    LIED_ABOUT,
    ambiguous_commits,
    flip_a_byte,
    stop_during_claim,
    stop_during_save,
    torn_save,
)
from tests.chaos.faults_of_processes import (
    deploy,
    drain,
    freeze_worker,
    kill_api,
    kill_trainer,
    kill_worker,
    kill_zygote,
)
from tests.chaos.faults_of_servers import (
    disk_full,
    freeze_postgres,
    kill_postgres,
    kill_valkey,
    latency_and_clocks,
    long_absence,
    lose_and_double_hints,
    silent_cut,
)
from tests.chaos.scene import Scene

FAULTS: dict[Callable[[Scene], None], tuple[str, ...]] = {
    kill_worker: ("worker killed with a run", "stop while the worker is lost"),
    kill_zygote: ("zygote killed with a run", "retry committed, answer lost"),
    kill_trainer: ("trainer killed", "retry committed, answer lost"),
    kill_api: ("API killed with clients connected",),
    kill_postgres: ("Postgres killed with runs",),
    kill_valkey: ("trained while Valkey was away",),
    freeze_worker: ("stale worker woke up and was fenced",),
    freeze_postgres: ("trained while Postgres stood still",),
    long_absence: ("lease unrenewed while Postgres was away",),
    silent_cut: ("connection fell silent",),
    latency_and_clocks: ("slow answers of the database", "clocks jumped under runs"),
    lose_and_double_hints: ("hints lost", "doubled hints"),
    ambiguous_commits: tuple(f"{verb} committed, answer lost" for verb in LIED_ABOUT),
    stop_during_claim: ("stop during claim",),
    stop_during_save: ("stop during save",),
    torn_save: ("torn save",),
    flip_a_byte: ("damaged checkpoint passed over",),
    deploy: ("API replaced with clients connected",),
    drain: ("run handed back", "release committed, answer lost"),
    disk_full: ("disk full",),
    lose_host: ("host of a run on two hosts lost",),
}
