"""Answers: a model answers questions as they come, many at a time."""
