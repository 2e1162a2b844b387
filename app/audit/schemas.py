"""The audit list on the wire."""

from pydantic import BaseModel, ConfigDict, Field

from app.runs.schemas import Moment


class AuditView(BaseModel):
    """One call that changed something, or tried to."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "aud_01k0q3x7v5m2n8p4r6t0w9y1z3",
                "ts": "2026-01-02T03:04:05.678Z",
                "method": "DELETE",
                "route": "/v1/runs/{run_id}",
                "resource": "run_01k0q3x7v5m2n8p4r6t0w9y1z3",
                "key_id": "key_01k0q3x7v5m2n8p4r6t0w9y1z3",
                "key_name": "laptop",
                "address": "192.0.2.7",
                "request_id": "req_01k0q3x7v5m2n8p4r6t0w9y1z3",
                "status": 204,
            }
        },
    )

    id: str
    ts: Moment
    method: str = Field(description="`CLI` for a command on the server.")
    route: str = Field(description="The path as its route states it, or the command.")
    resource: str | None = Field(description="Id or name of what was made or changed.")
    key_id: str | None
    key_name: str = Field(description="Name of the key at that time; of a command, the unix user.")
    address: str | None = Field(description="Where the connection came from: behind a proxy, that.")
    request_id: str | None
    status: int | None
