"""Promises about the pages: one shell without data, assets that a browser keeps forever, nothing from elsewhere."""

import gzip
import re
from pathlib import Path

import pytest

from app.web import assets
from app.web.endpoints import PAGES
from tests.server import ApiServer

_RUN = "run_" + "0" * 26
ADDRESSES = [re.sub(r"\{[^}]+\}", _RUN, page) for page in PAGES]
SCRIPTS = sorted((assets.STATIC / "js").rglob("*.js"))


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_page_is_the_same_shell_without_data(shared_api: ApiServer, address: str) -> None:
    with shared_api.client_with(None) as browser:
        answer = browser.get(address)
        head = browser.head(address)
    assert answer.status_code == head.status_code == 200 and head.content == b""
    assert answer.content == assets.load_assets().shell.body
    assert answer.headers["content-security-policy"] == assets.CONTENT_SECURITY_POLICY
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["content-type"].startswith("text/html")


def test_the_policy_lets_a_page_load_and_send_to_this_server_only() -> None:
    directives = (directive.split() for directive in assets.CONTENT_SECURITY_POLICY.split(";"))
    assert {name: sources for name, *sources in directives} == {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }


def test_an_address_that_does_not_exist_is_a_page_for_browsers_and_an_error_for_programs(shared_api: ApiServer) -> None:
    page = {"Accept": "text/html,application/xhtml+xml"}
    with shared_api.client_with(None) as stranger:
        answer = stranger.get("/no/such-page", headers=page, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fno%2Fsuch-page")
        assert stranger.get("/v1/none", headers=page).status_code == 401
    answer = shared_api.client.get("/no/such-page", headers=page)
    assert (answer.status_code, answer.content) == (404, assets.load_assets().shell.body)
    for address, headers in (("/no/such-page", {}), ("/v1/none", page), ("/assets/none", page)):
        answer = shared_api.client.get(address, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json"), address
    assert shared_api.client.post("/no/such-page", headers=page).status_code == 404


def test_assets_are_kept_forever_under_the_digest_of_their_version(shared_api: ApiServer) -> None:
    loaded = assets.load_assets()
    with shared_api.client_with(None) as browser:
        plain = {"Accept-Encoding": "identity"}
        for name, file in loaded.files.items():
            answer = browser.get(f"/assets/{loaded.digest}/{name}", headers=plain)
            assert (answer.status_code, answer.content) == (200, file.body), name
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["content-type"] == file.media_type
        with browser.stream(
            "GET", f"/assets/{loaded.digest}/css/tables.css", headers={"Accept-Encoding": "gzip"}
        ) as zipped:
            body = b"".join(zipped.iter_raw())
        assert zipped.headers["content-encoding"] == "gzip" and zipped.headers["vary"] == "Accept-Encoding"
        assert gzip.decompress(body) == loaded.files["css/tables.css"].body
        others = [
            "/assets/0000000000000000/js/main.js",
            f"/assets/{loaded.digest}/js/none.js",
            f"/assets/{loaded.digest}/",
        ]
        others += [f"/assets/{loaded.digest}/../assets.py", f"/assets/{loaded.digest}/%2e%2e/assets.py"]
        assert {browser.get(path).status_code for path in others} <= {401, 404}
        assert browser.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


def test_the_shell_names_only_files_that_exist_and_has_nothing_inline() -> None:
    loaded = assets.load_assets()
    shell = loaded.shell.body.decode()
    named = re.findall(rf'"{assets.PREFIX}/{loaded.digest}/([^"]+)"', shell)
    assert len(named) >= 8 and set(named) <= set(loaded.files)
    assert not re.search(r"<style|<script(?![^>]+src=)|style=|\son\w+=|https?://", shell)


def test_every_script_is_reached_from_the_entry() -> None:
    entry = assets.STATIC / "js/main.js"
    reached, waiting = set(), [entry]
    while waiting:
        script = waiting.pop()
        if script not in reached:
            reached.add(script)
            imported = re.findall(r"(?:from|import\()\s*'(\.[^']+)'", script.read_text())
            waiting += [(script.parent / path).resolve() for path in imported]
    assert all(path.is_file() for path in reached)
    assert {path for path in reached if "vendor" not in path.parts} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(assets.STATIC)))
def test_no_script_makes_markup_or_code_of_text_or_loads_from_elsewhere(script: Path) -> None:
    text = script.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
