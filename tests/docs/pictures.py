"""
The pictures of the HTML page in the documentation.

`python -m tests.docs.pictures` makes them again, which is needed when the page looks otherwise. It
runs README's files and tests of two defective files with `--edgeq-html`, opens the page in Chromium
(found as in `tests/report/test_html_browser.py`), and keeps the parts that the texts speak of.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

from tests.docs.blocks import PAGES, blocks
from tests.docs.session import Session, environment

PICTURES = PAGES / "pictures"

WIDTH = 1200
"""Of the window, in pixels."""

COLOURS = 256
"""Number of colours of a stored picture."""

_FILES = ("my_model.py", "test_model_quant.py", "test_shipped.py")

_GAP = 12
"""Pixels between two parts, and around all of them."""

_COARSE = """\
import torch
from my_model import images, trained

from pytest_edgeq import Budget, assert_within_budget


def test_dead_channel(edgeq):
    model = trained()
    with torch.no_grad():
        model.stem.weight[5] = 0
        model.stem.bias[5] = -1
        model.layer1[0].conv.weight[:, 5] *= 60
    quantized = edgeq.quantize(
        model, (images(1, seed=0)[0],), calibration=images(32, seed=1), name="DeadChannel"
    )
    assert_within_budget(edgeq.compare(quantized, images(64, seed=2)), Budget(sqnr_db=36))
"""
"""A channel that is always zero, with weights on it so large that the others get a few codes."""


def _report(folder: Path) -> Path:
    """Run the tests, of which one fails, and return the page that the run has written."""
    session = Session(folder, environment())
    for block in [*blocks(), *blocks(PAGES / "how-to" / "debug-a-failure.md")]:
        if block.file is not None and block.file[0] in _FILES:
            session.do(block)
    folder.joinpath("test_coarse.py").write_text(_COARSE, encoding="utf-8")
    for arguments, code in [
        (("test_model_quant.py", "--edgeq-update"), 0),
        *2 * [(("--edgeq-html=report.html",), 1)],  # the second one has all files in the cache
    ]:
        done = subprocess.run(
            ["pytest", *arguments], cwd=folder, env=environment(), check=False, timeout=600
        )
        assert done.returncode == code, f"pytest {arguments}: exit status {done.returncode}"
    return folder / "report.html"


def _section(model: Locator, heading: str) -> Locator:
    title = model.page.get_by_role("heading", name=heading, exact=True)
    return model.locator("section").filter(has=title)


def _keep(name: str, parts: list[Locator]) -> None:
    """Store parts of the page below each other."""
    pictures = [Image.open(io.BytesIO(part.screenshot())).convert("RGB") for part in parts]
    height = sum(each.height + _GAP for each in pictures) + _GAP
    width = max(each.width for each in pictures) + 2 * _GAP
    whole = Image.new("RGB", (width, height), "white")
    top = _GAP
    for each in pictures:
        whole.paste(each, (_GAP, top))
        top += each.height + _GAP
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)
    print(f"{name}: {whole.width} x {whole.height}, {(PICTURES / name).stat().st_size:,} bytes")


def _draw(page: Page) -> None:
    page.evaluate("for (const each of document.querySelectorAll('details.model')) each.open = true")
    for chart in page.locator("[data-chart]:visible").all():
        chart.scroll_into_view_if_needed()
        chart.and_(page.locator("[data-drawn]")).wait_for()


def main() -> None:
    """Write all pictures."""
    browser_path = os.environ.get("EDGEQ_TESTS_CHROMIUM") or shutil.which("chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = _report(Path(folder))
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(report.as_uri())
        _draw(page)
        failed, passed = page.locator("details.model.failed"), page.locator("details.model.passed")
        coarse = failed.filter(has_text="test_dead_channel")
        shipped = failed.filter(has_text="test_the_build")
        stages, layers = "Where the loss arises", "Layers"
        table = page.locator("#models")
        _keep("report.png", [table, _section(coarse, stages), _section(coarse, layers)])
        _keep("failure.png", [_section(shipped, "Failed tests"), _section(shipped, layers)])
        _keep("sound.png", [_section(passed, stages), _section(passed, layers)])
        browser.close()


if __name__ == "__main__":
    main()
