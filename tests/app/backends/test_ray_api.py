"""The connection to the dashboard of a Ray cluster."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.backends.ray_api import RayApi, RayError
from tests.app.ray_server import ray_server


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that no public authority has signed, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ray-head")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1)
    ).add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "ray.pem"
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM) + private)
    return path


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
            await stranger.job("anneal-run-1")
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = RayApi(url, "sesame")
        assert await trusting.job("anneal-run-1") is None and server.tokens == {"Bearer sesame"}
        await trusting.close()
