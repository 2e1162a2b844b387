"""Local server that speaks S3, for tests marked `full`: it is part of the extra `integrations`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import httpx
import pytest

SECRET = "secret-of-the-store"


@contextmanager
def s3_server(bucket: str) -> Iterator[Any]:
    """Serve an empty bucket; endpoint and credentials are in the environment, as those of a worker."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    httpx.post(f"{endpoint}/moto-api/reset").raise_for_status()  # all servers of a process have the same buckets
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of an earlier server
    boto3.client("s3").create_bucket(Bucket=bucket)
    try:
        yield server
    finally:
        patch.undo()
        server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a prefix of a bucket on a local server."""
    with s3_server("checkpoints"):
        yield "s3://checkpoints/of-anneal"
