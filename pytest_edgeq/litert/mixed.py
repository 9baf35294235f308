"""Quantized graphs of PT2E with some of their layers in float."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from pytest_edgeq.litert.configs import FOLLOWERS, NODE_METADATA, RefusedError, op_name
from pytest_edgeq.litert.exported import drop_guards
from pytest_edgeq.litert.histograms import fast_histograms
from pytest_edgeq.litert.libraries import pt2e_module, quiet
from pytest_edgeq.litert.pt2e_graphs import annotate, prepare_pt2e
from pytest_edgeq.litert.simulated import refuse_lost_writes

_Place = TypeVar("_Place")


@dataclasses.dataclass(slots=True, eq=False)
class Rounding:
    """Quantization of a tensor, and dequantization; equal only to itself."""

    scale: torch.Tensor  # one, or one for each channel
    zero_point: torch.Tensor
    low: int
    high: int
    axis: int | None  # of the channels
    _factors: tuple[float, float, int] = dataclasses.field(init=False)  # without an axis

    def __post_init__(self) -> None:
        """Read the scale once."""
        if self.axis is None:
            scale = self.scale.float()
            self._factors = float(1 / scale), float(scale), int(self.zero_point)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes that are nearest."""
        if self.axis is None:
            # `torch.fake_quantize_per_tensor_affine` returns the same bits in ten times the time:
            # torch 2.13 computes a mask for gradients with it, one element after the other.
            inverse, scale, point = self._factors
            codes = (values * inverse).round_().clamp_(self.low - point, self.high - point)
            return codes.mul_(scale)
        return torch.fake_quantize_per_channel_affine(
            values, self.scale.float(), self.zero_point.int(), self.axis, self.low, self.high
        )


class Roundings(NamedTuple):
    """The tensors that a quantizer rounds; tensors of one group have the same rounding."""

    operands: Mapping[tuple[str, str], Rounding]  # by the names of an op and its operand
    results: Mapping[str, Rounding]  # by the name of an op

    def of(self, op: str, operand: str) -> tuple[Rounding, ...]:
        """Return the roundings of an operand: its producer's, and its own if that differs."""
        first, second = self.results.get(operand), self.operands.get((op, operand))
        both = (first,) if first is second else (first, second)
        return tuple(each for each in both if each is not None)

    def of_layer(self, layers: Mapping[str, str], layer: str) -> Roundings:
        """
        Return those of one layer; `layers` has the layer of each op.

        An operand that is also an annotated result belongs to its producer.
        """
        return Roundings(
            {
                (op, operand): each
                for (op, operand), each in self.operands.items()
                if layers.get(op) == layer and operand not in self.results
            },
            {op: each for op, each in self.results.items() if layers.get(op) == layer},
        )


NOTHING = Roundings({}, {})


def can_configure_inside(quantizer: Any) -> bool:
    """
    Return whether modules inside one that is left in float can stay as they are quantized.

    They need a config of their own by name, which wins over one by type or by operator.
    """
    known = hasattr(quantizer, "global_config") and hasattr(quantizer, "module_name_config")
    return known and not any(
        getattr(quantizer, name, None) for name in ("module_type_config", "operator_type_config")
    )


def kept_inside(
    floats: Collection[str], layers: Iterable[str], modules: Collection[str]
) -> list[str]:
    """
    Return the outermost of the graph's modules that stay quantized inside those left in float.

    The layers are all modules with quantized ops of their own, to which a config applies.
    """
    found: dict[str, None] = {}
    for outer in floats:
        for layer in layers:
            if layer.startswith(f"{outer}.") and layer not in floats:
                names = layer.split(".")
                paths = (".".join(names[:n]) for n in range(outer.count(".") + 2, len(names) + 1))
                found[next(each for each in paths if each in modules)] = None
    return [each for each in found if each not in floats]


def named_around(quantizer: Any, module: str) -> str | None:
    """Return the name by which a PT2E quantizer configures a module; None if it has none."""
    while module and module not in quantizer.module_name_config:
        module = module.rpartition(".")[0]
    return module or None


def left_in_float(quantizer: Any, layers: Iterable[str], kept: Iterable[str] = ()) -> Any:
    """Return a copy of a PT2E quantizer that leaves layers in float, and keeps modules inside."""
    changed = copy.deepcopy(quantizer)
    for module in kept:
        named = named_around(quantizer, module)
        config = quantizer.module_name_config[named] if named else quantizer.global_config
        changed.set_module_name(module, config)
    for layer in layers:
        if not hasattr(changed, "set_module_name"):
            raise RefusedError(
                f"{type(quantizer).__name__} has no set_module_name, by which a PT2E quantizer "
                "leaves layers in float: give this method to the class, or use the converter's "
                "PT2EQuantizer"
            )
        changed.set_module_name(layer, None)
    return changed


