"""Imports every module that defines a table."""

from sqlalchemy import MetaData

from app.tables.base import Base


def all_models() -> MetaData:
    """Return the metadata of the whole schema."""
    import app.tables.actions
    import app.tables.administration.api_keys
    import app.tables.administration.audit
    import app.tables.administration.installation
    import app.tables.administration.secrets
    import app.tables.checkpoints
    import app.tables.datasets
    import app.tables.events
    import app.tables.experiments
    import app.tables.openai_requests
    import app.tables.parts
    import app.tables.runs
    import app.tables.scheduling
    import app.tables.usage
    import app.tables.webhooks
    import app.tables.workers  # noqa: F401

    return Base.metadata
