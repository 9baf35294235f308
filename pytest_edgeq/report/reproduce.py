"""
Reproduce the failure of a test without pytest, with the kept samples and expected outputs.

It needs numpy and ai-edge-litert, and reads the files in its own folder. Exit status 1: the file
behaves as recorded, so the failure is reproduced; 2: it behaves otherwise here, or a file is not
the recorded one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

RESOLVERS = {
    "xnnpack": "BUILTIN",
    "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "reference": "BUILTIN_REF",
}


def kernels_of(case: Mapping[str, Any]) -> str:
    """Return the kernels for a run here: those of the target, else XNNPACK."""
    kernels: str = case["kernels"]
    return kernels if kernels in RESOLVERS else "xnnpack"


class File:
    """A `.tflite` file with one of its signatures, as `bundle.json` describes them."""

    def __init__(self, path: Path, case: Mapping[str, Any]) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType[RESOLVERS[kernels_of(case)]]
        self.interpreter = Interpreter(str(path), experimental_op_resolver_type=resolver)
        self.interpreter.allocate_tensors()
        self.runner: Any = None
        if case["subgraph"]:
            self.runner = self.interpreter.get_signature_runner(case["signature"])
            self.inputs = self.runner.get_input_details()
            self.outputs = self.runner.get_output_details()
        else:
            details = {
                each["index"]: each
                for each in (
                    *self.interpreter.get_input_details(),
                    *self.interpreter.get_output_details(),
                )
            }
            self.inputs = {name: details[index] for name, index in case["inputs"].items()}
            self.outputs = {name: details[index] for name, index in case["outputs"].items()}
        self.moved = case["moved"]

    def run(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs in float, of inputs in float, both as the reference lays them out."""
        codes = {name: self._encoded(name, sample[name]) for name in self.inputs}
        found = self._run(codes)
        return {name: self._decoded(name, found[name]) for name in self.outputs}

    def _run(self, codes: Mapping[str, Array]) -> Mapping[str, Array]:
        if self.runner is not None:
            outputs: Mapping[str, Array] = self.runner(**codes)
            return outputs
        shapes = {name: self.inputs[name]["index"] for name in codes}
        now = {each["index"]: tuple(each["shape"]) for each in self.interpreter.get_input_details()}
        # Allocated only where a shape differs: it would reset what a file keeps from run to run.
        if any(now[index] != codes[name].shape for name, index in shapes.items()):
            for name, index in shapes.items():
                self.interpreter.resize_tensor_input(index, codes[name].shape)
            self.interpreter.allocate_tensors()
        for name, index in shapes.items():
            self.interpreter.set_tensor(index, codes[name])
        self.interpreter.invoke()
        return {
            name: self.interpreter.get_tensor(each["index"]) for name, each in self.outputs.items()
        }

    def _encoded(self, name: str, value: Array) -> Array:
        detail = self.inputs[name]
        if name in self.moved["inputs"]:
            value = np.moveaxis(value, *self.moved["inputs"][name])
        if is_quantized(detail):
            scale, zero_point = parameters(detail, value.ndim)
            limits = np.iinfo(detail["dtype"])
            value = np.clip(np.rint(value / scale) + zero_point, limits.min, limits.max)
        return np.asarray(value.astype(detail["dtype"]), order="C")

    def _decoded(self, name: str, value: Array) -> Array:
        detail = self.outputs[name]
        if is_quantized(detail):
            scale, zero_point = parameters(detail, value.ndim)
            value = ((value - zero_point) * scale).astype(np.float32)
        elif value.dtype == np.float16:
            value = value.astype(np.float32)
        moved = self.moved["outputs"].get(name)
        return value if moved is None else np.moveaxis(value, *reversed(moved))


def is_quantized(detail: Mapping[str, Any]) -> bool:
    """Return whether an input or output is of integers with a scale."""
    scales = detail["quantization_parameters"]["scales"]
    return bool(len(scales)) and np.issubdtype(detail["dtype"], np.integer)


def parameters(detail: Mapping[str, Any], rank: int) -> tuple[Array, Array]:
    """Return scale and zero point, ready to meet an array of the tensor's shape."""
    found = detail["quantization_parameters"]
    width = np.float32 if np.dtype(detail["dtype"]).itemsize <= 2 else np.float64
    shape = [1] * rank
    if len(found["scales"]) > 1:
        shape[found["quantized_dimension"]] = -1
    scale, zero_point = (found[key].astype(width) for key in ("scales", "zero_points"))
    return scale.reshape(shape), zero_point.reshape(shape)


