"""Convert sparse constants to dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.flatbuffer import integers

_DENSE = 0
"""`DimensionType.DENSE`; 1 is `SPARSE_CSR`."""


def densified(sparsity: Any, shape: Sequence[int], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """
    Return the dense values of a sparse constant.

    The dimensions of blocks follow those of the tensor, each a part of one of them; `schema.fbs`,
    `SparsityParameters`.

    Raises:
        ValueError, LookupError, MemoryError: The layout does not fit the shape or the values.
    """
    order, blocks = (
        integers(each) for each in (sparsity.TraversalOrderAsNumpy(), sparsity.BlockMapAsNumpy())
    )
    levels = [sparsity.DimMetadata(i) for i in range(sparsity.DimMetadataLength())]
    ends, indices = (
        [_vector(getattr(each, f"{name}Type")(), getattr(each, name)()) for each in levels]
        for name in ("ArraySegments", "ArrayIndices")
    )
    most = max(values.size, *(each.size for each in ends))
    lengths = dict.fromkeys(range(len(shape)), 1)
    lengths |= {each: levels[len(shape) + i].DenseSize() for i, each in enumerate(blocks)}
    places = np.zeros((len(shape), 1), np.int64)  # of each element of the level before
    for number, (level, dimension) in enumerate(zip(levels, order, strict=True)):
        count = places.shape[1]
        if level.Format() == _DENSE:
            size = level.DenseSize()
            if not 0 <= count * size <= most:
                raise ValueError(f"dimension {number} has {count * size} places")
            parents, here = np.repeat(np.arange(count), size), np.tile(np.arange(size), count)
        else:
            parents, here = np.repeat(np.arange(count), np.diff(ends[number])), indices[number]
        places = places[:, parents]
        is_block = dimension >= len(shape)
        axis = blocks[dimension - len(shape)] if is_block else dimension
        places[axis] += here if is_block else here * lengths[axis]
    if places.min(initial=0) < 0:
        raise ValueError("an index is negative")
    dense = np.zeros(shape, values.dtype)
    dense[tuple(places)] = values
    return dense


def _vector(kind: int, table: Any) -> npt.NDArray[np.int64]:
    """Return the integers of a `SparseIndexVector`."""
    from ai_edge_litert import schema_py_generated as schema

    readers = {
        schema.SparseIndexVector.Int32Vector: schema.Int32Vector,
        schema.SparseIndexVector.Uint16Vector: schema.Uint16Vector,
        schema.SparseIndexVector.Uint8Vector: schema.Uint8Vector,
    }
    if table is None or kind not in readers:
        return np.zeros(0, np.int64)
    vector = readers[kind]()
    vector.Init(table.Bytes, table.Pos)
    values = vector.ValuesAsNumpy()
    return values.astype(np.int64) if isinstance(values, np.ndarray) else np.zeros(0, np.int64)
