"""
Samples for calibration and evaluation, checked against the model's inputs.

A sample is a tensor, a tuple (or list) of tensors, or a dict of tensors by argument name; a pair
`(tuple, dict)` serves models with both. numpy arrays stand in for tensors where a model was
loaded from a file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.arrays import kind_of, short_repr
from pytest_edgeq.tflite.layout import UNTURNED, Layouts, fits, mismatch_hint
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor
from pytest_edgeq.versions import loaded_torch

_TOGETHER = 16  # samples requested from the factory at once when all are read in order

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Name, shape and dtype of one input."""

    name: str  # `args_0`, `args_1`, … or the keyword
    shape: tuple[int, ...]  # −1 for any length
    dtype: str  # numpy's name for it
    # whether integers of any width are accepted: the file's own may be narrower than the model's
    # (litert-torch stores int64 as int32); values that do not fit are refused later
    any_integer: bool = False
    # whether float16 is accepted as well as float32: the file stores float16
    any_float: bool = False
    # the file's layout where the reference has another one; `""` where both agree, None without a
    # file
    layout: str | None = None

    def check(self, value: Any, where: str) -> None:
        """Check one tensor of a sample."""
        if not is_tensor(value):
            raise TypeError(
                f"{where}, input {self.name!r}: expected a tensor, got {type(value).__name__}"
            )
        shape, dtype = tuple(value.shape), dtype_name(value)
        if not fits(shape, self.shape):
            batched = shape[:1] != self.shape[:1] and shape[1:] == self.shape[1:]
            missing = shape == self.shape[1:]
            hint = ""
            if batched or missing:
                hint = f"; the file is built for batches of {self.shape[0]}: " + (
                    "split the batch" if batched else "add the batch dimension"
                )
            elif not self.layout:
                permute = _suggested_permute(shape, self.shape)
                hint = mismatch_hint(shape, self.shape) if self.layout == "" else ""
                if permute:
                    hint += f"{'; or' if hint else ';'} permute the sample: {permute}"
            elif self.layout and mismatch_hint(shape, self.shape):
                hint = (
                    f"; samples are laid out as the reference has them, and layout="
                    f"{self.layout!r} permutes them for the file"
                )
            raise ValueError(
                f"{where}, input {self.name!r}: expected shape {_shape(self.shape)}, got "
                f"{_shape(shape)}{hint}"
            )
        will_do = (self.any_integer and dtype in _INTEGERS) or (
            self.any_float and dtype in ("float16", "float32")
        )
        # No array has the dtype "string"; encoding a sample reports such inputs.
        if dtype != self.dtype and not will_do and self.dtype != "string":
            floats = self.dtype.startswith("float") and not dtype.startswith(("float", "bfloat"))
            hint = (
                "; integers in place of floats: convert them as the model was trained "
                "(for images, usually x.float() / 255)"
                if floats
                else ""
            )
            raise TypeError(
                f"{where}, input {self.name!r}: expected {self.dtype}, got {dtype}{hint}"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, bound: positional and keyword tensors in the model's order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Positional ones first, then keyword ones in the model's order."""
        return (*self.args, *self.kwargs.values())

    def arrays(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the tensors as numpy arrays, without a copy."""
        return tuple(as_array(tensor) for tensor in self.tensors)

    def clone(self) -> Sample:
        """Return a copy that outlives the data loader's buffers."""
        return self.mapped(_copy)

    def mapped(self, function: Callable[[Any], Any]) -> Sample:
        """Return a sample with the function's result in place of each tensor."""
        return Sample(
            tuple(map(function, self.args)),
            {name: function(tensor) for name, tensor in self.kwargs.items()},
        )


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Inputs that a sample must have."""

    args: tuple[InputSpec, ...]
    kwargs: dict[str, InputSpec]
    # names of the model's positional parameters, for samples that are dicts
    parameters: tuple[str, ...] = ()
    # whether the model accepts any name, so that a dict is passed on by name
    keeps_names: bool = False

    @classmethod
    def of_inputs(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parameters: Sequence[str],
        *,
        dynamic: bool = False,
    ) -> SampleSpec:
        """Return the spec of example inputs; with `dynamic`, of their ranks and dtypes only."""

        def spec(name: str, value: Any) -> InputSpec:
            shape = tuple(-1 if dynamic else int(length) for length in value.shape)
            return InputSpec(name, shape, dtype_name(value))

        return cls(
            tuple(spec(f"args_{i}", value) for i, value in enumerate(args)),
            {name: spec(name, value) for name, value in kwargs.items()},
            tuple(parameters[: len(args)]),
        )

    @classmethod
    def of_signature(
        cls,
        signature: Signature,
        parameters: Sequence[str] = (),
        positional: int = 0,
        layouts: Layouts = UNTURNED,
        *,
        keeps_names: bool = False,
    ) -> SampleSpec:
        """
        Return the spec of a file's inputs: floats for quantized inputs.

        Inputs are matched by name: `args_<position>` as litert-torch writes them, or the names of
        the reference's parameters; by the file's own order if neither is known.
        """
        specs = {io_tensor.name: _of_tensor(io_tensor, layouts) for io_tensor in signature.inputs}
        named = [name for name in parameters if name in specs]
        numbered = {n for n in specs if re.fullmatch(r"args_\d+", n) and n not in named}
        args = [f"args_{i}" for i in range(len(numbered))]
        rest = [name for name in specs if name not in numbered and name not in named]
        if not named and not positional and numbered == set(args):
            if numbered:
                return cls(
                    tuple(specs[name] for name in args),
                    {name: specs[name] for name in rest},
                    tuple(args) if keeps_names else (),
                    keeps_names,
                )
            return cls(tuple(specs.values()), {}, tuple(specs), keeps_names)
        if numbered != set(args) or (rest and (numbered or named)):
            raise ValueError(
                f"the file has the inputs {list(specs)} and the reference {list(parameters)}: "
                "names that agree in part only would be paired by position. Give a reference whose "
                "parameters bear the file's names"
            )
        if rest:
            # Names of another converter: only position is left.
            return cls(tuple(specs.values()), {}, tuple(parameters[: min(positional, len(specs))]))
        # A parameter that the file does not have would shift the ones behind it.
        first = list(itertools.takewhile(specs.__contains__, parameters[:positional]))
        by_position = tuple(args) or tuple(first)
        by_name = named if args else named[len(first) :]
        return cls(
            tuple(specs[name] for name in by_position),
            {name: specs[name] for name in by_name},
            tuple(parameters[: min(positional, len(args))]) if args else by_position,
        )

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Positional ones first, then keyword ones."""
        return (*self.args, *self.kwargs.values())

    def bind(self, sample: Any, where: str) -> Sample:
        """Bind a sample to the model's inputs and check it."""
        args, kwargs = self._split(sample, where)
        names = [*(spec.name for spec in self.args), *self.kwargs]
        if self.keeps_names and not args and kwargs.keys() == set(names):
            bound = Sample((), {name: kwargs[name] for name in names})
            return self._checked(bound, where)
        args, kwargs = self._by_name(args, kwargs)
        if len(args) != len(self.args):
            hint = ""
            if self.kwargs:
                hint = (
                    f"; the model also has {sorted(self.kwargs)} by name: give a pair "
                    "((tensor, …), {name: tensor}), or a dict with all names"
                )
            elif kwargs and self.parameters:
                hint = f"; by name it expects {list(self.parameters)}, and got {sorted(kwargs)}"
            elif len(args) == len(self.args) + 1:
                hint = "; if the last one is a label, leave it out: (x for x, label in loader)"
            raise ValueError(
                f"{where}: expected {len(self.args)} positional "
                f"input{'s'[: len(self.args) != 1]}, got {len(args)}{hint}"
            )
        if set(kwargs) != set(self.kwargs):
            raise ValueError(
                f"{where}: expected {sorted(self.kwargs) or 'nothing'} by name, got "
                f"{sorted(kwargs) or 'nothing'}"
                + "".join(nearest(name, self.kwargs) for name in set(kwargs) - set(self.kwargs))
                + (
                    "; give a pair ((tensor, …), {name: tensor})"
                    if self.args and not kwargs
                    else ""
                )
            )
        bound = Sample(tuple(args), {name: kwargs[name] for name in self.kwargs})
        return self._checked(bound, where)

    def _checked(self, bound: Sample, where: str) -> Sample:
        for spec, value in zip(self.inputs, bound.tensors, strict=True):
            spec.check(value, where)
        return bound

    def _split(self, sample: Any, where: str) -> tuple[Sequence[Any], dict[str, Any]]:
        if is_tensor(sample):
            return (sample,), {}
        if isinstance(sample, Mapping):
            return (), dict(sample)
        if isinstance(sample, (tuple, list)):
            if len(sample) == 2 and isinstance(sample[1], Mapping):
                args = (sample[0],) if is_tensor(sample[0]) else tuple(sample[0])
                return args, dict(sample[1])
            return sample, {}
        raise TypeError(
            f"{where}: expected a tensor, a tuple of tensors or a dict of tensors, got "
            f"{type(sample).__name__}"
        )

    def _by_name(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Move positional parameters that were passed by name into position."""
        named, left = dict(kwargs), self.parameters[len(args) :]
        if left and set(left) <= set(named):
            args = (*args, *(named.pop(name) for name in left))
        return args, named


def _suggested_permute(shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Suggest a permute for a sample with its channels elsewhere; empty if none helps."""
    if len(shape) != len(wanted) or len(shape) < 3:
        return ""
    first, *between = range(len(shape))
    for order, reason in (
        ((first, between[-1], *between[:-1]), "its channels are last"),
        ((first, *between[1:], between[0]), "its channels are first"),
    ):
        if fits([shape[i] for i in order], wanted):
            return f"x.permute({', '.join(map(str, order))}), as {reason}"
    return ""


def _of_tensor(io_tensor: SignatureTensor, layouts: Layouts) -> InputSpec:
    half = io_tensor.tensor.dtype == "float16"
    dtype = "float32" if half or io_tensor.tensor.is_quantized else io_tensor.tensor.dtype
    return InputSpec(
        io_tensor.name,
        layouts.shape(io_tensor),
        dtype,
        any_integer=dtype in _INTEGERS,
        any_float=half,
        layout=layouts.of(io_tensor) or "",
    )


def read_samples(
    samples: Iterable[Any], spec: SampleSpec, kind: str, *, finite: bool = False
) -> Iterator[Sample]:
    """Read samples once, in order, holding one at a time."""
    if is_tensor(samples) or isinstance(samples, (Mapping, str, bytes)):
        several = "; or split a batch: x.split(1) of torch, numpy.split(x, len(x))"
        raise TypeError(
            f"{kind}: expected an iterable of samples, got one {kind_of(samples)}; put it "
            f"into a list: [sample]{several if is_tensor(samples) else ''}"
        )
    try:
        iterator = iterate(samples)
    except TypeError:
        raise TypeError(
            f"{kind}: expected an iterable of samples, got {type(samples).__name__}"
        ) from None
    count = 0
    for sample in iterator:
        bound = spec.bind(sample, f"{kind} sample {count}")
        if finite:
            _check_finite(bound, spec, f"{kind} sample {count}")
        yield bound
        count += 1
    if count == 0:
        hint = (
            ". A generator yields its samples once, and this one is used up: make it anew for each "
            "use, or keep the samples in a list"
            if iterator is samples
            else ""
        )
        raise ValueError(f"{kind}: there is no sample in the {type(samples).__name__}{hint}")


def iterate(samples: Any) -> Iterator[Any]:
    """Return an iterator; a map-style dataset, without `__iter__`, may accept any index."""
    iterator: Iterator[Any] = iter(samples)
    if hasattr(samples, "__iter__") or not hasattr(samples, "__len__"):
        return iterator
    return itertools.islice(iterator, len(samples))


class SampleSource:
    """An iterable of n samples, of which any process can read any range."""

    def __init__(self, factory: Callable[[range], Iterable[Any]], n: int) -> None:
        if not callable(factory):
            raise TypeError(
                "samples: expected a factory that is called with a range of indices and returns "
                f"their samples, got {type(factory).__name__}"
            )
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"samples: expected the number of samples, got {short_repr(n)}")
        if n < 0:
            raise ValueError(f"samples: expected 0 samples or more, got {n}")
        self.factory = factory
        self._n = n

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._n

    def __iter__(self) -> Iterator[Any]:
        """Read all samples in order, a few at a time."""
        for start in range(0, self._n, _TOGETHER):
            yield from self.read(range(start, min(start + _TOGETHER, self._n)))

    def read(self, indices: range) -> Iterator[Any]:
        """Read the samples of a range, in order."""
        count = 0
        for sample in self.factory(indices):
            if count == len(indices):
                raise ValueError(_wrong_count(indices, "more"))
            yield sample
            count += 1
        if count < len(indices):
            raise ValueError(_wrong_count(indices, str(count)))


def _wrong_count(indices: range, got: str) -> str:
    return (
        f"samples: expected {len(indices)} samples of the factory for {indices!r}, got {got}\n"
        "cause: the factory is called with a range of indices, and returns one sample for each"
    )


def _check_finite(sample: Sample, spec: SampleSpec, where: str) -> None:
    for input_spec, array in zip(spec.inputs, sample.arrays(), strict=True):
        if not np.issubdtype(array.dtype, np.floating):
            continue
        bad = array.size - int(np.isfinite(array).sum())
        if bad:
            raise ValueError(
                f"{where}, input {input_spec.name!r}: {bad} of {array.size} values are NaN or "
                "infinite; ranges of such values would make every scale meaningless. Clean the "
                "data, or leave the sample out"
            )


def is_tensor(value: Any) -> bool:
    """Return whether it is a torch tensor or a numpy array, without importing torch."""
    torch = loaded_torch()
    return isinstance(value, np.ndarray if torch is None else (np.ndarray, torch.Tensor))


def dtype_name(value: Any) -> str:
    """Return the name of a tensor's or array's dtype, such as `float32`."""
    return str(value.dtype).removeprefix("torch.")


def as_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array, sharing its memory if possible."""
    if isinstance(tensor, np.ndarray):
        return tensor
    detached = tensor.detach().cpu()
    if dtype_name(detached) == "bfloat16":
        detached = detached.float()
    array: np.ndarray[Any, Any] = detached.numpy()
    return array


def _copy(tensor: Any) -> Any:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.detach().clone()


def _shape(shape: Sequence[int]) -> str:
    return "×".join("?" if length == -1 else str(length) for length in shape) or "scalar"