class AnnotatedGraph:
    """
    An exported graph that a quantizer annotates again for each choice of layers.

    Args:
        exported: The graph; it is changed.
        quantizer: The quantizer, whose transformations of the graph are applied.
        samples: Returns the calibration samples, as positional and keyword inputs. They are read
            once more whenever tensors share a range that did not before.
    """

    def __init__(
        self,
        exported: torch.fx.GraphModule,
        quantizer: Any,
        samples: Callable[[], Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]],
    ) -> None:
        # Batch norms are folded into convolutions, as for the quantizer itself.
        self._graph = prepare_pt2e(exported, quantizer, annotates=False)
        drop_guards(self._graph)
        refuse_lost_writes(self._graph, clones=True)
        self.graph = MixedGraph(self._graph)
        self._samples = samples
        self._ranges: dict[tuple[Any, ...], Rounding | None] = {}

    @functools.cached_property
    def modules(self) -> set[str]:
        """The paths of the modules that the model calls."""
        stacks = (node.meta.get("nn_module_stack", {}) for node in self._graph.graph.nodes)
        return {path for stack in stacks for path, _ in stack.values()}

    @functools.cached_property
    def followers(self) -> set[str]:
        """The names of the ops that are quantized with the op before; see `FOLLOWERS`."""
        return {node.name for node in self._graph.graph.nodes if op_name(node) in FOLLOWERS}

    def layers(self, made: Roundings) -> dict[str, str]:
        """
        Return the path of the module of each annotated op, by the op's name.

        An op that a quantizer fuses with the one before, such as a ReLU, has that one's.
        """
        found: dict[str, str] = {}
        with_operands = {op for op, _ in made.operands}
        for node in self._graph.graph.nodes:
            if node.name not in with_operands and node.name not in made.results:
                continue
            stack = list(node.meta.get("nn_module_stack", {}).values())
            before = next((each.name for each in node.all_input_nodes if each.name in found), None)
            if node.name not in with_operands and before is not None:
                found[node.name] = found[before]
            elif node.op == "call_function":
                found[node.name] = stack[-1][0] if stack else ""
        return found

    def roundings(self, quantizers: Sequence[Any]) -> list[Roundings]:
        """
        Return what each quantizer rounds, by one run of the calibration samples.

        Raises:
            RefusedError: A setting of a quantizer has no effect, or is impossible.
        """
        annotated = [self._observers(each) for each in quantizers]
        missing = {
            key: observer
            for observers in annotated
            for key, observer in observers.values()
            if key not in self._ranges
        }
        if missing:
            self._observe(missing)
        return [self._resolved(observers) for observers in annotated]

    def _observers(self, quantizer: Any) -> dict[Any, tuple[tuple[Any, ...], Any]]:
        """Return the observer of each annotated tensor, with a key of its group."""
        for node in self._graph.graph.nodes:
            for name in ("quantization_annotation", *NODE_METADATA):
                node.meta.pop(name, None)
        prepare = pt2e_module("prepare")
        with quiet():
            annotate(quantizer, self._graph)
            specs = prepare._get_edge_or_node_to_qspec(self._graph)
            specs = {place: spec for place, spec in specs.items() if spec is not None}
            groups = prepare._get_edge_or_node_to_group_id(specs)
            observers = prepare._get_obs_or_fq_map(groups, specs, is_qat=False)
        members: dict[int, set[str]] = {}
        for place, group in groups.items():
            node = place[0] if isinstance(place, tuple) else place
            members.setdefault(group, set()).add(node.name)
        return {
            place: ((frozenset(members[group]), _kind(observers[place])), observers[place])
            for place, group in groups.items()
            if observers[place] is not None
        }

    def _observe(self, missing: Mapping[tuple[Any, ...], Any]) -> None:
        """Find the ranges of groups of tensors."""
        by_tensor: dict[str, list[Any]] = {}
        for (names, _), observer in missing.items():
            for name in names:
                by_tensor.setdefault(name, []).append(observer)
        with torch.no_grad(), quiet(), fast_histograms():
            for name in self.graph.constants.keys() & by_tensor.keys():
                for observer in by_tensor.pop(name):
                    observer(self.graph.constants[name])
            for args, kwargs in self._samples() if by_tensor else ():
                # In the order of the graph: the histogram of several tensors depends on it.
                for name, value in self.graph.run(args, kwargs, NOTHING).items():
                    for observer in by_tensor.get(name, ()):
                        observer(value)
            for key, observer in missing.items():
                self._ranges[key] = _rounding(observer)

    def _resolved(self, observers: Mapping[Any, tuple[tuple[Any, ...], Any]]) -> Roundings:
        operands: dict[tuple[str, str], Rounding] = {}
        results: dict[str, Rounding] = {}
        for place, (key, _) in observers.items():
            rounding = self._ranges[key]
            if rounding is None:
                continue
            if isinstance(place, tuple):
                operands[place[1].name, place[0].name] = rounding
            else:
                results[place.name] = rounding
        return Roundings(operands, results)


