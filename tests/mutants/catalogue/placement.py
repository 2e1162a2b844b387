"""Mutants of the placement of runs on devices."""

from tests.mutants.mutant import Change, Mutant

_FIT = "app/runs/queue/fit.py"
_PLACEMENT = "tests/app/runs/queue/test_placement.py"

MUTANTS = (
    Mutant(
        name="claim-ignores-memory",
        promises=(2,),
        about="A run is claimed for a device that is too small for it.",
        changes=(
            Change(
                _FIT,
                "return self.memory_on(kind) <= device.memory_mb and self.has_gpu(device)",
                "return self.has_gpu(device)",
            ),
        ),
        test=f"{_PLACEMENT}::test_in_a_mixed_fleet_no_run_is_claimed_where_it_cannot_fit_and_none_starves",
    ),
    Mutant(
        name="small-run-takes-the-large-device",
        promises=(2,),
        about="A run takes the first device that it fits, so a larger run waits for it.",
        changes=(Change(_FIT, "        fitting.sort(key=lambda index: worker.devices[index].memory_mb)\n", ""),),
        test=f"{_PLACEMENT}::test_a_small_run_leaves_the_large_device_free",
    ),
    Mutant(
        name="restart-hands-runs-to-a-cpu",
        promises=(2,),
        about="Runs that prefer a GPU go to a CPU as soon as the last GPU worker is offline.",
        changes=(
            Change(
                "app/runs/queue/fleet.py",
                "workers.state <> 'offline' OR workers.heartbeat_at > clock_timestamp() - make",
                "workers.state = 'online' OR workers.heartbeat_at > clock_timestamp() + make",
            ),
        ),
        test=f"{_PLACEMENT}::test_a_cpu_takes_a_run_that_prefers_a_gpu_once_the_last_gpu_is_gone_for_an_hour",
    ),
)
