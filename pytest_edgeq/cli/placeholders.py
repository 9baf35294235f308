"""Random inputs of given shapes, and the code that makes them in a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_edgeq.names import nearest

if TYPE_CHECKING:
    import torch

_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = (*_FLOATS, *_INTEGERS, "bool")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """
    Random values in the place of one input.

    Attributes:
        shape: Of the tensor.
        dtype: torch's name for it.
        below: Integers are less; 2 where nothing is known of them.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    below: int = 2

    @property
    def code(self) -> str:
        """The expression that makes one from `generator`: floats from a standard normal one."""
        numbers = ", ".join(map(str, self.shape))
        shape = f"({numbers},)" if len(self.shape) == 1 else f"({numbers})"
        if self.dtype in _FLOATS:
            dtype = "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}"
            return f"torch.randn({shape}, generator=generator{dtype})"
        if self.dtype == "bool":
            return f"torch.randint(0, 2, {shape}, generator=generator).bool()"
        dtype = "" if self.dtype == "int64" else f", dtype=torch.{self.dtype}"
        return f"torch.randint(0, {self.below}, {shape}, generator=generator{dtype})"


@dataclass(frozen=True, slots=True)
class Placeholders:
    """
    The inputs of a model, by position or by name.

    Attributes:
        by_position: One for each positional argument.
        by_name: One for each keyword argument.
    """

    by_position: tuple[Placeholder, ...] = ()
    by_name: Mapping[str, Placeholder] | None = None

    @classmethod
    def like(cls, inputs: Any) -> Placeholders:
        """
        Return placeholders of the shapes and dtypes of sample inputs.

        Raises:
            TypeError: Anything else.
        """
        import torch

        if isinstance(inputs, torch.Tensor):
            return cls((_like(inputs, "sample inputs"),))
        if isinstance(inputs, Mapping):
            return cls(by_name={name: _like(value, name) for name, value in inputs.items()})
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(_like(each, f"input {i}") for i, each in enumerate(inputs)))
        raise TypeError(
            "sample inputs: expected a tensor, a tuple of tensors, or a dict of them by argument, "
            f"got {type(inputs).__name__}"
        )

    @property
    def code(self) -> list[str]:
        """The lines of the expression that makes one sample."""
        if self.by_name is not None:
            return [
                "{",
                *(f'    "{name}": {each.code},' for name, each in self.by_name.items()),
                "}",
            ]
        if len(self.by_position) == 1:
            return [f"({self.by_position[0].code},)"]
        return ["(", *(f"    {each.code}," for each in self.by_position), ")"]

    @property
    def has_integers(self) -> bool:
        """Whether an input holds integers, whose range is a guess."""
        each = (*self.by_position, *(self.by_name or {}).values())
        return any(one.dtype in _INTEGERS for one in each)

    def samples(self, number: int, seed: int) -> list[Any]:
        """Return what the code makes: samples as `edgeq.compare` takes them."""
        import torch

        code = compile("\n".join(self.code), "<samples>", "eval")
        generator = torch.Generator().manual_seed(seed)
        return [eval(code, {"torch": torch, "generator": generator}) for _ in range(number)]


def _like(value: torch.Tensor, where: str) -> Placeholder:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: expected a tensor, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    _check_dtype(dtype, where)
    below = 2
    if dtype in _INTEGERS and value.numel():
        below = max(below, int(value.max()) + 1)
    return Placeholder(tuple(value.shape), dtype, below)


def parse_shape(text: str) -> Placeholder:
    """
    Return the placeholder that `1,3,224,224` or `1,16:int64` describes.

    Raises:
        ValueError: No shape, or an unknown dtype.
    """
    numbers, separator, dtype = text.partition(":")
    try:
        shape = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        raise ValueError(f"expected numbers such as 1,3,224,224 or 1,16:int64, got {text!r}") from (
            None
        )
    if min(shape) < 1:
        raise ValueError(f"expected lengths of 1 or more, got {text!r}")
    if separator:
        _check_dtype(dtype, text)
    return Placeholder(shape, dtype or "float32")


def _check_dtype(dtype: str, where: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(
            f"{where}: unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; there are "
            f"{', '.join(DTYPES)}"
        )
