"""
The table of options on the page `reference/pytest`.

`python -m tests.docs.options_table` writes it anew from `pytest_edgeq.plugin.options`, which is
needed whenever an option comes, goes or gets another text.
"""

from __future__ import annotations

import re

from pytest_edgeq.plugin.options.declared import OPTIONS, Option
from tests.docs.blocks import PAGES

PAGE = PAGES / "reference" / "pytest.md"

_TABLE = re.compile(r"^\| option \| ini .*\n(?:\|.*\n)+", re.M)


def table() -> str:
    """Return the table as it has to stand on the page."""
    rows = [("option", "ini", "default", "meaning"), ("---",) * 4, *map(_row, OPTIONS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def shown() -> str:
    """Return the table as it stands there."""
    [found] = _TABLE.findall(PAGE.read_text("utf-8"))
    return str(found)


def _row(option: Option) -> tuple[str, ...]:
    value = f"[={option.metavar}]" if option.bare is not None else f"={option.metavar}"
    default = "none" if option.default == "" else f"`{option.default}`"
    return f"`{option.flag}{value}`", f"`{option.name}`", default, option.help.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), encoding="utf-8")
