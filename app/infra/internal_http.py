"""HTTP client of a service in the operator's network, whose address is a setting of the server."""

import httpx


def internal_client(url: str, token: str | None, timeout: httpx.Timeout) -> httpx.AsyncClient:
    """Return a client for paths below `url` that sends `token` as a bearer token, through no proxy.

    Any number of requests may be open at a time.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # A proxy for the internet would also see the token.
    certificates = httpx.create_ssl_context(trust_env=False)
    certificates.set_default_verify_paths()  # those of the system and of SSL_CERT_FILE, such as a private authority
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, verify=certificates
    )
