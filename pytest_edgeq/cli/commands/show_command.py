"""`edgeq show`: what a file holds, and its health."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.cli.files import (
    PATH,
    io_document,
    io_table,
    label_of,
    open_files,
    project_runtimes,
    section_option,
)
from pytest_edgeq.cli.text import hanging, indented, json_option, print_json, table
from pytest_edgeq.cli.trouble import FOUND, TroubleError, exit_codes, in_sentences
from pytest_edgeq.numerics.findings import counted

if TYPE_CHECKING:
    from pytest_edgeq.numerics.findings import Finding
    from pytest_edgeq.runtimes.delegation import Delegation
    from pytest_edgeq.runtimes.edge import EdgeFile
    from pytest_edgeq.tflite.bundles import Bundle
    from pytest_edgeq.tflite.op_dtypes import OpDtypes


@click.command(
    epilog=exit_codes(
        "the file is healthy", "there is a finding", "wrong usage, or the file cannot be read"
    )
)
@click.argument("model", type=PATH)
@json_option
@section_option
@click.option(
    "--model-explorer",
    type=PATH,
    metavar="DIR",
    help="Write node data for Model Explorer into this folder: dtypes and schemes of the ops.",
)
@click.option(
    "--record",
    type=PATH,
    metavar="RUN.json",
    help="With --model-explorer: add SQNR, LSB error and verdict of the ops, as a run measured "
    "them (pytest --edgeq-json).",
)
@click.option(
    "--runtime",
    metavar="NAME",
    help="Mark the ops that run on a GPU, with LiteRT's reasons for the others: gpu, gpu_f32, or "
    "TARGET:gpu or TARGET:gpu_f32 of this project. Compiles the file there.",
)
@click.pass_context
def command(
    ctx: click.Context,
    model: Path,
    as_json: bool,
    section: str | None,
    model_explorer: Path | None,
    record: Path | None,
    runtime: str | None,
) -> None:
    """
    Show inputs, outputs, op dtypes, sizes and health of a .tflite file.

    Of a bundle (.litertlm, .task), show all sections, and each model as a file.

    Health is read from the parameters alone, nothing is run: scales that are zero or subnormal,
    activations that were never calibrated (scale 1.0, zero point 0), biases at the limits of int32,
    ops that the kernels abort at or compute from foreign memory, and ops whose quantization the
    kernels refuse or do not compute. Quantization that the CPU kernels compute and accelerators may
    refuse is a warning, not a finding.
    """
    if record is not None and model_explorer is None:
        raise click.UsageError("--record needs --model-explorer DIR")
    from pytest_edgeq.runtimes.delegation import delegation_of
    from pytest_edgeq.tflite.bundles import open_bundle

    runtimes = contextlib.nullcontext() if runtime is None else project_runtimes(runtime)
    with in_sentences(), runtimes as known:
        bundle = None if section is not None else open_bundle(model)
        names = [section] if bundle is None else bundle.names
        if model_explorer is not None and len(names) != 1:
            raise click.UsageError("--model-explorer needs one model: choose it by --section")
        documents: dict[str | None, dict[str, Any]] = {}
        lines = [] if bundle is None else _section_lines(bundle)
        written, found = [], False
        for name in names:
            [edge] = open_files(model, section=name, runtimes=known)
            delegation = None if runtime is None else delegation_of(edge, runtime)
            if model_explorer is not None:
                written = _node_data(edge, model_explorer, record)
            findings, warnings = _findings(edge, delegation)
            found = found or bool(findings)
            if as_json:
                documents[name] = _document(model, edge, findings, warnings, delegation)
            else:
                lines += ["", *_lines(model, edge, findings, warnings, delegation)]
    if as_json:
        if bundle is None:
            print_json(documents[section])
        else:
            listed = [
                {"name": s.name, "size_bytes": s.size, "type": s.kind} for s in bundle.sections
            ]
            print_json({"file": str(bundle.path), "models": documents, "sections": listed})
    else:
        click.echo("\n".join(lines).lstrip())
    for path in written:
        click.echo(f"{path}: written", err=True)
    ctx.exit(FOUND if found else 0)


def _section_lines(bundle: Bundle) -> list[str]:
    rows = [(each.name, each.kind, f"{each.size:,}") for each in bundle.sections]
    size = sum(each.size for each in bundle.sections)
    head = f"{bundle.path.name}: {counted(len(rows), 'section')}, {counted(size, 'byte')}"
    return [head, *indented(table(("section", "type", "bytes"), rows, numbers=("bytes",)))]


def _node_data(edge: EdgeFile, folder: Path, record: Path | None) -> list[Path]:
    from pytest_edgeq.report.model_explorer import write_node_data

    if record is None:
        return write_node_data(edge, folder)
    from pytest_edgeq.report.run import showing

    with showing(record) as run:
        layers = run.layers_of(edge)
        if layers:
            return write_node_data(edge, folder, layers)
    raise TroubleError(
        f"{record}: the run has measured no ops of this file: expected a test that calls "
        "edgeq.localize or edgeq.check on it"
    )


def _findings(
    edge: EdgeFile, delegation: Delegation | None
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings, and the warnings."""
    from pytest_edgeq.compare.file_health import (
        conformance_findings,
        static_findings,
        unsafe_findings,
    )
    from pytest_edgeq.errors import grouped

    findings = (*static_findings(edge), *unsafe_findings(edge))
    if delegation is not None and delegation.refusal is not None:
        first = delegation.refusal.text.splitlines()[0]
        findings += (replace(*grouped([delegation.refusal]), symptom=first),)
    return findings, conformance_findings(edge, warnings=True)


