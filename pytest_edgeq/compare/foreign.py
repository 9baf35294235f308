"""References other than torch modules: Keras models, onnxruntime sessions and `.tflite` files."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.samples import SampleSpec
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ops import QDQ

_KERAS = ("keras", "tf_keras")

# Parameters of `call` that the framework passes besides the inputs.
_NOT_INPUTS = ("training", "mask")

# ONNX's names of types that numpy calls otherwise.
_ONNX_FLOATS = {"float": "float32", "double": "float64"}


def is_keras(reference: object) -> bool:
    """Return whether it is a Keras model or layer, without importing Keras."""
    return any(
        kind.__name__ == "Layer" and kind.__module__.split(".")[0] in _KERAS
        for kind in type(reference).__mro__
    )


def keras_input_names(model: Any) -> tuple[str, ...]:
    """Return the names of a Keras model's inputs, in call order: of its graph, else of `call`."""
    structure = _structure(model)
    if structure is not None:
        return tuple(_leaf_names(structure))
    return tuple(
        name
        for name, parameter in inspect.signature(model.call).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in _NOT_INPUTS
    )


def keras_output_names(reference: object) -> tuple[str, ...]:
    """Return the output names of a Keras model with a graph, else none."""
    names = getattr(reference, "output_names", None) if is_keras(reference) else None
    return tuple(names or ())


def call_keras(model: Any, /, *args: npt.NDArray[Any], **kwargs: npt.NDArray[Any]) -> Any:
    """Call a Keras model in inference mode."""
    structure = _structure(model)
    if structure is None:
        return model(*args, training=False, **kwargs)
    inputs = _by_name("the Keras model", tuple(_leaf_names(structure)), args, kwargs)
    return model(_filled(structure, inputs), training=False)


