"""Files that end the process: what TFLite's kernels check by abort is checked here before."""

from __future__ import annotations

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import ModulePaths
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap

__all__ = ["refuse_abort"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

# Inputs are shifted left by so many bits before they are added, and the sum is then multiplied by
# 2 · (greatest input scale) / (2^shift · output scale), for which the kernels demand less than 1:
# QuantizeMultiplierSmallerThanOneExp in tensorflow/lite/kernels/{add,sub}.cc, ai-edge-litert 2.3.0.
_LEFT_SHIFT = {"int8": 20, "uint8": 20, "int16": 15}


def refuse_abort(graph: OpGraph, runtime: str, modules: ModulePaths | None) -> None:
    """
    Refuse a file whose scales make the kernels of ADD or SUB abort, and the test run with them.

    Raises:
        RuntimeError: Says which op and why.
    """
    for op in graph.ops:
        if op.name not in ("ADD", "SUB"):
            continue
        inputs = [graph.tensor(op, index) for index in op.inputs]
        output = graph.tensor(op, op.outputs[0])
        if output.dtype not in _LEFT_SHIFT or not all(len(t.scales) for t in (*inputs, output)):
            continue
        greatest = max(float(tensor.scales[0]) for tensor in inputs)
        scale = float(output.scales[0])
        power = _LEFT_SHIFT[output.dtype] - 1
        if scale > 0 and greatest >= 2**power * scale:
            [entry] = [
                e
                for e in OpDtypeMap(graph, modules).ops(op.name)
                if (e.subgraph, e.index) == (op.subgraph, op.index)
            ]
            raise RuntimeError(
                f"the {runtime} runtime cannot load the .tflite file: {entry.where}\n"
                f"cause: an input's scale, {greatest:.3g}, is 2^{power} times the output's, "
                f"{scale:.3g}, or more: the kernels would abort, and end this process. Such a "
                "scale comes from a constant with infinite or huge values, for instance an "
                "attention mask of -inf, which the converter clamps to the largest float. Let the "
                "model mask with a finite value of the scores' own size (-30, say: softmax makes "
                "1e-13 of it), or leave the op in float"
            )
