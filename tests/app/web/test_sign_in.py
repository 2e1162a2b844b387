"""Promises about who gets in, in a real browser: sign-in, sign-out, revoked keys, and pages of other sites."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import Engine

from app.api_keys.service import revoke_key_sync
from app.config import Settings
from tests.app.web.foreign_site import ForeignSite
from tests.browser import sign_in, window
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer, ThreadServer


@pytest.fixture
def visitor(page: Page, tolerated: list[str]) -> Page:
    """Tab without a session."""
    tolerated.append("status of 401")
    page.context.clear_cookies()
    return page


class TestSignIn:
    def test_a_link_works_once_and_leaves_the_address(self, visitor: Page, shared_api: ApiServer) -> None:
        link = shared_api.client.post("/v1/session/links").json()["url"]
        visitor.goto("/login")
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible()
        visitor.goto(link)  # only what follows `#` differs, so the browser loads no page
        expect(visitor.get_by_role("heading", name="Runs")).to_be_visible()
        assert visitor.url == f"{shared_api.url}/"
        visitor.context.clear_cookies()
        visitor.goto(link)
        expect(visitor.get_by_role("alert")).to_contain_text("This link was used, or has expired")
        assert "#" not in visitor.url

    def test_sign_in_returns_to_the_address_and_sign_out_ends_it(
        self, visitor: Page, shared_api: ApiServer, tolerated: list[str]
    ) -> None:
        tolerated.append("status of 404")
        visitor.goto("/workers?x=1")
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible()
        edges = visitor.locator(".signin form > *").evaluate_all("parts => parts.map((part) => part.offsetLeft)")
        assert len(edges) > 3 and len(set(edges)) == 1, "each part is below the one before"
        visitor.get_by_label("API key").fill("anneal_" + "x" * 43)
        visitor.get_by_role("button", name="Sign in").click()
        expect(visitor.get_by_role("alert")).to_contain_text("This key is unknown, expired or revoked")
        visitor.get_by_label("API key").fill(shared_api.key)
        visitor.get_by_role("button", name="Sign in").click()
        expect(visitor.get_by_role("heading", name="Workers")).to_be_visible()
        assert visitor.url.endswith("/workers?x=1")
        assert visitor.evaluate("document.cookie") == ""
        visitor.goto("/no-such-page")
        expect(visitor.get_by_text("There is no page at this address.")).to_be_visible()
        visitor.get_by_role("button", name="Account and theme").click()
        visitor.get_by_role("button", name="Sign out").click()
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible()
        visitor.goto("/")
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible()

    def test_sign_in_ends_with_its_key(self, visitor: Page, shared_api: ApiServer) -> None:
        assert isinstance(shared_api, ThreadServer)
        visitor.goto("/")
        visitor.get_by_label("API key").fill(shared_api.key_with(["read"]))
        visitor.get_by_role("button", name="Sign in").click()
        expect(visitor.get_by_role("heading", name="Runs")).to_be_visible()
        expect(visitor.get_by_role("link", name="New run")).to_have_count(0)
        key_id = visitor.evaluate("fetch('/v1/session').then((answer) => answer.json())")["key_id"]
        assert revoke_key_sync(shared_api.settings, key_id)
        shared_api.application.state.auth._callers.clear()
        visitor.get_by_role("link", name="Datasets").click()
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible()

    def test_a_revoked_key_ends_the_open_stream_and_leads_to_the_sign_in(
        self, visitor: Page, shared_api: ApiServer, live: Trainer, tolerated: list[str]
    ) -> None:
        assert isinstance(shared_api, ThreadServer)
        tolerated.append("ERR_INCOMPLETE_CHUNKED_ENCODING")
        with shared_api.client_with(shared_api.key_with(["read"])) as reader:
            link = reader.post("/v1/session/links").json()["url"]
        visitor.goto(link)
        expect(visitor.get_by_role("heading", name="Runs")).to_be_visible()
        visitor.goto(f"/runs/{live.run_id}")
        expect(visitor.get_by_role("log").locator(".ln")).to_have_count(1)
        key_id = visitor.evaluate("fetch('/v1/session').then((answer) => answer.json())")["key_id"]
        assert revoke_key_sync(shared_api.settings, key_id)
        # Without any input: the service ends the stream within 30 s, and the page finds out why.
        expect(visitor.get_by_role("heading", name="Sign in")).to_be_visible(timeout=90_000)
        assert visitor.url.endswith(f"/login?next=%2Fruns%2F{live.run_id}")


@pytest.fixture
def live(shared_api: ApiServer, engine: Engine) -> Iterator[Trainer]:
    """A run in training, with one line and one step."""
    trainer = Trainer(engine, make_run(shared_api.client, make_dataset(engine))["id"]).begin(total=100)
    trainer.log("a line")
    trainer.metric(1, loss=2.5)
    yield trainer
    # Its worker sends no heartbeat: once it counts as dead, the run would be pending beside that of the next test.
    shared_api.client.post(f"/v1/runs/{trainer.run_id}/stop")


class TestOtherSites:
    @pytest.fixture(scope="class")
    def allowed(self) -> Iterator[ForeignSite]:
        """A site whose origin the service allows."""
        with ForeignSite() as site:
            yield site

    @pytest.fixture(scope="class")
    def unknown(self) -> Iterator[ForeignSite]:
        """A site that the service does not know."""
        with ForeignSite() as site:
            yield site

    @pytest.fixture(scope="class")
    def open_api(self, shared_api: ApiServer, allowed: ForeignSite, unknown: ForeignSite) -> Iterator[ApiServer]:
        """The same service, with the origin of the one site in its settings."""
        values = shared_api.settings.model_dump() | {"allowed_origins": allowed.origin}
        with ThreadServer(Settings(**values)) as server:
            allowed.serve(server)
            unknown.serve(server)
            yield server

    def test_a_page_on_an_allowed_origin_reads_a_stream_by_ticket(
        self, chromium: Browser, open_api: ApiServer, allowed: ForeignSite, live: Trainer
    ) -> None:
        with window(chromium, open_api.url, hosts=(allowed.origin,), expected=("favicon",)) as context:
            page = context.new_page()
            page.goto(f"{allowed.origin}/?run={live.run_id}")
            expect(page.locator("#loss")).to_have_text("2.5000")
            live.metric(2, loss=1.25)
            expect(page.locator("#step")).to_have_text("2")
            expect(page.locator("#loss")).to_have_text("1.2500")

    def test_a_page_on_another_origin_reads_nothing_with_the_same_ticket(
        self, chromium: Browser, open_api: ApiServer, unknown: ForeignSite, live: Trainer
    ) -> None:
        with window(chromium, open_api.url, hosts=(unknown.origin,), expected=("CORS", "ERR_FAILED")) as context:
            page = context.new_page()
            with page.expect_console_message(lambda line: "blocked by CORS policy" in line.text):
                page.goto(f"{unknown.origin}/?run={live.run_id}")
            expect(page.locator("#loss")).to_have_text("–")

    def test_no_page_of_another_port_or_site_changes_anything_with_the_session(
        self, chromium: Browser, shared_api: ApiServer, unknown: ForeignSite, live: Trainer
    ) -> None:
        # Another port is the same site: the browser sends the cookie along, and the service has to refuse.
        other_site = unknown.origin.replace("127.0.0.1", "localhost")
        expected = ("status of 40",)
        with window(chromium, shared_api.url, hosts=(unknown.origin, other_site), expected=expected) as context:
            sign_in(context, shared_api.client)
            page = context.new_page()
            statuses = [
                self._post(page, f"{site}/empty", f"{shared_api.url}/v1/runs/{live.run_id}/stop")
                for site in (unknown.origin, other_site)
            ]
        assert statuses == [403, 403]
        shown = shared_api.client.get(f"/v1/runs/{live.run_id}").json()
        assert (shown["status"], shown["stop_requested_at"]) == ("running", None)

    @staticmethod
    def _post(page: Page, site: str, address: str) -> int:
        """Send a form, which needs no preflight request, from a page of the site; return the status of the answer."""
        page.goto(site)
        with page.expect_navigation(url=address) as answer:
            page.evaluate(
                """(address) => {
                  const form = document.createElement('form');
                  Object.assign(form, { method: 'post', action: address });
                  document.body.append(form);
                  form.submit();
                }""",
                address,
            )
        assert answer.value is not None
        return answer.value.status
