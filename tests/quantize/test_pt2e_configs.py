"""PT2E quantizers that users set up: each config reaches what it was set for, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import net
from pytest_edgeq import Edgeq, assert_no_float_ops, assert_op_dtypes, litert
from tests.quantize import making
from tests.quantize.quantizers import converters, per_channel, per_tensor, xnnpacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_edgeq import QuantizedModel

aten = torch.ops.aten


class Block(nn.Module):
    """A convolution and an addition, each with a ReLU behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.relu_a = nn.ReLU()
        self.relu_b = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Give what came in, and more."""
        y: Tensor = self.relu_b(self.relu_a(self.conv(x)) + x)
        return y


def blocks() -> nn.Module:
    """Two blocks, a pool and a linear layer: every op of it in int8 under the default preset."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(self.gate(self.pool(self.two(self.one(x)))).flatten(1))

    parts = {"pool": nn.MaxPool2d(2), "gate": nn.Sigmoid(), "fc": nn.Linear(16, 3)}
    return net(forward, one=Block(), two=Block(), **parts)


def composed(*quantizers: Any) -> Any:
    """One after the other."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer

        return ComposableQuantizer(list(quantizers))


def quantize(
    quantizer: Any, make: Callable[[], nn.Module] = blocks, *shapes: tuple[int, ...]
) -> QuantizedModel:
    """The model under a quantizer, close to torch."""
    shapes = shapes or ((1, 4, 4, 4),)
    quantized = making.quantize(quantizer, make, *shapes)
    # int8 networks of a few layers lie at 30 dB and above; a wrong scale anywhere at less than 15.
    assert making.sqnr_db(quantized, make, *shapes) > 20
    return quantized


def told(quantized: QuantizedModel) -> dict[str, str]:
    """Scheme, or granularity of the weight in an op of scheme int8, by op and module."""
    return {
        f"{entry.op} {entry.module}": (entry.granularity if entry.scheme == "int8" else None)
        or entry.scheme
        for entry in quantized.op_dtypes
        if entry.op in ("CONV_2D", "ADD", "MAX_POOL_2D", "LOGISTIC", "FULLY_CONNECTED")
    }


SCHEMES = {
    "CONV_2D one.conv": "per_channel",
    "ADD one": "int8",
    "CONV_2D two.conv": "per_channel",
    "ADD two": "int8",
    "MAX_POOL_2D pool": "int8",
    "LOGISTIC gate": "int8",
    "FULLY_CONNECTED fc": "per_channel",
}


def test_the_converters_own_quantizer() -> None:
    """Set up by the user, it does what the preset does, byte by byte."""
    made = [
        making.quantize(quantizer)
        for quantizer in (converters().set_global(per_channel()), "pt2e_static_int8")
    ]

    assert made[0].tflite == made[1].tflite
    assert made[0].options["quantizer"] == "PT2EQuantizer"
    assert (
        made[0].options["quantizer.global_config.weight.qscheme"].endswith("per_channel_symmetric")
    )
    assert made[1].options == {"quantizer": "pt2e_static_int8", "strict_export": "True"}
    assert made[1].with_tflite(made[1].tflite).options == {}


# What is set beside a global config, and how the file then differs from the default's.
SETTINGS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "a name before a class": (
        lambda q: q.set_module_type(Block, None).set_module_name("two", per_tensor()),
        {"CONV_2D one.conv": "float", "ADD one": "float", "CONV_2D two.conv": "per_tensor"},
    ),
    "a class before an operator": (
        lambda q: q.set_operator_type(aten.linear, None).set_module_type(nn.Linear, per_tensor()),
        {"FULLY_CONNECTED fc": "per_tensor"},
    ),
    "the inner name before the outer, and an overload": (
        lambda q: (
            q.set_module_name("one", per_tensor())
            .set_module_name("one.conv", per_channel())
            .set_operator_type(aten.linear.default, per_tensor())
        ),
        {"FULLY_CONNECTED fc": "per_tensor"},
    ),
    "an operator in float": (
        lambda q: q.set_operator_type(aten.add, None),
        # A sigmoid is quantized only behind what is.
        {"ADD one": "float", "ADD two": "float", "MAX_POOL_2D pool": "float"}
        | {"LOGISTIC gate": "float"},
    ),
    "ops apart from what is before them": (
        lambda q: q.set_module_type(nn.MaxPool2d, per_tensor()).set_operator_type(
            aten.sigmoid, per_tensor()
        ),
        {},
    ),
    "composed": (
        lambda q: composed(
            converters().set_module_name("one", per_tensor()),
            composed(converters().set_operator_type(aten.linear, per_channel(is_dynamic=True))),
            q,
        ),
        {"CONV_2D one.conv": "per_tensor", "FULLY_CONNECTED fc": "dynamic"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_config_beside_the_global_one(name: str) -> None:
    """All else is as under the global config alone."""
    change, differs = SETTINGS[name]
    quantized = quantize(change(converters().set_global(per_channel())))

    assert told(quantized) == {**SCHEMES, **differs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reached"),
    [
        (
            lambda q: q.set_module_name("two", per_channel()),
            ("CONV_2D two.conv", "ADD two", "MAX_POOL_2D pool"),
        ),
        (lambda q: q.set_module_type(nn.Linear, per_channel()), ("FULLY_CONNECTED fc",)),
        (
            lambda q: q.set_operator_type(aten.add, per_channel()),
            ("ADD one", "ADD two", "MAX_POOL_2D pool"),
        ),
    ],
    ids=["name", "class", "operator"],
)
def test_a_config_without_a_global_one(
    change: Callable[[Any], Any], reached: tuple[str, ...]
) -> None:
    """All else stays in float, additions with a ReLU behind them as well."""
    quantized = quantize(change(converters()))

    # The converter moves a DEQUANTIZE behind a pool.
    floats = dict.fromkeys(SCHEMES, "float")
    assert told(quantized) == {**floats, **{key: SCHEMES[key] for key in reached}}


@pytest.mark.slow
def test_a_quantizer_without_any_config() -> None:
    """The converter reads its mode from the global config; where there is none it is derived."""
    from litert_torch.quantize.pt2e_quantizer_utils import OP_TO_ANNOTATOR

    class LinearOnly(type(converters())):  # type: ignore[misc] # the class is the library's own
        def annotate(self, model: Any) -> Any:
            OP_TO_ANNOTATOR["linear"](model, per_channel(), None)
            return model

    quantized = quantize(LinearOnly())

    assert told(quantized) == {
        **dict.fromkeys(SCHEMES, "float"),
        "FULLY_CONNECTED fc": "per_channel",
    }


@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
        pytest.param(
            lambda: nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(3))), marks=pytest.mark.slow
        ),
    ],
    ids=["linear", "convolution"],
)
@pytest.mark.parametrize("by_none", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layer_between_those_that_have_a_config(
    layers: Callable[[], nn.Module], by_none: bool
) -> None:
    """No config is for it, but the converter by itself would quantize it."""
    quantizer = converters()
    if by_none:
        quantizer.set_global(per_channel())
        quantizer.module_name_config["1"] = None  # the setter takes no None
    else:
        quantizer.set_module_name("0", per_channel()).set_module_name("2", per_channel())
    quantized = quantize(quantizer, layers, (1, 8, 4, 8))

    assert list(told(quantized).values()) == ["per_channel", "float", "per_channel"]


@pytest.mark.slow
def test_what_is_float_stays_float_behind_what_is_not() -> None:
    """An annotation does not spread to a layer that None keeps in float."""
    quantizer = converters().set_global(per_channel()).set_module_type(nn.AdaptiveAvgPool2d, None)
    quantized = quantize(
        quantizer, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), (1, 3, 8, 8)
    )
    assert_op_dtypes(quantized, "MEAN", scheme="float", count=1)


def siamese() -> nn.Module:
    """One network for two images, each of its convolutions padded in words."""

    def forward(self: Any, left: Tensor, right: Tensor) -> Any:
        return self.maps(left) + self.maps(right)

    conv = nn.Conv2d(3, 4, 3, padding="same", bias=False)
    last = nn.Conv2d(4, 4, 4, padding="same")
    return net(forward, maps=nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), last))


@pytest.mark.slow
@pytest.mark.parametrize("xnnpack", [False, True])
def test_every_call_of_a_convolution(xnnpack: bool) -> None:
    """The second call, too, and whether its padding is a number or a word."""
    quantizer = xnnpacks()[0] if xnnpack else converters()
    shapes = ((1, 3, 8, 8), (1, 3, 8, 8))
    quantized = quantize(quantizer.set_global(per_channel()), siamese, *shapes)

    assert_op_dtypes(
        quantized, "CONV_2D", input="int8", weight="int8", bias="int32", output="int8", count=4
    )
    assert_no_float_ops(quantized)


def levels() -> nn.Module:
    """A detector's head: one convolution for all levels, a batch norm for each; then joined."""

    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = (norm(self.conv(x)) for norm in self.norms)
        return torch.stack([first, 10 * second], 1)

    norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
    return net(forward, conv=nn.Conv2d(3, 4, 3, bias=False), norms=norms)


