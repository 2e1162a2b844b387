"""Cookie that holds the session of a browser."""

import re

from starlette.datastructures import Headers

_NAME = "anneal_session"
_PORT = re.compile(r":([0-9]{1,5})$")
_MOST_BYTES = 16 * 1024
_SESSION = re.compile(rf'(?:^|;)\s*((?:__Host-)?{_NAME}(?:_[0-9]{{1,5}})?)\s*=\s*"?([^;"\s]*)')
"""Name and value of a session. To decode all cookies of a request takes ten times as long as to refuse the request."""


def name_of(headers: Headers, *, is_secure: bool) -> str:
    """Return the name of the cookie for the host of a request.

    All ports of a host share its cookies: without the port in their names, two services on one host would sign each
    other's browsers out. Browsers accept the prefix `__Host-` only over HTTPS.
    """
    port = _PORT.search(headers.get("host", ""))
    name = f"{_NAME}_{port[1]}" if port else _NAME
    return f"__Host-{name}" if is_secure else name


def session_of(headers: Headers) -> str | None:
    """Return the session token of a request; None without one, or if another site caused the request.

    Browsers send in `Sec-Fetch-Site` where a request comes from. A page on another port of this host is another origin
    but the same site, so `SameSite=Strict` alone would send it the cookie.
    """
    sent = "; ".join(headers.getlist("cookie"))  # a proxy of HTTP/2 may send a field for each cookie
    if not sent or len(sent) > _MOST_BYTES or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return None
    cookies = dict(_SESSION.findall(sent))
    return cookies.get(name_of(headers, is_secure=True)) or cookies.get(name_of(headers, is_secure=False)) or None
