"""Check how a sparse constant is laid out, and write it densely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_DENSE = 0
"""`DimensionType.DENSE`; 1 is `SPARSE_CSR`."""


def stored_elements(sparsity: Any, shape: Sequence[int]) -> int | str:
    """
    Return the number of stored elements, or what is wrong.

    The dimensions of blocks stand behind those of the tensor, each for a part of one of them;
    `schema.fbs`, `SparsityParameters`, and `VerifyAndCountSparseElements` in
    tflite/core/tools/verifier.cc.
    """
    order = _integers(sparsity.TraversalOrderAsNumpy())
    count, rank = sparsity.DimMetadataLength(), len(shape)
    if count != len(order) or sorted(order[:rank]) != list(range(rank)):
        return f"its sparse layout traverses {order} of {count} described dimensions"
    if sorted(order[rank:]) != list(range(rank, count)):
        return f"its sparse layout traverses {order} of {count} described dimensions"
    levels = [sparsity.DimMetadata(i) for i in range(count)]
    blocks = _integers(sparsity.BlockMapAsNumpy())
    if len(blocks) != count - rank or any(not 0 <= dimension < rank for dimension in blocks):
        return f"its sparse layout has the block map {blocks} for {count - rank} dimensions"
    sizes = [*shape, *(0 for _ in blocks)]
    for position, dimension in enumerate(blocks):
        length = levels[rank + position].DenseSize()
        if length <= 0:
            return f"its sparse layout has blocks of {length}"
        sizes[order[rank + position]] = length
        sizes[dimension] //= length
    return _count(levels, [sizes[dimension] for dimension in order])


def densified(sparsity: Any, shape: Sequence[int], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a sparse constant with its zeros."""
    order, blocks = (
        _integers(each) for each in (sparsity.TraversalOrderAsNumpy(), sparsity.BlockMapAsNumpy())
    )
    levels = [sparsity.DimMetadata(i) for i in range(len(order))]
    lengths = dict.fromkeys(range(len(shape)), 1)
    lengths |= {each: levels[len(shape) + i].DenseSize() for i, each in enumerate(blocks)}
    parents = np.zeros(1, np.int64)  # of each element, that of the level before
    places = np.zeros((len(shape), 1), np.int64)
    for level, dimension in zip(levels, order, strict=True):
        if level.Format() == _DENSE:
            size = level.DenseSize()
            parents = np.repeat(np.arange(places.shape[1]), size)
            here = np.tile(np.arange(size), places.shape[1])
        else:
            segments = _vector(level.ArraySegmentsType(), level.ArraySegments())
            here = _vector(level.ArrayIndicesType(), level.ArrayIndices())
            parents = np.repeat(np.arange(places.shape[1]), np.diff(segments))
        places = places[:, parents]
        is_block = dimension >= len(shape)
        axis = blocks[dimension - len(shape)] if is_block else dimension
        places[axis] += here if is_block else here * lengths[axis]
    dense = np.zeros(shape, values.dtype)
    dense[tuple(places)] = values
    return dense


def _count(levels: Sequence[Any], sizes: Sequence[int]) -> int | str:
    """Go down the tree of levels; each sparse one starts the count of elements anew."""
    elements = 1
    for number, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        if level.Format() == _DENSE:
            if level.DenseSize() != size:
                return f"sparse dimension {number} has {level.DenseSize()} places of {size}"
            elements *= size
            continue
        segments = _vector(level.ArraySegmentsType(), level.ArraySegments())
        places = _vector(level.ArrayIndicesType(), level.ArrayIndices())
        if segments is None or places is None:
            return f"sparse dimension {number} has no indices"
        if (
            len(segments) != elements + 1
            or segments[0] != 0
            or np.any(np.diff(segments) < 0)
            or segments[-1] != len(places)
        ):
            return f"sparse dimension {number} has segments that do not cover its indices"
        if len(places) and not 0 <= places.min() <= places.max() < size:
            return f"sparse dimension {number} has an index beyond its {size} places"
        elements = len(places)
    return elements


def _integers(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else []


def _vector(kind: int, table: Any) -> Any:
    """Return the integers of a `SparseIndexVector`, None where there are none."""
    from ai_edge_litert import schema_py_generated as schema

    readers = {
        schema.SparseIndexVector.Int32Vector: schema.Int32Vector,
        schema.SparseIndexVector.Uint16Vector: schema.Uint16Vector,
        schema.SparseIndexVector.Uint8Vector: schema.Uint8Vector,
    }
    if table is None or kind not in readers:
        return None
    vector = readers[kind]()
    vector.Init(table.Bytes, table.Pos)
    values = vector.ValuesAsNumpy()
    return values.astype(np.int64) if isinstance(values, np.ndarray) else None
