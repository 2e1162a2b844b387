"""The schema of version 0.1.0."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0100"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("max_devices", sa.Integer(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("max_devices >= 0", name=op.f("ck_api_keys_max_devices_positive")),
        sa.CheckConstraint("scopes <@ ARRAY['read','write','admin']", name=op.f("ck_api_keys_scopes_known")),
        sa.CheckConstraint("octet_length(digest) = 64", name=op.f("ck_api_keys_digest_is_sha256_hex")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("ts", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("key_name", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_key_id_id"), "audit_log", ["key_id", "id"], unique=False)
    op.create_index(op.f("ix_audit_log_resource_id"), "audit_log", ["resource", "id"], unique=False)
    op.create_table(
        "datasets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("extension", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("columns", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("preview", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("source", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("token_statistics", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("bytes > 0", name=op.f("ck_datasets_has_bytes")),
        sa.CheckConstraint("octet_length(sha256) = 64", name=op.f("ck_datasets_sha256_is_hex")),
        sa.CheckConstraint("rows > 0", name=op.f("ck_datasets_has_rows")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
    )
    op.create_table(
        "installation",
        sa.Column("is_the_one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.CheckConstraint("is_the_one", name=op.f("ck_installation_one")),
        sa.PrimaryKeyConstraint("is_the_one", name=op.f("pk_installation")),
    )
    for name, key in (("event_feed", "number"), ("event_feed_queue", "position")):
        op.create_table(
            name,
            sa.Column(key, sa.BigInteger(), sa.Identity(always=True), nullable=False),
            sa.Column("run_id", sa.Text(), nullable=False),
            sa.Column("seq", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint(key, name=op.f(f"pk_{name}")),
        )
        op.create_index(op.f(f"ix_{name}_run_id"), name, ["run_id"], unique=False)
    op.create_table(
        "experiments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), server_default="", nullable=False),
        sa.Column("max_devices", sa.Integer(), nullable=True),
        sa.Column("tags", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("max_devices >= 0", name=op.f("ck_experiments_max_devices_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
    )
    op.create_index(
        "ix_experiments_max_devices",
        "experiments",
        ["id"],
        unique=False,
        postgresql_where=sa.text("max_devices IS NOT NULL"),
    )
    op.create_table(
        "metric_rollups",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("series", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "attempt", "segment", "kind", "level", "number", name=op.f("pk_metric_rollups")
        ),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index(
        "ix_metric_rollups_whole", "metric_rollups", ["run_id"], unique=False, postgresql_where=sa.text("level = 0")
    )
    op.create_table(
        "replica_deletions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_replica_deletions")),
    )
    op.create_table(
        "run_deletions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_deletions")),
    )
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ts", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", postgresql.JSON(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_run_events")),
        postgresql_partition_by="RANGE (run_id)",
    )
    op.create_index(
        "ix_run_events_history",
        "run_events",
        ["run_id", "seq"],
        unique=False,
        postgresql_where=sa.text("type NOT IN ('log', 'metric', 'device', 'progress', 'distribution')"),
    )
    op.create_index(
        "ix_run_events_metric",
        "run_events",
        ["run_id", "seq"],
        unique=False,
        postgresql_where=sa.text("type IN ('metric', 'eval')"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )
    op.create_table(
        "tokens",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("octet_length(digest) = 64", name=op.f("ck_tokens_digest_is_sha256_hex")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_tokens_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_tokens")),
    )
    op.create_index("ix_tokens_key_id", "tokens", ["key_id"], unique=False)
    op.create_index("ix_tokens_expires_at", "tokens", ["expires_at"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("process_started", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("backends", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("labels", postgresql.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("launch_mode", sa.Text(), nullable=False),
        sa.Column("launch_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("plugins", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("gguf", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("group_address", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("launch_mode IN ('zygote','cold')", name=op.f("ck_workers_launch_mode_known")),
        sa.CheckConstraint("state IN ('online','draining','offline')", name=op.f("ck_workers_state_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "dataset_idempotency_keys",
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("request_digest", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_dataset_idempotency_keys_dataset_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("created_by", "idempotency_key", name=op.f("pk_dataset_idempotency_keys")),
    )
    op.create_index(
        op.f("ix_dataset_idempotency_keys_dataset_id"), "dataset_idempotency_keys", ["dataset_id"], unique=False
    )
    op.create_table(
        "devices",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("lease_epoch", sa.Integer(), nullable=True),
        sa.Column("trouble", sa.Text(), nullable=True),
        sa.Column("paused_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("telemetry", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("kind IN ('cpu','cuda')", name=op.f("ck_devices_kind_known")),
        sa.CheckConstraint("(run_id IS NULL) = (lease_epoch IS NULL)", name=op.f("ck_devices_run_with_lease_epoch")),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_devices_worker_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("worker_id", "index", name=op.f("pk_devices")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experiment_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tags", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("task", sa.Text(), server_default="train", nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("eval_dataset_id", sa.Text(), nullable=True),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("method", sa.Text(), sa.Computed("config ->> 'method'", persisted=True), nullable=False),
        sa.Column("base_model", sa.Text(), sa.Computed("config ->> 'base_model'", persisted=True), nullable=False),
        sa.Column("user_set_fields", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("effective_config", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("devices_needed", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("hosts_needed", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column(
            "requirements", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("resources", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("pending_reason", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_digest", sa.Text(), nullable=True),
        sa.Column("parent_run_id", sa.Text(), nullable=True),
        sa.Column("resume_checkpoint_id", sa.Text(), nullable=True),
        sa.Column("base_run_id", sa.Text(), nullable=True),
        sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_restarts", sa.Integer(), server_default=sa.text("3"), nullable=False),
        sa.Column("stop_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stop_mode", sa.Text(), nullable=True),
        sa.Column("stop_grace_seconds", sa.Float(), nullable=True),
        sa.Column("preempted_for", sa.Text(), nullable=True),
        sa.Column("notified_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("lease_epoch", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("lost_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("event_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("attempt_event_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("current_step", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("current_epoch", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("best_loss", sa.Double(), nullable=True),
        sa.Column("best_score", sa.Double(), nullable=True),
        sa.Column("final_loss", sa.Double(), nullable=True),
        sa.Column("final_score", sa.Double(), nullable=True),
        sa.Column("checkpoint_step", sa.Integer(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("output_attempt", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("task IN ('train','evaluate','export')", name=op.f("ck_runs_task_known")),
        sa.CheckConstraint("end_reason IS NULL OR status = 'completed'", name=op.f("ck_runs_end_reason_of_completed")),
        sa.CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name=op.f("ck_runs_error_iff_failed")),
        sa.CheckConstraint(
            "(status IN ('completed','failed','cancelled')) = (finished_at IS NOT NULL)",
            name=op.f("ck_runs_finished_iff_terminal"),
        ),
        sa.CheckConstraint(
            "(status IN ('initializing','running','checkpointing')) = (lease_owner IS NOT NULL)",
            name=op.f("ck_runs_leased_iff_live"),
        ),
        sa.CheckConstraint(
            "status <> 'cancelled' OR stop_requested_at IS NOT NULL", name=op.f("ck_runs_cancelled_by_stop")
        ),
        sa.CheckConstraint(
            "status <> 'pending' OR stop_requested_at IS NULL", name=op.f("ck_runs_stopped_never_waits")
        ),
        sa.CheckConstraint(
            "status IN ('pending','initializing','running','checkpointing','completed','failed','cancelled')",
            name=op.f("ck_runs_status_known"),
        ),
        sa.CheckConstraint(
            "status NOT IN ('initializing','running','checkpointing') OR attempt > 0",
            name=op.f("ck_runs_live_has_attempt"),
        ),
        sa.CheckConstraint("(lease_owner IS NULL) = (lease_expires_at IS NULL)", name=op.f("ck_runs_lease_whole")),
        sa.CheckConstraint(
            "preempted_for IS NULL OR status IN ('initializing','running','checkpointing')",
            name=op.f("ck_runs_preempted_is_live"),
        ),
        sa.CheckConstraint("devices_needed BETWEEN 1 AND 1024", name=op.f("ck_runs_devices_needed_bounded")),
        sa.CheckConstraint(
            "hosts_needed > 0 AND devices_needed % hosts_needed = 0", name=op.f("ck_runs_hosts_divide_devices")
        ),
        sa.CheckConstraint(
            "event_seq >= 0 AND attempt_event_count >= 0 AND first_seq >= 1", name=op.f("ck_runs_counters_positive")
        ),
        sa.CheckConstraint("lease_epoch >= attempt AND attempt >= 0", name=op.f("ck_runs_lease_epoch_covers_attempts")),
        sa.CheckConstraint("max_restarts BETWEEN 0 AND 100", name=op.f("ck_runs_max_restarts_bounded")),
        sa.CheckConstraint("priority BETWEEN -1000 AND 1000", name=op.f("ck_runs_priority_bounded")),
        sa.ForeignKeyConstraint(["base_run_id"], ["runs.id"], name=op.f("fk_runs_base_run_id")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_runs_dataset_id")),
        sa.ForeignKeyConstraint(["eval_dataset_id"], ["datasets.id"], name=op.f("fk_runs_eval_dataset_id")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name=op.f("fk_runs_experiment_id")),
        sa.ForeignKeyConstraint(["parent_run_id"], ["runs.id"], name=op.f("fk_runs_parent_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("created_by", "idempotency_key", name=op.f("uq_runs_created_by_idempotency_key")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index("ix_runs_base_model_id", "runs", ["base_model", "id"], unique=False)
    op.create_index("ix_runs_name_id", "runs", ["name", "id"], unique=False)
    op.create_index("ix_runs_base_run_id", "runs", ["base_run_id"], unique=False)
    op.create_index(
        "ix_runs_begun",
        "runs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("attempt > 0 AND status NOT IN ('completed','failed','cancelled')"),
    )
    op.create_index("ix_runs_dataset_id", "runs", ["dataset_id"], unique=False)
    op.create_index("ix_runs_eval_dataset_id", "runs", ["eval_dataset_id"], unique=False)
    op.create_index(
        "ix_runs_experiment_id_final_loss",
        "runs",
        ["experiment_id", "method", "final_loss", "id"],
        unique=False,
        postgresql_where=sa.text("final_score IS NULL AND final_loss IS NOT NULL"),
    )
    op.create_index(
        "ix_runs_experiment_id_final_score",
        "runs",
        ["experiment_id", "method", "final_score", "id"],
        unique=False,
        postgresql_where=sa.text("final_score IS NOT NULL"),
    )
    op.create_index("ix_runs_experiment_id_id", "runs", ["experiment_id", "id"], unique=False)
    op.create_index("ix_runs_experiment_id_status_id", "runs", ["experiment_id", "status", "id"], unique=False)
    op.create_index(
        "ix_runs_final_loss",
        "runs",
        ["method", "final_loss", "id"],
        unique=False,
        postgresql_where=sa.text("final_score IS NULL AND final_loss IS NOT NULL"),
    )
    op.create_index(
        "ix_runs_final_score",
        "runs",
        ["method", "final_score", "id"],
        unique=False,
        postgresql_where=sa.text("final_score IS NOT NULL"),
    )
    op.create_index(
        "ix_runs_live",
        "runs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("status IN ('initializing','running','checkpointing')"),
    )
    op.create_index("ix_runs_parent_run_id", "runs", ["parent_run_id"], unique=False)
    op.create_index(
        "ix_runs_pending",
        "runs",
        ["backend", sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        "ix_runs_owner",
        "runs",
        [sa.literal_column("coalesce(created_by, '')"), sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index(
        "ix_runs_wide",
        "runs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending' AND devices_needed > 1"),
    )
    op.create_index(
        "ix_runs_queue",
        "runs",
        [sa.literal_column("priority DESC"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index("ix_runs_resume_checkpoint_id", "runs", ["resume_checkpoint_id"], unique=False)
    op.create_index("ix_runs_status_id", "runs", ["status", "id"], unique=False)
    op.create_index(
        "ix_runs_tags",
        "runs",
        ["tags"],
        unique=False,
        postgresql_using="gin",
        postgresql_ops={"tags": "jsonb_path_ops"},
    )
    op.create_index(
        "ix_runs_unmeasured",
        "runs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("final_loss IS NULL AND final_score IS NULL"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.Text(), nullable=False),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("save_seconds", sa.Double(), nullable=True),
        sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("bad_reason", sa.Text(), nullable=True),
        sa.Column("replica_started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("replicated_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('periodic','stop','best','final')", name=op.f("ck_checkpoints_kind_known")),
        sa.CheckConstraint("octet_length(manifest_sha256) = 64", name=op.f("ck_checkpoints_manifest_is_sha256_hex")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
    )
    op.create_index(
        "ix_checkpoints_copies_to_remove",
        "checkpoints",
        ["id"],
        unique=False,
        postgresql_where=sa.text("deleted_at IS NOT NULL AND replica_started_at IS NOT NULL"),
    )
    op.create_index("ix_checkpoints_run_id_id", "checkpoints", ["run_id", "id"], unique=False)
    op.create_index(
        "ix_checkpoints_without_copy",
        "checkpoints",
        ["id"],
        unique=False,
        postgresql_where=sa.text("replicated_at IS NULL AND deleted_at IS NULL AND bad_reason IS NULL"),
    )
    op.create_table(
        "reservations",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("spare", sa.Integer(), nullable=False),
        sa.Column("durations", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("devices > 0 AND spare >= 0", name=op.f("ck_reservations_counts_positive")),
        sa.ForeignKeyConstraint(
            ["worker_id"], ["workers.id"], name=op.f("fk_reservations_worker_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_reservations")),
    )
    op.create_table(
        "quota_reservations",
        sa.Column("quota_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("spare", sa.Integer(), nullable=False),
        sa.Column("durations", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("spare >= 0", name=op.f("ck_quota_reservations_spare_positive")),
        sa.PrimaryKeyConstraint("quota_id", name=op.f("pk_quota_reservations")),
    )
    op.create_table(
        "run_parts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("lease_epoch", sa.Integer(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("first_rank", sa.Integer(), nullable=False),
        sa.Column("device_indexes", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("meeting", sa.Text(), nullable=True),
        sa.Column("is_leaving", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("job", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("activity", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("part > 0 AND first_rank > 0", name=op.f("ck_run_parts_follows_the_lead")),
        sa.CheckConstraint("outcome IS NULL OR ended_at IS NOT NULL", name=op.f("ck_run_parts_outcome_of_ended")),
        sa.PrimaryKeyConstraint("run_id", "lease_epoch", "part", name=op.f("pk_run_parts")),
    )
    op.create_index(
        "ix_run_parts_open", "run_parts", ["worker_id"], unique=False, postgresql_where=sa.text("ended_at IS NULL")
    )
    op.create_table(
        "ray_jobs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("lease_epoch", sa.Integer(), nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=True),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("left_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "lease_epoch", name=op.f("pk_ray_jobs")),
    )
    op.create_table(
        "device_usage",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("device_seconds", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_device_usage")),
    )
    op.create_table(
        "run_actions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column(
            "parameters", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("status", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("result", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_digest", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "(status = 'waiting') = (finished_at IS NULL)", name=op.f("ck_run_actions_finished_iff_not_waiting")
        ),
        sa.CheckConstraint(
            "action IN ('checkpoint','evaluate','sample','set_learning_rate','extend')",
            name=op.f("ck_run_actions_action_known"),
        ),
        sa.CheckConstraint("status <> 'done' OR step IS NOT NULL", name=op.f("ck_run_actions_done_at_a_step")),
        sa.CheckConstraint("status IN ('waiting','done','refused','failed')", name=op.f("ck_run_actions_status_known")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_actions_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_actions")),
    )
    op.create_index("ix_run_actions_run_id_id", "run_actions", ["run_id", "id"], unique=False)
    op.create_index(
        "ix_run_actions_waiting",
        "run_actions",
        ["run_id"],
        unique=False,
        postgresql_where=sa.text("status = 'waiting'"),
    )
    op.create_table(
        "run_attempts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lease_epoch", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("start_step", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("report", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("output_sha256", sa.Text(), nullable=True),
        sa.Column("records_sha256", sa.Text(), nullable=True),
        sa.CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name=op.f("ck_run_attempts_outcome_iff_ended")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_attempts_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_run_attempts")),
    )
    op.create_table(
        "run_estimates",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("estimate", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_estimates_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_estimates")),
    )
    op.create_table(
        "run_eval_datasets",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_run_eval_datasets_dataset_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_eval_datasets_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_run_eval_datasets")),
    )
    op.create_index("ix_run_eval_datasets_dataset_id", "run_eval_datasets", ["dataset_id"], unique=False)
    op.create_table(
        "run_reward_models",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("reward_run_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["reward_run_id"], ["runs.id"], name=op.f("fk_run_reward_models_reward_run_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_reward_models_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "reward_run_id", name=op.f("pk_run_reward_models")),
    )
    op.create_index("ix_run_reward_models_reward_run_id", "run_reward_models", ["reward_run_id"], unique=False)
    op.create_table(
        "run_timings",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("similarity_key", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("timings", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_timings_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_run_timings")),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "ix_run_timings_similarity_key_run_id",
        "run_timings",
        ["similarity_key", sa.literal_column("run_id DESC")],
        unique=False,
    )

    # Rows with ids outside of the monthly partitions (app.tables.events) go here.
    # Uncompressed, so that a reader knows the size of an event without reading it; few are large enough to compress.
    op.execute("ALTER TABLE run_events ALTER COLUMN data SET STORAGE EXTERNAL")
    op.execute("CREATE TABLE run_events_default PARTITION OF run_events DEFAULT")
    # A trigger, because events are inserted by several statements; `app.runs.events.feed` numbers what it queues.
    op.execute(
        """
        CREATE FUNCTION run_events_feed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO event_feed_queue (run_id, seq) VALUES (NEW.run_id, NEW.seq);
            RETURN NULL;
        END $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER run_events_feed AFTER INSERT ON run_events FOR EACH ROW
        WHEN (NEW.type = ANY (ARRAY['status','progress','end'])) EXECUTE FUNCTION run_events_feed()
        """
    )
    # A trigger instead of the code that ends runs: replicas of an older version end runs too.
    op.execute(
        """
        CREATE FUNCTION runs_final_loss() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            NEW.final_loss := CASE WHEN NEW.status IN ('completed','failed','cancelled') THEN NEW.best_loss END;
            NEW.final_score := CASE WHEN NEW.status IN ('completed','failed','cancelled') THEN NEW.best_score END;
            RETURN NEW;
        END $$
        """
    )
    op.execute(
        "CREATE TRIGGER runs_final_loss BEFORE UPDATE OF status ON runs FOR EACH ROW EXECUTE FUNCTION runs_final_loss()"
    )
    # A trigger instead of the statement that ends runs: each query of a trigger sees what is committed by then, so an
    # action that was accepted while the end waited for its lock is refused too.
    op.execute(
        """
        CREATE FUNCTION runs_refuse_actions() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            UPDATE run_actions SET status = 'refused', finished_at = clock_timestamp(),
                message = 'The run is ' || NEW.status || ': it ended before this could be done.'
            WHERE run_id = NEW.id AND status = 'waiting';
            RETURN NULL;
        END $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER runs_refuse_actions AFTER UPDATE OF status ON runs FOR EACH ROW
        WHEN (NEW.status IN ('completed','failed','cancelled') AND OLD.status IS DISTINCT FROM NEW.status)
        EXECUTE FUNCTION runs_refuse_actions()
        """
    )
