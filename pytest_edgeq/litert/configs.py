"""User configs of the converter's `PT2EQuantizer`, and of torchao's XNNPACK quantizer."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Hashable, Iterator, Mapping
from types import ModuleType
from typing import Any

from pytest_edgeq.litert.libraries import converter_module, pt2e_module
from pytest_edgeq.names import nearest


class RefusedError(ValueError):
    """A quantizer's setting has no effect, or is impossible in a `.tflite`."""


# Metadata of a node for which a config of None was set, or a dynamic one.
LEFT_IN_FLOAT = "edgeq_left_in_float"
WEIGHT_ALONE = "edgeq_weight_alone"

# Our metadata of annotated nodes, besides torchao's annotation.
NODE_METADATA = (LEFT_IN_FLOAT, WEIGHT_ALONE)

FOLLOWERS = (
    *("relu", "relu_", "hardtanh", "hardtanh_", "mean", "flatten", "adaptive_avg_pool2d"),
    *("permute", "permute_copy", "squeeze", "squeeze_copy", "view", "view_copy", "slice_copy"),
)
"""Names of torch's ops that the quantizers fuse with the op before, or that keep its scale."""

_Key = tuple[str, Hashable]

_GLOBAL: _Key = ("set_global", None)


@contextlib.contextmanager
def configs_as_set() -> Iterator[None]:
    """
    Apply each config of these quantizers to its own target.

    A module's name has priority over its class, the class over the operator, the operator over the
    global config; of names and of classes the innermost has priority. None leaves in float.

    Bugs of litert-torch 0.10.0 with torch 2.13, all silent: it searches module names in the keys of
    `nn_module_stack`, which are numbers now, and classes where torch writes their names, so neither
    ever matches; it never reads `set_operator_type` (nor does torchao 0.18.0); it quantizes every
    addition or product followed by a ReLU by the first config, because it passes its filter as
    another argument; it leaves pools in float whose config precedes that of their input; and of a
    convolution that is called twice both annotate one call only, as the weight is annotated then.

    Raises:
        RefusedError: When the quantizer annotates: a name, a class or an operator that the model
            does not have, or a config without an op that the quantizer knows.
    """
    pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
    classes = [converter_module("quantize.pt2e_quantizer").PT2EQuantizer]
    annotators = [pt2e_quantizer_utils]
    # Owners of such a quantizer have imported it; importing it here would cost seconds.
    xnnpack = sys.modules.get("torchao.testing.pt2e._xnnpack_quantizer")
    if xnnpack is not None:
        classes.append(xnnpack.XNNPACKQuantizer)
        annotators.append(sys.modules["torchao.testing.pt2e._xnnpack_quantizer_utils"])
    find = pt2e_quantizer_utils.find_sequential_partitions

    def find_filtered(model: Any, kinds: Any, filter_fn: Any = None) -> Any:
        return find(model, kinds, filter_fn=filter_fn)

    def is_annotated(nodes: Any) -> bool:
        return any(
            "quantization_annotation" in node.meta
            and node.meta["quantization_annotation"]._annotated
            for node in nodes
            # A weight or a bias may be another call's, too.
            if node.op != "get_attr"
        )

    modes = [f"_annotate_for_{mode}_quantization_config" for mode in ("static", "dynamic")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            replaced(pt2e_quantizer_utils, find_sequential_partitions=find_filtered)
        )
        for each in annotators:
            stack.enter_context(replaced(each, _is_annotated=is_annotated))
        for each in classes:
            stack.enter_context(replaced(each, **dict.fromkeys(modes, _annotate)))
        yield


def accept_none(module: ModuleType) -> None:
    """
    Make a module's quantizer classes accept None as the config of a module name.

    litert-torch 0.10.0 and torchao 0.18.0 accept None in `set_module_type`, annotate the parameter
    of `set_module_name` as `Optional[QuantizationConfig]`, and raise there
    `quantization_config == None is not supported yet`. `configs_as_set` applies configs of None.
    """
    kind: Any = vars(module).get("PT2EQuantizer") or vars(module).get("XNNPACKQuantizer")
    method = getattr(kind, "set_module_name", None)
    if method is None or hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def set_module_name(self: Any, module_name: str, quantization_config: Any) -> Any:
        if quantization_config is not None:
            return method(self, module_name, quantization_config)
        self.module_name_config[module_name] = None
        return self

    kind.set_module_name = set_module_name


