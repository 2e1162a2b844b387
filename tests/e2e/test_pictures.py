"""The pictures of the documentation, made of real runs: `make pictures` writes them into docs/assets."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import sign_in, window
from tests.e2e.conftest import TrainingStack
from tests.nodes import ROOT

PICTURES = ("dashboard-run", "dashboard-run-dark", "dashboard-runs", "dashboard-compare", "dashboard-new")
_ALL_DRAWN = """(charts) => {
  const isInSight = (one) => one.getBoundingClientRect().top < innerHeight;
  const isDrawn = (one) => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((byte) => byte > 0);
  const inSight = [...document.querySelectorAll('.chart canvas')].filter(isInSight);
  return inSight.length >= charts && inSight.every(isDrawn);
}"""


@pytest.mark.full
@pytest.mark.usefixtures("ends")
def test_the_pictures_show_runs_in_training(stack: TrainingStack, chromium: Browser, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PICTURES") or tmp_path)
    common = {"eval_split": 0.2, "eval_steps": 10, "save_steps": 50, "logging_steps": 1, "packing": False}
    runs = []
    for name, more in (("docstrings, rank 4", {"lora_r": 4}), ("docstrings, rank 16", {"lora_r": 16})):
        config = {"base_model": "tiny", "method": "qlora", "learning_rate": 5e-3, "batch_size": 4, "max_steps": 150}
        config |= {"max_seq_length": 64, **common, **more}
        runs.append(stack.create(config=config, backend="celery", dataset_id=stack.chats, name=name, tags=["docs"]))
    for run_id in runs:
        stack.until(run_id, "completed", timeout=180)
    config |= {"max_steps": 1200, "learning_rate": 2e-3, "lora_r": 8}
    live = stack.create(
        config=config, backend="celery", dataset_id=stack.chats, name="docstrings, rank 8, longer", tags=["docs"]
    )
    stack.until_step(live, 400, timeout=180)
    for scheme, suffix in (("light", ""), ("dark", "-dark")):
        options = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1.5, "color_scheme": scheme}
        with window(chromium, stack.api.url, **options) as context:
            page = sign_in(context, stack.client)
            _shoot(page, f"/runs/{live}", folder / f"dashboard-run{suffix}.png", charts=3)
            if suffix:
                continue
            _shoot(page, "/?tag=docs", folder / "dashboard-runs.png", charts=0)
            _shoot(page, f"/compare?ids={','.join(runs)}", folder / "dashboard-compare.png", charts=2)
            page.goto(f"/new?dataset={stack.chats}")
            page.locator("#field-base_model").fill("tiny")
            expect(page.get_by_role("region", name="Estimate")).to_contain_text("Memory")
            _save(page, folder / "dashboard-new.png")
    assert {path.stem for path in folder.glob("dashboard-*.png")} == set(PICTURES)


def _shoot(page: Page, address: str, path: Path, *, charts: int) -> None:
    page.goto(address)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.wait_for_function(_ALL_DRAWN, arg=charts)
    _save(page, path)


def _save(page: Page, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path)


def test_the_documentation_shows_pictures_that_exist() -> None:
    for name in PICTURES:
        assert (ROOT / "docs" / "assets" / f"{name}.png").stat().st_size > 10_000, "run `make pictures`"
