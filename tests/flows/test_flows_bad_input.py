"""Bad input: a clear error that says what was seen and what to do, and no file left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import (
    ConvBnRelu,
    EmbeddingMean,
    NeverExported,
    NonStrictOnly,
    ResidualNet,
    SoftmaxHead,
    TwoInputs,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import Traced
from pytest_edgeq.quantize.conversion_refusals import refusal

STATIC = ("pt2e_static_int8", "recipe_static_wi8_ai8")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Any:
    """No half-written file, whatever the error."""
    yield
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (lambda x: x, "expected a torch.nn.Module, got a function"),
        (ResidualNet, "expected a torch.nn.Module, got the class .*instantiate it"),
        (None, "expected a torch.nn.Module, got a NoneType"),
    ],
)
def test_not_a_module(maker: Edgeq, thing: Any, told: str) -> None:
    """A function, a class, nothing."""
    with pytest.raises(TypeError, match=told):
        maker.quantize(thing, (torch.ones(1),))


@pytest.mark.parametrize("preset", ["pt2e_static_int8", "recipe_dynamic_wi8_afp32", None])
def test_a_module_in_train_mode(maker: Edgeq, preset: str | None) -> None:
    """The model itself, for every flow; its flag is left as it was."""
    model = seeded(ResidualNet).train()
    with pytest.raises(ValueError, match=r"the model is in train mode.*model\.eval\(\)"):
        maker.quantize(model, ResidualNet.sample_inputs(), quantizer=preset)

    assert model.training


def test_a_submodule_in_train_mode(maker: Edgeq) -> None:
    """One batch norm that was switched back is enough, and is named."""
    model = seeded(ConvBnRelu)
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    model.get_submodule(name).train()
    with pytest.raises(ValueError, match=f"submodule '{name}' is in train mode"):
        maker.quantize(model, ConvBnRelu.sample_inputs())


@pytest.mark.parametrize("nothing", [None, (), []])
def test_no_sample_inputs(maker: Edgeq, nothing: Any) -> None:
    """There is nothing to trace the model with."""
    with pytest.raises(ValueError, match=r"no sample inputs: the model is traced with them"):
        maker.quantize(seeded(ResidualNet), nothing)


def test_sample_inputs_that_are_no_tensors(maker: Edgeq) -> None:
    """A number among the tensors is named by its place; a dict belongs elsewhere."""
    with pytest.raises(TypeError, match=r"sample_inputs\[1\]: expected a torch.Tensor, got float"):
        maker.quantize(seeded(TwoInputs), (TwoInputs.sample_inputs()[0], 1.0))
    with pytest.raises(TypeError, match="keyword inputs are sample_kwargs"):
        maker.quantize(seeded(TwoInputs), {"image": torch.ones(1)})


@pytest.mark.parametrize("preset", STATIC)
def test_calibration_is_missing(maker: Edgeq, preset: str) -> None:
    """A static flow without data names the quantizer and the way out."""
    with pytest.raises(ValueError, match=f"{preset} needs calibration data and got none.*Pass"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=preset)


@pytest.mark.parametrize("preset", STATIC)
def test_calibration_is_empty(maker: Edgeq, preset: str) -> None:
    """An empty list is not calibration."""
    with pytest.raises(ValueError, match=r"calibration: there is no sample in the list"):
        maker.quantize(
            seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=preset, calibration=[]
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("preset", STATIC)
def test_a_generator_used_twice(maker: Edgeq, preset: str) -> None:
    """The second model gets nothing from it, and is told why."""
    once = samples(ResidualNet, 2)
    model = seeded(ResidualNet)
    maker.quantize(model, ResidualNet.sample_inputs(), quantizer=preset, calibration=once)
    with pytest.raises(ValueError, match=r"generator gives its samples once, and this one is used"):
        maker.quantize(model, ResidualNet.sample_inputs(), quantizer=preset, calibration=once)


image, vector = TwoInputs.sample_inputs(1)
BAD_SAMPLES = {
    "one of two": (image, ValueError, "sample 1: expected 2 positional inputs, got 1"),
    "with a label": (
        (image, vector, torch.tensor([3])),
        ValueError,
        "expected 2 positional inputs, got 3.*label",
    ),
    "a batch": (
        (image.repeat(4, 1, 1, 1), vector),
        ValueError,
        "input 'args_0': expected shape 1×3×8×8, got 4×3×8×8.*split the batch",
    ),
    "no batch dimension": (
        (image[0], vector),
        ValueError,
        "expected shape 1×3×8×8, got 3×8×8.*add the batch dimension",
    ),
    "another size": ((image[..., :4], vector), ValueError, "got 1×3×8×4"),
    "integers": (
        ((image * 10).to(torch.uint8), vector),
        TypeError,
        "expected float32, got uint8.*integers stand where floats belong",
    ),
    "doubles": ((image.double(), vector), TypeError, "expected float32, got float64"),
    "another name": (
        {"image": image, "vektor": vector},
        ValueError,
        "expected 2 positional inputs, got 0|vektor",
    ),
    "not a tensor": ((image, "vector"), TypeError, "input 'args_1': expected a tensor, got str"),
    "a number": (3.0, TypeError, "expected a tensor, a tuple of tensors or a dict"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("preset", STATIC)
@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_calibration_sample_does_not_fit(maker: Edgeq, preset: str, case: str) -> None:
    """The second sample is bad, and named."""
    sample, error, told = BAD_SAMPLES[case]
    with pytest.raises(error, match=f"(?s)calibration sample 1.*{told.removeprefix('sample 1: ')}"):
        maker.quantize(
            seeded(TwoInputs),
            TwoInputs.sample_inputs(),
            quantizer=preset,
            calibration=[TwoInputs.sample_inputs(), sample],
        )


@pytest.mark.parametrize("preset", STATIC)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_a_calibration_sample(maker: Edgeq, preset: str, value: float) -> None:
    """One NaN would make every scale meaningless."""
    bad = ResidualNet.sample_inputs(1)[0].clone()
    bad[0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"sample 0, input 'args_0': 1 of .* NaN or inf"):
        maker.quantize(
            seeded(ResidualNet),
            ResidualNet.sample_inputs(),
            quantizer=preset,
            calibration=[bad],
        )


def test_one_tensor_is_not_a_list_of_samples(maker: Edgeq) -> None:
    """Iterating over a tensor would take its rows for samples."""
    sample = ResidualNet.sample_inputs()[0]
    with pytest.raises(TypeError, match=r"an iterable of samples, got one Tensor.*\[sample\]"):
        maker.quantize(seeded(ResidualNet), (sample,), calibration=sample)


@pytest.mark.parametrize("preset", ["pt2e_static_int8", "recipe_dynamic_wi8_afp32", None])
def test_a_model_that_export_refuses(maker: Edgeq, preset: str | None) -> None:
    """Our hint comes first, then the line, then torch's own message without its links."""
    with pytest.raises(RuntimeError, match=r"torch.export refuses NeverExported") as caught:
        maker.quantize(
            seeded(NeverExported),
            NeverExported.sample_inputs(),
            quantizer=preset,
            calibration=samples(NeverExported, 2),
        )
    cause = caught.value.__cause__

    assert "no Python branch on a tensor's values" in str(caught.value).splitlines()[0]
    assert cause is not None
    assert str(cause).partition("\n\n")[0] in str(caught.value)


