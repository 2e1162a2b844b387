"""Predictions: a model answers the rows of a dataset, and its answers are scored."""
