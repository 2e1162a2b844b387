"""Banner of every page while the queue is paused."""

from playwright.sync_api import Page, ViewportSize, expect

from tests.app.web.pages import HOSTILE, PHONE, too_wide, violations
from tests.server import ApiServer


def test_every_page_says_why_the_queue_is_paused_and_an_admin_resumes_it(page: Page, shared_api: ApiServer) -> None:
    assert shared_api.client.post("/v1/queue/pause", json={"reason": HOSTILE}).status_code == 200
    page.goto("/workers")
    banner = page.locator(".banner.paused")
    expect(banner).to_contain_text("<img src=x onerror=alert(1)>")
    assert violations(page) + too_wide(page) == []
    narrow: ViewportSize = {"width": 640, "height": 720}
    for window in (PHONE, narrow):
        page.set_viewport_size(window)
        icon, text = banner.locator("svg").bounding_box(), banner.get_by_role("heading").bounding_box()
        assert icon and text and text["x"] < icon["x"] + icon["width"] + 20, "the text is not beside the icon"
        assert too_wide(page) == []
    banner.get_by_role("button", name="Resume the queue").click()
    expect(banner).to_have_count(0)
    assert shared_api.client.get("/v1/queue").json()["paused"] is False
