"""A package keeps to the lines of Python that pyproject.toml allows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.edgeq-lines]")[2]
BUDGETS = {part: int(n) for part, n in re.findall(r'^"(.+)" = (\d+)$', TABLE, re.MULTILINE)}


def lines(part: str) -> int:
    """Count the lines of a folder or a file, without those of parts inside that are counted too."""
    inside = [ROOT / other for other in BUDGETS if other.startswith(f"{part}/")]
    paths = (ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part]
    counted = (path for path in paths if not any(map(path.is_relative_to, inside)))
    return sum(len(path.read_bytes().splitlines()) for path in counted)


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_keeps_its_budget(part: str) -> None:
    """Whoever needs more raises the number in pyproject.toml, where everybody sees it."""
    assert 0 < lines(part) <= BUDGETS[part]
