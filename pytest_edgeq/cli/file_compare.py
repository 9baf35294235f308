"""Errors of one file against another, on samples of `.npz` files; without torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.file_health import runtime_findings, static_findings
from pytest_edgeq.compare.language.layout import holds_language_model
from pytest_edgeq.compare.measurement import Measurement, SampleOutputs
from pytest_edgeq.compare.reference import in_file_order
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.comparison import Comparison, WorstSample
from pytest_edgeq.quantize.language import open_sections
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.layout import fits
from pytest_edgeq.tflite.subgraph import SignatureTensor

if TYPE_CHECKING:
    from pytest_edgeq.edgeq import Edgeq

Array = npt.NDArray[Any]
Arrays = Sequence[Array]


def compare_files(
    reference: EdgeFile,
    edge: EdgeFile,
    samples: Iterable[tuple[str, Arrays]],
    *,
    runtime: str,
    name: str,
) -> Comparison:
    """Measure the errors of one file against the other; inputs of samples are their origins."""
    names = [entry.name for entry in reference.signature.inputs]
    wanted, outputs = ([e.name for e in each.signature.outputs] for each in (reference, edge))
    # How a file was calibrated is not known; by averages its ranges clip more.
    measurement = Measurement(edge, names, {"total": ("float", "edge")}, averaged=True)
    origins = []
    for index, (where, arrays) in enumerate(samples):
        origins.append(where)
        given = reference.decode(_run(reference, names, arrays, runtime, where))
        expected = list(zip(wanted, given, strict=True))
        codes = _run(edge, names, arrays, runtime, where)
        values = {"float": in_file_order(expected, outputs, name), "edge": edge.decode(codes)}
        measurement.update(index, Sample(tuple(arrays), {}), SampleOutputs(codes, values))
    return Comparison(
        name=name,
        flow="prebuilt",
        runtime=runtime,
        total=measurement.results()["total"],
        health=(
            *measurement.findings(),
            *static_findings(edge),
            *runtime_findings(edge, runtime),
        ),
        worst_samples=_with_origins(measurement.worst.result(), origins),
    )


def _with_origins(worst: Iterable[WorstSample], origins: Sequence[str]) -> tuple[WorstSample, ...]:
    return tuple(replace(each, inputs=origins[each.index]) for each in worst)


def compare_language_models(
    reference: Path, file: Path, inputs: Sequence[Path], edgeq: Edgeq, name: str
) -> Comparison | None:
    """Measure one language model against the other by position; None of other files."""
    if not holds_language_model(open_sections(file, edgeq._session)):
        return None
    try:
        model = edgeq.load(file, float_tflite=reference, name=name)
    except ValueError as error:  # another layout, or two files that do not fit
        other = "or compare one signature: --signature decode, of a bundle with --section"
        raise ValueError(f"{error}; {other}") from None
    read = list(_read_sequences(inputs))
    if not read:
        raise ValueError(f"{inputs[0]} holds no sequence")
    origins, sequences = zip(*read, strict=True)
    comparison = edgeq.compare(model, sequences)
    return replace(comparison, worst_samples=_with_origins(comparison.worst_samples, origins))


def _read_sequences(paths: Sequence[Path]) -> Iterator[tuple[str, Array]]:
    """Yield the token ids of each sequence of several files, with its origin."""
    for path in paths:
        with _opened(path, "tokens") as loaded:
            if "tokens" not in loaded:
                raise ValueError(
                    f"{path} has no array 'tokens', and sequences of token ids are what language "
                    "models are compared on: write np.savez(path, tokens=…), or compare one "
                    "signature: --signature decode"
                )
            for number, tokens in enumerate(np.atleast_2d(_read(loaded, path, "tokens"))):
                yield f"{path.name}[{number}]", tokens


def _run(
    edge: EdgeFile, names: Sequence[str], arrays: Arrays, runtime: str, where: str
) -> list[npt.NDArray[Any]]:
    try:
        return edge.run(names, arrays, runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {edge.label}: {error}") from None


_NUMBERED = ("args", "arr")
"""Names by position: of litert-torch's inputs, and of `np.savez(path, first, second)`."""


def read_samples(
    paths: Sequence[Path], inputs: Sequence[SignatureTensor]
) -> Iterator[tuple[str, list[Array]]]:
    """Yield the samples of several files, one after another, each with its origin."""
    for path in paths:
        with _opened(path, inputs[0].name) as loaded:
            columns = [
                _split(_read(loaded, path, key), path, entry)
                for key, entry in zip(_keys(loaded, path, inputs), inputs, strict=True)
            ]
        counts = {entry.name: len(each) for entry, each in zip(inputs, columns, strict=True)}
        if len(set(counts.values())) > 1:
            numbers = ", ".join(f"{number} of {name!r}" for name, number in counts.items())
            raise ValueError(f"{path}: expected as many samples of each input, got {numbers}")
        for number, arrays in enumerate(zip(*columns, strict=True)):
            yield f"{path.name}[{number}]", list(arrays)


def _opened(path: Path, name: str) -> np.lib.npyio.NpzFile:
    """Open a file of arrays; a refusal suggests the name of one."""
    write = f"write np.savez(path, {name}=…)"
    try:
        loaded = np.load(path)
    except (ValueError, EOFError, zipfile.BadZipFile):
        # What numpy says of it is how to unpickle it, which runs code.
        raise ValueError(f"{path} is no .npz file: {write}") from None
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise TypeError(f"{path} holds one array without a name: {write}")
    return loaded


def _keys(loaded: Mapping[str, Array], path: Path, inputs: Sequence[SignatureTensor]) -> list[str]:
    """Return the name of the array for each input."""
    names = [entry.name for entry in inputs]
    known = list(loaded)
    missing = [name for name in names if name not in known]
    if not missing:
        return names
    if len(missing) == len(names):
        for stem in _NUMBERED:
            numbered = [f"{stem}_{position}" for position in range(len(names))]
            if all(name in known for name in numbered):
                return numbered
    raise ValueError(
        f"{path} has no array {missing[0]!r}{nearest(missing[0], known)}; it holds {known}, and "
        f"the model has {names}"
    )


def _read(loaded: Mapping[str, Array], path: Path, key: str) -> Array:
    try:
        array = loaded[key]
    except ValueError as error:
        raise ValueError(f"{path}: the array {key!r} cannot be read: {error}") from None
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _split(array: Array, path: Path, entry: SignatureTensor) -> Array:
    """Return an array whose first axis counts samples."""
    wanted = entry.tensor.shape_signature
    samples = array
    if array.ndim == len(wanted):
        is_batch = wanted[:1] == (1,) or (wanted[:1] == (-1,) and len(wanted) > 1)
        # Samples in one batch, for a model of batches of any size.
        samples = array[:, np.newaxis] if is_batch and len(array) != 1 else array[np.newaxis]
    if fits(samples.shape[1:], wanted):
        return samples
    raise ValueError(
        f"{path}: array for the input {entry.name!r}: expected shape {list(wanted)}, or n of them "
        f"as {['n', *wanted]}, got {list(array.shape)}".replace("'n'", "n")
    )
