"""Explain errors of export, quantizers and converters: cause and fix."""

from __future__ import annotations

import linecache
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from pytest_edgeq import litert
from pytest_edgeq.errors import CrashedConversionError
from pytest_edgeq.names import readable
from pytest_edgeq.quantize.cache.environment import is_installed
from pytest_edgeq.versions import check_stack, producer, untried

# By library, if its message is unknown.
_HINTS = {
    "torch.export": "its forward runs on the sample inputs, and fails while torch traces it",
    "the quantizer": (
        "its annotations do not fit the exported graph; a part of the model that it does not "
        "know can be left in float by a subclass that overrides annotate, or quantized by a "
        "recipe instead"
    ),
    "calibration": (
        "the observers or the model cannot take this sample: look for NaN in the weights, and "
        "for indices out of range"
    ),
    "the converter": (
        "an op or a dtype that litert-torch cannot lower; the last lines name it. Replace it "
        "in the model, or keep that part out of the file"
    ),
}

_BY_VALUES = (
    "its forward must be traceable: no Python branch on a tensor's values (torch.where instead), "
    "no sizes or indices that come from a tensor's values (.item(), x[x > 0])"
)

# Known messages of torch.export (torch 2.13).
_OF_TRACES = {
    "[Dd]ata-dependent": _BY_VALUES,
    r"\.numpy\(\) is not supported|can't convert .* to numpy": (
        "it computes in numpy, which no trace can follow: use torch's functions in forward"
    ),
}

# Known messages of the converter (litert-torch 0.10.0).
_KNOWN = {
    "ConcretizationTypeError|NonConcreteBooleanIndexError": _BY_VALUES,
    # It lowers no output that is None.
    "contained a None item": (
        "its forward returns None among its outputs; wrap it in a module that returns tensors"
    ),
    "BFloat16|x(b?f16|f64)>|:f16:": (
        "it computes in half or double precision, for which litert-torch lacks ops: pass "
        "model.float() and float32 inputs"
    ),
    "Lowering not found: cond": (
        "litert-torch lowers no torch.cond; compute both branches and choose between them: "
        "torch.where(condition, one, other)"
    ),
    "Lowering not found: while_loop": (
        "litert-torch lowers no while_loop; repeat the steps a fixed number of times in Python"
    ),
    # It cannot name the outputs of a namedtuple.
    "'type' object is not iterable": (
        "its forward returns a namedtuple; wrap it in a module that returns a plain tuple or a dict"
    ),
}

# The converter's errors for a dynamic size, which it reads as -2^63 or a tracer.
_OPEN_SIZE = "JitTracer|-9223372036854775808|-18446744073709551616|RankedTensorType"

_OPEN = (
    "litert-torch does not lower the op that the last lines name with sizes left open ({}): give "
    'no dynamic_shapes, but a signature for each size: sample_inputs={{"one": …, "two": …}}'
)

# Known messages of the converter for a graph that a quantizer has annotated.
_OF_ANNOTATIONS = {
    "'(tuple|list)' object has no attribute": (
        "the quantizer observes an op that returns several tensors (unbind, split, chunk): take "
        "the parts by indices or slices in the model (x[:, 0] in place of x.unbind(1)), or "
        "quantize by a recipe (recipe_static_wi8_ai8)"
    ),
    # It lowers the model, but not with the quantizer's annotations.
    "quantization parameters violate|failed to verify that .* must have same element type": (
        "the quantizer wrote scales or dtypes that TFLite does not allow for the op in the last "
        "lines (for instance, two ops read one tensor and need different scales of it): leave the "
        "op in float by a subclass of the quantizer that overrides annotate, or quantize by a "
        "recipe (recipe_static_wi8_ai8)"
    ),
}

# torchao 0.18.0 asserts that both results of a GRU are used, or reads users that do not exist.
_GRU = (
    "its annotator of nn.GRU ({}) fails where the last state is not used, and where it is an "
    "output: quantize by a recipe (recipe_static_wi8_ai8)"
)

# TRANSPOSE_CONV and litert-torch 0.10.0 support the paddings VALID and SAME only.
_TRANSPOSED = (
    "transposed convolutions whose padding it cannot lower: {}. It lowers those without padding, "
    "and those with kernel_size = stride + 2 · padding and no output_padding, such as "
    "kernel_size=4, stride=2, padding=1 in place of kernel_size=3, stride=2, padding=1, "
    "output_padding=1, which doubles the size as well"
)


