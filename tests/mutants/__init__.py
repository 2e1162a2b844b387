"""Deliberate bugs, each with the test that has to notice it: `python -m tests.mutants`."""
