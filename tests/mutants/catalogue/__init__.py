"""All mutants."""

from tests.mutants.catalogue import checkpoints, events, runs, workers
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*runs.MUTANTS, *events.MUTANTS, *workers.MUTANTS, *checkpoints.MUTANTS)
