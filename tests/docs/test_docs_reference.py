"""The reference names everything that is public, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pytest_edgeq
from pytest_edgeq.cli.pages import FOLDER
from pytest_edgeq.localize import rows
from pytest_edgeq.names import PRESETS
from pytest_edgeq.numerics import findings
from pytest_edgeq.plugin.options.declared import OPTIONS
from pytest_edgeq.plugin.options.values import CI_VARIABLES
from pytest_edgeq.tflite.conformance import RULE_NAMES
from tests.docs import options_table
from tests.docs.blocks import ROOT

REFERENCE = FOLDER / "reference"


def _column(page: str, heading: str) -> list[str]:
    """Return the code in the first column of a page's tables with this head."""
    text = REFERENCE.joinpath(page).read_text("utf-8")
    _, *tables = text.split(f"| {heading} |")
    assert tables, f"{page} has no table of {heading}"
    rows = "\n".join(table.partition("\n\n")[0] for table in tables)
    return re.findall(r"^\| `([^`]+)` \|", rows, re.M)


def test_every_public_name_is_rendered_from_its_docstring() -> None:
    """And the names are those that users import."""
    text = "".join(page.read_text("utf-8") for page in REFERENCE.glob("*.md"))
    rendered = set(re.findall(r"^\.\. auto\w+:: pytest_edgeq\.(\w+)$", text, re.M))

    assert rendered == set(pytest_edgeq.__all__)


def test_the_table_of_options_is_that_of_the_plugin() -> None:
    """Written anew by `python -m tests.docs.options_table`."""
    assert options_table.shown() == options_table.table()
    assert options_table.table().count("\n") == len(OPTIONS) + 2


def test_presets_kinds_of_health_and_verdicts_are_listed() -> None:
    """In the order in which the package has them, none left out."""
    kinds = [
        value for name, value in vars(findings).items() if name.isupper() and isinstance(value, str)
    ]
    kinds += RULE_NAMES
    verdicts = (rows.SOUND, rows.LOWERING, rows.QUANTIZATION, rows.UNMATCHED)

    assert _column("quantizers.md", "preset") == list(PRESETS)
    assert sorted(_column("failures.md", "kind")) == sorted(kinds)
    assert _column("failures.md", "verdict") == list(verdicts)


@pytest.fixture(scope="module")
def texts() -> str:
    """The source of the whole package."""
    package = Path(pytest_edgeq.__file__).parent
    return "\n".join(path.read_text("utf-8") for path in package.rglob("*.py"))


def test_labels_of_failures_are_those_that_failures_have(texts: str) -> None:
    """Those of the golden texts are listed, and no text lacks one that is."""
    listed = _column("failures.md", "label")
    golden = "".join(p.read_text("utf-8") for p in ROOT.glob("tests/*/golden/*.txt"))
    used = set(
        re.findall(r"^(?:cause|fix|update|effect|file|health|since [a-z ]+|note):", golden, re.M)
    )

    assert used <= set(listed)
    assert [label for label in listed if label.removesuffix(":") not in texts] == []


def test_variables_of_ci_that_are_told_of_are_looked_at() -> None:
    """On the page about CI."""
    text = FOLDER.joinpath("how-to", "ci-and-xdist.md").read_text("utf-8")
    told = set(re.findall(r"`([A-Z_]{2,})`", text))

    assert told
    assert told <= set(CI_VARIABLES)