_Result = TypeVar("_Result")


def refuse_clearly(
    name: str,
    who: str,
    step: Callable[[], _Result],
    tried: Iterable[litert.Traced] = (),
    *,
    is_annotated: bool = True,
    strict_export: bool = True,
) -> _Result:
    """Run a step, and raise any error of its library in full, after a hint."""
    try:
        return step()
    except litert.RefusedError as refused:
        raise ValueError(f"{name}: {refused}") from None  # its text is complete
    except CrashedConversionError:
        raise
    except Exception as error:
        check_stack(error)
        text = refusal(
            name, who, error, tried, is_annotated=is_annotated, strict_export=strict_export
        )
        raise RuntimeError(text) from error


def refusal(
    name: str,
    who: str,
    error: Exception,
    tried: Iterable[litert.Traced] = (),
    *,
    is_annotated: bool = False,
    strict_export: bool = True,
) -> str:
    """Return a hint, the library's message, and an option that may matter."""
    tried = list(tried)
    for traced in tried:
        own = _own_error(traced)
        if own is not None:
            return (
                f"{name}: its forward fails on the sample inputs ({_input_text(traced)})\n"
                f"cause: {_shortened(own)}\n"
                "fix: give inputs that the model accepts in eval mode; no quantizer is involved"
                f"{_as_floats(traced)}"
            )
    text = _hinted(name, who, error, tried, is_annotated=is_annotated)
    return text if strict_export else f"{text}\n{_NOT_STRICT}"


_NOT_STRICT = (
    "strict_export=False was given: the default, True, traces the model in another way, and may "
    "take it"
)


def _hinted(
    name: str, who: str, error: Exception, tried: Sequence[litert.Traced], *, is_annotated: bool
) -> str:
    """Return a hint and the library's message, if the model runs."""
    if who == "the converter" and any(map(_is_export, _frames(error))):
        who = "torch.export"
    if who == "torch.export":
        return _untraceable(name, error, tried)
    # Symptoms are searched in whole messages; the printed ones may be shortened.
    message, words = _message(error), _shortened(error)
    *_, innermost = _chain(error)
    if innermost is not error:
        message += f"\n{_message(innermost)}"
        words += f"\ncause: {_shortened(innermost)}"
    if who.startswith("calibration"):
        broken = [text for traced in tried for text in _not_a_number(traced.model)]
        if broken:
            return (
                f"{name}: its weights hold NaN: {', '.join(broken[:4])}"
                f"{', …' if len(broken) > 4 else ''}: load a checkpoint that is whole\n{words}"
            )
    for of, symptom, search, text in _OF_LAYERS:
        if who == of and re.search(symptom, message):
            found = [each for traced in tried for each in search(traced)]
            if found:
                return f"{who} refuses {name}: {text.format(', '.join(found))}\n{words}"
    meanings = (_KNOWN | (_OF_ANNOTATIONS if is_annotated else {})).items()
    hint = next((hint for symptom, hint in meanings if re.search(symptom, message)), None)
    verb = "stops" if who.startswith("calibration") else "refuses"
    if hint is None and (new := untried(producer())):
        requirements = " ".join(each.requirement for each in new if each.requirement)
        return (
            f"{who} {verb} {name}: pytest-edgeq was not tried with {', '.join(map(str, new))}\n"
            f"{words}" + f"\nfix: pip install {requirements}" * bool(requirements)
        )
    hint = hint or _HINTS[who.split(" sample")[0]]
    return f"{who} {verb} {name}: {hint}\n{words}"


def _untraceable(name: str, error: Exception, tried: Sequence[litert.Traced]) -> str:
    """Return the error of torch.export and the line of the model that raised it."""
    *_, innermost = _chain(error)
    message = f"{_message(error)}\n{_message(innermost)}"
    traces = _OF_TRACES.items()
    hint = next((hint for symptom, hint in traces if re.search(symptom, message)), None)
    lines = [f"torch.export refuses {name}: {hint or _HINTS['torch.export']}"]
    packages = {
        type(module).__module__.partition(".")[0]
        for traced in tried
        for module in traced.model.modules()
    } - {"torch"}
    frames = [frame for frame in _frames(error) if _is_own(frame, packages)]
    if frames:
        frame, line = frames[-1]
        code = frame.f_code
        source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        lines.append(f"at {code.co_filename}:{line}, in {code.co_name}: {source}")
    # After the first paragraph torch explains how to debug it.
    return "\n".join([*lines, _shortened(innermost).partition("\n\n")[0]])