def figures(expected: list[Array], got: list[Array], scale: float | None) -> dict[str, str]:
    """Return the errors of one output over all samples, as they are printed."""
    wanted = np.concatenate([each.astype(np.float64).ravel() for each in expected])
    with np.errstate(all="ignore"):
        error = np.concatenate([each.astype(np.float64).ravel() for each in got]) - wanted
        sqnr_db = 10 * np.log10(np.square(wanted).sum() / np.square(error).sum())
    largest = np.abs(error).max() if error.size else 0.0
    return {
        "max abs error": f"{largest:.4g}",
        "max LSB error": "-" if scale is None else f"{largest / scale:.4g}",
        "SQNR dB": f"{sqnr_db:.2f}",
    }


def by_sample(path: Path) -> dict[str, dict[str, Array]]:
    """Read arrays by sample and name; their keys are `<sample>/<name>`."""
    samples: dict[str, dict[str, Array]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            sample, _, name = key.partition("/")
            samples.setdefault(sample, {})[name] = arrays[key]
    return samples


def show_file(case: Mapping[str, Any], file: File) -> None:
    """Print the dtypes of a file's inputs, outputs and ops."""
    print("  no samples were compared; the file's dtypes:")
    for side in ("inputs", "outputs"):
        for name, detail in getattr(file, side).items():
            scale, zero_point = detail["quantization"]
            codes = f", scale {scale:.6g}, zero point {zero_point}" if is_quantized(detail) else ""
            dtype, shape = np.dtype(detail["dtype"]).name, detail["shape"].tolist()
            print(f"  {side[:-1]} {name}: {dtype} {shape}{codes}")
    for op in case["ops"]:
        taken = ", ".join([*op["inputs"], *(each for each in (op["weight"], op["bias"]) if each)])
        print(f"  {op['where']}: {taken} -> {', '.join(op['outputs'])}")


def show_errors(folder: Path, case: Mapping[str, Any], file: File) -> bool:
    """Run the samples, print expected and got, and return whether the errors are as recorded."""
    kept = case["samples"]
    expected, recorded = by_sample(folder / kept["expected"]), by_sample(folder / kept["got"])
    samples = by_sample(folder / kept["inputs"])
    got = {sample: file.run(inputs) for sample, inputs in samples.items()}
    print(f"  samples {', '.join(samples)} of {kept['of']}, the worst ones")
    if case["expected_by"]:
        print(f"  expected: outputs of the {case['expected_by']} kernels")
    if case["is_stateful"]:
        print("  the file keeps state: the samples follow each other, from a fresh start")
    same = True
    for name, detail in file.outputs.items():
        scale = detail["quantization"][0] if is_quantized(detail) else None
        wanted = [expected[sample][name] for sample in samples]
        here = [got[sample][name] for sample in samples]
        then = figures(wanted, [recorded[sample][name] for sample in samples], scale)
        now = figures(wanted, here, scale)
        same = same and now == then
        print(f"  output {name}:")
        for figure, value in now.items():
            print(f"    {figure}: {value} (recorded: {then[figure]})")
        show_worst(list(samples), wanted, here)
    if case["blame"]:
        print(f"  layer to blame: {case['blame']}")
    if not same:
        print(f"  not the recorded outputs: {case['runtime']} kernels computed something else then")
    return same


def show_worst(samples: list[str], expected: list[Array], got: list[Array]) -> None:
    """Print the element of each sample that is furthest off."""
    for sample, wanted, found in zip(samples, expected, got, strict=True):
        if not wanted.size:
            continue
        with np.errstate(all="ignore"):
            error = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
        # What is not a number is the furthest.
        place = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
        where = ", ".join(str(int(index)) for index in place)
        values = f"expected {float(wanted[place]):.6g}, got {float(found[place]):.6g}"
        print(f"    sample {sample} [{where}]: {values}")


def show(folder: Path, case: Mapping[str, Any]) -> bool:
    """Run one file, and return whether it behaves as recorded."""
    signature = f", signature {case['signature']}" if case["signature"] else ""
    print(f"\n{case['model']}: {case['name']}{signature}, runtime {case['runtime']}")
    if case["note"]:
        print(f"  {case['note']}")
    path = folder / case["model"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != case["sha256"]:
        print("  not the recorded file: it was changed")
        return False
    if case["runtime"] not in RESOLVERS:
        print(f"  recorded on {case['runtime']}, run on {kernels_of(case)} here")
    try:
        file = File(path, case)
    except (RuntimeError, ValueError) as error:
        print(f"  cannot be run: {error}")
        return case["samples"] is None
    if case["samples"] is None:
        show_file(case, file)
        return True
    return show_errors(folder, case, file)


def main() -> int:
    """Show every file of the bundle, and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")
    folder = Path(__file__).parent
    bundle = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    print((folder / "failure.txt").read_text(encoding="utf-8").rstrip())
    shown = [show(folder, case) for case in bundle["cases"]]
    print("\nshown as recorded" if all(shown) else "\nNOT shown as recorded")
    return 1 if all(shown) else 2


if __name__ == "__main__":
    sys.exit(main())
