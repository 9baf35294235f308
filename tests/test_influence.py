"""Inputs whose changes no longer reach the output, in files that are written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite.writer import chain, constant
from pytest_edgeq import Edgeq, QuantizedModel
from tests.checked import checked

Array = npt.NDArray[Any]

_LARGE = 300.0

_G = np.random.default_rng(0)
_ENCODE = (_G.normal(size=(32, 16)) / 4).astype(np.float32)
_READ = (_G.normal(size=(8, 32)) / 6).astype(np.float32)


def _weights(large: float) -> tuple[Array, Array]:
    """Two channels of the code are large, and what reads them is as small: the model's the same."""
    encode, read = _ENCODE.copy(), _READ.copy()
    encode[:2] *= large
    read[:, :2] /= large
    return encode, read


def _model(large: float, share: float = 0.3) -> Callable[..., Array]:
    encode, read = _weights(large)

    def model(source: Any, state: Any, extra: Any = None) -> Array:
        del extra
        code = np.asarray(source) @ encode.T @ read.T
        return np.asarray(share * code + np.asarray(state), np.float32)

    return model


def _int8(width: int, peak: float) -> dict[str, Any]:
    return {"dtype": "int8", "shape": (1, width), "scales": [peak / 127]}


def _constant(values: Array) -> dict[str, Any]:
    """Weights with a scale for each output channel."""
    scales = (np.abs(values).max(axis=1) / 127).astype(np.float32)
    return constant(np.round(values / scales[:, None]), "int8", scales=scales.tolist())


def _dense(taken: str, weights: str, given: str) -> tuple[str, str, str, str]:
    return "FULLY_CONNECTED", f"{taken} {weights} -", given, "FullyConnectedOptions"


def _content(large: float, share: float = 0.3, *, extra: str | None = None) -> bytes:
    """Write the quantized model: FULLY_CONNECTED, FULLY_CONNECTED, ADD of the state."""
    encode, read = _weights(large)
    value = np.stack([source[0] for source, _ in _samples(64, seed=5)])
    tensors = {"source": _int8(16, 4.0), "state": _int8(8, 4.0), "extra": {"dtype": extra}}
    for name, weights in (("code", encode), ("made", share * read)):
        value = value @ weights.T
        peak = float(np.abs(value).max())
        tensors |= {name: _int8(len(weights), peak), f"{name}_weights": _constant(weights)}
    return chain(
        _dense("source", "code_weights", "code"),
        _dense("code", "made_weights", "made"),
        ("ADD", "made state", "result", "AddOptions"),
        inputs="source state" + " extra" * (extra is not None),
        outputs="result",
        key="encode",
        result=_int8(8, 4.0 + peak),
        **tensors,
    )


def _samples(n: int, seed: int = 1) -> list[tuple[Array, ...]]:
    drawn = np.random.default_rng(seed)
    return [
        tuple(drawn.uniform(-4, 4, (1, size)).astype(np.float32) for size in (16, 8))
        for _ in range(n)
    ]


def _loaded(large: float, share: float = 0.3, **options: Any) -> QuantizedModel:
    reference = _model(large, share)
    return Edgeq().load(_content(large, share, **options), reference=reference, name="seq2seq")


def _text(model: QuantizedModel, samples: Any) -> str:
    return " ".join(checked(model, samples)[0].split())


def test_an_input_that_a_tensor_of_few_codes_loses_is_found() -> None:
    """Named are the input and the tensor; also of a signature that is chosen."""
    model = _loaded(_LARGE)
    for each in (model, model.signature("encode")):
        text = _text(each, _samples(6))
        assert text.startswith("input 'source': expected 6.02 dB SQNR or more of the change that ")
        assert "in the output of FULLY_CONNECTED #0 rounding removes the change from 30 of " in text
        assert re.search(r"channels (0, 1|1, 0) fill its range", text)
        assert re.search(r"scale channels (0, 1|1, 0) down in the model and the consumers up", text)


