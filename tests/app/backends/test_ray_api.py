"""The connection to the dashboard of a Ray cluster."""

import ssl
from pathlib import Path

import pytest

from app.backends.ray_api import RayApi, RayError
from tests.app.ray_server import ray_server
from tests.certificates import write_certificate


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path / "ray.pem")


async def test_a_private_authority_is_trusted_if_the_operator_says_so(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        url = server.url.replace("http:", "https:")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        stranger = RayApi(url, None)
        with pytest.raises(RayError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get_job("anneal-run-1")
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = RayApi(url, "sesame")
        assert await trusting.get_job("anneal-run-1") is None and server.tokens == {"Bearer sesame"}
        await trusting.close()
