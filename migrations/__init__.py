"""Migrations of the schema: one numbered file per change, applied by `anneal migrate` while replicas serve.

Rules for deploys without downtime (tests check them for each migration):

- **Expand, then contract.** Replicas of the previous version continue to serve on the new schema, so a migration only
  adds: tables, columns that may be null or have a server default, indexes. Unused parts are dropped a release later, in
  a migration that says so: `BREAKS_OLD_REPLICAS = "no version since 0.3 reads it"`.
- **No long lock.** Each migration is a separate transaction that waits a second for a lock and is then retried, because
  every append queues up behind one that waits. Keep it short: rows are filled in by later code or in batches.
- **Indexes on tables with rows** are built by `online.create_index`, concurrently with appends, alone in their
  migration: it commits what came before it, and a retried migration finds its index and continues. Not on `run_events`,
  which is partitioned: each partition gets its own index.
- **Kept unchanged.** Databases have run it, so no migration is ever changed, renumbered or deleted.
- **Four-digit numbers**: by their order a replica knows whether a database is newer than itself (it serves) or older
  (it asks for `anneal migrate`).
"""
