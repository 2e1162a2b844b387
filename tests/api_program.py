"""`python -m tests.api_program PORT`: serve the API with the HTTP protocol of `app.server`, and stop it soon."""

import sys

import uvicorn

from app.api.uvicorn_protocol import Protocol

if __name__ == "__main__":
    uvicorn.run(
        "app.main:create_app",
        factory=True,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http=Protocol,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
