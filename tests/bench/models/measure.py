"""
Measure a cell: put a model through a flow, and read the file.

All of it runs in a process of its own (`Worker`), because a kernel that aborts takes its process
with it, and then that is what the cell says.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.bench.models.cells import BORDERS, Cell, number_class, verdict
from tests.bench.models.flatbuffer import read
from tests.shared_cache import shared_cache
from tests.waiting import SECONDS

if TYPE_CHECKING:
    from pytest_edgeq import Edgeq, QuantizedModel

# Recipes average ranges over the samples; fewer leave them short of what the activations reach.
N_CALIBRATION = 64
N_EVALUATION = 8
LIMIT_S = 300.0


class Flow(NamedTuple):
    """A quantizer, the scheme that it promises, and what makes the quantizer."""

    promise: str
    quantizer: Callable[[], Any]


def _preset(name: str) -> Callable[[], str]:
    return lambda: name


def _torchao_dynamic_wi8() -> Any:
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis

    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    )


def _torchao_weight_only_wi4() -> Any:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis

    int4: Any = getattr(torch, "int4")  # noqa: B009 # torch's own types leave it out
    return IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerAxis(0))


FLOWS: dict[str, Flow] = {
    "pt2e_static_int8": Flow("int8", _preset("pt2e_static_int8")),
    "pt2e_static_int8_per_tensor": Flow("int8", _preset("pt2e_static_int8_per_tensor")),
    "pt2e_dynamic_int8": Flow("dynamic", _preset("pt2e_dynamic_int8")),
    "pt2e_qat_int8": Flow("int8", _preset("pt2e_qat_int8")),
    "torchao_dynamic_wi8": Flow("dynamic", _torchao_dynamic_wi8),
    "torchao_weight_only_wi4": Flow("weight_only", _torchao_weight_only_wi4),
    "recipe_static_wi8_ai8": Flow("int8", _preset("recipe_static_wi8_ai8")),
    "recipe_static_wi8_ai16": Flow("int16x8", _preset("recipe_static_wi8_ai16")),
    "recipe_dynamic_wi8_afp32": Flow("dynamic", _preset("recipe_dynamic_wi8_afp32")),
    "recipe_dynamic_wi4_afp32": Flow("dynamic", _preset("recipe_dynamic_wi4_afp32")),
    "recipe_weight_only_wi8_afp32": Flow("weight_only", _preset("recipe_weight_only_wi8_afp32")),
    "recipe_weight_only_wi4_afp32": Flow("weight_only", _preset("recipe_weight_only_wi4_afp32")),
    "None": Flow("float", lambda: None),
}


class Measured(NamedTuple):
    """What was found."""

    cell: Cell  # as it would be recorded
    # every op that is not of the promised scheme, with its module and dtypes; of an error its text
    listing: list[str]
    # where the second reading of the file differs from the op-dtype map, and changes of the model
    failures: list[str]


def quantized_by(model: Any, flow: str, maker: Edgeq) -> QuantizedModel:
    """Put a small model through a flow, with all its signatures."""
    kind = type(model)
    sizes = kind.signatures() if hasattr(kind, "signatures") else None
    calibration: Any = [_sample(kind, 1000 + i) for i in range(N_CALIBRATION)]
    if sizes is not None:
        drawn = [kind.signatures(1000 + i) for i in range(N_CALIBRATION)]
        calibration = {key: [each[key] for each in drawn] for key in sizes}
    quantizer = FLOWS[flow].quantizer()
    options: dict[str, Any] = {}
    if quantizer == "pt2e_qat_int8":
        options["train"] = _trainer(model)
    return maker.quantize(
        model,
        kind.sample_inputs() if sizes is None else sizes,
        sample_kwargs=kind.sample_kwargs() or None,
        quantizer=quantizer,
        calibration=calibration,
        dynamic_shapes=kind.dynamic_shapes(),
        **options,
    )


def _sample(kind: Any, seed: int) -> tuple[Any, Any]:
    return kind.sample_inputs(seed), kind.sample_kwargs(seed)


def _trainer(model: Any) -> Callable[[Any], None]:
    """Some small steps towards the float model's own outputs."""
    import torch
    from torch.utils import _pytree as pytree

    def train(prepared: Any) -> None:
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
        for seed in range(2000, 2024):
            args, kwargs = _sample(type(model), seed)
            with torch.no_grad():
                expected = pytree.tree_leaves(model(*args, **kwargs))
            given = pytree.tree_leaves(prepared(*args, **kwargs))
            loss = sum(
                (a - b).square().mean()
                for a, b in zip(given, expected, strict=True)
                if b.is_floating_point()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def observe(quantized: QuantizedModel, promise: str) -> Cell:
    """Read from the file what is recorded of it, but for the numbers."""
    ops: dict[str, Counter[str]] = {}
    borders: Counter[str] = Counter()
    for entry in quantized.op_dtypes:
        if entry.op in BORDERS:
            borders[entry.op] += 1
        else:
            ops.setdefault(entry.scheme, Counter())[entry.op] += 1
    sides = quantized.op_dtypes.to_dict()
    cell: Cell = {
        "verdict": "",
        "ops": {scheme: dict(sorted(ops[scheme].items())) for scheme in sorted(ops)},
        "inputs": [border["dtype"] for border in sides["inputs"]],
        "outputs": [border["dtype"] for border in sides["outputs"]],
    }
    if weights := _weights(quantized):
        cell["weights"] = weights
    if borders:
        cell["borders"] = dict(sorted(borders.items()))
    cell["verdict"] = verdict(cell, promise)
    return cell


def _weights(quantized: QuantizedModel) -> dict[str, str]:
    """By op, how its weights are stored; several kinds are joined with `and`."""
    kinds: dict[str, set[str]] = {}
    for entry in quantized.op_dtypes:
        if entry.op not in BORDERS:
            kind = " ".join(filter(None, (entry.weight, entry.granularity))) or "none"
            kinds.setdefault(entry.op, set()).add(kind)
    return {op: " and ".join(sorted(kinds[op])) for op in sorted(kinds) if kinds[op] != {"none"}}


def second_reading(quantized: QuantizedModel) -> list[str]:
    """Tell where the op-dtype map differs from what the schema alone says."""
    first = [
        (entry.op.split(":")[0], "border" if entry.op in BORDERS else entry.scheme)
        for entry in quantized.op_dtypes
    ]
    second = read(quantized.tflite)
    if len(first) != len(second):
        return [f"the map has {len(first)} ops, the file {len(second)}"]
    return [
        f"op {index}: the map says {mapped}, the file {found}"
        for index, (mapped, found) in enumerate(zip(first, second, strict=True))
        if mapped != (found.op, found.scheme)
    ]


def measure(model: Any, flow: str, maker: Edgeq) -> Measured:
    """Measure one cell."""
    promise = FLOWS[flow].promise
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            quantized = quantized_by(model, flow, maker)
            numbers = figures(type(model), quantized, maker)
        except Exception as error:  # the class and the text are what is recorded
            return _refused(error, type(model).__name__)
    failures = second_reading(quantized)
    cell = observe(quantized, promise)
    if any("strict=False" in str(warning.message) for warning in caught):
        cell["warns"] = "exported with strict=False"
    cell.update(numbers)
    left = [entry for entry in quantized.op_dtypes if entry.op not in BORDERS]
    listing = [
        f"{entry.where}: {', '.join(entry.inputs)} → {', '.join(entry.outputs)}, {entry.scheme}"
        for entry in left
        if entry.scheme not in (promise, "integer")
    ]
    return Measured(cell, listing, failures)


def _known(error: Exception) -> str:
    """The name of what a user catches it by."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return next(kinds)


def _refused(error: Exception, name: str) -> Measured:
    text = str(error)
    upstream = error.__cause__
    if upstream is None and not _is_ours(error):
        upstream = error
    told = text if upstream is None else str(upstream)
    line = next((line.strip() for line in told.splitlines() if line.strip()), "")
    # Without the model's name, so that refusals of one kind read alike.
    words = max((part.strip(" :") for part in line.split(name)), key=len)
    cell: Cell = {
        "verdict": "error",
        "raises": _known(error),
        "upstream": None if upstream is None else type(upstream).__name__,
        "says": words[:100].strip(),
        "text": f"{text}\n{told}",
    }
    return Measured(cell, [text], [])


def _is_ours(error: Exception) -> bool:
    """Whether an error was raised by a line of pytest-edgeq."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "pytest_edgeq" in Path(trace.tb_frame.f_code.co_filename).parts


def figures(kind: Any, quantized: QuantizedModel, maker: Edgeq) -> Cell:
    """The worst signature's figures: the class of its SQNR, and the stage that lost it."""
    comparisons = []
    for key in quantized.signatures:
        evaluation = [
            kind.signatures(3000 + i)[key]
            if hasattr(kind, "signatures")
            else _sample(kind, 3000 + i)
            for i in range(N_EVALUATION)
        ]
        comparisons.append(maker.compare(quantized.signature(key), evaluation))
    worst = min(comparisons, key=lambda comparison: comparison.total.sqnr_db)
    sqnr_db = worst.total.sqnr_db
    cell: Cell = {"numbers": number_class(sqnr_db)}
    if cell["numbers"] == "wrong":
        stages = {name: stage.sqnr_db for name, stage in worst.stages.items() if name != "total"}
        cell["blame"] = min(stages, key=lambda name: stages[name])
    cell["sqnr_db"] = round(sqnr_db, 1)
    return cell


def _serve(pipe: Any) -> None:
    """Answer for one model after the other until the pipe is closed."""
    import torch

    import fixtures.models
    from pytest_edgeq import Edgeq

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # A process of its own reads the run's cache by the environment.
        maker = Edgeq(directory=Path(directory), cache_dir=shared_cache())
        while True:
            try:
                name, flows = pipe.recv()
            except EOFError:
                return
            model = fixtures.models.seeded(getattr(fixtures.models, name))
            before = {key: value.clone() for key, value in model.state_dict().items()}
            for flow in flows:
                measured = measure(model, flow, maker)
                after = model.state_dict()
                changed = [k for k, v in before.items() if not torch.equal(v, after[k])]
                measured.failures.extend(f"the model's {key} was changed" for key in changed)
                pipe.send(measured)


class Worker:
    """A process that measures, and is started anew when a kernel has taken it down."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def measure(self, model: str, flows: Iterable[str]) -> dict[str, Measured]:
        """Measure one model in some flows."""
        found: dict[str, Measured] = {}
        while rest := [flow for flow in flows if flow not in found]:
            if self._process is None:
                self._start()
            self._pipe.send((model, rest))
            for flow in rest:
                measured = self._receive()
                found[flow] = measured
                if self._process is None:
                    break
        return found

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _receive(self) -> Measured:
        with contextlib.suppress(EOFError):
            if self._pipe.poll(LIMIT_S):
                measured: Measured = self._pipe.recv()
                return measured
            self._process.kill()
        self._process.join(SECONDS)
        code = self._process.exitcode
        self._process = None
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        cell = {
            "verdict": "error",
            "raises": "the process died",
            "upstream": name,
            "says": name,
            "text": name,
        }
        return Measured(cell, [name], [])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(SECONDS)
