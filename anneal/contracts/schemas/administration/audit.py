"""Wire models of the audit log."""

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.field_types import Timestamp


class AuditView(BaseModel):
    """Call that made or attempted changes."""

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
    ts: Timestamp
    method: str = Field(description="HTTP method; `CLI` for a command on the server.")
    route: str = Field(description="Path template of the route, or the command.")
    resource: str | None = Field(description="Id or name of the created or changed resource.")
    key_id: str | None
    key_name: str = Field(description="Name of the key at that time; for a command, the Unix user.")
    address: str | None = Field(description="Source address of the connection; behind a proxy, the proxy's address.")
    request_id: str | None
    status: int | None