def _joined() -> QuantizedModel:
    """Load a file in which small values of one input share the scale of a TANH."""
    small = (_ENCODE / 1000).astype(np.float32)
    read = np.concatenate([1000 * _READ, _READ[:, :8]], axis=1)
    content = chain(
        _dense("source", "small", "code"),
        ("TANH", "state", "bent"),
        ("CONCATENATION", "code bent", "joined", "ConcatenationOptions", {"axis": 1}),
        _dense("joined", "read", "out"),
        inputs="source state",
        outputs="out",
        key="encode",
        source=_int8(16, 4.0),
        state=_int8(8, 4.0),
        small=_constant(small),
        read=_constant(read),
        out=_int8(8, 8.0),
        **{name: _int8(n, 127 / 128) for name, n in (("code", 32), ("bent", 8), ("joined", 40))},
    )

    def model(source: Any, state: Any) -> Array:
        joined = np.concatenate([np.asarray(source) @ small.T, np.tanh(np.asarray(state))], axis=1)
        return np.asarray(joined @ read.T, np.float32)

    return Edgeq().load(content, reference=model, name="joined")


def test_a_scale_that_a_concatenation_shares_is_named() -> None:
    """No channel of the named tensor fills the range, and scaling it down would make it worse."""
    text = _text(_joined(), _samples(6))
    assert "in the output of FULLY_CONNECTED #0 rounding removes the change from " in text
    assert "its range [-1, 0.992] is too wide for them; CONCATENATION #2 has one scale " in text
    assert "for all of its operands, that of TANH #1" in text
    assert "fix: scale the operand with the smaller values up in the model" in text
    assert "down in the model" not in text


@pytest.mark.parametrize(
    ("large", "share", "n_samples"),
    [
        (1.0, 0.3, 6),  # no large channels
        (1.0, 0.001, 6),  # the change is within the rounding of the output: a sound file loses it
        (_LARGE, 0.3, 1),  # nothing to swap with
    ],
)
def test_what_is_sound_or_not_known_passes(large: float, share: float, n_samples: int) -> None:
    """Without a word."""
    assert _text(_loaded(large, share), _samples(n_samples)) == ""


def _with_extra(samples: list[tuple[Array, ...]], dtype: Any, low: int, high: int) -> Any:
    drawn = np.random.default_rng(9)
    return [(*each, drawn.integers(low, high, (1, 4)).astype(dtype)) for each in samples]


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("bool", 0, 2), ("int32", 0, 2), ("int32", 0, 50)]
)
def test_inputs_that_change_nothing_raise_no_alarm(dtype: str, low: int, high: int) -> None:
    """Masks, indices and what is not used."""
    samples = _with_extra(_samples(6), np.dtype(dtype), low, high)
    assert _text(_loaded(1.0, extra=dtype), samples) == ""
    assert _text(_loaded(_LARGE, extra=dtype), samples).startswith("input 'source'")


def test_a_reference_that_refuses_mixed_samples_is_not_asked_for_more() -> None:
    """Of samples that fit only together nothing is known."""
    samples, model = _samples(6), _model(_LARGE)
    known = {each[0].tobytes() + each[1].tobytes() for each in samples}

    def strict(source: Any, state: Any) -> Array:
        if np.asarray(source).tobytes() + np.asarray(state).tobytes() not in known:
            raise KeyError("not a sample")
        return model(source, state)

    loaded = Edgeq().load(_content(_LARGE), reference=strict, name="seq2seq")
    assert _text(loaded, samples) == ""


def test_an_input_that_never_changes() -> None:
    """Nothing is known of it; of another one, the tensor of few codes is proof enough."""
    first, samples = _samples(1)[0], _samples(6)
    assert _text(_loaded(_LARGE), [(first[0], state) for _, state in samples]) == ""
    same_state = [(source, first[1]) for source, _ in samples]
    assert _text(_loaded(_LARGE), same_state).startswith("input 'source'")
    assert _text(_loaded(1.0), same_state) == ""
