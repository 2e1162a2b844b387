"""The schema's history: one file per change, numbered, applied by `anneal migrate` while replicas serve.

Rules, so that a deploy needs no downtime (tests hold each migration to them):

- **Expand, then contract.** Replicas of the version before go on serving on the new schema. So a migration only adds:
  tables, columns that may be null or have a server default, indexes. What nothing uses any more is dropped a release
  later, in a migration that says so: `BREAKS_OLD_REPLICAS = "no version since 0.3 reads it"`.
- **No long lock.** Each migration is a transaction of its own that waits a second for a lock and then is tried again,
  because every append queues up behind one that waits. Keep it short: rows are filled in by later code or in batches.
- **Indexes on tables that hold rows** are built by `online.create_index`, beside the appends, alone in their migration:
  it commits what came before it, and a migration that is tried again finds its index and goes on. Not on `run_events`,
  which is partitioned: there each partition gets its own.
- **Numbers of four digits**: by their order a replica knows whether a database is newer than itself (it serves) or
  older (it says to run `anneal migrate`).
"""