@contextlib.contextmanager
def replaced(holder: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a module or a class temporarily."""
    originals = {name: getattr(holder, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(holder, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(holder, name, original)


def _annotate(quantizer: Any, model: Any) -> Any:
    """Replacement for the methods of the quantizers that select a config's targets."""
    QuantizationAnnotation = pt2e_module("quantizer").QuantizationAnnotation

    by_name, by_type = quantizer.module_name_config, quantizer.module_type_config
    configs: dict[_Key, Any] = {
        **{("set_module_name", name): each for name, each in by_name.items()},
        **{("set_module_type", name_of(kind)): each for kind, each in by_type.items()},
        **{("set_operator_type", op): c for op, c in quantizer.operator_type_config.items()},
        _GLOBAL: quantizer.global_config,
    }
    _check_targets(model, configs)
    keys = _keys(model, configs)
    for node in _calls(model):
        floats = all(key != _GLOBAL and configs[key] is None for key in keys[node])
        if floats and "quantization_annotation" not in node.meta:
            # So that no pattern matches it, and no annotation spreads to it.
            node.meta["quantization_annotation"] = QuantizationAnnotation(_annotated=True)
            node.meta[LEFT_IN_FLOAT] = True
    others = {node for node in _calls(model) if _is_annotated(node)}
    before = -1
    # A pool is annotated once its input is, which another config may do later.
    while before != (now := sum(map(_is_annotated, model.graph.nodes))):
        before = now
        for key, config in configs.items():
            if config is not None:
                mode = "dynamic" if _is_dynamic(config) else "static"
                annotate = getattr(quantizer, f"_annotate_all_{mode}_patterns")
                annotate(model, config, lambda node, key=key: key in keys[node])
        if len(configs) == 1 and not others:
            # A single config is applied by the quantizer alone, with the ops that it skips.
            break
    for node in _calls(model):
        dynamic = any(_is_dynamic(configs[key]) for key in keys[node] if configs[key] is not None)
        if dynamic and node not in others and _is_annotated(node):
            node.meta[WEIGHT_ALONE] = True
    for key, config in configs.items():
        nodes = [n for n in _calls(model) if _key(n, configs) == key]
        annotated = [n for n in nodes if key in keys[n] and _is_annotated(n)]
        if key != _GLOBAL and config is not None and nodes and not annotated:
            raise RefusedError(
                f"{_key_text(key)} has no effect: {type(quantizer).__name__} knows no op of "
                f"{', '.join(sorted({str(n.target) for n in nodes})[:5])} as this graph has it. An "
                "activation belongs to the op before it; set the config of that one. Of a graph "
                "that was not exported strictly it knows no add, mul or cat"
            )
    return model


def _calls(model: Any) -> list[Any]:
    return [node for node in model.graph.nodes if node.op == "call_function"]


def _is_annotated(node: Any) -> bool:
    """Return whether any tensor of a node is to be quantized."""
    annotation = node.meta.get("quantization_annotation")
    return annotation is not None and (
        annotation.output_qspec is not None
        or any(spec is not None for spec in annotation.input_qspec_map.values())
    )


def op_name(node: Any) -> str:
    """Return a node's operator without namespace and overload, or an empty string."""
    if getattr(node, "op", None) != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).split("::")[-1]


def _is_dynamic(config: Any) -> bool:
    return config.input_activation is None or bool(config.input_activation.is_dynamic)


def _keys(model: Any, configs: Mapping[_Key, Any]) -> dict[Any, set[_Key]]:
    """Return the config of each node; nodes outside modules get those of their users."""
    keys: dict[Any, set[_Key]] = {}
    for node in _calls(model):
        key = _key(node, configs)
        before = keys.get(node.args[0], set()) if op_name(node) in FOLLOWERS else set()
        is_float = key != _GLOBAL and configs[key] is None
        fused = op_name(node) in ("relu", "relu_") and not is_float
        # A config of None for a block is not meant for layers inside it with configs of their own.
        is_kept = is_float and any(_is_inside(key, each) for each in before)
        if before and (fused or is_kept):
            keys[node] = before
        else:
            keys[node] = {key}
    for node in model.graph.nodes:
        if node not in keys:
            keys[node] = {key for user in node.users for key in keys.get(user, ())}
    return keys


def _is_inside(outer: _Key, inner: _Key) -> bool:
    """Return whether a config is that of a module inside another one, both by name."""
    is_name = outer[0] == inner[0] == "set_module_name"
    return is_name and str(inner[1]).startswith(f"{outer[1]}.")


def _key(node: Any, configs: Mapping[_Key, Any]) -> _Key:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    target = node.target
    candidates: list[_Key] = [
        *(("set_module_name", path) for path, _ in reversed(stack)),
        *(("set_module_type", name_of(kind)) for _, kind in reversed(stack)),
        ("set_operator_type", target),
        ("set_operator_type", getattr(target, "overloadpacket", None)),
    ]
    return next((key for key in candidates if key in configs), _GLOBAL)


def _check_targets(model: Any, configs: Mapping[_Key, Any]) -> None:
    nodes = _calls(model)
    layers = [layer for n in nodes for layer in n.meta.get("nn_module_stack", {}).values()]
    known: dict[str, set[Any]] = {
        "set_module_name": {path for path, _ in layers},
        "set_module_type": {name_of(kind) for _, kind in layers},
        "set_operator_type": {
            target
            for n in nodes
            for target in (n.target, getattr(n.target, "overloadpacket", None))
        },
    }
    for key in configs:
        method, target = key
        if key != _GLOBAL and target not in known[method]:
            what = "op" if method == "set_operator_type" else "module"
            names = {str(each) for each in known[method] if each}
            raise RefusedError(f"{_key_text(key)} matches no {what}{nearest(str(target), names)}")


def _key_text(key: _Key) -> str:
    method, target = key
    return f"{method}({target!r})" if method == "set_module_name" else f"{method}({target})"


def name_of(value: Any) -> str:
    """Return the module and the qualified name of a class or a function; a name as it is."""
    if isinstance(value, str):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
