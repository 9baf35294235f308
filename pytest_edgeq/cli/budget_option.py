"""The option `--budget metric=bound`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.names import nearest

if TYPE_CHECKING:
    from pytest_edgeq.numerics.budget import Budget


def _parse(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> Budget | None:
    """
    Return the budget that all bounds make; None without any.

    Raises:
        click.BadParameter: No `metric=bound`, an unknown metric, or a bound that Budget refuses.
    """
    if not given:
        return None
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.results import LOWER_BOUNDED, UPPER_BOUNDED

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


budget_option = click.option(
    "--budget",
    multiple=True,
    metavar="METRIC=BOUND",
    callback=_parse,
    help="A bound for every output, such as sqnr_db=30 or max_abs_error=0.1; may be repeated.",
)
