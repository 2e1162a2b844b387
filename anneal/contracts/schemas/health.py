"""Wire models of liveness and readiness."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Alive(BaseModel):
    """Liveness: the process responds."""

    model_config = ConfigDict(json_schema_extra={"example": {"status": "ok"}})

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Readiness: everything that a run needs from this process is available."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"version": "0.1.0", "database": "ok", "migrations": "0104", "broker": "ok"}}
    )

    version: str = Field(description="Version of Anneal that answers.")
    database: Literal["ok"] = "ok"
    migrations: str = Field(description="Revision of the database's schema.")
    broker: Literal["ok"] = "ok"
