"""`edgeq init`: write a first test of a model."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.trouble import TroubleError, exit_codes, in_sentences
from pytest_edgeq.names import DEFAULT_PRESET, PRESETS, nearest

# pt2e_qat_int8 needs a function that trains the model.
_QUANTIZERS = tuple(preset for preset in PRESETS if preset != "pt2e_qat_int8")
_FLOATS = ("float16", "float32", "float64")
_DTYPES = (*_FLOATS, "uint8", "int8", "int16", "int32", "int64", "bool")

_NAMES = ("model", "quantized", "samples", "pytest", "torch")  # of the test itself

_TEST = '''\
"""
Quantization tests of {target}, begun by `edgeq init`.

First replace the random data in `samples`, then store the baselines:

    pytest --edgeq-update

and commit the folder __edgeq__ that it writes next to this file. From then on `pytest`
fails when an op dtype or an error is not what was accepted.
"""

import pytest
import torch

from {module} import {imported}


# REPLACE random data by real data, preprocessed as on the device: ranges that are
# calibrated on noise, and errors that are measured on it, are not those of your model.
# Random integers must lie in the range that the model accepts.
def samples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        {inputs}
        for _ in range(n)
    ]


# Quantized once for all tests of this file.
@pytest.fixture(scope="module")
def quantized(edgeq):
    torch.manual_seed(0)  # of weights that are not loaded
    {model} = {built}
    model.eval()  # load its weights here
    return edgeq.quantize(
        model,
        {keyword}=samples(1, seed=0)[0],
        quantizer="{quantizer}",
        calibration=samples(32, seed=1),
    )


# Dtypes of inputs, outputs and every op, as they were accepted. What must hold whatever is
# accepted: pytest_edgeq.assert_input_dtypes, assert_op_dtypes, assert_no_float_ops.
def test_every_op_is_as_accepted(edgeq, quantized):
    edgeq.check_op_dtypes(quantized)


# Errors against torch, on samples that the calibration has not seen. For fixed limits let
# edgeq.suggest_budget(comparison) print a budget for pytest_edgeq.assert_within_budget.
def test_errors(edgeq, quantized):
    comparison = edgeq.compare(quantized, samples(64, seed=2))
    edgeq.check_errors(comparison)


# The default gate: every runtime, every op against torch, health.
def test_it_may_ship(edgeq, quantized):
    edgeq.check(quantized, samples(16, seed=3))
'''


def _parse_shapes(
    ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> list[str]:
    """Return the expression of a random tensor for each shape; refuse invalid ones."""
    made = []
    for text in given:
        numbers, _, dtype = text.partition(":")
        try:
            shape = tuple(int(number) for number in numbers.split(","))
        except ValueError:
            shape = (0,)
        if min(shape) < 1:
            raise click.BadParameter(
                f"expected numbers such as 1,3,224,224 or 1,16:int64, got {text!r}"
            )
        if dtype and dtype not in _DTYPES:
            raise click.BadParameter(
                f"unknown dtype {dtype!r}{nearest(dtype, _DTYPES)}; there are {', '.join(_DTYPES)}"
            )
        made.append(_random(shape, dtype or "float32"))
    return made


@click.command(
    epilog=exit_codes("the test is written", None, "wrong usage, or a factory that cannot be used")
)
@click.argument("factory", metavar="PACKAGE.MODULE:FACTORY")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="N,N,…[:DTYPE]",
    callback=_parse_shapes,
    help="Shape of an input, such as 1,3,224,224 or 1,16:int64; once for each, in order.",
)
@click.option(
    "--quantizer",
    type=click.Choice(_QUANTIZERS),
    default=DEFAULT_PRESET,
    show_default=True,
    metavar="PRESET",
    help=f"How the model is quantized: {', '.join(_QUANTIZERS)}.",
)
@click.option(
    "--output",
    type=PATH,
    default=Path("test_model_quant.py"),
    show_default=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def command(factory: str, shapes: list[str], quantizer: str, output: Path, force: bool) -> None:
    """
    Write a first quantization test of a torch model.

    The factory is a function or a class that is called without arguments and makes an nn.Module, or
    a pair of one and its sample inputs (a tensor, a tuple of tensors, or a dict of them by
    argument); or it is the model itself. Without sample inputs their shapes are needed.

    Replace the random data in the test by real data, and store the baselines by pytest
    --edgeq-update.
    """
    if output.exists() and not force:
        raise TroubleError(f"{output} exists; --force replaces it, --output names another file")
    if not output.parent.is_dir():
        raise TroubleError(f"{output}: there is no folder {output.parent}")
    with in_sentences():
        output.write_text(_written(factory, shapes, quantizer), encoding="utf-8")
    click.echo(f"{output}: written")
    click.echo(f"next: replace the random data in it, then: pytest {output} --edgeq-update")


def _written(target: str, shapes: list[str], quantizer: str) -> str:
    import torch

    found = _imported(target)
    is_model = isinstance(found, torch.nn.Module)
    try:
        made = found if is_model else found()
    except Exception as error:
        raise RuntimeError(f"{target}() fails: {type(error).__name__}: {error}") from error
    is_pair = isinstance(made, (tuple, list)) and len(made) == 2
    model, inputs = made if is_pair else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{target} returns {type(made).__name__}: expected a torch nn.Module, or a pair of one "
            "and its sample inputs"
        )
    if not shapes and inputs is None:
        raise ValueError(
            f"{target} returns no sample inputs: name the shape of each by --shape, in the order "
            f"of {type(model).__name__}.forward{inspect.signature(model.forward)}, or let the "
            "factory return a pair of the model and its inputs"
        )
    module, _, path = target.partition(":")
    imported = path.partition(".")[0]
    if imported in _NAMES:
        imported, path = f"{imported} as my_{imported}", f"my_{path}"
    by_name = not shapes and isinstance(inputs, Mapping)
    lines = ["(", *(f"    {each}," for each in shapes), ")"] if shapes else _like(inputs)
    return _TEST.format(
        target=target,
        module=module,
        imported=imported,
        inputs="\n        ".join(lines),
        model="model, _" if is_pair else "model",
        built=path if is_model else f"{path}()",
        keyword="sample_kwargs" if by_name else "sample_inputs",
        quantizer=quantizer,
    )


def _imported(target: str) -> Any:
    """Import `pkg.mod:factory`, also from the working directory."""
    module, _, path = target.partition(":")
    if not (module and path):
        raise ValueError(
            f"expected package.module:factory, such as my_model:Classifier, got {target!r}"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        near = nearest(missing, [each.name for each in pkgutil.iter_modules([str(Path.cwd())])])
        raise ValueError(
            f"{module} cannot be imported: there is no module {missing!r}{near} in {Path.cwd()} or "
            "among what is installed"
        ) from error
    except Exception as error:
        raise RuntimeError(f"{module} cannot be imported: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _like(inputs: Any) -> list[str]:
    """Return the lines of an expression that makes random inputs like these."""
    import torch

    values = [inputs]
    if isinstance(inputs, (tuple, list, Mapping)):
        values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    if not all(isinstance(each, torch.Tensor) for each in values):
        raise TypeError(
            "sample inputs: expected a tensor, a tuple of tensors, or a dict of them by argument, "
            f"got {type(inputs).__name__}"
        )
    made = []
    for each in values:
        if (dtype := str(each.dtype).removeprefix("torch.")) not in _DTYPES:
            raise TypeError(f"sample inputs: expected {', '.join(_DTYPES)}, got {dtype}")
        below = 2 if each.is_floating_point() or not each.numel() else int(each.max()) + 1
        made.append(_random(tuple(each.shape), dtype, below))
    if isinstance(inputs, Mapping):
        pairs = zip(inputs, made, strict=True)
        return ["{", *(f'    "{name}": {each},' for name, each in pairs), "}"]
    return ["(", *(f"    {each}," for each in made), ")"]


def _random(shape: tuple[int, ...], dtype: str, below: int = 2) -> str:
    """Return an expression that makes a random tensor by `generator`."""
    suffix = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    if dtype in _FLOATS:
        return f"torch.randn({shape}, generator=generator{suffix})"
    return f"torch.randint(0, {max(below, 2)}, {shape}, generator=generator{suffix})"
