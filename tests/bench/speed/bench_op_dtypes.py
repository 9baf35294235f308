"""
The op-dtype map of a `.tflite` of over 100 MB: time and memory. Run it: it is not a test.

`python tests/bench/speed/bench_op_dtypes.py` converts two linear layers of 4096×4096, then
maps the file in processes of their own, five times each way. Targets: under 0.1 s and under
50 MB. Linux only: the peak is read from /proc, because `ru_maxrss` is inherited from the parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]

_MEASURE = """
import json, pathlib, re, sys, time

def peak_mb():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024

warm = sys.argv[2] == "warm"
if warm:
    import ai_edge_litert.interpreter
    import ai_edge_litert.schema_py_generated
    from pytest_edgeq.runtimes.edge import EdgeFile
before, start = peak_mb(), time.perf_counter()
from pytest_edgeq.runtimes.edge import EdgeFile
source = pathlib.Path(sys.argv[1])
entries = EdgeFile(source).op_dtypes.to_dict()["ops"]
seconds = time.perf_counter() - start
assert entries[0]["op"] == "FULLY_CONNECTED", entries
print(json.dumps({"seconds": seconds, "mb": peak_mb() - before}))
"""


def _measure(path: Path, kind: str) -> dict[str, float]:
    command = [sys.executable, "-c", _MEASURE, str(path), kind]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _main() -> None:
    import torch

    from pytest_edgeq import litert

    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(2))).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.tflite"
        path.write_bytes(
            litert.convert({litert.SIGNATURE: litert.Traced(model, (torch.randn(1, 4096),))})
        )
        print(f"file: {path.stat().st_size / 1e6:.0f} MB")
        for kind, meaning in (("warm", "map alone"), ("cold", "map and the imports it needs")):
            runs = [_measure(path, kind) for _ in range(5)]
            seconds = [run["seconds"] for run in runs]
            extra = [run["mb"] for run in runs]
            print(
                f"{meaning}: {min(seconds):.4f} … {max(seconds):.4f} s, "
                f"{min(extra):.1f} … {max(extra):.1f} MB more at the peak"
            )


if __name__ == "__main__":
    _main()
