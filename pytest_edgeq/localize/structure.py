"""Pair the ops of a quantized file and its float form, and compare both."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pytest_edgeq.baselines.align import common
from pytest_edgeq.localize.constant_checks import (
    SAME_SCALE,
    check_bias,
    check_stored_weight,
    cover_all_values,
    written_scale,
)
from pytest_edgeq.localize.consumers import changed_input
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.conformance import is_shared
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import COMMUTATIVE, HOLDING, INPUT_AT
from pytest_edgeq.tflite.roles import StoredTensor, role_of, roles_of, stored_constant
from pytest_edgeq.tflite.same import (
    decomposition_differences,
    option_differences,
    source_of,
)
from pytest_edgeq.tflite.subgraph import Op, Signature, Subgraph

Array = npt.NDArray[Any]


class Pairs:
    """Paired ops of two files; behind casts and reshapes the tensor in front counts."""

    def __init__(self, file: Subgraph, form: Subgraph, inputs: Mapping[int, int]) -> None:
        self._file, self._form = file, form
        self.ops: dict[int, Op] = {}  # from the quantized file to the float file, as `tensors`
        self.tensors = dict(inputs)
        self.sources = _sources(file)  # by the output of a reshape or cast, its source
        self._float_sources = _sources(form)

    @property
    def unpaired(self) -> list[Op]:
        """Ops of the quantized file without a partner, except reshapes and casts."""
        return [o for o in self._file.ops if o.name not in HOLDING and o.index not in self.ops]

    @property
    def unused(self) -> list[Op]:
        """Ops of the float file without a partner, likewise."""
        used = {partner.index for partner in self.ops.values()}
        return [o for o in self._form.ops if o.name not in HOLDING and o.index not in used]

    @property
    def is_whole(self) -> bool:
        """Whether every op of both files has a partner."""
        return not self.unpaired and not self.unused

    def source(self, tensor: int) -> int:
        """Return the tensor of the quantized file whose elements one holds."""
        return self.sources.get(tensor, tensor)

    def float_source(self, tensor: int) -> int:
        """Return the tensor of the float file whose elements one holds."""
        return self._float_sources.get(tensor, tensor)

    def partner(self, tensor: int) -> int | None:
        """Return the float file's counterpart of a tensor of the quantized file."""
        found = self.tensors.get(self.source(tensor))
        return None if found is None else self.float_source(found)

    @functools.cached_property
    def counterparts(self) -> dict[int, int]:
        """Tensors of the quantized file by their source in the float file."""
        return {self.float_source(there): here for here, there in self.tensors.items()}

    def add(self, op: Op, partner: Op) -> None:
        """Pair two ops."""
        self.ops[op.index] = partner
        # In a damaged file an op may have fewer outputs: `same` reports that.
        outputs = zip(op.outputs, partner.outputs, strict=False)
        self.tensors.update((here, there) for here, there in outputs if here >= 0)

    def add_by_wiring(self) -> None:
        """Pair ops of one name and shape whose non-constant inputs are paired."""
        by_wiring: dict[Hashable, list[Op]] = {}
        for op in self.unused:
            operands = map(self.float_source, op.inputs)
            live = tuple(i for i in operands if i in self._form.producer or i in self._form.inputs)
            by_wiring.setdefault((op.name, _lengths(self._form, op), live), []).append(op)
        for op in self.unpaired:
            operands = map(self.source, op.inputs)
            known = [i for i in operands if i in self._file.producer or i in self._file.inputs]
            live = tuple(each for i in known if (each := self.partner(i)) is not None)
            found = by_wiring.get((op.name, _lengths(self._file, op), live))
            if found and live and len(live) == len(known):
                self.add(op, found.pop(0))


