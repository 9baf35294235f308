"""`edgeq init`: write a first test of a model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.trouble import TroubleError, exit_codes, in_sentences
from pytest_edgeq.names import DEFAULT_PRESET, PRESETS

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.cli.placeholders import Placeholder, Placeholders

# pt2e_qat_int8 needs a function that trains the model.
_QUANTIZERS = tuple(preset for preset in PRESETS if preset != "pt2e_qat_int8")


def _parse_shapes(
    ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> list[Placeholder]:
    """
    Return a placeholder for each shape.

    Raises:
        click.BadParameter: No shape.
    """
    from pytest_edgeq.cli.placeholders import parse_shape

    try:
        return [parse_shape(text) for text in given]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(
    epilog=exit_codes(
        "the test is written",
        None,
        "wrong usage, a factory that cannot be used, or a model that cannot be quantized",
    )
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
def command(
    factory: str, shapes: list[Placeholder], quantizer: str, output: Path, force: bool
) -> None:
    """
    Write a first quantization test of a torch model.

    The factory is a function or a class that is called without arguments and makes an nn.Module, or
    a pair of one and its sample inputs (a tensor, a tuple of tensors, or a dict of them by
    argument); or it is the model itself. Without sample inputs their shapes are needed.

    The model is quantized once, on random inputs, to write today's dtypes and an error budget into
    the test: this needs torch and takes as long as a conversion of the model. Replace the random
    data in the test by real data, and store the baselines by pytest --edgeq-update.
    """
    if output.exists() and not force:
        raise TroubleError(f"{output} exists; --force replaces it, --output names another file")
    if not output.parent.is_dir():
        raise TroubleError(f"{output}: there is no folder {output.parent}")
    with in_sentences():
        text = _written(factory, shapes, quantizer)
        output.write_text(text, encoding="utf-8")
    click.echo(f"{output}: written")
    click.echo(f"next: replace the random data in it, then: pytest {output} --edgeq-update")


def _written(target: str, shapes: list[Placeholder], quantizer: str) -> str:
    from pytest_edgeq.cli.factory import load_factory
    from pytest_edgeq.cli.first_measurement import measure
    from pytest_edgeq.cli.first_test import render
    from pytest_edgeq.cli.placeholders import Placeholders
    from pytest_edgeq.runtimes.process_state import seeded

    factory = load_factory(target)
    with seeded(0):  # as in the test
        model, inputs, gives_inputs = factory.build()
    if shapes:
        samples = Placeholders(tuple(shapes))
    elif inputs is not None:
        samples = Placeholders.like(inputs)
    else:
        raise ValueError(
            f"{target} gives no sample inputs: name the shape of each by --shape, in the order of "
            f"{_forward(model)}, or let the factory give a pair of the model and its inputs"
        )
    _try(model, samples)
    click.echo(
        f"quantizing {target} by {quantizer}, to measure what the test can assert …", err=True
    )
    measured = measure(model, samples, quantizer)
    return render(factory, samples, measured, quantizer=quantizer, gives_inputs=gives_inputs)


def _forward(model: torch.nn.Module) -> str:
    names = ", ".join(inspect.signature(model.forward).parameters)
    return f"{type(model).__name__}.forward({names})"


def _try(model: torch.nn.Module, samples: Placeholders) -> None:
    """
    Run the model once.

    Raises:
        ValueError: It fails on these inputs.
    """
    import torch

    [sample] = samples.samples(1, seed=0)
    arguments: tuple[Any, dict[str, Any]] = ((), sample)
    if samples.by_name is None:
        arguments = (sample, {})
    try:
        with torch.no_grad():
            model(*arguments[0], **arguments[1])
    except Exception as error:
        shapes = ", ".join(
            f"{each.dtype} {list(each.shape)}"
            for each in (*samples.by_position, *(samples.by_name or {}).values())
        )
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{_forward(model)} fails on inputs of {shapes}: {type(error).__name__}: {first}"
        ) from error