def _kind(observer: Any) -> tuple[Any, ...]:
    """Return the settings of an observer; of one with a fixed scale that scale, too."""
    names = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "eps", "scale")
    settings = (getattr(observer, name, None) for name in names)
    # torch takes a hundred times as long to format a tensor as a list.
    numbers = (each.tolist() if isinstance(each, torch.Tensor) else each for each in settings)
    return (type(observer), *map(str, numbers))


def _rounding(observer: Any) -> Rounding | None:
    """Return the rounding of an observer; None of one that derives its scale, as of a bias."""
    if not hasattr(observer, "quant_min") or hasattr(observer, "obs_or_fqs"):
        return None
    scale, point = observer.calculate_qparams()
    axis = observer.ch_axis if observer.qscheme in _PER_CHANNEL else None
    return Rounding(scale, point, observer.quant_min, observer.quant_max, axis)


_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)


class _GraphCall(NamedTuple):
    """A call of an op in a graph."""

    node: torch.fx.Node
    name: str
    operands: list[str]  # their names
    mutates: bool  # whether it writes into an operand


class MixedGraph:
    """An exported graph in float, run with some of its tensors rounded."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.constants: dict[str, torch.Tensor] = {}
        self._rounded: dict[tuple[str, str, tuple[int, ...]], torch.Tensor] = {}
        self._inputs: list[str] = []
        self._steps: list[_GraphCall] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._inputs.append(node.name)
            elif node.op == "get_attr":
                self.constants[node.name] = operator.attrgetter(str(node.target))(module)
            else:
                mutates = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
                names = [each.name for each in node.all_input_nodes]
                self._steps.append(_GraphCall(node, node.name, names, bool(mutates)))

    @torch.no_grad()
    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Roundings
    ) -> dict[str, Any]:
        """Return the value of each op, with the roundings that are made."""
        spec = self.module._in_spec
        flat = torch.fx._pytree.tree_flatten_spec((args, dict(kwargs)), spec)
        values = dict(zip(self._inputs, flat, strict=True))
        for step in self._steps:
            values[step.name] = self._call(step, values, made)
        return values

    @torch.no_grad()
    def changed(
        self, values: Mapping[str, Any], before: Roundings, made: Roundings
    ) -> dict[str, Any]:
        """Return the values that differ from those of a run with other roundings."""
        found: dict[str, Any] = {}
        known = ChainMap(found, values)  # type: ignore[arg-type] # it writes into the first alone
        others = _differing(before.results, made.results)  # operands that differ
        ops = {op for op, _ in _differing(before.operands, made.operands)}
        for step in self._steps:
            if step.name in ops or not others.isdisjoint(step.operands):
                found[step.name] = self._call(step, known, made)
                others.add(step.name)
        return found

    def outputs(self, values: Mapping[str, Any]) -> Any:
        """Return the outputs of a run, nested as the model nests them."""
        return self.module.graph.process_outputs(values["output"])

    def _call(self, step: _GraphCall, values: Mapping[str, Any], made: Roundings) -> Any:
        def operand(node: torch.fx.Node) -> Any:
            value = self._value(step.name, node.name, values, made)
            return value.clone() if step.mutates and isinstance(value, torch.Tensor) else value

        node = step.node
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        if not callable(node.target):
            return args[0]  # of the node `output`
        return node.target(*args, **kwargs)

    def _value(self, op: str, operand: str, values: Mapping[str, Any], made: Roundings) -> Any:
        roundings = made.of(op, operand)
        constant = self.constants.get(operand)
        if constant is None:
            return _rounded(values[operand], roundings)
        if not roundings:
            return constant
        key = (op, operand, tuple(map(id, roundings)))
        if key not in self._rounded:
            self._rounded[key] = _rounded(constant, roundings)
        return self._rounded[key]


def _differing(before: Mapping[_Place, Rounding], made: Mapping[_Place, Rounding]) -> set[_Place]:
    """Return where two roundings differ."""
    return {each for each in before.keys() | made.keys() if before.get(each) is not made.get(each)}


def _rounded(values: Any, roundings: Iterable[Rounding]) -> Any:
    return functools.reduce(lambda value, rounding: rounding(value), roundings, values)
