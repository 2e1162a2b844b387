"""`make gpu-check`: the training path on this machine's GPU in eight minutes, measured beside plain TRL.

`runner` starts each stage as a process of its own with a time limit; `stages` has a module for each. A stage records
rows, which are on disk at once. `markdown` renders them, and `publish` puts them into `docs/internals/gpu.md`. Nothing
here needs pytest or a network, so that it also runs where packages are only on PYTHONPATH.
"""
