"""Fuzzing of the whole API from its own description: `make fuzz`."""
