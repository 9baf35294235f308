"""The page: the record of a run as one self-contained HTML file."""

from __future__ import annotations

import base64
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from pytest_edgeq.report.html.view import model_views, text_blocks
from pytest_edgeq.report.model_rows import number_of

if TYPE_CHECKING:
    from pytest_edgeq.report.run import Run


def html_page(run: Run) -> str:
    """Return the page of a run."""
    return rendered(
        "page.html.jinja",
        run=run.data,
        models=model_views(run),
        unowned=[test for test in run.tests if test["failure"] and not test["models"]],
    )


def rendered(template: str, **values: Any) -> str:
    """
    Return a page with its style and scripts.

    It asks the network for nothing, and its security policy forbids the browser to: scripts run
    only if they are the page's own, by their hash.
    """
    templates = Environment(
        loader=PackageLoader("pytest_edgeq.report.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"figure": _figure, "blocks": text_blocks}
    # Of Bokeh's bundles the one with plots; no script may end the element that it stands in.
    (bokeh,) = Resources(mode="inline", components=["bokeh"]).js_raw[:1]
    scripts = [bokeh.replace("</script", "<\\/script"), _asset("page.js")]
    page: str = templates.get_template(template).render(
        values,
        style=_asset("page.css"),
        scripts=scripts,
        hashes=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
    )
    return page


def _asset(name: str) -> str:
    return files("pytest_edgeq.report.html").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(sha256(script.encode("utf-8")).digest()).decode("ascii")


def _figure(value: float | str | None) -> str:
    """Return a number of the record as text, in the digits that a reader compares."""
    number = number_of(value)
    return "–" if number is None else f"{number:.5g}".replace("-", "−").replace("inf", "∞")
