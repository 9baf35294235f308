"""The `--json` option, and the documents that it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document with sorted keys; NaN and infinity must be in it as text."""
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    click.echo(text)
