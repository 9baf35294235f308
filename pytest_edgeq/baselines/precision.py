"""Whether a change of the op-dtype map is why errors are worse than in the baseline."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from pytest_edgeq.baselines.align import Row, align
from pytest_edgeq.baselines.errors import changes, regressed
from pytest_edgeq.numerics.findings import LOSSY_OP, WRONG_KINDS, Finding
from pytest_edgeq.runtimes.edge import EdgeFile

_GRANULARITIES: Final = ("blockwise", "per_channel", "per_tensor")  # from the finest

_BITS: Final = re.compile(r"\d+")


def explains_errors(
    maps: tuple[Mapping[str, Any], Mapping[str, Any]],
    edge: EdgeFile,
    layer: Finding | None,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> bool:
    """
    Whether op dtypes that changed are why errors are worse than in the baseline.

    An error in LSB is explained if the output's dtype changed. Other errors are, if each output
    that is worse depends on an op that computes with fewer bits, and weights, calibration samples
    and kernels are the baseline's.
    """
    dtypes = [{each["name"]: each["dtype"] for each in side["outputs"]} for side in maps]
    worse = [
        (stage, output)
        for stage, output, metric in regressed(old, new)
        if metric != "max_lsb_error" or dtypes[0].get(output) == dtypes[1].get(output)
    ]
    if not worse:
        return True
    is_same = all(change == "" for change in changes(old, new).values())
    coarser = coarser_ops(*maps)
    if not is_same or (layer is not None and layer.kind in WRONG_KINDS):
        return False
    if layer is not None and layer.kind == LOSSY_OP and layer.place.op not in coarser:
        return False
    behind = _outputs_behind(edge, coarser)
    return all(stage != "conversion" and output in behind for stage, output in worse)


def coarser_ops(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[int]:
    """Return the positions in the new map of ops that compute with fewer bits than in the old."""
    changed = align(old["ops"], new["ops"]).changed
    return {
        after for before, after in changed if _is_coarser(old["ops"][before], new["ops"][after])
    }


def _is_coarser(old: Row, new: Row) -> bool:
    before, after = (
        [_bits(row["inputs"]), _bits(row["outputs"]), _bits([row["weight"] or ""]), _steps(row)]
        for row in (old, new)
    )
    return any(0 < is_now < was for was, is_now in zip(before, after, strict=True))


def _bits(dtypes: Collection[str]) -> int:
    """Return the least width of some dtypes; 0 where there is none."""
    return min((int(each) for dtype in dtypes for each in _BITS.findall(dtype)), default=0)


def _steps(row: Row) -> int:
    """Return a rank of the granularity, lower if coarser; 0 for none."""
    known = row["granularity"] or ""
    return min((3 - place for place, each in enumerate(_GRANULARITIES) if each in known), default=0)


def _outputs_behind(edge: EdgeFile, places: Collection[int]) -> set[str]:
    """Return the outputs that depend on ops at some positions of the map."""
    signature = edge.signature
    tensors: set[int] = set()
    for place, op in enumerate(edge.graph.ops):
        is_behind = place in places or not tensors.isdisjoint(op.inputs)
        if is_behind and op.subgraph == signature.subgraph:
            tensors.update(op.outputs)
    return {each.name for each in signature.outputs if each.tensor.index in tensors}
