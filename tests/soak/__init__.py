"""Soak: memory and latency of a service under attack."""
