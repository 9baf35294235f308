"""
The documentation pages that are packed with the package.

A page is known by its path below `docs/` without the ending, for instance
`how-to/choose-a-budget`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from pytest_edgeq.names import hint, nearest

FOLDER: Final = Path(__file__).parents[1] / "docs"  # the source folder for Sphinx

_ORDER: Final = ("index", "tutorial", "how-to", "reference", "explanation")


class Page(NamedTuple):
    """A page by its name, with its first heading and its Markdown file."""

    name: str
    title: str
    path: Path


def pages() -> tuple[Page, ...]:
    """Return every page, in the order in which they are to be read."""
    found = []
    for path in FOLDER.rglob("*.md"):
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        title = path.read_text("utf-8").partition("\n")[0]
        found.append(Page(name, title.removeprefix("# "), path))
    return tuple(sorted(found, key=_place))


def find_page(name: str) -> Page:
    """Return the page of this name, or of a unique last part, begin or piece of one."""
    known = {page.name: page for page in pages()}
    if name in known:
        return known[name]
    for fits in (str.__eq__, str.startswith, str.__contains__):
        found = [page for page in known.values() if name and fits(page.path.stem, name)]
        if len(found) == 1:
            return found[0]
        if found:
            meant = hint(page.name for page in found)
            raise ValueError(f"{name!r} is the name of {len(found)} pages{meant}")
    raise ValueError(
        f"there is no page {name!r}{nearest(name, known)}\n  pages: {', '.join(known)}"
    )


def _place(page: Page) -> tuple[int, bool, str]:
    group = page.name.partition("/")[0]
    return _ORDER.index(group), page.path.stem != "index", page.name