def test_a_model_that_only_non_strict_export_takes(maker: Edgeq) -> None:
    """It goes through with a warning that says what is lost, at the caller's line."""
    with pytest.warns(UserWarning, match=r"\(strict=True\) refuses the model") as seen:
        quantized = maker.quantize(
            seeded(NonStrictOnly),
            NonStrictOnly.sample_inputs(),
            calibration=samples(NonStrictOnly, 4),
        )

    assert [warning.filename for warning in seen] == [__file__]
    assert [entry.scheme for entry in quantized.op_dtypes.ops(op="ADD")] == ["float"]


def test_non_strict_export_by_choice_does_not_warn(maker: Edgeq) -> None:
    """strict_export=False says that the user knows (warnings are errors in this suite)."""
    maker.quantize(
        seeded(NonStrictOnly),
        NonStrictOnly.sample_inputs(),
        calibration=samples(NonStrictOnly, 4),
        strict_export=False,
    )


def test_an_embedding_that_no_kernel_takes(maker: Edgeq) -> None:
    """Conversion succeeds; we find out at quantize time and say which op, why, and the way out."""
    with pytest.raises(RuntimeError, match=r"cannot load .*: EMBEDDING_LOOKUP #1 \(embed\)") as e:
        maker.quantize(
            seeded(EmbeddingMean), EmbeddingMean.sample_inputs(), quantizer="pt2e_dynamic_int8"
        )

    assert "its weight has zero point" in str(e.value)
    assert "dynamic PT2E quantization writes such tables" in str(e.value)
    assert "recipe_dynamic_wi8_afp32" in str(e.value)