def by_name(ours: Signature, theirs: Signature, side: str) -> dict[int, int]:
    """Pair inputs or outputs by name if all names match, else by position."""
    one, two = getattr(ours, side), getattr(theirs, side)
    names = {io_tensor.name: io_tensor.tensor.index for io_tensor in two}
    known = names.keys() == {io_tensor.name for io_tensor in one}
    return {
        here.tensor.index: names[here.name] if known else there.tensor.index
        for here, there in zip(one, two, strict=False)
    }


def paired(quantized: EdgeFile, other: EdgeFile) -> Pairs:
    """
    Pair the ops of two files; inputs are matched by name, or by position.

    Ops are paired in order, by name and output shape; between two pairs, if shapes differ, by name
    alone, and if as many are left on both sides, by shape alone, since one op may replace another.
    The remaining ones, and TRANSPOSE, which converters move, are paired by their inputs, and else
    in order again.
    """
    file, form = quantized.subgraph, other.subgraph
    ours, theirs = (
        [op for op in each.ops if op.name not in HOLDING and op.name != "TRANSPOSE"]
        for each in (file, form)
    )
    places = common(
        [(op.name, _lengths(file, op)) for op in ours],
        [(op.name, _lengths(form, op)) for op in theirs],
    )
    filled = []
    last = (-1, -1)
    for place in [*places, (len(ours), len(theirs))]:
        one, two = (range(a + 1, b) for a, b in zip(last, place, strict=True))
        between = common([ours[i].name for i in one], [theirs[i].name for i in two])
        named = [(one[i], two[j]) for i, j in between]
        left = [i for i in one if i not in {i for i, _ in named}]
        others = [j for j in two if j not in {j for _, j in named}]
        shapes = [_lengths(file, ours[i]) for i in left]
        if shapes == [_lengths(form, theirs[j]) for j in others]:
            named += zip(left, others, strict=True)
        filled += sorted(named)
        filled += [place] if place != (len(ours), len(theirs)) else []
        last = place
    pairs = Pairs(file, form, by_name(quantized.signature, other.signature, "inputs"))
    for i, j in filled:
        pairs.add(ours[i], theirs[j])
    pairs.add_by_wiring()
    for by_shape in (True, False):
        unpaired, unused = pairs.unpaired, pairs.unused
        keys = [
            [(op.name, by_shape and _lengths(each, op)) for op in ops]
            for each, ops in ((file, unpaired), (form, unused))
        ]
        for i, j in common(*keys):
            pairs.add(unpaired[i], unused[j])
    return pairs


def _lengths(subgraph: Subgraph, op: Op) -> tuple[int, ...]:
    """Return the sorted lengths of the first output's axes, without those of length 1."""
    shape = subgraph.tensors[op.outputs[0]].shape if op.outputs and op.outputs[0] >= 0 else ()
    return tuple(sorted(length for length in shape if length != 1))


def _sources(subgraph: Subgraph) -> dict[int, int]:
    sources: dict[int, int] = {}
    for op in subgraph.ops:
        if op.name in HOLDING:
            sources[op.outputs[0]] = sources.get(op.inputs[0], op.inputs[0])
    return sources


OF_QUANTIZATION = frozenset(
    {
        *("asymmetricQuantizeInputs", "weightsFormat", "quantizedBiasType", "potScaleInt16"),
        *("keepNumDims", "newShape"),
    }
)
"""Options that only quantized kernels read, or that repeat a tensor's shape."""


_SMALL = 1 << 16  # maximum number of elements of a constant that is cached
_Read = TypeVar("_Read")


