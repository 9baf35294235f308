"""Every code block of README and of the pages is run, or says why not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pytest_edgeq.cli.pages import find_page, pages
from pytest_edgeq.plugin.options.declared import OPTIONS
from tests.docs.blocks import FILES, PAGES, README, ROOT, Block, blocks, commands
from tests.docs.session import Session, environment
from tests.docs.workflows import workflow_installs

# A page runs suites and commands, one after the other: 13 s of CPU time the tutorial.
pytestmark = pytest.mark.timeout(900)

ALL = [README, *sorted(PAGES.rglob("*.md"))]
RUN = [page for page in ALL if any(block.commands for block in blocks(page))]
RENDERED = ("{eval-rst}", "{toctree}")
MARKDOWN = [*ALL, ROOT / "CONTRIBUTING.md"]


def _id(page: Path) -> str:
    return page.relative_to(ROOT if page.parent == ROOT else PAGES).with_suffix("").as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=_id)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest, warm: str
) -> None:
    """From README's files on, each block is done in its turn."""
    if page.stem == "the-phones-gpu":
        tmp_path.joinpath("gpu").symlink_to(request.getfixturevalue("gpu_root"))
    session = Session(tmp_path, environment(warm))
    if page != README:
        for block in blocks(README):
            if block.file is not None:
                session.do(block)
    for block in blocks(page):
        if page != README or block.commands or block.file is not None:
            session.do(block)


@pytest.mark.parametrize("page", ALL, ids=_id)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    """A file without a command behind it would be shown, and never be run."""
    found = blocks(page)
    fences = re.findall(r"^```", page.read_text("utf-8"), re.M)
    assert len(fences) == 2 * len(found), "a fence is not closed, or not of a known form"
    if page == README:
        found = [block for block in found if block.language != "console" or block.commands]
    is_run = False
    for block in reversed(found):
        if block.why_not_run:
            assert len(block.why_not_run.split()) > 2, f"line {block.line}: a reason is a sentence"
            _check_syntax(block)
        elif block.language.startswith("{"):
            assert block.language in RENDERED, f"line {block.line}: rendered by what?"
        elif block.commands:
            is_run = True
        elif block.note == "printed by the tutorial":
            assert block.text in {each.text for each in blocks(PAGES / "tutorial.md")}
        else:
            assert is_run or block.language == "text", f"line {block.line}: nothing runs it"


def _check_syntax(block: Block) -> None:
    if block.language == "yaml":
        assert isinstance(yaml.safe_load(block.text), dict)
    elif block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=100)
    else:
        assert block.language not in FILES, f"line {block.line}: can be run"


def test_the_commands_pin_torch_and_stand_in_the_pipeline() -> None:
    """The pipeline runs what the README says, not a copy of it."""
    script = ROOT.joinpath(".ci", "run").read_text("utf-8")

    assert len(commands()) == 2
    install = "pip install --quiet torch==2.13.0 '.[convert]' --group"
    assert all(install in command for command in commands())
    assert "tests/readme.py" in script


def test_a_workflow_installs_torch_once_for_the_cpu() -> None:
    """In one call that reads both indexes and pins torch, or pip replaces it by a CUDA build."""
    assert len(workflow_installs()) == 7
    for install in workflow_installs():
        assert install[:3] == ["python", "-m", "pip"]
        assert "torch==2.13.0" in install
        assert install[install.index("--index-url") + 1].endswith("/whl/cpu")
        assert install[install.index("--extra-index-url") + 1] == "https://pypi.org/simple"


def test_the_long_description_has_no_relative_link() -> None:
    """A package index shows README alone, so a link or picture to a file beside it is dead."""
    assert 'readme = "README.md"' in ROOT.joinpath("pyproject.toml").read_text("utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", README.read_text("utf-8"))
    assert [target for target in targets if not target.startswith("https://")] == []


def test_readme_names_every_page_for_edgeq_docs() -> None:
    """In place of links; two pages of docstrings and the first page are reached from others."""
    rows = re.findall(r"^\| [\w ,-]+ \| (`(?!edgeq docs).*`) \|$", README.read_text("utf-8"), re.M)
    named = {find_page(name).name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    left_out = {"index", "reference/assertions", "reference/edgeq"}
    assert named == {page.name for page in pages()} - left_out


def test_the_tutorial_asks_for_no_more_than_it_measured() -> None:
    """The budget in its test is no tighter than the one that `suggest_budget` prints."""
    text = PAGES.joinpath("tutorial.md").read_text("utf-8")
    printed, pasted = (
        {name: float(bound) for name, bound in re.findall(r"(\w+)=([\d.]+)", budget)}
        for budget in re.findall(r"Budget\(([^)]+)\)", text)
    )
    at_least = {"sqnr_db", "worst_sample_sqnr_db", "cosine_similarity", "top1_agreement"}
    assert pasted
    assert pasted.keys() <= printed.keys()
    for name, bound in pasted.items():
        low, high = sorted((bound, printed[name]))
        assert (low if name in at_least else high) == bound, name


def test_the_tutorial_takes_the_model_of_the_readme() -> None:
    """Who has read one of them knows the model of the other, and of all pages."""
    shown = [
        [block.text for block in blocks(page) if block.file == ("my_model.py", False)]
        for page in (README, PAGES / "tutorial.md")
    ]
    assert len(shown[0]) == 1
    assert shown[0] == shown[1]


@pytest.mark.parametrize("page", MARKDOWN, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    """Files, and headings of pages; Sphinx looks at those of its own pages once more."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(PAGES) or not page.is_relative_to(PAGES), (
            f"not packed: {target}"
        )
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.M)
            assert anchor in map(_slug, headings), f"{page.name}: no heading {anchor}"


def test_pictures_are_small_and_shown() -> None:
    """Each by a page; `python -m tests.docs.pictures` makes them."""
    stored = set(PAGES.joinpath("pictures").iterdir())
    shown = {
        (page.parent / path).resolve()
        for page in ALL
        for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text("utf-8"))
    }

    assert shown == stored
    assert max(path.stat().st_size for path in stored) < 150_000


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", MARKDOWN, ids=_id)
def test_options_that_are_told_of_exist(page: Path) -> None:
    """A flag, and its name in the ini file."""
    text = page.read_text("utf-8")
    flags = set(re.findall(r"--edgeq-[a-z-]*[a-z]", text))
    assert flags <= {option.flag for option in OPTIONS}
