"""
FX graph mode of torch.ao: its observers' parameters on an exported graph.

torch's decomposed form of a prepared model contains the quantization of each tensor. It is exported
and compared node by node with the graph to annotate: the same ops in the same order, on the same
operands and with the same constants, or nothing is annotated.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_edgeq.litert.configs import RefusedError
from pytest_edgeq.litert.libraries import pt2e_module, quiet
from pytest_edgeq.litert.pt2e_graphs import _saw_no_data


def quantizer_from_fx(prepared: torch.fx.GraphModule) -> Any:
    """
    Return a quantizer with the parameters of a model prepared by FX graph mode.

    The parameters of its observers and fake quantizers become fixed parameters of the `.tflite`:
    the scales unchanged, zero points of unsigned codes less 128, also if the observer used only a
    part of the codes (`reduce_range` has made its scales twice as coarse, and coarse they stay).
    Weights must be symmetric; the code −128, which `.tflite` does not have for them, becomes −127.

        quantizer = quantizer_from_fx(prepared)
        quantized = edgeq.quantize(quantizer.float_model, inputs, quantizer=quantizer)

    Args:
        prepared: From `prepare_fx` or `prepare_qat_fx`, calibrated or trained, not yet converted.
            It is not changed.

    Returns:
        A PT2E `Quantizer`. Its `float_model` is the prepared model with its trained weights and
        without observers, in eval mode. It quantizes other models of these ops and weights too.

    Raises:
        TypeError: Not a model that FX graph mode prepared.
        ValueError: Observers that saw no data, or a quantization that `.tflite` does not have.
    """
    _check_prepared(prepared)
    with quiet():
        from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx

        Quantizer = pt2e_module("quantizer").Quantizer

        plain = _without_observers(prepared)
        observed = copy.deepcopy(prepared).eval()
        _observe_weights(observed)
        decomposed = _convert_to_reference_decomposed_fx(observed).eval()
    _check_static(decomposed)

    class FxQuantizer(Quantizer):  # type: ignore[misc, valid-type] # it ships no types
        float_model: torch.nn.Module = plain

        def annotate(self, model: Any) -> Any:
            _Matcher(_exported_like(decomposed, model), model).annotate()
            return model

        def validate(self, model: Any) -> None:
            """Nothing is annotated that was not compared."""

    return FxQuantizer()


def is_prepared_by_torch_ao(model: torch.nn.Module) -> bool:
    """Return whether a model has observers of torch's eager or FX graph mode."""
    return any(map(_is_observer, model.modules()))


def _is_observer(module: torch.nn.Module) -> bool:
    # torchao's PT2E has classes of the same names, which are none of these.
    quantization = torch.ao.quantization
    return isinstance(module, (quantization.ObserverBase, quantization.FakeQuantizeBase))


def _check_prepared(prepared: Any) -> None:
    if not isinstance(prepared, torch.fx.GraphModule) or not is_prepared_by_torch_ao(prepared):
        what = type(prepared).__name__
        if isinstance(prepared, torch.nn.Module) and is_prepared_by_torch_ao(prepared):
            what += " that eager mode prepared, whose observers are tied to no graph"
        raise TypeError(
            "quantizer_from_fx: expected a result of prepare_fx or prepare_qat_fx, calibrated or "
            f"trained, before convert_fx; got a {what}"
        )
    if "_observed_graph_module_attrs" not in prepared.meta:
        raise TypeError(
            "quantizer_from_fx: the module holds observers, but FX graph mode did not prepare it "
            "(its meta says nothing of it): pass prepare_fx's own result, or a deep copy of it"
        )
    watched = {n.target: n.args[0] for n in prepared.graph.nodes if n.op == "call_module"}
    unseen = [
        str(watched[name])
        for name, module in prepared.named_modules(remove_duplicate=False)
        if name in watched and _is_observer(module) and _saw_no_data(module)
    ]
    if unseen:
        raise ValueError(
            f"quantizer_from_fx: {len(unseen)} observer(s) saw no data: those of "
            f"{', '.join(unseen[:5])}. Run the prepared model on samples first: prepared(inputs)"
        )