def test_a_softmax_whose_scale_no_kernel_takes(maker: Edgeq) -> None:
    """An annotated softmax output must have the scale 1/256."""
    from torchao.quantization.pt2e.observer import MinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec

    from pytest_edgeq import litert

    quantizer = litert.pt2e_preset("pt2e_static_int8")
    kind = type(quantizer)
    spec = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=MinMaxObserver,
    )

    class WithSoftmax(kind):  # type: ignore[valid-type, misc] # the class is the library's own
        def annotate(self, model: Any) -> Any:
            model = super().annotate(model)
            for node in model.graph.nodes:
                if node.target == torch.ops.aten.softmax.int:
                    node.meta["quantization_annotation"] = QuantizationAnnotation(
                        input_qspec_map={node.args[0]: spec}, output_qspec=spec, _annotated=True
                    )
            return model

    with pytest.raises(RuntimeError, match=r"cannot load the .tflite file: SOFTMAX") as caught:
        maker.quantize(
            seeded(SoftmaxHead),
            SoftmaxHead.sample_inputs(),
            quantizer=WithSoftmax().set_global(quantizer.global_config),
            calibration=samples(SoftmaxHead, 4),
        )

    assert "1/256" in str(caught.value)


def test_a_quantizer_that_quantizes_nothing(maker: Edgeq) -> None:
    """A float file in silence is the worst answer."""
    from torchao.quantization.pt2e.quantizer import Quantizer

    class Idle(Quantizer):  # type: ignore[misc] # torchao ships no types
        def annotate(self, model: Any) -> Any:
            return model

        def validate(self, model: Any) -> None:
            return None

    with pytest.raises(ValueError, match=r"nothing was quantized by Idle: every op.*in float"):
        maker.quantize(
            seeded(ResidualNet),
            ResidualNet.sample_inputs(),
            quantizer=Idle(),
            calibration=samples(ResidualNet, 2),
        )


def test_a_recipe_that_quantizes_nothing(maker: Edgeq) -> None:
    """Its only rule leaves every op in float."""
    rules = _rules()
    rules[0] = {"regex": ".*", "operation": "*", "algorithm_key": "no_quantize"}
    with pytest.raises(ValueError, match=r"nothing was quantized by recipe"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=rules)


def _rules() -> list[dict[str, Any]]:
    from pytest_edgeq import litert

    return litert.load_recipe("recipe_dynamic_wi8_afp32")


def test_a_recipe_as_a_list_and_as_a_file(maker: Edgeq, tmp_path: Path) -> None:
    """The two give the same file."""
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(_rules()), encoding="utf-8")
    model = seeded(ResidualNet)
    made = [
        maker.quantize(model, ResidualNet.sample_inputs(), quantizer=recipe).tflite
        for recipe in (_rules(), str(path), path)
    ]
    path.unlink()

    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        ("{", ValueError, "is not JSON"),
        ('{"regex": ".*"}', TypeError, "expected a list of dicts"),
        ("[]", ValueError, "has no rule"),
        ('[{"regex": ".*"}]', ValueError, "rule 1 of 1: 'operation' and .* missing"),
        ("[3]", TypeError, "expected a list of dicts"),
    ],
)
def test_a_bad_recipe_file(
    maker: Edgeq, tmp_path: Path, content: str, error: type[Exception], told: str
) -> None:
    """Broken JSON, another shape, no rule, a rule without its parts."""
    path = tmp_path / "rules.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=told):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=str(path))
    path.unlink()


