"""
TensorFlow's interpreter, in the process of torch and LiteRT.

Importing TensorFlow is safe or not for a whole process, so every claim is made of real ones: in
each order of imports the same files come out of the converter and the same numbers out of every
runtime as in processes that never see the other library, and the process ends as it should.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.tflite import make
from pytest_edgeq.names import NEEDS_TENSORFLOW
from pytest_edgeq.runtimes.edge import EdgeFile

# TensorFlow is imported and converts, in processes of their own.
pytestmark = pytest.mark.timeout(600)

FILES = sorted(make.CONVERTED.glob("*.tflite"))[::8]
ROOT = Path(__file__).parents[2]

# Warnings are errors, as in this suite; libraries that are not at issue warn when imported.
_PRELUDE = """
import gc, hashlib, json, sys, warnings
from pathlib import Path

gc.disable()  # a fifth of the time of these processes

def quietly(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return __import__(name)

def digest(arrays):
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return whole.hexdigest()

def run_all(files, runtimes, threads=1):
    import numpy as np
    from pytest_edgeq.tflite.boundary import numpy_dtype
    from pytest_edgeq.runtimes.edge import EdgeFile

    found = {}
    for path in map(Path, files):
        edge = EdgeFile(path, threads=threads)
        generator = np.random.default_rng(0)
        inputs = {}
        for border in edge.signature.inputs:
            shape = [3 if n < 0 else n for n in border.tensor.shape_signature]
            # Rows of an embedding, and small values all the same.
            values = generator.integers(0, 2, shape) if border.tensor.dtype == "int32" else (
                generator.normal(size=shape) * 3
            )
            inputs[border.name] = values.astype(numpy_dtype(border.tensor.dtype))
        for runtime in runtimes:
            found[f"{path.name} {runtime}"] = digest(edge.runner(runtime).run(inputs))
    return found

def convert():
    import torch
    from fixtures.models import ConvBnRelu, samples, seeded
    from pytest_edgeq import Edgeq

    model = seeded(ConvBnRelu)
    found = {"torch": digest([model(*ConvBnRelu.sample_inputs()).detach().numpy()])}
    for quantizer in ("pt2e_static_int8", "recipe_static_wi8_ai8"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantized = Edgeq(seed=1).quantize(
                model, ConvBnRelu.sample_inputs(), quantizer=quantizer,
                calibration=samples(ConvBnRelu, 4),
            )
        found[str(quantizer)] = hashlib.sha256(quantized.tflite).hexdigest()
    return found
"""


def _process(body: str, *files: Path) -> Any:
    """Run a script in a process of its own, and give what it printed last."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PRELUDE + body, *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


_LITERT = ("xnnpack", "builtin", "reference", "compiled")

_WITHOUT_TENSORFLOW = f"""
found = convert() | run_all(sys.argv[1:], {_LITERT})
assert "tensorflow" not in sys.modules
print(json.dumps(found))
"""

# Neither torch nor LiteRT, and nothing of ours: TensorFlow as its own users know it.
_TENSORFLOW_ALONE = """
import numpy as np
tensorflow = quietly("tensorflow")
found = {}
for path in map(Path, sys.argv[1:]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = tensorflow.lite.Interpreter(str(path), num_threads=1)
    generator = np.random.default_rng(0)
    for detail in interpreter.get_input_details():
        shape = [3 if n < 0 else n for n in detail["shape_signature"]]
        values = generator.integers(0, 2, shape) if detail["dtype"] == np.int32 else (
            generator.normal(size=shape) * 3
        )
        interpreter.resize_tensor_input(detail["index"], shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(detail["index"], values.astype(detail["dtype"]))
    interpreter.invoke()
    outputs = [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]
    found[f"{path.name} tensorflow"] = digest(outputs)
assert not {"torch", "ai_edge_litert", "litert_torch"} & set(sys.modules)
print(json.dumps(found))
"""

_ALL_AT_ONCE = f"""
found = convert() | run_all(sys.argv[1:], {(*_LITERT, "tensorflow")})
assert {{"tensorflow", "torch", "litert_torch", "ai_edge_litert"}} <= set(sys.modules)
# Once more with everything loaded, and with a second thread in every interpreter.
assert found == found | run_all(sys.argv[1:], {(*_LITERT, "tensorflow")}, threads=2)
print(json.dumps(found))
"""

_ORDERS = {
    "tensorflow-first": 'quietly("tensorflow")\n',
    "converter-first": 'quietly("litert_torch")\n',
}


@pytest.mark.slow
def test_one_process_holds_all() -> None:
    """The same files and the same bits as apart, in every order of imports; and a clean end."""
    apart = _process(_WITHOUT_TENSORFLOW, *FILES) | _process(_TENSORFLOW_ALONE, *FILES)
    assert len(apart) == 3 + 5 * len(FILES)
    for order, imports in _ORDERS.items():
        assert _process(imports + _ALL_AT_ONCE, *FILES) == apart, order


_FIRST_USE = """
found = run_all(sys.argv[1:], ("xnnpack", "compiled"))
assert "tensorflow" not in sys.modules
found |= run_all(sys.argv[1:], ("tensorflow",))
assert "tensorflow" in sys.modules
# Neither torch nor the converter is needed for it, and the filters are as they were.
assert not {"torch", "litert_torch"} & set(sys.modules)
try:
    warnings.warn("still an error")
except UserWarning:
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_it_is_imported_when_first_used() -> None:
    """It takes four seconds and 400 MB; and its warnings are no errors, in a suite like this."""
    found = _process(_FIRST_USE, *FILES[:3])
    assert len(found) == 9
    # One thread, small nets: the same kernels give the same bits (3 of 59 files differ by an ulp).
    for path in FILES[:3]:
        assert found[f"{path.name} tensorflow"] == found[f"{path.name} xnnpack"]


def test_without_tensorflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without it cannot be had here; `None` is how Python marks a module as missing."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    edge = EdgeFile(FILES[0])
    with pytest.raises(ModuleNotFoundError) as caught:
        edge.runner("tensorflow")
    assert str(caught.value) == NEEDS_TENSORFLOW
    assert "pip install 'pytest-edgeq[tensorflow]'" in NEEDS_TENSORFLOW