def _check_static(decomposed: torch.fx.GraphModule) -> None:
    for node in decomposed.graph.nodes:
        if "choose_qparams" in str(node.target):
            raise ValueError(
                f"quantizer_from_fx: {node.args[0]} is quantized dynamically: there are no "
                "parameters to take over. Quantize the float model by 'pt2e_dynamic_int8'"
            )


def _observe_weights(model: torch.fx.GraphModule) -> None:
    """
    Run the fake quantizers once more on the trained weights, with batch norms folded.

    `convert_fx` does so, which moves their averages a last time; torch's decomposed form does not
    (torch 2.13), and its weights have other scales by up to a hundredth.
    """
    with torch.no_grad():
        quantized: list[Any] = [m for m in model.modules() if hasattr(m, "weight_fake_quant")]
        for module in quantized:
            plain = module.to_float()
            layer = plain[0] if isinstance(plain, torch.nn.Sequential) else plain
            module.weight_fake_quant(layer.weight)


def _without_observers(prepared: torch.fx.GraphModule) -> torch.nn.Module:
    """Return the float model with the trained weights and folded batch norms."""
    model = copy.deepcopy(prepared).eval()
    # Tensors that share parameters have one observer under several names.
    modules = dict(model.named_modules(remove_duplicate=False))
    for node in list(model.graph.nodes):
        if node.op != "call_module":
            continue
        module = modules[node.target]
        if _is_observer(module):
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)
        elif hasattr(module, "weight_fake_quant"):
            model.set_submodule(node.target, module.to_float().eval())
    model.delete_all_unused_submodules()
    plain = torch.fx.GraphModule(model, model.graph)
    plain.meta.clear()
    return plain.eval()


def _exported_like(decomposed: torch.fx.GraphModule, model: Any) -> torch.fx.GraphModule:
    """Export torch's decomposed form with the inputs of another exported graph."""
    values = {n.target: n.meta["val"] for n in _placeholders(model)}
    names = [n.target for n in _placeholders(decomposed)]
    if set(names) != set(values):
        raise RefusedError(
            f"quantizer_from_fx: the prepared model has {names}, the model {list(values)}; "
            "quantize its own float form: quantizer.float_model"
        )
    with quiet():
        examples = {
            name: torch.zeros([int(length) for length in value.shape], dtype=value.dtype)
            for name, value in values.items()
        }
        auto = torch.export.Dim.AUTO
        free = {
            name: {i: auto for i, n in enumerate(value.shape) if isinstance(n, torch.SymInt)}
            for name, value in values.items()
        }
        exported = torch.export.export(decomposed, (), examples, dynamic_shapes=free)
        graph: Any = exported.module()
        graph.graph.eliminate_dead_code()
    return graph  # type: ignore[no-any-return] # torch.export gives no other


def _placeholders(graph: torch.fx.GraphModule) -> list[Any]:
    return list(graph.graph.find_nodes(op="placeholder"))


@dataclass(frozen=True, slots=True)
class _Params:
    """Quantization parameters: lists of one, or of one a channel along an axis."""

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int | None