def test_a_recipe_path_that_does_not_exist(maker: Edgeq) -> None:
    """It is a FileNotFoundError with the path."""
    with pytest.raises(FileNotFoundError, match=r"no recipe at nowhere.json"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer="nowhere.json")


def test_an_unknown_preset(maker: Edgeq) -> None:
    """The nearest and all valid ones are listed."""
    with pytest.raises(ValueError, match=r"unknown quantizer preset 'pt2e_int8'") as caught:
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer="pt2e_int8")

    assert "pt2e_static_int8" in str(caught.value)
    assert "recipe_weight_only_wi4_afp32" in str(caught.value)


@pytest.mark.parametrize("thing", [3, object(), ResidualNet, {"regex": ".*"}])
def test_something_that_is_no_quantizer(maker: Edgeq, thing: Any) -> None:
    """The kinds that are taken are listed."""
    with pytest.raises(TypeError, match=r"quantizer: expected a preset's name, a PT2E Quantizer"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=thing)


def test_a_quantizer_class_is_to_be_instantiated(maker: Edgeq) -> None:
    """The class instead of an instance is a frequent slip."""
    from pytest_edgeq import litert

    kind = type(litert.pt2e_preset("pt2e_static_int8"))
    with pytest.raises(TypeError, match=r"instantiate it"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=kind)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("preset", ["pt2e_static_int8", "recipe_static_wi8_ai8", None])
def test_the_model_is_left_as_it_was(maker: Edgeq, preset: str | None) -> None:
    """Parameters and buffers bit for bit, training flags, hooks, gradients."""
    model = seeded(ResidualNet)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    hooks = dict(model._forward_hooks)
    maker.quantize(
        model,
        ResidualNet.sample_inputs(),
        quantizer=preset,
        calibration=samples(ResidualNet, 4),
    )

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {n: v.data_ptr() for n, v in model.state_dict().items()} == pointers
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert dict(model._forward_hooks) == hooks
    handle.remove()


def test_bad_settings() -> None:
    """Runtime, threads and seed are checked when an Edgeq is made."""
    with pytest.raises(ValueError, match=r"unknown runtime 'xnpack' .did you mean .*valid: "):
        Edgeq(runtime="xnpack")
    with pytest.raises(ValueError, match=r"threads: expected at least 1, got 0"):
        Edgeq(threads=0)
    with pytest.raises(ValueError, match=r"seed: expected 0"):
        Edgeq(seed=-1)