def _frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """Return the frames of a chain of errors, each with its line, innermost last."""
    return [frame for each in _chain(error) for frame in traceback.walk_tb(each.__traceback__)]


def _is_export(frame: tuple[types.FrameType, int]) -> bool:
    """Return whether a frame is the call of `torch.export.export`."""
    code = frame[0].f_code
    return code.co_name == "export" and code.co_filename == torch.export.__file__


def _is_own(frame: tuple[types.FrameType, int], packages: Collection[str]) -> bool:
    """Return whether a frame runs the model's own code."""
    file = frame[0].f_code.co_filename
    if str(frame[0].f_globals.get("__name__")).partition(".")[0] in packages:
        return True
    return not is_installed(file) and not Path(file).is_relative_to(Path(__file__).parents[1])


def _open_sizes(traced: litert.Traced) -> Iterator[str]:
    """Yield the dynamic axes, by input."""
    if traced.dynamic_shapes is None:
        return
    program = litert.export(traced, runs=False)
    for node in program.graph.find_nodes(op="placeholder"):
        shape = getattr(node.meta.get("val"), "shape", ())
        axes = [str(i) for i, size in enumerate(shape) if isinstance(size, torch.SymInt)]
        if axes:
            yield f"{node.name}: {'axis' if len(axes) == 1 else 'axes'} {' and '.join(axes)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those from which, or during whose handling, it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _own_error(traced: litert.Traced) -> Exception | None:
    try:
        with torch.no_grad():
            traced.model(*traced.args, **traced.kwargs)
    except Exception as error:
        # Whatever the user's code raises.
        return error
    return None


def _input_text(traced: litert.Traced) -> str:
    """Format the sample inputs: dtype and shape of each."""
    inputs = [*((f"args_{i}", each) for i, each in enumerate(traced.args)), *traced.kwargs.items()]
    return ", ".join(
        f"{name}: {str(each.dtype).removeprefix('torch.')} {'×'.join(map(str, each.shape))}"
        if isinstance(each, torch.Tensor)
        else f"{name}: {type(each).__name__}"
        for name, each in inputs
    )


def _as_floats(traced: litert.Traced) -> str:
    """Return a hint if weights are floats and all inputs integers, such as images."""
    dtypes = [each.dtype for each in (*traced.args, *traced.kwargs.values())]
    floats = any(weight.is_floating_point() for weight in traced.model.parameters())
    if not floats or any(dtype.is_floating_point for dtype in dtypes):
        return ""
    return "; for images, usually x.float() / 255"


def _not_a_number(model: torch.nn.Module) -> Iterator[str]:
    """Yield the parameters and buffers with NaN, and how many."""
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        count = int(torch.isnan(values).sum())
        if count:
            yield f"{readable(name)} ({count} of {values.numel()} values)"


def _recurrent(traced: litert.Traced) -> Iterator[str]:
    """Yield the names of the GRUs."""
    for name, layer in traced.model.named_modules():
        if isinstance(layer, torch.nn.GRU):
            yield readable(name) or "the model itself"


def _unknown_transposed(traced: litert.Traced) -> Iterator[str]:
    """Yield the names of the transposed convolutions that the converter cannot lower."""
    layers = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
    for name, layer in traced.model.named_modules():
        if not isinstance(layer, layers):
            continue
        # The padding of a transposed convolution is never a string.
        paddings = [int(each) for each in layer.padding]
        sizes = zip(layer.kernel_size, layer.stride, paddings, layer.output_padding, strict=True)
        if any(
            padding and stride > 1 and (kernel != stride + 2 * padding or more)
            for kernel, stride, padding, more in sizes
        ):
            yield readable(name) or "the model itself"


# By library and symptom: what finds the layers or inputs that it cannot process, and the hint.
_OF_LAYERS = (
    ("the quantizer", "have two outputs|list index out of range", _recurrent, _GRU),
    ("the converter", "legalize operation 'mhlo.conv", _unknown_transposed, _TRANSPOSED),
    ("the converter", _OPEN_SIZE, _open_sizes, _OPEN),
)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shortened(error: BaseException) -> str:
    """Return class and message of an error, shortened in the middle."""
    lines = [
        line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
        for line in _message(error).splitlines()
    ]
    return "\n".join(lines if len(lines) <= 20 else [*lines[:10], "…", *lines[-9:]])


_LONGEST = 400
"""Characters of a line; torch and MLIR print whole modules and constants."""