class _Matcher:
    """Matches the nodes of torch's decomposed form with those of an exported graph."""

    def __init__(self, theirs: torch.fx.GraphModule, ours: torch.fx.GraphModule) -> None:
        self._theirs, self._ours = theirs, ours
        self._pairs: dict[Any, Any] = {}
        # For each tensor: its users, and the quantizations between.
        self._uses: dict[Any, dict[Any, list[_Params]]] = {}

    def annotate(self) -> None:
        """Annotate the graph, or refuse graphs that differ and what a `.tflite` cannot have."""
        by_name = {node.target: node for node in _placeholders(self._ours)}
        self._pairs = {node: by_name[node.target] for node in _placeholders(self._theirs)}
        theirs, ours = list(_computation(self._theirs)), list(_computation(self._ours))
        # The first op that differs is more helpful than the number of ops, which is checked below.
        for index, (their, our) in enumerate(zip(theirs, ours, strict=False)):
            if their.target != our.target:
                raise RefusedError(
                    f"quantizer_from_fx: op {index} is {_name(their)} in the prepared model and "
                    f"{_name(our)} in the model{_WAY_OUT}"
                )
            self._match(_arguments(their), _arguments(our), our)
            self._pairs[their] = our
        if len(theirs) != len(ours):
            raise RefusedError(
                f"quantizer_from_fx: the prepared model has {len(theirs)} ops, the model "
                f"{len(ours)}{_WAY_OUT}"
            )
        their, our = (each.graph.output_node() for each in (self._theirs, self._ours))
        self._match(their.args, our.args, our)
        for source, uses in self._uses.items():
            self._annotate(source, uses)

    def _match(self, their: Any, our: Any, user: Any) -> None:
        if isinstance(their, torch.fx.Node):
            source, chain = self._unquantized(their)
            if source.op == "get_attr" and getattr(our, "op", None) == "get_attr":
                self._match_constants(source, our)
            elif self._pairs.get(source) is not our:
                self._refuse(user, their, our)
            uses = self._uses.setdefault(our, {})
            if uses.setdefault(user, chain) != chain:
                raise RefusedError(
                    f"quantizer_from_fx: {_name(user)} reads {our} twice with different "
                    "quantization, which annotations cannot express"
                )
        elif isinstance(their, (list, tuple)):
            if not isinstance(our, (list, tuple)) or len(our) != len(their):
                self._refuse(user, their, our)
            for one, other in zip(their, our, strict=True):
                self._match(one, other, user)
        elif isinstance(our, torch.fx.Node) or their != our:
            self._refuse(user, their, our)

    def _refuse(self, user: Any, their: Any, our: Any) -> None:
        raise RefusedError(
            f"quantizer_from_fx: {_name(user)} has {their} in the prepared model and {our} in the "
            f"model{_WAY_OUT}"
        )

    def _match_constants(self, their: Any, our: Any) -> None:
        expected = operator.attrgetter(their.target)(self._theirs).detach()
        actual = operator.attrgetter(our.target)(self._ours).detach()
        # Both sides fold batch norms by the same formula, in float32: 2⁻²⁴ a rounding. A hundred
        # of them, on the scale of the largest, is far below any training step worth a file.
        if expected.shape == actual.shape and expected.dtype == actual.dtype:
            if torch.equal(expected, actual):
                return
            largest = float(expected.abs().max())
            difference = float((expected - actual).abs().max())
            if difference <= 1e-5 * largest:
                return
            what = f"differs by up to {difference:.3g} (its largest value is {largest:.3g})"
        else:
            what = f"is {tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)}"
        raise RefusedError(
            f"quantizer_from_fx: {our.target} of the model {what} from {their.target} of the "
            f"prepared one, for whose weights its parameters were chosen{_WAY_OUT}"
        )

    def _unquantized(self, node: Any) -> tuple[Any, list[_Params]]:
        """Return the tensor before quantize and dequantize nodes, and their parameters."""
        chain: list[_Params] = []
        while _is_quantization(node):
            # dequantize(quantize(source)): both have the same parameters.
            quantize = node.args[0]
            chain.insert(0, self._params(quantize))
            node = quantize.args[0]
        return node, chain

    def _params(self, quantize: Any) -> _Params:
        per_channel = "per_channel" in str(quantize.target)
        scales, zero_points, *rest = (
            operator.attrgetter(value.target)(self._theirs) if hasattr(value, "op") else value
            for value in quantize.args[1:]
        )
        dtype = rest[-1]
        if dtype not in (torch.uint8, torch.int8):
            raise RefusedError(
                f"quantizer_from_fx: {quantize.args[0]} is quantized to {dtype}; .tflite has "
                "8 bits here"
            )
        shift = 128 if dtype is torch.uint8 else 0
        return _Params(
            tuple(torch.as_tensor(scales).flatten().tolist()),
            tuple(int(zp) - shift for zp in torch.as_tensor(zero_points).flatten().tolist()),
            rest[0] if per_channel else None,
        )

    def _annotate(self, source: Any, uses: dict[Any, list[_Params]]) -> None:
        first = [chain[0] if chain else None for chain in uses.values()]
        # torchao applies the quantization of an output to all its users.
        at_source = source.op != "get_attr" and all(each == first[0] for each in first)
        if at_source and first[0] is not None:
            self._check_number(source, first[0])
            _annotation(source).output_qspec = self._activation(source, first[0])
        for user, chain in uses.items():
            if user.op != "output" and 0 < len(chain) <= 1 + at_source:
                make = self._weight if source.op == "get_attr" else self._activation
                _annotation(user).input_qspec_map[source] = make(source, chain[-1])
            elif len(chain) > at_source:
                raise RefusedError(
                    f"quantizer_from_fx: {source} is quantized {len(chain)} time(s) on its way to "
                    f"{_name(user)}, and differently elsewhere, which annotations cannot express"
                )

    def _check_number(self, node: Any, params: _Params) -> None:
        """
        Refuse sums and products with a number, which FX quantizes in its own way.

        Their output has the observer of their operand, because torch's integer kernels choose the
        parameters themselves; in a file they would clip.
        """
        operands = [uses[node][-1:] for uses in self._uses.values() if node in uses]
        with_number = node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor) and any(
            isinstance(each, (int, float)) for each in node.args
        )
        if with_number and [params] in operands:
            raise RefusedError(
                f"quantizer_from_fx: {_name(node)} has a number operand, {node.args}, and FX has "
                "no parameters for its result. Make the number a buffer of the model: "
                "self.register_buffer('offset', torch.tensor([10.0]))"
            )

    def _activation(self, node: Any, params: _Params) -> Any:
        if params.axis is not None:
            raise RefusedError(
                f"quantizer_from_fx: {node} has parameters by channel; .tflite has them for "
                "weights only"
            )
        return pt2e_module("quantizer").FixedQParamsQuantizationSpec(
            dtype=torch.int8,
            scale=params.scales[0],
            zero_point=params.zero_points[0],
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
        )

    def _weight(self, node: Any, params: _Params) -> Any:
        if any(params.zero_points):
            raise RefusedError(
                f"quantizer_from_fx: the weight {node.target} has zero points other than 0; "
                ".tflite has symmetric weights: prepare with a per_tensor_symmetric or "
                "per_channel_symmetric weight observer"
            )
        per_channel = params.axis is not None
        return pt2e_module("quantizer").QuantizationSpec(
            dtype=torch.int8,
            quant_min=-127,
            quant_max=127,
            qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
            ch_axis=params.axis,
            observer_or_fake_quant_ctr=_fixed_observer().with_args(scales=params.scales),
        )


