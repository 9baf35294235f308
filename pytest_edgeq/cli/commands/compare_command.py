"""`edgeq compare`: errors of one file against another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.cli.files import PATH, label_of, open_files, project_runtimes, section_option
from pytest_edgeq.cli.text import hanging, json_option, metric_tables, print_json, wrapped
from pytest_edgeq.cli.trouble import FOUND, exit_codes, in_sentences
from pytest_edgeq.names import DEFAULT_RUNTIME, RUNTIMES, nearest
from pytest_edgeq.numerics.findings import counted

if TYPE_CHECKING:
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.numerics.findings import Finding


def _parse_budget(
    ctx: click.Context, parameter: click.Parameter, given: Sequence[str]
) -> Budget | None:
    """Return the budget that all bounds make, or None without any; refuse invalid ones."""
    if not given:
        return None
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.metric_table import LOWER_BOUNDED, UPPER_BOUNDED

    metrics = (*UPPER_BOUNDED, *LOWER_BOUNDED)
    bounds: dict[str, Any] = {}
    for each in given:
        metric, separator, text = each.partition("=")
        if not separator:
            raise click.BadParameter(f"expected metric=bound, such as sqnr_db=30, got {each!r}")
        if metric not in metrics:
            raise click.BadParameter(
                f"unknown metric {metric!r}{nearest(metric, metrics)}; there are "
                f"{', '.join(metrics)}"
            )
        if metric in bounds:
            raise click.BadParameter(f"{metric} is bounded twice")
        try:
            bounds[metric] = float(text)
        except ValueError:
            raise click.BadParameter(f"{metric}: expected a number, got {text!r}") from None
    try:
        return Budget(**bounds)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(
    epilog=exit_codes(
        "finite outputs without a budget, or a budget that is kept",
        "the budget is not kept, or an output of B is NaN or infinite",
        "wrong usage, samples that do not fit, or a file that cannot be read or run",
    )
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--inputs",
    type=PATH,
    multiple=True,
    required=True,
    help="An .npz file of samples; may be repeated.",
)
@click.option(
    "--runtime",
    metavar="NAME",
    default=DEFAULT_RUNTIME,
    show_default=True,
    help=f"What runs both files: {', '.join(RUNTIMES)}, or a target of this project.",
)
@section_option
@click.option("--signature", help="The entry point to run, of files with several.")
@click.option(
    "--budget",
    multiple=True,
    metavar="METRIC=BOUND",
    callback=_parse_budget,
    help="A bound for every output, such as sqnr_db=30 or max_abs_error=0.1; may be repeated.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    a: Path,
    b: Path,
    inputs: tuple[Path, ...],
    runtime: str,
    section: str | None,
    signature: str | None,
    budget: Budget | None,
    as_json: bool,
) -> None:
    """
    Measure the errors of file B against file A on the same samples.

    Samples are floats, whatever the files' dtypes: they are quantized for a quantized input, and
    outputs are dequantized. The .npz file holds an array for each input of A, by its name as `edgeq
    show` prints it, or as args_0, args_1, … (arr_0, arr_1, … as np.savez names them) by position.
    Other arrays are ignored.

    An array has the shape of the input, for one sample, or an axis more in front that counts the
    samples. For an input whose first dimension is 1 or free, an array of as many dimensions and
    another length counts samples along its first axis. All arrays of one .npz file hold as many
    samples; the samples of several files follow each other. Floats are read as float32.

    A language model with a key-value cache is measured at every position of sequences, unless
    --signature or --section is given: the .npz file holds token ids as `tokens`, of the shape
    [length] or [sequences, length].

    Outputs are paired by name, or by position where the files have no name in common. There is no
    default tolerance: without --budget the figures are shown, and the exit code is 0 unless an
    output of B is NaN or infinite.

    Each file is first run in a child process: a crash there, or a run of more than 300 seconds, is
    reported with the op that was running.
    """
    with in_sentences():
        comparison = _compared(a, b, inputs, runtime, section, signature)
        violations = budget.violations(comparison.total, "total") if budget else []
        needed = budget.needed(comparison.total) if budget else None
    if as_json:
        print_json(
            {
                **comparison.to_dict(),
                "budget": budget and budget.bounds(),
                "violations": [each.title for each in violations],
            }
        )
    else:
        lines = _lines(comparison)
        if budget is not None:
            lines += _budget_lines(budget, violations, needed)
        click.echo("\n".join(lines))
    ctx.exit(FOUND if violations or comparison.total.nonfinite else 0)


def _compared(
    a: Path,
    b: Path,
    inputs: tuple[Path, ...],
    runtime: str,
    section: str | None,
    signature: str | None,
) -> Comparison:
    from pytest_edgeq.check.assertions.expect import bare_isolation
    from pytest_edgeq.cli.file_compare import compare_files, compare_language_models, read_samples
    from pytest_edgeq.edgeq import Edgeq

    with project_runtimes(runtime) as known:
        if section is None and signature is None:
            name = f"{b} against {a}"
            language = compare_language_models(
                a, b, inputs, Edgeq(runtime=runtime, runtimes=known), name
            )
            if language is not None:
                return language
        runtimes = known.isolated(bare_isolation())
        reference, edge = open_files(a, b, section=section, runtimes=runtimes)
        keys = [each.key for each in max(reference.signatures, edge.signatures, key=len)]
        if signature is not None:
            reference, edge = reference.at(signature), edge.at(signature)
        elif len(keys) > 1:
            raise ValueError(
                f"the file has {len(keys)} signatures {keys}: choose one: --signature {keys[0]}"
            )
        samples = read_samples(inputs, reference.signature.inputs)
        name = f"{label_of(b, edge.graph.section)} against {label_of(a, reference.graph.section)}"
        return compare_files(reference, edge, samples, runtime=runtime, name=name)


def _lines(comparison: Comparison) -> list[str]:
    total = comparison.total
    head = f"{comparison.name}: {comparison.runtime}, {counted(total.n_samples, 'sample')}"
    lines = [*wrapped(head), "", *metric_tables(total)]
    if comparison.positions:
        lines += ["", *str(comparison.by_position()).splitlines()]
    if total.nonfinite:
        lines.append(f"{counted(total.nonfinite, 'element')} NaN or infinite")
    worst = [f"{each.inputs} ({each.sqnr_db:.4g} dB)" for each in comparison.worst_samples]
    lines += ["", *wrapped(f"worst samples: {', '.join(worst)}")]
    health = [line for each in comparison.health for line in hanging(str(each))]
    found = counted(len(comparison.health), "finding") if health else "nothing found"
    return [*lines, f"health: {found}", *health]


def _budget_lines(budget: Budget, violations: list[Finding], needed: Budget | None) -> list[str]:
    if not violations:
        return [f"budget: kept ({', '.join(_bounds(budget))})"]
    lines = [f"budget: {counted(len(violations), 'violation')}"]
    lines += [line for each in violations for line in hanging(each.title)]
    if needed is not None:
        options = " ".join(f"--budget {bound}" for bound in _bounds(needed))
        lines += hanging(f"update: this measurement needs {options}")
    return lines


def _bounds(budget: Budget) -> list[str]:
    return [f"{metric}={bound!r}" for metric, bound in budget.bounds().items()]
