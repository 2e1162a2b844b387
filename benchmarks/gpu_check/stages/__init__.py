"""Stages of the check: each module has a function `run(check)`."""
