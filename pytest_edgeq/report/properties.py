"""Figures of a test as properties of a JUnit XML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_edgeq.report.journal import PhaseJournal

PREFIX = "edgeq."
"""Of the name of every property."""

_METRICS = ("sqnr_db", "max_lsb_error", "max_abs_error", "cosine_similarity", "top1_agreement")


def properties_of(journal: PhaseJournal) -> dict[str, str]:
    """Return the properties of one phase of a test."""
    found: dict[str, str] = {}
    for event in journal["events"]:
        if event["model"] is None:
            continue
        model = journal["models"][event["model"]]
        name = f"{PREFIX}{model['name']}[{model['quantizer'] or model['flow']}]"
        found[f"{name}.size_bytes"] = str(model["size_bytes"])
        floats = sum(op["scheme"] == "float" for op in model["ops"])
        found[f"{name}.float_ops"] = str(floats)
        for stage, errors in event.get("comparison", {"stages": {}})["stages"].items():
            found |= {
                f"{name}.{stage}.{metric}": str(errors[metric])
                for metric in _METRICS
                if errors[metric] is not None
            }
    return found
