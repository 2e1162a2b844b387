"""Deliberate bugs, each with the test that must detect it: `python -m tests.mutants`."""
