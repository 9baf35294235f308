"""Configs by name, by class and by operator: each reaches what it was set for, and nothing else."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import (
    Budget,
    Edgeq,
    assert_no_float_ops,
    assert_op_dtypes,
    assert_within_budget,
    litert,
)

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


class Net(SmallModel):
    """Two blocks, a pool and a linear layer: every op of it in int8 under the default preset."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Block()
        self.two = Block()
        self.pool = nn.MaxPool2d(2)
        self.gate = nn.Sigmoid()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Give three values."""
        y: Tensor = self.fc(self.gate(self.pool(self.two(self.one(x)))).flatten(1))
        return y

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """One image."""
        return (normal(1, 4, 4, 4, seed=seed),)


def per_channel(**options: Any) -> Any:
    """The default preset's config, or a variant."""
    with litert.quiet():
        from litert_torch.quantize.pt2e_quantizer import get_symmetric_quantization_config

        return get_symmetric_quantization_config(**{"is_per_channel": True, **options})


def per_tensor() -> Any:
    """Told from the other by the granularity of the weights in the file."""
    return per_channel(is_per_channel=False)


def converters() -> Any:
    """The converter's own quantizer."""
    with litert.quiet():
        from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer

        return PT2EQuantizer()


def xnnpacks() -> Any:
    """Torchao's copy of ExecuTorch's quantizer, which says that it is deprecated."""
    with litert.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer

        return XNNPACKQuantizer()


def composed(*quantizers: Any) -> Any:
    """One after the other."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer

        return ComposableQuantizer(list(quantizers))


def quantize(maker: Edgeq, quantizer: Any, model: type[SmallModel] = Net) -> QuantizedModel:
    """The model under a quantizer, close to torch."""
    quantized = maker.quantize(
        seeded(model), model.sample_inputs(), quantizer=quantizer, calibration=samples(model, 16)
    )
    comparison = maker.compare(quantized, samples(model, 8, seed=2))
    # int8 networks of a few layers lie at 30 dB and above; a wrong scale anywhere at less than 15.
    assert_within_budget(comparison, Budget(sqnr_db=20))
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
FLOAT = dict.fromkeys(SCHEMES, "float")


@pytest.mark.slow
def test_the_default_reaches_all(maker: Edgeq) -> None:
    """What the tests below differ from."""
    quantized = quantize(maker, converters().set_global(per_channel()))

    assert told(quantized) == SCHEMES
    assert_no_float_ops(quantized)


# What is set, and how the file then differs from the default.
SETTINGS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "a name": (
        lambda q: q.set_module_name("one", per_tensor()),
        {"CONV_2D one.conv": "per_tensor"},
    ),
    "a class": (
        lambda q: q.set_module_type(nn.Linear, per_tensor()),
        {"FULLY_CONNECTED fc": "per_tensor"},
    ),
    "an operator": (
        lambda q: q.set_operator_type(aten.conv2d, per_tensor()),
        {"CONV_2D one.conv": "per_tensor", "CONV_2D two.conv": "per_tensor"},
    ),
    "an overload": (
        lambda q: q.set_operator_type(aten.linear.default, per_tensor()),
        {"FULLY_CONNECTED fc": "per_tensor"},
    ),
    "a name before a class": (
        lambda q: q.set_module_type(Block, None).set_module_name("two", per_tensor()),
        {"CONV_2D one.conv": "float", "ADD one": "float", "CONV_2D two.conv": "per_tensor"},
    ),
    "a class before an operator": (
        lambda q: q.set_operator_type(aten.linear, None).set_module_type(nn.Linear, per_tensor()),
        {"FULLY_CONNECTED fc": "per_tensor"},
    ),
    "the inner name before the outer": (
        lambda q: q.set_module_name("one", per_tensor()).set_module_name("one.conv", per_channel()),
        {},
    ),
    "a class in float": (
        lambda q: q.set_module_type(nn.Linear, None),
        {"FULLY_CONNECTED fc": "float"},
    ),
    "an operator in float": (
        lambda q: q.set_operator_type(aten.add, None),
        # A sigmoid is quantized only behind what is.
        {"ADD one": "float", "ADD two": "float", "MAX_POOL_2D pool": "float"}
        | {"LOGISTIC gate": "float"},
    ),
    "a pool apart from what is before it": (
        lambda q: q.set_module_type(nn.MaxPool2d, per_tensor()),
        {},
    ),
    "a sigmoid apart from what is before it": (
        lambda q: q.set_operator_type(aten.sigmoid, per_tensor()),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_config_beside_the_global_one(maker: Edgeq, name: str) -> None:
    """All else is as under the global config alone."""
    change, differs = SETTINGS[name]
    quantized = quantize(maker, change(converters().set_global(per_channel())))

    assert told(quantized) == {**SCHEMES, **differs}


@pytest.mark.sweep(1)
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
    maker: Edgeq, change: Callable[[Any], Any], reached: tuple[str, ...]
) -> None:
    """All else stays in float, additions with a ReLU behind them as well."""
    quantized = quantize(maker, change(converters()))

    # The converter moves a DEQUANTIZE behind a pool.
    assert told(quantized) == {**FLOAT, **{key: SCHEMES[key] for key in reached}}


@pytest.mark.slow
def test_what_is_float_stays_float_behind_what_is_not(maker: Edgeq) -> None:
    """An annotation does not spread to a layer that None keeps in float."""

    class Pooled(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.pool = nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.pool(self.conv(x))
            return y

        @staticmethod
        def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
            return (normal(1, 3, 8, 8, seed=seed),)

    plain, kept = converters(), converters()
    plain.set_global(per_channel())
    kept.set_global(per_channel()).set_module_type(nn.AdaptiveAvgPool2d, None)

    assert_op_dtypes(quantize(maker, plain, Pooled), "MEAN", scheme="int8", count=1)
    assert_op_dtypes(quantize(maker, kept, Pooled), "MEAN", scheme="float", count=1)


class Siamese(SmallModel):
    """One network for two images, each of its convolutions padded in words."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 4, padding="same")

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Give what the images have in common."""
        y: Tensor = self.maps(left) + self.maps(right)
        return y

    def maps(self, image: Tensor) -> Tensor:
        """Give four maps of one image."""
        y: Tensor = self.second(torch.relu(self.norm(self.first(image))))
        return y

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """Two images, one twice as bright."""
        return normal(1, 3, 8, 8, seed=seed), 2 * normal(1, 3, 8, 8, seed=seed + 1000)


@pytest.mark.slow
@pytest.mark.parametrize("make", [converters, xnnpacks])
def test_every_call_of_a_convolution(maker: Edgeq, make: Callable[[], Any]) -> None:
    """The second call, too, and whether its padding is a number or a word."""
    quantized = quantize(maker, make().set_global(per_channel()), Siamese)

    assert_op_dtypes(
        quantized, "CONV_2D", input="int8", weight="int8", bias="int32", output="int8", count=4
    )
    assert_no_float_ops(quantized)


class Levels(SmallModel):
    """A detector's head: one convolution for all levels, a batch norm for each; then joined."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        norms: list[Any] = [nn.BatchNorm2d(4) for _ in range(2)]
        for factor, norm in enumerate(norms, 1):
            norm.running_mean.fill_(factor)
            norm.running_var.fill_(0.1 * factor)
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        """Give the maps of both levels, the second much larger in value."""
        first, second = (norm(self.conv(x)) for norm in self.norms)
        y: Tensor = torch.stack([first, 10 * second], 1)
        return y

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """One image."""
        return (normal(1, 3, 8, 8, seed=seed),)


