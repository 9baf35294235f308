"""
Write the bundle of a failed test: the files, the worst samples, the outputs, and a script.

Its texts are portable: without absolute paths and values of environment variables. The script is
`reproduce.py` next to this module, copied as it is; `bundle.json` lists the files for it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.report.model_explorer import write_node_data
from pytest_edgeq.report.whole_files import write_json, write_whole

if TYPE_CHECKING:
    from pytest_edgeq.compare.failed_samples import FailedSamples
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.localize.rows import LayerErrors
    from pytest_edgeq.numerics.comparison import WorstSample
    from pytest_edgeq.report.run import Run

Array = npt.NDArray[Any]

_FREE = frozenset({"cause", "change", "error", "findings", "message", "note", "records"})
"""Fields that may contain the text of an error."""

_SHORTEST = 12  # length from which a variable's value is no ordinary word, and may be a secret

_END = r"(?=$|[\\/\s'\":,;)\]}>])"
_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|]"
_ABSOLUTE = re.compile(
    rf"(?<![\w~/.…-])(?:/[A-Za-z_.]{_PART}*(?:/{_PART}+)*|[A-Za-z]:[\\/]{_PART}+(?:[\\/]{_PART}+)*)"
)


def portable(data: Any, rootdir: Path) -> Any:
    """
    Return a copy of JSON-able data without absolute paths and, in texts of errors, environment.

    A text is a path only if its first folder exists on this machine: tensors of a file made from
    ONNX are called `/conv/Conv_output_0`. The value of an environment variable becomes `$NAME`.
    """
    return _portable(data, _known_folders(rootdir), is_free=isinstance(data, str))


def _portable(data: Any, folders: Mapping[str, str], *, is_free: bool) -> Any:
    if isinstance(data, str):
        text = _without_paths(data, folders)
        return _without_environment(text) if is_free else text
    if isinstance(data, Mapping):
        return {
            _without_paths(key, folders): _portable(value, folders, is_free=is_free or key in _FREE)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_portable(each, folders, is_free=is_free) for each in data]
    return data


def _known_folders(rootdir: Path) -> dict[str, str]:
    """Return the text in place of each folder, the longest folders first."""
    folders = {tempfile.gettempdir(): "…", str(Path.home()): "~"}
    folders |= {str(rootdir): ".", str(rootdir.resolve()): "."}
    return {
        folder: short
        for folder, short in sorted(folders.items(), key=lambda each: -len(each[0]))
        if folder != Path(folder).anchor
    }


def _without_paths(text: str, folders: Mapping[str, str]) -> str:
    text = re.sub(r"file://(?=/)", "", text)
    for folder, short in folders.items():
        if short == ".":
            text = re.sub(rf"{re.escape(folder)}[\\/]", "", text)
        text = re.sub(re.escape(folder) + _END, short, text)
    return _ABSOLUTE.sub(_shortened, text)


def _shortened(found: re.Match[str]) -> str:
    parts = re.split(r"[\\/]", found[0])
    is_path = parts[0] or os.path.exists(f"/{parts[1]}")  # noqa: PTH110 # of any text False
    return f"…/{parts[-1]}" if is_path else found[0]


def _without_environment(text: str) -> str:
    values = {value: name for name, value in os.environ.items() if len(value) >= _SHORTEST}
    for value, name in sorted(values.items(), key=lambda each: -len(each[0])):
        text = text.replace(value, f"${name}")
    return text


_SIDES = {"float": "expected", "edge": "got"}  # file names of outputs; others keep their own

_TEXTS = ("name", "note", "blame")  # fields of a case that may hold paths
_LONGEST = 60  # characters of a test's id in the name of its bundle


@dataclass(frozen=True, slots=True)
class Evidence:
    """The models and comparisons of a failed test."""

    models: Sequence[QuantizedModel]  # each as often as it was used
    samples: Sequence[FailedSamples]  # of its comparisons and the failed assertion, in order
    layers: Sequence[tuple[QuantizedModel, LayerErrors]]  # of localizing, in order

    @property
    def is_empty(self) -> bool:
        """Whether there is no model to keep."""
        return not self.models and not self.samples


def bundle_name(test: str, rootdir: Path) -> str:
    """Return the unique name of a test's bundle, of letters, digits and `._-`."""
    shown = re.sub(r"[^A-Za-z0-9_.]+", "-", portable(test, rootdir)).strip("-.")
    return f"{shown[-_LONGEST:].strip('-.')}-{sha256(test.encode()).hexdigest()[:8]}"