def test_a_model_that_gives_none(maker: Edgeq) -> None:
    """The converter's own words do not say that it is about an output; ours do."""

    class WithNone(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + 1, None

    with pytest.raises(RuntimeError, match="gives None among its outputs") as caught:
        maker.quantize(WithNone().eval(), (torch.ones(1, 4),), quantizer=None)

    assert "contained a None item" in str(caught.value)


class _Encoding(nn.Module):
    """An input that is joined with a multiple of itself, as positional encodings do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, 4)
        self.frequencies = nn.Buffer(2.0 ** torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (x[..., None] * self.frequencies).flatten(-2)
        y: torch.Tensor = self.head(torch.cat([x, scaled], 1))
        return y


def _between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Conv2d(4, 4, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "match"),
    [
        (_Encoding, (1, 4), "gave the op that the last lines name scales or dtypes"),
        (lambda: _between(nn.Threshold(0.1, 0.5)), (1, 3, 8, 8), "confuses NCHW and NHWC"),
        (lambda: _between(nn.LogSigmoid()), (1, 3, 8, 8), "confuses NCHW and NHWC"),
    ],
)
def test_a_quantized_graph_that_the_converter_cannot_write(
    maker: Edgeq, make: Callable[[], nn.Module], shape: tuple[int, ...], match: str
) -> None:
    """Not an op that it cannot lower: the way out that we name converts the same model."""
    model, x = seeded(make), (normal(*shape, seed=0),)
    with pytest.raises(RuntimeError, match=match) as caught:
        maker.quantize(model, x, quantizer="pt2e_static_int8", calibration=[x])
    assert "quantize by a recipe (recipe_static_wi8_ai8)" in str(caught.value)
    assert maker.quantize(model, x, quantizer="recipe_static_wi8_ai8", calibration=[x]).tflite


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", "recipe_dynamic_wi8_afp32"])
def test_a_model_whose_own_forward_fails(maker: Edgeq, quantizer: str | None) -> None:
    """No exporter and no converter refuses it: it does not run in torch."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4)).eval(), (torch.ones(1, 4),)
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(model, x, quantizer=quantizer, calibration=[x] if quantizer else None)
    assert str(caught.value).splitlines() == [
        "Sequential: its forward fails on the sample inputs (args_0: float32 1×4)",
        "cause: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 8x4)",
        "fix: give inputs that the model takes in eval mode; no quantizer is involved",
    ]


class _Recurrent(nn.Module):
    def __init__(self, *, state: bool) -> None:
        super().__init__()
        self.state = state
        self.recurrent = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        steps, last = self.recurrent(x)
        return (self.head(steps), last) if self.state else (self.head(steps),)


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True])
def test_a_gru_that_the_annotator_fails_on(maker: Edgeq, state: bool) -> None:
    """It is named, and the way out converts it."""
    model, x = seeded(lambda: _Recurrent(state=state)), (normal(1, 5, 4, seed=0),)
    with pytest.raises(RuntimeError, match=r"annotator of nn.GRU \(recurrent\) fails") as caught:
        maker.quantize(model, x, quantizer="pt2e_static_int8", calibration=[x])
    assert "quantize by a recipe (recipe_static_wi8_ai8)" in str(caught.value)
    # The last state as an output is another fault upstream, which is told by itself.
    if not state:
        assert maker.quantize(model, x, quantizer="recipe_static_wi8_ai8", calibration=[x]).tflite


def test_weights_that_hold_nan(maker: Edgeq) -> None:
    """They are named; the observers' own words come behind."""
    last, x = nn.Linear(4, 3), (normal(1, 4, seed=0),)
    model = nn.Sequential(nn.Linear(4, 4), last).eval()
    with torch.no_grad():
        last.bias[1] = math.nan
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(model, x, quantizer="pt2e_static_int8", calibration=[x])
    assert str(caught.value).splitlines()[0] == (
        "Sequential: its weights hold NaN: 1.bias (1 of 3 values): load a checkpoint that is whole"
    )


def test_images_as_they_were_read(maker: Edgeq) -> None:
    """Whole numbers where the weights are floats: what was given is told, and what is usual."""
    model, x = nn.Linear(4, 3).eval(), (torch.ones(1, 4, dtype=torch.uint8),)
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(model, x, quantizer="pt2e_static_int8", calibration=[x])
    first, *_, last = str(caught.value).splitlines()
    assert first == "Linear: its forward fails on the sample inputs (args_0: uint8 1×4)"
    assert last == (
        "fix: give inputs that the model takes in eval mode; no quantizer is involved; for images, "
        "usually x.float() / 255"
    )


def test_an_observer_at_what_gives_several_tensors() -> None:
    """Met where a decoder parts queries, keys and values by unbind (torchao 0.18.0)."""
    error = AttributeError("'tuple' object has no attribute 'numel'")
    assert refusal("Net", "calibration sample 0", error, is_annotated=True).startswith(
        "calibration sample 0 stops Net: the quantizer observes an op that gives several tensors "
        "(unbind, split, chunk): take the parts by indices or slices in the model (x[:, 0] in "
    )


