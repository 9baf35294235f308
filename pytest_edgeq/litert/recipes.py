"""Recipes: the rules of ai-edge-quantizer, on a float `.tflite`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.libraries import recipe_module
from pytest_edgeq.litert.rules import check_rules
from pytest_edgeq.presets import PRESETS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Recipe = list[dict[str, Any]]


__all__ = ["biases_of_any_rank", "calibrate_recipe", "load_recipe", "quantize_recipe"]


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """
    Give a recipe's rules from our preset's name, a `.json` path or the list itself.

    Returns:
        The rules, plain: as JSON holds them.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The file is not JSON, there is no rule in it, or a rule says something that the
            library does not know.
        TypeError: The content is not a list of dicts.
    """
    where = "recipe"
    if isinstance(recipe, str) and recipe in PRESETS:
        rules = getattr(recipe_module("recipe"), recipe.removeprefix("recipe_"))()
    elif isinstance(recipe, (str, Path)):
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
        # What the library's own functions give holds enums.
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
    """Say whose error it is: ai-edge-quantizer raises whatever it stumbles over."""
    try:
        yield
    except Exception as error:
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
) -> Any | None:
    """
    Collect the ranges that a recipe needs, by running the float `.tflite`.

    Args:
        float_tflite: What will be quantized.
        recipe: Its rules.
        samples: By signature, each a stream of inputs by name; read only if the recipe needs them.
        threads: Of the interpreter.

    Returns:
        What `quantize_recipe` wants, None where the recipe needs no calibration.
    """
    if not _recipe_quantizer(float_tflite, recipe).need_calibration:
        return None
    manager = recipe_module("recipe_manager").RecipeManager()
    with quiet():
        manager.load_quantization_recipe(recipe)
        calibrator = recipe_module("calibrator").Calibrator(float_tflite, num_threads=threads)
    # One sample a call: `Quantizer.calibrate` counts its data set with len(list(…)) before it reads
    # it (ai-edge-quantizer 0.10.0), so a generator comes out empty and a list is held whole. The
    # ranges gathered are the same.
    for signature, stream in samples.items():
        for sample in stream:
            with quiet(), _refusals("cannot calibrate for the recipe"):
                calibrator.calibrate({signature: [sample]}, manager)
    return calibrator.get_model_qsvs()


@contextlib.contextmanager
def biases_of_any_rank() -> Iterator[None]:
    """
    Quantize a bias along its channels, whatever its shape.

    ai-edge-quantizer 0.10.0 takes every bias for one-dimensional and writes its scales along
    dimension 0. A bias that litert-torch 0.10.0 folds of an ADD behind the layer has the shape
    (1, 1, 1, channels), as of a transposed convolution in front of a batch norm or of a linear
    layer on NHWC behind LayerScale: no interpreter opens the file (`num_scales must be 1 for
    per-layer quantization, or 1 for per-axis quantization, but got 12`).
    """
    library = recipe_module("algorithms.uniform_quantize.uniform_quantize_tensor")
    quantize = library.symmetric_quantize_bias_tensor

    def along_channels(bias: npt.NDArray[Any], *args: Any, **kwargs: Any) -> Any:
        made = quantize(bias.reshape(-1), *args, **kwargs)
        along = None if made.quantized_dimension is None else bias.ndim - 1
        codes = made.quantized_data.reshape(bias.shape)
        return dataclasses.replace(made, quantized_dimension=along, quantized_data=codes)

    with replaced(library, symmetric_quantize_bias_tensor=along_channels):
        yield


def quantize_recipe(float_tflite: bytes, recipe: Recipe, calibration: Any | None) -> bytes:
    """Quantize a float `.tflite` by a recipe."""
    quantizer = _recipe_quantizer(float_tflite, recipe)
    # ai-edge-quantizer 0.4 has no progress to turn off.
    known = inspect.signature(quantizer.quantize).parameters
    progress = {"enable_progress_bar": False, "enable_progress_report": False}
    options = {name: value for name, value in progress.items() if name in known}
    # Its report of sizes and times goes to standard output.
    with (
        quiet(),
        contextlib.redirect_stdout(io.StringIO()),
        biases_of_any_rank(),
        _refusals("cannot apply the recipe"),
    ):
        result = quantizer.quantize(calibration, **options)
    return bytes(result.quantized_model)