@pytest.mark.slow
def test_a_shared_convolution_with_a_batch_norm_for_each_call(maker: Edgeq) -> None:
    """Each call has its own folded in; what is stacked keeps its own scale, if in float."""
    quantized = quantize(maker, "pt2e_static_int8", Levels)
    comparison = maker.compare(quantized, samples(Levels, 8, seed=2))

    # 2 dB where the second level gets the scale of the first, and clips.
    assert_within_budget(comparison, lowering=Budget(sqnr_db=30))
    assert_op_dtypes(quantized, "CONV_2D", scheme="int8", weight="int8", count=2)
    assert_op_dtypes(quantized, "CONCATENATION", scheme="float", count=1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["xxh", "hhx", "xhh"])
def test_what_is_concatenated_with_itself(maker: Edgeq, order: str) -> None:
    """The annotators have its two uses share parameters, and so with themselves."""

    class Twice(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            """Give three values."""
            tensors = {"x": x, "h": self.a(x)}
            y: Tensor = self.b(torch.cat([tensors[each] for each in order], -1))
            return y

        @staticmethod
        def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
            """Some rows."""
            return (normal(16, 4, seed=seed),)

    quantized = quantize(maker, "pt2e_static_int8", Twice)

    assert_op_dtypes(quantized, "CONCATENATION", scheme="int8", count=1)
    assert_no_float_ops(quantized)


def test_a_layer_between_those_that_have_a_config(maker: Edgeq) -> None:
    """No config is for it, but the converter by itself would quantize it."""

    class Linears(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            """Give eight values."""
            y: Tensor = self.c(self.b(self.a(x)))
            return y

        @staticmethod
        def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
            """Some rows."""
            return (normal(16, 8, seed=seed),)

    quantizer = converters()
    for name in ("a", "c"):
        quantizer.set_module_name(name, per_channel())
    quantized = quantize(maker, quantizer, Linears)

    assert told(quantized) == {
        "FULLY_CONNECTED a": "per_channel",
        "FULLY_CONNECTED b": "float",
        "FULLY_CONNECTED c": "per_channel",
    }


@pytest.mark.slow
def test_quantizers_in_a_composed_one(maker: Edgeq) -> None:
    """The configs of each reach what they were set for, and the last takes the rest."""
    quantizer = composed(
        converters().set_module_name("one", per_tensor()),
        composed(converters().set_operator_type(aten.linear, per_tensor())),
        converters().set_global(per_channel()),
    )
    quantized = quantize(maker, quantizer)

    assert told(quantized) == {
        **SCHEMES,
        "CONV_2D one.conv": "per_tensor",
        "FULLY_CONNECTED fc": "per_tensor",
    }
    assert_no_float_ops(quantized)


@pytest.mark.slow
def test_the_xnnpack_quantizer(maker: Edgeq) -> None:
    """Its static config has no `is_dynamic` for the converter to read; all is int8 even so."""
    from torchao.testing.pt2e._xnnpack_quantizer import get_symmetric_quantization_config

    def config(**options: bool) -> Any:
        return get_symmetric_quantization_config(**options)

    quantizer = xnnpacks().set_global(config(is_per_channel=True))
    quantizer.set_operator_type(aten.linear, config(is_per_channel=False))
    quantizer.set_module_name("one", config(is_per_channel=False))
    quantized = quantize(maker, quantizer)

    assert told(quantized) == {
        **SCHEMES,
        "CONV_2D one.conv": "per_tensor",
        "FULLY_CONNECTED fc": "per_tensor",
    }
    assert_no_float_ops(quantized)


def test_the_xnnpack_quantizer_dynamically(maker: Edgeq) -> None:
    """It annotates activations, too, which kernels quantize by themselves."""
    from torchao.testing.pt2e._xnnpack_quantizer import get_symmetric_quantization_config

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantized = quantize(maker, xnnpacks().set_global(config))

    assert_op_dtypes(
        quantized,
        "FULLY_CONNECTED",
        scheme="dynamic",
        input="float32",
        weight="int8",
        granularity="per_channel",
        count=1,
    )
    assert_op_dtypes(quantized, "CONV_2D", scheme="dynamic", weight="int8", count=2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_executorchs_own_quantizer(maker: Edgeq, dynamic: bool) -> None:
    """Where ExecuTorch is installed: it has no `is_dynamic` either, and reads operators itself."""
    executorchs = pytest.importorskip(
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer",
        reason="executorch is not installed; tried with 1.5.1",
        exc_type=ImportError,
    )
    config = executorchs.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    quantizer = executorchs.XNNPACKQuantizer().set_operator_type(aten.linear.default, config)
    quantized = quantize(maker, quantizer)

    scheme = "dynamic" if dynamic else "int8"
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight="int8", count=1)


@pytest.mark.slow
def test_one_layer_in_float_among_static_ones(maker: Edgeq) -> None:
    """The converter by itself would quantize what stands between two quantized tensors."""

    class Three(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.convs(x)
            return y

        @staticmethod
        def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
            return (normal(1, 3, 8, 8, seed=seed),)

    quantizer = converters().set_global(per_channel())
    # The setter takes no None.
    quantizer.module_name_config["convs.2"] = None
    quantized = quantize(maker, quantizer, Three)

    assert told(quantized) == {
        "CONV_2D convs.0": "per_channel",
        "CONV_2D convs.2": "float",
        "CONV_2D convs.4": "per_channel",
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by name", "composed"])
def test_one_layer_dynamically_among_static_ones(maker: Edgeq, how: str) -> None:
    """Each as it was asked for; the borders of such a file are floats."""
    dynamic = per_channel(is_dynamic=True)
    quantizer = converters().set_global(per_channel())
    if how == "by name":
        quantizer.set_module_name("fc", dynamic)
    else:
        quantizer = composed(converters().set_module_name("fc", dynamic), quantizer)
    quantized = quantize(maker, quantizer)

    assert told(quantized) == {**SCHEMES, "FULLY_CONNECTED fc": "dynamic"}
    assert_op_dtypes(quantized, "FULLY_CONNECTED", weight="int8", granularity="per_channel")
    assert_no_float_ops(quantized, allow=("FULLY_CONNECTED",))


@pytest.mark.sweep(2)
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
def test_a_config_without_effect(maker: Edgeq, change: Callable[[Any], Any], message: str) -> None:
    """What would be passed over in silence is an error, in a composed quantizer as well."""
    quantizer = change(converters().set_global(per_channel()))
    with pytest.raises(ValueError, match=message):
        quantize(maker, quantizer)
    with pytest.raises(ValueError, match=message):
        quantize(maker, composed(quantizer))