def _document(
    path: Path,
    edge: EdgeFile,
    findings: Sequence[Finding],
    warnings: Sequence[Finding],
    delegation: Delegation | None,
) -> dict[str, Any]:
    return {
        "constants": [
            {"bytes": size, "count": number, "dtype": dtype}
            for dtype, number, size in _constants(edge)
        ],
        "delegation": delegation and delegation.to_dict(),
        "file": label_of(path, edge.graph.section),
        "health": [finding.to_dict() for finding in findings],
        "ops": [{"index": entry.index, **entry.to_dict()} for entry in edge.op_dtypes],
        "schemes": _schemes(edge),
        "signatures": [
            {
                "inputs": [io_document(io_entry) for io_entry in signature.inputs],
                "key": signature.key,
                "outputs": [io_document(io_entry) for io_entry in signature.outputs],
            }
            for signature in edge.signatures
        ],
        "size_bytes": len(edge.graph.buffer),
        "warnings": [finding.to_dict() for finding in warnings],
    }


def _lines(
    path: Path,
    edge: EdgeFile,
    findings: Sequence[Finding],
    warnings: Sequence[Finding],
    delegation: Delegation | None,
) -> list[str]:
    name = label_of(path.name, edge.graph.section)
    lines = [f"{name}: {counted(len(edge.graph.buffer), 'byte')}"]
    for signature in edge.signatures:
        if len(edge.signatures) > 1:
            lines += ["", f"signature {signature.key}"]
        for side in ("inputs", "outputs"):
            lines += ["", f"{side}:", *indented(io_table(getattr(signature, side)))]
    schemes = _schemes(edge)
    counts = ", ".join(f"{number} {scheme}" for scheme, number in schemes.items())
    total = len(edge.op_dtypes)
    lines += ["", f"ops: {schemes.get('float', 0)} of {total} in float ({counts})"]
    lines += indented(_op_table(list(edge.op_dtypes), delegation))
    if delegation is not None:
        summary, *reasons = delegation.reasons
        lines += ["", summary, *(line for text in reasons for line in hanging(text))]
    lines += ["", "constants:", *indented(_constant_table(edge)), ""]
    health = [line for each in findings for line in hanging(str(each))]
    lines += [f"health: {counted(len(findings), 'finding')}" if health else "health: nothing found"]
    lines += health
    if warnings:
        lines += [counted(len(warnings), "warning") + ":"]
    return [*lines, *(line for each in warnings for line in hanging(str(each)))]


def _schemes(edge: EdgeFile) -> dict[str, int]:
    """Count the ops of each scheme, the most frequent first."""
    return dict(Counter(sorted(entry.scheme for entry in edge.op_dtypes)).most_common())


def _op_table(entries: Sequence[OpDtypes], delegation: Delegation | None) -> list[str]:
    runs = [""] * len(entries) if delegation is None else [each.runs_on for each in delegation.ops]
    return table(
        ("#", "op", "inputs", "weight", "bias", "outputs", "granularity", "scheme", "runs on"),
        [
            (
                f"{entry.subgraph}:{entry.index}" if entry.subgraph else str(entry.index),
                entry.op,
                _dtypes(entry.inputs),
                entry.weight or "",
                entry.bias or "",
                _dtypes(entry.outputs),
                entry.granularity or "",
                entry.scheme,
                runs_on,
            )
            for entry, runs_on in zip(entries, runs, strict=True)
        ],
        numbers=("#",),
    )


def _dtypes(dtypes: Sequence[str]) -> str:
    if len(dtypes) > 2 and len(set(dtypes)) == 1:
        return f"{len(dtypes)} × {dtypes[0]}"
    return ", ".join(dtypes)


def _constant_table(edge: EdgeFile) -> list[str]:
    size = len(edge.graph.buffer)
    constants: list[tuple[str, int | str, int]] = [*_constants(edge)]
    rest = size - sum(stored for *_, stored in constants)
    rows = [
        (dtype, str(number), f"{stored:,}", f"{stored / size:.1%}")
        for dtype, number, stored in [*constants, ("(all else)", "", rest)]
    ]
    numbers = ("count", "bytes", "share")
    return table(("dtype", *numbers), rows, numbers=numbers)


def _constants(edge: EdgeFile) -> list[tuple[str, int, int]]:
    """Return dtype, number and bytes of the constants in the file, the most bytes first."""
    # Several tensors may share one buffer.
    sizes = {
        tensor.buffer: (tensor.dtype, edge.graph.stored(tensor).size)
        for subgraph in edge.graph.subgraphs
        for tensor in subgraph.tensors
        if tensor.is_constant and not tensor.is_external
    }
    found: dict[str, list[int]] = {}
    for dtype, size in sizes.values():
        found.setdefault(dtype, []).append(size)
    rows = [(dtype, len(each), sum(each)) for dtype, each in found.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))