_WAY_OUT = (
    ". Quantize the trained float model that the prepared one holds: "
    "edgeq.quantize(quantizer.float_model, …, quantizer=quantizer)"
)


def _computation(graph: torch.fx.GraphModule) -> Iterator[Any]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and not _is_quantization(node):
            yield node


def _is_quantization(node: Any) -> bool:
    return node.op == "call_function" and "quantized_decomposed" in str(node.target)


def _arguments(node: Any) -> Sequence[Any]:
    """Return all arguments of a node in its op's order, defaults filled in."""
    normalized = torch.fx.operator_schemas.normalize_function(
        node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True
    )
    if normalized is None:  # of no operator
        return [node.args, sorted(node.kwargs.items())]
    return [*normalized.kwargs.values()]


def _annotation(node: Any) -> Any:
    empty = pt2e_module("quantizer").QuantizationAnnotation(_annotated=True)
    return node.meta.setdefault("quantization_annotation", empty)


def _name(node: Any) -> str:
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    where = f" in {paths[-1]!r}" if paths and paths[-1] else ""
    return f"{node.target}{where}"


def _fixed_observer() -> Any:
    """Return an observer class of weights with fixed scales."""
    ObserverBase = pt2e_module("observer").ObserverBase

    # torchao 0.18.0 recognizes observers with a ch_axis by their name.
    class FixedPerChannelObserver(ObserverBase):  # type: ignore[misc, valid-type] # no types
        def __init__(self, scales: Sequence[float], dtype: Any, **spec: Any) -> None:
            super().__init__(dtype=dtype, is_dynamic=False)
            self.quant_min, self.quant_max = spec["quant_min"], spec["quant_max"]
            self.qscheme, self.ch_axis = spec["qscheme"], spec["ch_axis"]
            self.register_buffer("scales", torch.tensor(scales))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
            scales = self.get_buffer("scales")
            return scales, torch.zeros_like(scales, dtype=torch.int32)

    return FixedPerChannelObserver
