"""`edgeq diff`: what changed from one file to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.cli.files import PATH, label_of, open_files, section_option
from pytest_edgeq.cli.text import json_option, print_json, wrapped
from pytest_edgeq.cli.trouble import FOUND, exit_codes, in_sentences
from pytest_edgeq.numerics.findings import aligned, counted

if TYPE_CHECKING:
    from pytest_edgeq.cli.file_diff import FileDiff, WeightRounding
    from pytest_edgeq.tflite.bundles import Bundle

_SHOWN = 40  # changes of parameters and constants that the text lists


@click.command(
    epilog=exit_codes("no difference", "the files differ", "wrong usage, or a file cannot be read")
)
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@json_option
@section_option
@click.pass_context
def command(ctx: click.Context, old: Path, new: Path, as_json: bool, section: str | None) -> None:
    """
    Show what changed from one .tflite file to another.

    Ops are aligned as baselines are: an op that was inserted is one difference, not one of every op
    behind it. Compared are inputs and outputs, op dtypes, options, wiring, scales and zero points,
    and the values of constants, all exactly. Names of tensors, metadata, and the order of bytes in
    the file are not. If the old file is in float, each quantized weight has the share of codes that
    are the rounding of its float values; the text lists those below 100 %, --json all.

    Sections of two bundles (.litertlm, .task) are paired by name: models are compared as files, the
    bytes of all others.
    """
    from pytest_edgeq.tflite.bundles import open_bundle

    with in_sentences():
        before, after = open_bundle(old), open_bundle(new)
        if section is not None or before is None or after is None:
            document, text = _file_diff(old, new, section)
        else:
            document, text = _bundle_diff(old, new, before, after)
    if as_json:
        print_json(document)
    else:
        click.echo(text)
    ctx.exit(0 if document["equal"] else FOUND)


def _bundle_diff(old: Path, new: Path, before: Bundle, after: Bundle) -> tuple[dict[str, Any], str]:
    """Return the diff of each model and of other sections, as JSON document and as text."""
    ours, theirs = ({each.name: each for each in side.sections} for side in (before, after))
    models: dict[str, dict[str, Any]] = {}
    changed, texts = [], []
    for name in [*ours, *(each for each in theirs if each not in ours)]:
        if name not in theirs or name not in ours:
            changed.append(name)
            texts.append(f"section {name}: only in {old if name in ours else new}")
        elif ours[name].is_model and theirs[name].is_model:
            models[name], text = _file_diff(old, new, name)
            texts.append(text)
        elif any(
            one != two
            for one, two in zip_longest(before.chunks(ours[name]), after.chunks(theirs[name]))
        ):
            changed.append(name)
            sizes = f"{ours[name].size:,} → {theirs[name].size:,} bytes"
            texts.append(f"section {name}: other content ({sizes})")
    document = {
        "changed_sections": changed,
        "equal": not changed and all(each["equal"] for each in models.values()),
        "models": models,
        "new": str(new),
        "old": str(old),
    }
    return document, "\n\n".join(texts)


def _file_diff(old: Path, new: Path, section: str | None) -> tuple[dict[str, Any], str]:
    """Return the diff of two files as JSON document and as text."""
    from pytest_edgeq.baselines.op_changes import describe_change
    from pytest_edgeq.cli.file_diff import FileDiff

    before, after = open_files(old, new, section=section)
    names = label_of(old, before.graph.section), label_of(new, after.graph.section)
    sizes = len(before.graph.buffer), len(after.graph.buffer)
    diff = FileDiff(before, after)
    found = describe_change(*diff.rows, sides=("old", "new"))
    roundings = list(diff.roundings())
    differs = found is not None or bool(diff.changes)
    document = {
        **_document(diff, roundings),
        "equal": not differs,
        "identical_bytes": before.graph.buffer[:] == after.graph.buffer[:],
        "new": names[1],
        "old": names[0],
        "size_bytes": {"new": sizes[1], "old": sizes[0]},
        "summary": "" if found is None else found.title,
    }
    if document["identical_bytes"]:
        return document, f"{names[0]} and {names[1]} are identical: {counted(sizes[0], 'byte')}"
    lines = [f"{names[0]} → {names[1]}"]
    lines += [part for line in ([] if found is None else found.lines) for part in wrapped(line)]
    lines += _change_lines(diff) + _rounding_lines(roundings)
    if not differs:
        lines.append("no difference but in names, metadata or the order of bytes")
    if sizes[0] != sizes[1]:
        lines.append(f"size: {sizes[0]:,} → {sizes[1]:,} bytes ({sizes[1] - sizes[0]:+,})")
    return document, "\n".join(lines)


def _change_lines(diff: FileDiff) -> list[str]:
    if not diff.changes:
        return []
    compared = counted(len(diff.alignment.pairs), "op")
    what = f"{counted(len(diff.changes), 'change')}, {compared} compared"
    lines = [f"options, wiring, parameters and constants ({what}):"]
    for where, group in groupby(diff.changes[:_SHOWN], key=lambda change: change.where):
        lines.append(f"  {where}")
        for each in group:
            lines += wrapped(f"    {each.what}: {each.old} → {each.new}")
    if (hidden := len(diff.changes) - _SHOWN) > 0:
        lines.append(f"  … and {hidden} more, which --json lists")
    return lines


def _rounding_lines(roundings: Sequence[WeightRounding]) -> list[str]:
    """Return how far the weights are the rounding of the float file's values."""
    if not roundings:
        return []
    rows = []
    odd = [each for each in roundings if not 0 < each.codes == each.equal]
    for each in odd[:_SHOWN]:
        share = f"{_percent(each.equal, each.codes)} of {counted(each.codes, 'code')}"
        if not each.codes:
            text = "not compared, as the shapes differ"
        elif not each.is_of_floats:
            text = f"not the float file's values ({share}): folded, permuted or other weights"
        else:
            worst = _percent(each.channel_equal, each.channel_codes)
            text = f"{share}; worst channel {each.channel}: {worst}, off by {each.furthest:.3g}"
        rows.append((each.where, text))
    whole = f"{len(roundings) - len(odd)} of {counted(len(roundings), 'weight')}"
    lines = [f"all codes of {whole} are the rounding of the float values{':' if odd else ''}"]
    lines += aligned(rows, indent="  ") if rows else []
    if (hidden := len(odd) - _SHOWN) > 0:
        lines.append(f"  … and {hidden} more, which --json lists")
    return lines


def _percent(count: int, total: int) -> str:
    """Return a share that is 100 % only if nothing is missing."""
    share = 100 * count / max(total, 1)
    return f"{share:.0f} %" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f} %"


def _document(diff: FileDiff, roundings: Sequence[WeightRounding]) -> dict[str, Any]:
    before, after = diff.rows
    alignment = diff.alignment

    def pair(one: int, two: int) -> dict[str, Any]:
        return {
            "new": after["ops"][two],
            "new_index": two,
            "old": before["ops"][one],
            "old_index": one,
        }

    return {
        "changes": [asdict(change) for change in diff.changes],
        "inputs": {"new": after["inputs"], "old": before["inputs"]},
        "ops": {
            "appeared": [{**after["ops"][at], "index": at} for at in alignment.appeared],
            "changed": [pair(*both) for both in alignment.changed],
            "disappeared": [{**before["ops"][at], "index": at} for at in alignment.disappeared],
            "moved": [pair(*both) for both in alignment.moved],
        },
        "outputs": {"new": after["outputs"], "old": before["outputs"]},
        "weights": [each.to_dict() for each in roundings],
    }