@pytest.mark.slow
def test_a_shared_convolution_with_a_batch_norm_for_each_call() -> None:
    """Each call has its own folded in; what is stacked keeps its own scale, if in float."""
    quantized = quantize("pt2e_static_int8", levels, (1, 3, 8, 8))

    # 2 dB where the second level gets the scale of the first, and clips.
    assert making.sqnr_db(quantized, levels, (1, 3, 8, 8), stage="lowering") > 30
    assert_op_dtypes(quantized, "CONV_2D", scheme="int8", weight="int8", count=2)
    assert_op_dtypes(quantized, "CONCATENATION", scheme="float", count=1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["xxh", "xhh"])
def test_what_is_concatenated_with_itself(order: str) -> None:
    """The annotators have its two uses share parameters, and so with themselves."""

    def forward(self: Any, x: Tensor) -> Any:
        tensors = {"x": x, "h": self.a(x)}
        return self.b(torch.cat([tensors[each] for each in order], -1))

    quantized = quantize(
        "pt2e_static_int8", lambda: net(forward, a=nn.Linear(4, 4), b=nn.Linear(12, 3)), (16, 4)
    )

    assert_op_dtypes(quantized, "CONCATENATION", scheme="int8", count=1)
    assert_no_float_ops(quantized)


@pytest.mark.slow
def test_the_xnnpack_quantizer() -> None:
    """Its static config has no `is_dynamic` for the converter to read; all is int8 even so."""
    quantizer, config = xnnpacks(is_per_channel=True)
    one_scale = xnnpacks(is_per_channel=False)[1]
    quantizer.set_global(config).set_operator_type(aten.linear, one_scale)
    quantized = quantize(quantizer.set_module_name("one", one_scale))

    differs = dict.fromkeys(("CONV_2D one.conv", "FULLY_CONNECTED fc"), "per_tensor")
    assert told(quantized) == {**SCHEMES, **differs}
    assert_no_float_ops(quantized)


