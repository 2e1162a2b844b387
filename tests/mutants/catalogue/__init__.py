"""All mutants."""

from tests.mutants.catalogue import checkpoints, events, outputs, placement, runs, workers
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *runs.MUTANTS,
    *placement.MUTANTS,
    *events.MUTANTS,
    *workers.MUTANTS,
    *checkpoints.MUTANTS,
    *outputs.MUTANTS,
)
