"""Stages of a check for the tests of its runner."""