def test_the_xnnpack_quantizer_dynamically() -> None:
    """It annotates activations, too, which kernels quantize by themselves."""
    quantizer, config = xnnpacks(is_per_channel=True, is_dynamic=True)
    quantized = quantize(quantizer.set_global(config))

    expected = {"scheme": "dynamic", "input": "float32", "weight": "int8"}
    assert_op_dtypes(quantized, "FULLY_CONNECTED", granularity="per_channel", count=1, **expected)
    assert_op_dtypes(quantized, "CONV_2D", count=2, **expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_executorchs_own_quantizer(dynamic: bool) -> None:
    """Where ExecuTorch is installed: it has no `is_dynamic` either, and reads operators itself."""
    executorchs = pytest.importorskip(
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer",
        reason="executorch is not installed; tried with 1.5.1",
        exc_type=ImportError,
    )
    config = executorchs.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    quantized = quantize(
        executorchs.XNNPACKQuantizer().set_operator_type(aten.linear.default, config)
    )
    scheme = "dynamic" if dynamic else "int8"
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight="int8", count=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q: q.set_module_name("three", per_channel()),
            r"Net: set_module_name\('three'\) matches no module",
        ),
        (
            lambda q: q.set_module_type(nn.LSTM, per_channel()),
            r"Net: set_module_type\(.*LSTM\) matches no module \(did you mean ",
        ),
        (
            lambda q: q.set_operator_type(aten.tanh, per_channel()),
            r"Net: set_operator_type\(aten.tanh\) matches no op",
        ),
        (
            lambda q: q.set_operator_type(aten.relu, per_channel()),
            r"Net: set_operator_type\(aten.relu\) has no effect: PT2EQuantizer knows no op of",
        ),
        (
            lambda q: q.set_module_type(nn.ReLU, per_tensor()),
            r"Net: set_module_type\(.*ReLU\) has no effect",
        ),
    ],
    ids=["name", "class", "operator", "an operator without a pattern", "a class without one"],
)
def test_a_config_without_effect(change: Callable[[Any], Any], message: str) -> None:
    """What would be passed over in silence is an error, in a composed quantizer as well."""
    quantizer = change(converters().set_global(per_channel()))
    for each in (quantizer, composed(quantizer)):
        with pytest.raises(ValueError, match=message):
            making.quantize(each, blocks, (1, 4, 4, 4))


def test_observers_that_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, they leave scales without meaning: an error names the tensors."""
    original = litert.prepare_pt2e

    def blind(exported: Any, quantizer: Any) -> Any:
        prepared = original(exported, quantizer)
        _, observer = litert.pt2e_graphs._static_activations(prepared)[1]
        observer.forward = lambda x: x
        return prepared

    monkeypatch.setattr(litert, "prepare_pt2e", blind)
    inputs = making.drawn(blocks, (1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"1 activation\(s\) were never calibrated: "):
        Edgeq(cache="off").quantize(blocks().eval(), inputs[0], calibration=inputs)
