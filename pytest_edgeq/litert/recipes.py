"""Recipes: the rules of ai-edge-quantizer, on a float `.tflite`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.libraries import quiet, recipe_module, registered_by_others
from pytest_edgeq.litert.rules import check_rules
from pytest_edgeq.names import PRESETS
from pytest_edgeq.versions import check_stack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pytest_edgeq.litert.native import Native

    Recipe = list[dict[str, Any]]


def load_recipe(recipe: str | os.PathLike[str] | Recipe) -> Recipe:
    """Return a recipe's rules from a preset's name, a `.json` path or a list."""
    where = "recipe"
    if isinstance(recipe, str) and recipe in PRESETS:
        rules = getattr(recipe_module("recipe"), recipe.removeprefix("recipe_"))()
    elif isinstance(recipe, (str, os.PathLike)):
        path = Path(recipe)
        where = f"recipe {path}"
        if not path.is_file():
            raise FileNotFoundError(f"no recipe at {path}")
        try:
            rules = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
    else:
        rules = recipe
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise TypeError(
            f"{where}: expected a list of dicts, one a rule, got {type(rules).__name__}"
        )
    if not rules:
        raise ValueError(f"{where} has no rule: nothing would be quantized")
    try:
        # Recipes from the library's own functions have enums.
        plain: Recipe = json.loads(json.dumps(rules))
    except TypeError as error:
        raise TypeError(f"{where}: a rule is not plain data: {error}") from None
    check_rules(plain, where)
    return plain


def _recipe_quantizer(float_tflite: bytes, recipe: Recipe) -> Any:
    library = recipe_module("quantizer")
    with quiet(), _refusals("refuses the recipe"):
        return library.Quantizer(float_tflite, recipe)


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Name the library in its errors: ai-edge-quantizer raises errors of any class."""
    try:
        yield
    except Exception as error:
        check_stack(error)
        raise RuntimeError(
            f"ai-edge-quantizer {what}: check the rules' operations, bits and granularity, and "
            "whether the library knows every op of the float .tflite (model.float_tflite)\n"
            f"{type(error).__name__}: {error}"
        ) from error


def calibrate_recipe(
    float_tflite: bytes,
    recipe: Recipe,
    samples: Mapping[str, Iterable[Mapping[str, npt.NDArray[np.generic]]]],
    *,
    threads: int,
    native: Native | None = None,
) -> Any | None:
    """Collect the ranges that a recipe needs, by running the float `.tflite`; None if none."""
    if not _recipe_quantizer(float_tflite, recipe).need_calibration:
        return None
    native = _that_can_run("calibrate", native)
    call, key = _call_here if native is None else native.call, next(_keys)
    call("calibrate", begin_calibration, key, float_tflite, recipe, threads)
    try:
        for signature, stream in samples.items():
            for sample in stream:
                call("calibrate", add_sample, key, signature, dict(sample))
        return call("calibrate", end_calibration, key)
    finally:
        _running.pop(key, None)


def _call_here(step: str, function: Callable[..., Any], /, *arguments: Any) -> Any:
    return function(*arguments)


def _no_progress_bar() -> AbstractContextManager[object]:
    """Suppress the bars that ai-edge-quantizer 0.10.0 draws for 100 operations or tensors."""
    return contextlib.redirect_stderr(io.StringIO())


_keys = itertools.count()

_running: dict[int, tuple[Any, Any]] = {}
"""Calibrator and rules of each calibration in progress, often for another process."""


def begin_calibration(key: int, float_tflite: bytes, recipe: Recipe, threads: int) -> None:
    """Start to collect ranges."""
    manager = recipe_module("recipe_manager").RecipeManager()
    with quiet():
        manager.load_quantization_recipe(recipe)
        calibrator = recipe_module("calibrator").Calibrator(float_tflite, num_threads=threads)
    _running[key] = calibrator, manager


def add_sample(key: int, signature: str, sample: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Add a sample to a calibration in progress."""
    if key not in _running:
        raise RuntimeError("the process that collected the ranges was ended by another test")
    calibrator, manager = _running[key]
    # One sample a call: `Quantizer.calibrate` counts its data set with len(list(…)) before it reads
    # it (ai-edge-quantizer 0.10.0), so a generator comes out empty and a list is held whole. The
    # ranges gathered are the same.
    with quiet(), _no_progress_bar(), _refusals("cannot calibrate for the recipe"):
        calibrator.calibrate({signature: [sample]}, manager)


def end_calibration(key: int) -> Any:
    """Return the collected ranges."""
    return _running.pop(key)[0].get_model_qsvs()


def _that_can_run(step: str, native: Native | None) -> Native | None:
    """Return the other process, unless it lacks rules registered in this one."""
    if native is not None and (foreign := registered_by_others()):
        native.runs_here(step, f"{foreign[0]} was registered by other code")
        return None
    return native


def biases_of_any_rank() -> AbstractContextManager[None]:
    """
    Quantize a bias along its channels, whatever its shape.

    ai-edge-quantizer 0.10.0 assumes that every bias has one dimension and writes its scales along
    dimension 0. A bias that litert-torch 0.10.0 folds from an ADD behind the layer has the shape
    (1, 1, 1, channels), for instance of a transposed convolution before a batch norm or of a linear
    layer on NHWC before LayerScale: no interpreter opens the file (`num_scales must be 1 for per-
    layer quantization, or 1 for per-axis quantization, but got 12`).
    """
    library = recipe_module("algorithms.uniform_quantize.uniform_quantize_tensor")
    quantize = library.symmetric_quantize_bias_tensor

    def along_channels(bias: npt.NDArray[Any], *args: Any, **kwargs: Any) -> Any:
        quantized = quantize(bias.reshape(-1), *args, **kwargs)
        along = None if quantized.quantized_dimension is None else bias.ndim - 1
        codes = quantized.quantized_data.reshape(bias.shape)
        return dataclasses.replace(quantized, quantized_dimension=along, quantized_data=codes)

    return replaced(library, symmetric_quantize_bias_tensor=along_channels)


def quantize_recipe(
    float_tflite: bytes, recipe: Recipe, calibration: Any | None, native: Native | None = None
) -> bytes:
    """Quantize a float `.tflite` by a recipe."""
    native = _that_can_run("quantize", native)
    if native is not None:
        return native.call("quantize", quantize_recipe, float_tflite, recipe, calibration)
    quantizer = _recipe_quantizer(float_tflite, recipe)
    # Its report of sizes and times is written to standard output.
    with (
        quiet(),
        contextlib.redirect_stdout(io.StringIO()),
        _no_progress_bar(),
        biases_of_any_rank(),
        _refusals("cannot apply the recipe"),
    ):
        result = quantizer.quantize(calibration, enable_progress_report=False)
    return bytes(result.quantized_model)