class ConstantPair:
    """A constant operand of two paired ops, read on first access."""

    def __init__(
        self,
        files: tuple[OpGraph, OpGraph],
        ops: tuple[Op, Op],
        place: int,
        constants: tuple[StoredTensor, StoredTensor],
    ) -> None:
        self.op, self.partner = ops
        self.place = place
        self.key = self.op.index, place
        self._files, self._constants = files, constants
        self._read: dict[str, Any] = {}

    @property
    def stored(self) -> Constant:
        """The constant of the quantized file."""
        return self._kept("stored", self._read_stored)

    @property
    def floats(self) -> Array:
        """The constant of the float file, in the shape of the quantized file."""
        return self._kept("floats", self._read_floats)

    def _read_stored(self) -> Constant:
        return read_constant(self._files[0], self.op, self._constants[0])

    def _read_floats(self) -> Array:
        constant = read_constant(self._files[1], self.partner, self._constants[1])
        floats = constant.floats if constant.scales is not None else constant.values
        floats = floats.reshape(self.shape)
        if floats.dtype.kind == "f" and np.isnan(floats).any():
            # No code represents NaN, which only a branch that is never selected can have.
            floats = np.where(np.isnan(floats), self.stored.floats, floats)
        return floats

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand in the quantized file."""
        return self._files[0].tensor(self.op, self.op.inputs[self.place]).shape

    def _kept(self, name: str, read: Callable[[], _Read]) -> _Read:
        """Read a constant, once if it is small."""
        found: _Read = self._read[name] if name in self._read else read()
        if math.prod(self.shape) <= _SMALL:
            self._read[name] = found
        return found


class Structure:
    """Two files whose ops are paired."""

    def __init__(self, file: EdgeFile, form: EdgeFile) -> None:
        self.pairs = paired(file, form)
        self._file, self._form = file.graph, form.graph
        self._ours, self._theirs = file.subgraph, form.subgraph

    @functools.cached_property
    def constants(self) -> tuple[ConstantPair, ...]:
        """Operands that are constants of as many elements in both files."""
        found = []
        for number, partner in self.pairs.ops.items():
            op = self._ours.ops[number]
            operands = zip(op.inputs, partner.inputs, strict=False)
            for place, (here, there) in enumerate(operands if op.name == partner.name else ()):
                ours = stored_constant(self._ours, here)
                theirs = stored_constant(self._theirs, there)
                if ours is None or theirs is None:
                    continue
                if math.prod(ours.tensor.shape) == math.prod(theirs.tensor.shape):
                    files, constants = (self._file, self._form), (ours, theirs)
                    found.append(ConstantPair(files, (op, partner), place, constants))
        return tuple(found)

    @functools.cached_property
    def biased(self) -> frozenset[int]:
        """Ops whose bias is compared with that of the float file."""
        return frozenset(pair.op.index for pair in self.constants if self._role(pair) == "bias")

    def findings(self, outputs: Iterable[tuple[str, int, int]]) -> Iterator[Finding]:
        """Compare options, operands, wiring and outputs."""
        for number, partner in self.pairs.ops.items():
            op = self._ours.ops[number]
            if op.name != partner.name:
                continue  # its values are compared instead
            files = self._form, self._file, partner, op
            yield from map(op.wrong, option_differences(*files, ignored=OF_QUANTIZATION))
            yield from map(op.wrong, decomposition_differences(*files))
            yield from self._operands(op, partner)
        for name, index, wanted in outputs:
            source = self.pairs.source(index)
            partner_index = self.pairs.float_source(wanted)
            if self.pairs.tensors.get(source) is None:
                continue  # the op has no partner
            if self.pairs.partner(index) != partner_index:
                maker = self._ours.producer.get(source)
                expected = self._expected_name(partner_index)
                text = (
                    f"the file's output {name!r} is its result: expected {expected}; wire that "
                    "output to the op that computes it"
                )
                yield (maker or self._ours.ops[-1]).wrong(text)

    def constant_findings(
        self,
        observed: Collection[tuple[float, int]] = (),
        rounded: Callable[[], Iterable[Array]] = list,
        *,
        covers_all: bool = False,
        wider: Mapping[int, float] = MappingProxyType({}),
    ) -> Iterator[Finding]:
        """Compare the constants of the quantized file with those of the float file."""
        weights = [pair for pair in self.constants if self._role(pair) == "weight"]
        kept = functools.cache(
            lambda: covers_all or cover_all_values((each.stored, each.floats) for each in weights)
        )

        for pair in self.constants:
            if np.array_equal(pair.stored.floats, pair.floats, equal_nan=True):
                continue
            if pair.stored.values.dtype.kind not in "fi" or pair.floats.dtype.kind != "f":
                if self._has_other_axes(pair) and not self._has_other_permutation(pair):
                    continue  # its values are compared instead
                if not np.array_equal(pair.stored.values, pair.floats):
                    text = (
                        f"constant operand {pair.place}: expected {_listed(pair.floats)}, got "
                        f"{_listed(pair.stored.values)}"
                    )
                    yield pair.op.wrong(text)
                continue
            role = self._role(pair)
            if role == "bias":
                yield from self._bias(pair, observed, wider)
                continue
            scales = 1.0 if pair.stored.scales is None else pair.stored.scales
            if role != "weight" and not (np.isfinite(scales) & (scales > 0)).all():
                continue  # codes that are compared as codes
            texts = check_stored_weight(
                pair.op.name, pair.stored, pair.floats, kept=kept if role == "weight" else None
            )
            if role != "weight":
                name = f"constant operand {pair.place}"
                texts = tuple(each.replace("the weight", name, 1) for each in texts)
            elif texts and _is_among(pair.stored, rounded()):
                continue
            yield from map(pair.op.wrong, texts)

    def _reader(self, op: Op, tensor: int) -> Op:
        """Return the op that reads an operand, or the RESHAPE in front of it."""
        reader, maker = op, self._ours.producer.get(tensor)
        while (
            maker is not None and maker.name in HOLDING and len(self._ours.consumers[tensor]) == 1
        ):
            reader, tensor = maker, maker.inputs[0]
            maker = self._ours.producer.get(tensor)
        return reader

    def _operands(self, op: Op, partner: Op) -> Iterator[Finding]:
        """Yield a finding on the reader of each operand unlike the partner's."""
        places = max(len(op.inputs), len(partner.inputs))
        ours, theirs = (
            [*each.inputs, *[-1] * (places - len(each.inputs))] for each in (op, partner)
        )
        exchanged = zip(ours, theirs[::-1], strict=True)
        if op.name in COMMUTATIVE and not any(self._operand(0, *each) for each in exchanged):
            return
        # A reordering of operands belongs to the op, not to a RESHAPE in front.
        is_reordered = Counter(map(self.pairs.partner, ours)) == Counter(
            there if (there := self.pairs.float_source(each)) in self.pairs.counterparts else None
            for each in theirs
        )
        for place, (here, there) in enumerate(zip(ours, theirs, strict=True)):
            reader = op if here < 0 or is_reordered else self._reader(op, here)
            text = self._operand(place if reader is op else 0, here, there)
            if text:
                yield reader.wrong(text)

    def _operand(self, place: int, here: int, there: int) -> str | None:
        ours, theirs = stored_constant(self._ours, here), stored_constant(self._theirs, there)
        if here < 0 or there < 0:
            # A bias of zeros may be omitted.
            graph, only = (self._file, ours) if there < 0 else (self._form, theirs)
            if here == there or (only is not None and not graph.constant(only.tensor).any()):
                return None
        elif ours is None:
            partner = self.pairs.partner(here)
            if partner is None or (theirs is None and partner == self.pairs.float_source(there)):
                return None  # the partner's, or the output of an op without a partner
        elif theirs is not None:
            return None
        return (
            f"operand {place}: expected {self._expected_name(there)}, got {self._source_name(here)}"
        )

    def _source_name(self, index: int) -> str:
        if index < 0:
            return "none"
        return source_of(self._file, self._ours.index, self.pairs.source(index))

    def _expected_name(self, index: int) -> str:
        """Name the quantized file's counterpart of a float tensor."""
        if index < 0:
            return "none"
        source = self.pairs.float_source(index)
        if source in self.pairs.counterparts:
            return self._source_name(self.pairs.counterparts[source])
        return source_of(self._form, self._theirs.index, source)

    def _has_other_axes(self, pair: ConstantPair) -> bool:
        """Whether partners have axes of length 1 at other places: numbers of axes differ then."""
        op, partner = pair.op, pair.partner
        for ours, theirs in ((op.inputs, partner.inputs), (op.outputs, partner.outputs)):
            # One of the two may omit its bias.
            for here, there in zip(ours, theirs, strict=False):
                if here < 0 or there < 0:
                    continue
                one, two = self._ours.tensors[here].shape, self._theirs.tensors[there].shape
                if one != two and [n for n in one if n != 1] == [n for n in two if n != 1]:
                    return True
        return False

    def _has_other_permutation(self, pair: ConstantPair) -> bool:
        """Whether a permutation orders the axes that are longer than 1 differently."""
        if pair.op.name != "TRANSPOSE":
            return False
        orders = []
        for subgraph, op, axes in (
            (self._ours, pair.op, pair.stored.values),
            (self._theirs, pair.partner, pair.floats),
        ):
            shape = subgraph.tensors[op.inputs[0]].shape
            long = [axis for axis, length in enumerate(shape) if length != 1]
            orders.append([long.index(axis) for axis in axes.ravel().tolist() if axis in long])
        return orders[0] != orders[1]

    def _role(self, pair: ConstantPair) -> str:
        return role_of(self._file, pair.op, pair.op.inputs[pair.place]) or "operand"

    def _bias(
        self,
        pair: ConstantPair,
        observed: Collection[tuple[float, int]],
        wider: Mapping[int, float],
    ) -> tuple[Finding, ...]:
        """Return the findings on a bias, or on the producer of its input."""
        scales = written_scale(self._file, pair.op)
        if scales is not None and abs(scales[0] / scales[1] - 1) > SAME_SCALE:
            assert pair.stored.scales is not None, "`written_scale` has read them"
            own = replace(pair.stored, scales=pair.stored.scales * scales[0] / scales[1])
            if not self._bias_values(pair, own, scales[0]):
                # The codes fit the input's scale, so the stored scale is wrong.
                return self._bias_values(pair, pair.stored, scales[0])
            if is_shared(self._file, pair.op, pair.op.inputs[INPUT_AT[pair.op.name]], observed):
                return self._bias_values(pair, pair.stored, scales[1])
            return (changed_input(self._file, pair.op, *scales),)
        tensor = pair.op.inputs[INPUT_AT.get(pair.op.name, 0)]
        written = None if scales is None else scales[1]
        return self._bias_values(pair, pair.stored, written, wider.get(tensor, 1.0))

    def _bias_values(
        self, pair: ConstantPair, stored: Constant, written: float | None, wider: float = 1.0
    ) -> tuple[Finding, ...]:
        tensor = self._file.tensor(pair.op, pair.op.inputs[INPUT_AT.get(pair.op.name, 0)])
        roles = roles_of(self._file, pair.op)
        parameters = qparams(tensor)
        scale = parameters[0] if written is None and parameters is not None else written
        weight = roles.weights[0].tensor if roles.weights else None
        scales = weight.scales if weight is not None and scale is not None else None
        if stored.scales is not None and (scale is None or scales is None):
            return ()
        texts = check_bias(
            stored, pair.floats, input_scale=scale, weight_scales=scales, wider=wider
        )
        return tuple(map(pair.op.wrong, texts))


def _is_among(stored: Constant, constants: Iterable[Array]) -> bool:
    """Whether a constant has the values of one of these, in any layout."""
    floats = np.sort(stored.floats.ravel())
    return any(
        each.size == floats.size and np.allclose(np.sort(each.ravel()), floats, rtol=1e-6, atol=0)
        for each in constants
    )


def _listed(values: Array) -> str:
    flat = values.ravel().tolist()
    return f"[{', '.join(map(str, flat[:6]))}{', …' if len(flat) > 6 else ''}]"
