"""Mutants of the placement of runs on devices."""

from tests.mutants.mutant import Change, Mutant

_FITTING = "app/runs/state/fitting.py"
_PLACEMENT = "tests/app/runs/scheduler/test_placement.py"

MUTANTS = (
    Mutant(
        name="claim-ignores-memory",
        promises=(2,),
        about="A run is claimed for a device that is too small for it.",
        changes=(
            Change(
                _FITTING,
                "cast(estimated, Integer), 0) <= func.coalesce(device.memory_mb, 0)",
                "cast(estimated, Integer), 0) >= 0",
            ),
        ),
        test=f"{_PLACEMENT}::test_in_a_mixed_fleet_no_run_is_claimed_where_it_cannot_fit_and_none_starves",
    ),
    Mutant(
        name="small-run-takes-the-large-device",
        promises=(2,),
        about="A run takes the first device that it fits, so a larger run waits for it.",
        changes=(
            Change(
                "app/runs/state/machine.py",
                ".order_by(free.c.memory_mb, free.c.index)",
                ".order_by(free.c.index)",
            ),
        ),
        test=f"{_PLACEMENT}::test_a_small_run_leaves_the_large_device_free",
    ),
    Mutant(
        name="restart-hands-runs-to-a-cpu",
        promises=(2,),
        about="Runs that prefer a GPU go to a CPU as soon as the last GPU worker is offline.",
        changes=(
            Change(
                _FITTING,
                "            owner.c.heartbeat_at > func.clock_timestamp() - seconds(GPU_MEMORY_SECONDS),\n",
                '            owner.c.state == "online",\n',
            ),
        ),
        test=f"{_PLACEMENT}::test_a_cpu_takes_a_run_that_prefers_a_gpu_once_the_last_gpu_is_gone_for_an_hour",
    ),
)