@pytest.mark.parametrize("who", ["torch.export", "the converter"])
def test_no_quantizer_is_blamed_where_none_annotated(who: str) -> None:
    """The same words come from the export of a float model, such as a Nystromformer's."""
    error = RuntimeError("Attempting to broadcast a dimension of length 16 at -2!")
    text = refusal("Net", who, error)
    assert text.startswith(f"{who} refuses Net: ")
    assert "quantizer" not in text


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "recipe_static_wi8_ai8"])
def test_a_transposed_convolution_that_the_converter_cannot_pad(
    maker: Edgeq, quantizer: str
) -> None:
    """The layer is named, and what it may be in its place converts and has the same shape."""

    def model(kernel: int, more: int) -> nn.Module:
        up = nn.ConvTranspose2d(4, 4, kernel, stride=2, padding=1, output_padding=more)
        return nn.Sequential(nn.Conv2d(3, 4, 3), up).eval()

    x = (normal(1, 3, 8, 8, seed=0),)
    refused, lowered = model(3, 1), model(4, 0)
    assert refused(*x).shape == lowered(*x).shape
    with pytest.raises(RuntimeError, match=r"padding it cannot lower: 1\. It lowers") as caught:
        maker.quantize(refused, x, quantizer=quantizer, calibration=[x])
    assert str(caught.value).startswith("the converter refuses Sequential: transposed")
    assert maker.quantize(lowered, x, quantizer=quantizer, calibration=[x]).tflite


def test_a_symptom_in_the_middle_of_a_long_line_is_recognized() -> None:
    """MLIR begins a line with a path: the installation decides where the line is cut."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1))
    traced = Traced(model, (normal(1, 4, 8, 8, seed=0),))
    for path in range(0, 400, 10):
        line = f"{'p' * path}: failed to legalize operation 'mhlo.convolution'{'x' * 400}"
        text = refusal("Sequential", "the converter", RuntimeError(line), [traced])
        assert "transposed convolutions whose padding it cannot lower: 0. " in text, path


class _Best(nn.Module):
    """The greatest scores, for which the converter has no op of TFLite."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give three of them."""
        best: torch.Tensor = self.scores(x).topk(3, -1).values * 2
        return best


@pytest.mark.parametrize("preset", [None, "recipe_static_wi8_ai8"])
def test_an_op_that_no_kernel_computes(maker: Edgeq, preset: str | None) -> None:
    """Also where the library that calibrates meets it first."""
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(
            _Best().eval(),
            (normal(2, 4, seed=0),),
            quantizer=preset,
            calibration=None if preset is None else [(normal(2, 4, seed=i),) for i in range(2)],
        )
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: STABLEHLO_SORT #")
    assert "no kernel of LiteRT (xnnpack, builtin, reference) computes STABLEHLO_SORT " in second
    assert "(torch.sort, torch.topk): keep that part out of the model" in second


