"""Fuzzing of the API from its OpenAPI document: `make fuzz`."""