def remove_bundle(folder: Path) -> None:
    """Remove the bundle of an earlier run, if there is one."""
    if (folder / "bundle.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)


def write_bundle(folder: Path, evidence: Evidence, run: Run, failure: str, rootdir: Path) -> None:
    """Replace a bundle atomically; samples are run again, in order, which repeats the figures."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        writer = _Writer(new, evidence)
        cases = []
        for model, samples in _pairs(evidence):
            case = writer.case(model, samples)
            # Names of inputs and outputs are the file's own.
            cases.append(case | {key: portable(case[key], rootdir) for key in _TEXTS})
        bundle = {"format": "pytest-edgeq bundle", "version": 1, "cases": cases}
        write_json(new / "bundle.json", bundle, indent=1)
        write_json(new / "record.json", portable(run.data, rootdir), indent=1)
        write_whole(new / "failure.txt", portable(failure, rootdir) + "\n")
        shutil.copyfile(Path(__file__).with_name("reproduce.py"), new / "reproduce.py")
        remove_bundle(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _pairs(evidence: Evidence) -> list[tuple[QuantizedModel, FailedSamples | None]]:
    """Return the samples with their models, then each signature without samples."""
    pairs: list[tuple[QuantizedModel, FailedSamples | None]] = [
        (each.model, each) for each in evidence.samples
    ]
    seen = {_entry(model) for model, _ in pairs}
    for model in evidence.models:
        is_one = len(model.edge.signatures) == 1
        for view in [model] if is_one else map(model.signature, model.signatures):
            if _entry(view) not in seen:
                seen.add(_entry(view))
                pairs.append((view, None))
    return pairs


def _entry(model: QuantizedModel) -> tuple[str, int]:
    """Return the key of an entry point of a file: hash and subgraph."""
    return model.sha256, model.edge.signature.subgraph


class _Writer:
    """Writes the files of a bundle, and describes them for the script."""

    def __init__(self, place: Path, evidence: Evidence) -> None:
        self._place = place
        self._layers = {_entry(model): layers for model, layers in evidence.layers}
        self._files: dict[str, str] = {}
        self._cases = 0

    def case(self, model: QuantizedModel, samples: FailedSamples | None) -> dict[str, Any]:
        """Write the files of one measurement, or of one model without one."""
        self._cases += 1
        signature, layouts = model.edge.signature, model.edge.layouts
        layers = self._layers.get(_entry(model))
        sides = {"inputs": signature.inputs, "outputs": signature.outputs}
        runtime = model.runtime if samples is None else samples.runtime
        return {
            "name": model.name,
            "model": self._file(model),
            "sha256": model.sha256,
            "signature": signature.key,
            "subgraph": signature.subgraph,
            "runtime": runtime,
            "kernels": model.edge.runtimes.kernels_of(runtime),
            "expected_by": None if samples is None else samples.expected_by,
            "is_stateful": model.edge.graph.is_stateful,
            **{side: {e.name: e.tensor.index for e in entries} for side, entries in sides.items()},
            "moved": {
                side: {each.name: axes for each in entries if (axes := layouts.axes(each))}
                for side, entries in sides.items()
            },
            "ops": [
                {**entry.to_dict(), "where": entry.where}
                for entry in model.op_dtypes
                if entry.subgraph == signature.subgraph
            ],
            "samples": None,
            "note": "",
            "blame": "" if layers is None else layers.cause,
            **({} if samples is None else self._samples(samples)),
        }

    def _file(self, model: QuantizedModel) -> str:
        """Write a model's files, once, and return the name of its `.tflite`."""
        if model.sha256 not in self._files:
            number = len(self._files) + 1
            name = self._files[model.sha256] = _numbered("model.tflite", number)
            (self._place / name).write_bytes(model.tflite)
            between = model.float_tflite
            if between is not None:
                (self._place / _numbered("float.tflite", number)).write_bytes(between)
            layers = {
                subgraph: measured.to_dict()
                for (digest, subgraph), measured in self._layers.items()
                if digest == model.sha256
            }
            if layers:
                folder = self._place / _numbered("model_explorer", number)
                write_node_data(model.edge, folder, layers)
        return self._files[model.sha256]

    def _samples(self, samples: FailedSamples) -> dict[str, Any]:
        """Write the worst samples with the outputs of every side."""
        model = samples.model
        # In the order in which a file that keeps state has seen them.
        worst = sorted(samples.worst, key=lambda each: each.index)
        given = [
            model.edge.by_input_name(model.input_names, each.inputs.arrays()) for each in worst
        ]
        kept = {"inputs": self._arrays("samples", worst, given)}
        try:
            outputs = _outputs(samples, worst)
        except Exception as error:  # the reference may be any code of the user
            first = (str(error).splitlines() or [""])[0]
            return {"note": f"samples could not be run again: {type(error).__name__}: {first}"}
        names = [entry.name for entry in model.edge.signature.outputs]
        for side, arrays in outputs.items():
            by_name = [dict(zip(names, each, strict=True)) for each in arrays]
            kept[side] = self._arrays(side, worst, by_name)
        return {"samples": {**kept, "of": samples.n_samples}}

    def _arrays(
        self, stem: str, samples: Sequence[WorstSample], arrays: Sequence[Mapping[str, Array]]
    ) -> str:
        """Write arrays by `<sample>/<name>`, and return the name of the file."""
        named = {
            f"{sample.index}/{name}": array
            for sample, by_name in zip(samples, arrays, strict=True)
            for name, array in by_name.items()
        }
        name = _numbered(f"{stem}.npz", self._cases)
        np.savez(self._place / name, allow_pickle=False, **named)
        return name


def _outputs(
    samples: FailedSamples, worst: Sequence[WorstSample]
) -> dict[str, list[Sequence[Array]]]:
    """Run samples again, and return their outputs in float by side."""
    if samples.expected_by is None:
        from pytest_edgeq.compare.comparer import Comparer
        from pytest_edgeq.compare.parallel import on_one_thread

        with on_one_thread(), Comparer(samples.model, samples.runtime) as comparer:
            outcomes = [comparer.update(each.inputs) for each in worst]
        return {
            _SIDES.get(side, side): [each.values[side] for each in outcomes]
            for side in outcomes[0].values
        }
    return {
        "expected": _computed(samples.model, samples.expected_by, worst),
        "got": _computed(samples.model, samples.runtime, worst),
    }


def _computed(
    model: QuantizedModel, runtime: str, worst: Sequence[WorstSample]
) -> list[Sequence[Array]]:
    edge = model.edge
    edge.restart()
    return [
        edge.decode(edge.run(model.input_names, each.inputs.arrays(), runtime)) for each in worst
    ]


def _numbered(name: str, number: int) -> str:
    """Return the name, with a number unless it is the first."""
    stem, dot, suffix = name.partition(".")
    return name if number == 1 else f"{stem}_{number}{dot}{suffix}"
