"""Modules for zygotes to preload in tests, each with one property of a real library."""
