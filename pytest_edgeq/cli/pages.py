"""
The documentation pages that are packed with the package.

A page is known by its path below `docs/` without the ending, for instance
`how-to/choose-a-budget`.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_edgeq.names import hint, nearest

FOLDER: Final = Path(__file__).parents[1] / "docs"  # the source folder for Sphinx

_ORDER: Final = ("index", "tutorial", "how-to", "reference", "explanation")

_BLOCK = re.compile(r"```\{eval-rst\}\n(.*?)```\n", re.DOTALL)
_DIRECTIVE = re.compile(r"\.\. auto\w+:: (\S+)((?:\n   :.+)*)")
_QUOTED = re.compile(r"(?<=: |> )'([^']*)'")  # an annotation


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

    def place(page: Page) -> tuple[int, bool, str]:
        group = page.name.partition("/")[0]
        return _ORDER.index(group), page.path.stem != "index", page.name

    return tuple(sorted(found, key=place))


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


def shown_text(page: Page) -> str:
    """Return the Markdown of a page, with signatures and docstrings for Sphinx's directives."""

    def described(block: re.Match[str]) -> str:
        parts: list[str] = []
        for name, options in _DIRECTIVE.findall(block[1]):
            parts += _described(name.rpartition(".")[2], pkgutil.resolve_name(name), options)
        return "\n".join(parts)

    return _BLOCK.sub(described, page.path.read_text("utf-8"))


def _described(name: str, subject: Any, options: str = "") -> Iterator[str]:
    """Yield a heading and the docstring of an object, and of the members that options name."""
    signature = ""
    if callable(subject):
        signature = _QUOTED.sub(r"\1", str(inspect.signature(subject)))
    yield f"### {name}{signature}\n\n{inspect.getdoc(subject) or ''}\n"
    for member, value in vars(subject).items() if inspect.isclass(subject) else ():
        public = ":members:" in options and not member.startswith("_")
        is_documented = inspect.isroutine(value) or isinstance(value, property)
        if (public and is_documented) or member in options:
            yield from _described(f"{name}.{member}", getattr(subject, member))
