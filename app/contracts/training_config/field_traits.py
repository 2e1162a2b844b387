"""Traits of configuration fields."""

CHANGEABLE_ON_RESUME = frozenset({
    "epochs", "max_steps", "min_steps", "save_steps", "save_total_limit", "logging_steps", "eval_steps",
    "time_limit_seconds", "stop_at_step", "early_stopping_patience", "learning_rate", "weight_decay",
    "report_to", "push_to_hub", "on_non_finite", "on_spike", "on_out_of_memory",
})  # fmt: skip
"""Fields that a resumed run may change; changing any other would silently train something else."""
