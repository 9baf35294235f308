"""The pages that are packed with the package."""

from __future__ import annotations

import pytest

from pytest_edgeq.cli.pages import FOLDER, find_page, pages


def test_every_page_has_a_name_a_title_and_a_place() -> None:
    """The first to be read stands first."""
    names = [page.name for page in pages()]

    assert names[:2] == ["index", "tutorial"]
    assert names[-1] == "explanation"
    assert len(names) == len(list(FOLDER.rglob("*.md")))
    assert all(page.path.read_text("utf-8").startswith(f"# {page.title}\n") for page in pages())


@pytest.mark.parametrize("name", ["how-to/choose-a-budget", "choose-a-budget"])
def test_a_page_is_found_by_its_name_or_the_last_part_of_it(name: str) -> None:
    """Where no other page has the same last part."""
    page = find_page(name)

    assert page.name == "how-to/choose-a-budget"
    assert page.path == FOLDER / "how-to" / "choose-a-budget.md"


def test_the_name_of_a_page_beats_the_last_part_of_another() -> None:
    """`index` is the first page, and not that of the reference."""
    assert find_page("index").path == FOLDER / "index.md"
    assert find_page("reference/index").path == FOLDER / "reference" / "index.md"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tutorail", "did you mean tutorial?"),
        ("choose-budget", "did you mean how-to/choose-a-budget?"),
    ],
)
def test_an_unknown_page_is_told_with_the_nearest_ones(name: str, hint: str) -> None:
    """And with all that there are."""
    with pytest.raises(ValueError, match=f"there is no page {name!r}") as caught:
        find_page(name)

    first, second = str(caught.value).splitlines()
    assert hint in first
    assert second.split(": ")[1].split(", ") == [page.name for page in pages()]
