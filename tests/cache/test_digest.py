"""Hashes: equal for equal values, others for others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytest_edgeq.litert.digest import UnhashableError, digest_of

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(_PLAIN, max_size=3), st.lists(_PLAIN, max_size=3))
def test_values_have_one_hash_only_if_they_are_written_alike(
    one: list[Any], other: list[Any]
) -> None:
    """`repr` tells 1 from True and 1.0, 0.0 from −0.0, and lists from tuples."""
    assert (digest_of(*one) == digest_of(*other)) == (repr(one) == repr(other))


def _bit_flipped(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    raw.view(-1)[-1] ^= 1
    return raw.view(tensor.dtype).reshape(tensor.shape)


X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        _bit_flipped(X),
        X.double(),
        X.half(),
        X.reshape(4, 3),
        X.t().contiguous().t(),
        X[:, :3],
        -X,
        X.numpy(),
    ],
    ids=["a bit", "float64", "float16", "shape", "strides", "part", "sign", "array"],
)
def test_every_property_of_a_tensor_counts(other: Any) -> None:
    """Its values, dtype, shape and layout in memory."""
    assert digest_of(X) == digest_of(X.clone()) == digest_of(nn.Parameter(X))
    assert digest_of(other) != digest_of(X)


def test_a_tensor_is_left_as_it_was() -> None:
    """Its memory may still be resized, as observers do; numpy would forbid it."""
    for tensor in (torch.tensor([]), torch.zeros(2), torch.zeros(2, 2).t()):
        before = digest_of(tensor)
        tensor.untyped_storage().resize_(64)
        assert digest_of(tensor) == before


@pytest.mark.parametrize("value", [float("nan"), -0.0, 1e-45, float("inf")])
def test_unusual_numbers_count(value: float) -> None:
    """NaN equals nothing, and hashes all the same."""
    one = torch.tensor([value])
    assert digest_of(one) == digest_of(torch.tensor([value]))
    assert digest_of(one) != digest_of(torch.tensor([0.0]))
    assert digest_of(value) != digest_of(0.0)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        functools.partial(lambda: None),
        np.array([object()]),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["object", "function", "partial", "objects", "sparse", "meta"],
)
def test_what_cannot_be_read_is_refused(value: Any) -> None:
    """Never hashed by its address or its class."""
    with pytest.raises(UnhashableError):
        digest_of([value])


def test_operators_of_others_are_refused() -> None:
    """Their code may change behind an equal name."""
    library: Any = torch.library.Library("edgeq_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("double(Tensor x) -> Tensor")
    operators: Any = torch.ops.edgeq_test
    with pytest.raises(UnhashableError, match=r"edgeq_test\.double"):
        digest_of(operators.double.default)
    assert digest_of(torch.ops.aten.add.Tensor) != digest_of(torch.ops.aten.add.Scalar)
    library._destroy()