class _Whitened(nn.Module):
    """A residual written as a sum of matrices, with the identity made in the forward."""

    def __init__(self, *, stored: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.one = nn.Buffer(torch.eye(4)) if stored else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the matrix."""
        one = torch.eye(4) if self.one is None else self.one
        return x @ (self.mix.weight + one)


def test_an_identity_matrix_that_the_forward_makes(maker: Edgeq) -> None:
    """The cause names what makes it, and what the cause says helps."""
    x = (normal(2, 4, seed=0),)
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(_Whitened(stored=False).eval(), x, quantizer=None)
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: STABLEHLO_IOTA #")
    assert "(torch.eye): register it as a buffer of the module" in second
    assert "torch.sort" not in second
    assert maker.quantize(_Whitened(stored=True).eval(), x, quantizer=None).tflite


class _Columns(nn.Module):
    """A convolution that is told the column of each pixel."""

    def __init__(self, *, repeated: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3)
        self.repeated = repeated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve."""
        columns = torch.arange(5.0).view(1, 1, 1, 5)
        whole = columns.repeat(1, 1, 6, 1) if self.repeated else columns.expand(1, 1, 6, 5)
        made: torch.Tensor = self.convolution(torch.cat([x, whole], 1))
        return made


def test_an_expanded_constant_whose_channels_are_not_moved(maker: Edgeq) -> None:
    """The cause says what the converter did, and what it says helps."""
    x = (normal(1, 3, 6, 5, seed=0),)
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(_Columns(repeated=False).eval(), x, quantizer=None)
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: BROADCAST_TO #")
    assert second.startswith("cause: the tensor does not broadcast to the shape that the op has")
    assert "or repeat it in place of expanding it" in second
    quantized = maker.quantize(_Columns(repeated=True).eval(), x, quantizer=None)
    assert maker.compare(quantized, [x]).total.sqnr_db > 100


class _LearnedQueries(nn.Module):
    """Scores of tokens by queries that no input changes, as Perceiver's are."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(normal(4, 16, seed=1))
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score."""
        scores: torch.Tensor = self.queries(self.latents) @ self.keys(x).mT
        return scores


def test_a_product_in_float_of_codes(maker: Edgeq) -> None:
    """The cause says which product, and what it says helps."""
    x = [(normal(1, 20, 8, seed=i),) for i in range(8)]
    model = _LearnedQueries().eval()
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(model, x[0], quantizer="pt2e_static_int8", calibration=x)
    first, second, third = str(caught.value).splitlines()[:3]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: FULLY_CONNECTED #")
    assert second.startswith("cause: it takes int8 and gives float32; no kernel does, and one of ")
    assert second.endswith("takes the dequantization in front of it away")
    assert third.startswith("fix: quantize by a recipe (recipe_static_wi8_ai8)")
    made = maker.quantize(model, x[0], quantizer="recipe_static_wi8_ai8", calibration=x)
    assert maker.compare(made, [(normal(1, 20, 8, seed=99),)]).total.sqnr_db > 10


class _Overlapping(nn.Module):
    """Patches that overlap, added up."""

    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.folded = folded
        self.places = nn.Buffer(torch.eye(16).view(16, 1, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join them to an image."""
        if self.folded:
            return nn.functional.fold(x, (8, 8), 4, stride=2)
        return nn.functional.conv_transpose2d(x.view(1, 16, 3, 3), self.places, stride=2)


def test_patches_that_a_scatter_adds_up(maker: Edgeq) -> None:
    """The cause names what torch calls it, and what the cause says helps."""
    x = (normal(1, 16, 9, seed=0),)
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(_Overlapping(folded=True).eval(), x, quantizer=None)
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: STABLEHLO_SCATTER")
    assert "(scatter_add, index_add, F.fold): multiply by a constant matrix" in second
    assert maker.quantize(_Overlapping(folded=False).eval(), x, quantizer=None).tflite
    folded, convolved = (_Overlapping(folded=each)(*x) for each in (True, False))
    assert torch.allclose(folded, convolved, atol=1e-5)


class _Expectation(nn.Module):
    """The mean of a distribution over bins, by a convolution whose weight the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give one number a pixel."""
        numbers = torch.arange(8.0).view(1, 8, 1, 1)
        means: torch.Tensor = nn.functional.conv2d(self.bins(x).softmax(1), numbers)
        return means


def test_a_weight_that_is_computed_when_the_model_runs(maker: Edgeq) -> None:
    """The preset annotates it as a stored one, and no activation is to blame."""
    x = (normal(1, 3, 4, 4, seed=0),)
    with pytest.raises(ValueError, match=r"its weight view\w* is computed when") as caught:
        maker.quantize(_Expectation().eval(), x, quantizer="pt2e_static_int8", calibration=[x])
    assert "activation" not in str(caught.value)


class _FromTheLeft(nn.Module):
    """A constant times what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.layer = nn.Parameter(normal(1, 6, 5, seed=3)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give six rows."""
        rows: torch.Tensor = self.left @ self.layer(x)
        return rows


class _Quotient(nn.Module):
    """A quotient whose divisor is next to 0 in places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give four numbers a row."""
        quotient: torch.Tensor = self.layer(x) / (torch.relu(self.layer(x.flip(-1))) + 1e-6)
        return quotient


@pytest.mark.parametrize(
    ("kind", "preset", "told"),
    [
        (
            _FromTheLeft,
            "recipe_dynamic_wi8_afp32",
            "codes beside floats as the second operand alone",
        ),
        (_Quotient, "recipe_static_wi8_ai8", "a divisor is the code of 0"),
    ],
)
def test_operands_that_the_kernels_of_a_recipe_refuse(
    maker: Edgeq, kind: type[nn.Module], preset: str, told: str
) -> None:
    """In a sentence with a way out, in front of the kernel's own condition."""
    torch.manual_seed(0)
    x = (normal(1, 5, 4, seed=0),)
    with pytest.raises(RuntimeError, match="leave the op in float") as caught:
        maker.quantize(
            kind().eval(), x, quantizer=preset, calibration=[x] if "static" in preset else None
        )
    assert told in str(caught.value)