def _structure(model: Any) -> Any:
    """Return a graph's inputs, nested as the model expects them; None without a graph."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    # A Sequential that learned its only input from a call has `inputs`, and no `input`.
    return getattr(model, "input", inputs[0])


def _leaf_names(structure: Any) -> list[str]:
    if isinstance(structure, Mapping):
        structure = list(structure.values())
    if isinstance(structure, (list, tuple)):
        return [name for each in structure for name in _leaf_names(each)]
    return [structure.name]


def _filled(structure: Any, inputs: Mapping[str, Any]) -> Any:
    if isinstance(structure, Mapping):
        return {key: _filled(each, inputs) for key, each in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_filled(each, inputs) for each in structure]
    return inputs[structure.name]


def _by_name(
    what: str,
    names: Sequence[str],
    args: Sequence[npt.NDArray[Any]],
    kwargs: Mapping[str, npt.NDArray[Any]],
) -> dict[str, npt.NDArray[Any]]:
    # A wrong number of inputs is reported below.
    inputs = dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > len(names) or set(inputs) != set(names):
        raise ValueError(
            f"{what} has the inputs {list(names)}, the sample has {len(args)} by position and "
            f"{sorted(kwargs)} by name"
        )
    return inputs


def looks_like_session(thing: object) -> bool:
    """Return whether it is an onnxruntime session, without importing onnxruntime."""
    return all(
        callable(getattr(thing, name, None)) for name in ("get_inputs", "get_outputs", "run")
    )


def onnx_reference(session: Any) -> Callable[..., dict[str, np.ndarray[Any, Any]]]:
    """
    Make an onnxruntime session a reference for `edgeq.load`.

    Inputs are paired with the file's by name where the names are the same, else by position, and
    so are outputs.
    A sample is passed unchanged; only whole numbers change their width, and floats become wider,
    where the session wants it, because no value changes by that.

    Args:
        session: An `onnxruntime.InferenceSession`.

    Raises:
        TypeError: Not a session.
    """
    if not looks_like_session(session):
        raise TypeError(
            f"onnx_reference: expected an onnxruntime.InferenceSession, got "
            f"{type(session).__name__}; make one: onnxruntime.InferenceSession('model.onnx')"
        )
    return OnnxReference(session)


class OnnxReference:
    """An onnxruntime session, callable with arrays, that returns its outputs by name."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._types = {each.name: each.type for each in session.get_inputs()}
        self._outputs = [each.name for each in session.get_outputs()]
        self.input_names = tuple(self._types)  # names of the ONNX graph's inputs, in order

    def __call__(
        self, *args: npt.NDArray[Any], **kwargs: npt.NDArray[Any]
    ) -> dict[str, npt.NDArray[Any]]:
        """Run one sample."""
        inputs = _by_name("the ONNX session", self.input_names, args, kwargs)
        feed = {name: self._cast(name, np.asarray(value)) for name, value in inputs.items()}
        return dict(zip(self._outputs, self._session.run(None, feed), strict=True))

    def _cast(self, name: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        kind = self._types[name].removeprefix("tensor(").removesuffix(")")
        try:
            wanted = np.dtype(_ONNX_FLOATS.get(kind, kind))
        except TypeError:  # a sequence or a bfloat16, which onnxruntime itself reports
            return value
        if value.dtype == wanted or wanted.kind not in "biuf":
            return value
        is_same_kind = {value.dtype.kind, wanted.kind} in ({"f"}, {"i"}, {"u"}, {"i", "u"})
        cast = value.astype(wanted)
        if is_same_kind and np.array_equal(cast, value, equal_nan=True):
            return cast
        raise TypeError(
            f"the ONNX input {name!r} expects {wanted}, the sample has {value.dtype}, and a cast "
            "would change its values: wrap the reference in a function with the intended cast"
        )


class FileReference:
    """A `.tflite` file, callable with arrays, that returns its float outputs by name."""

    _RUNTIME = "xnnpack"

    def __init__(self, edge: EdgeFile, *, is_form: bool = False) -> None:
        self.edge = edge.clone()
        self.is_form = is_form
        self._spec = SampleSpec.of_signature(edge.signature, layouts=edge.layouts)
        # names of a sample's inputs, in order
        self.input_names = tuple(spec.name for spec in self._spec.inputs)
        self._lock = threading.Lock()

    @property
    def is_float(self) -> bool:
        """Whether it is a float file whose constants are not quantized."""
        return not self.quantizes and self._schemes <= {"float", "integer"}

    @property
    def quantizes(self) -> bool:
        """Whether it quantizes activations."""
        io_tensors = (*self.edge.signature.inputs, *self.edge.signature.outputs)
        if any(io_tensor.tensor.is_quantized for io_tensor in io_tensors):
            return True
        return not self._schemes <= {"float", "integer", "float16", "weight_only"}

    @property
    def _schemes(self) -> set[str]:
        return {each.scheme for each in self.edge.op_dtypes if each.op not in QDQ}

    def __call__(
        self, *args: npt.NDArray[Any], **kwargs: npt.NDArray[Any]
    ) -> dict[str, npt.NDArray[Any]]:
        """Run one sample: inputs by the file's names if known, else by position."""
        if not kwargs.keys() <= set(self.input_names):
            args, kwargs = (*args, *kwargs.values()), {}
        sample = self._spec.bind((args, kwargs), "the reference file")
        with self._lock:
            codes = self.edge.run(self.input_names, sample.arrays(), self._RUNTIME)
            decoded = self.edge.decode(codes)
        names = [io_tensor.name for io_tensor in self.edge.signature.outputs]
        return dict(zip(names, decoded, strict=True))

    def __reduce__(self) -> Any:
        content, edge = bytes(self.edge.graph.buffer[:]), self.edge
        return _opened_reference, (content, edge.key, edge.layout, self.is_form)


def _opened_reference(content: bytes, key: str | None, layout: Any, is_form: bool) -> FileReference:
    edge = EdgeFile(content, layout=layout)
    return FileReference(edge if key is None else edge.at(key), is_form=is_form)
