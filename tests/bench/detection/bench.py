"""
The detection bench: sound models × defects × seeds, through the default gate and through its peers.

    python -m tests.bench.detection.bench            small networks, a minute a network and flow
    python -m tests.bench.detection.bench --full     all networks, and 200 sound rebuilds: hours
    python -m tests.bench.detection.bench --net Mlp --flow pt2e_static_int8 --kind "zero point ± 1"
    python -m tests.bench.detection.bench --net bert --where file        an architecture by others

Writes `README.md` beside it, and with `--json FILE` every case. What was missed, what was blamed
wrongly and what was a false alarm is listed by name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.session import SnapshotSession
from pytest_edgeq.tflite.runtimes import Runtime
from tests.bench.detection import architectures, defects_file, defects_model, defects_runtime, peers
from tests.bench.detection.flatfile import FlatFile
from tests.bench.detection.plain import Run, same_codes
from tests.bench.detection.sound import FLOWS, NETS, Net, Sound, build, sound

PAGE = Path(__file__).with_name("README.md")
_LINES = 6  # so many lines of a failure are kept
_LIBRARIES = ("torch", "litert-torch", "ai-edge-litert", "torchao", "ai-edge-quantizer")


_LARGE_FLOWS = ("pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32")
SOME_KINDS = (
    *("activation scale × 1.02", "weight scale × 1.1, one channel", "zero point ± 1"),
    *("weight: one bit", "channel zeroed", "channels swapped", "weights transposed"),
    *("bias ± 16", "fused activation dropped", "padding changed", "op made float"),
    *("buffers aliased", "softmax sharper", "operands exchanged", "operand replaced"),
    *("transpose permuted", "constant: largest zeroed", "constant rolled by one"),
)
"""Some defects of each sort, for networks that take seconds a case."""

_ITSELF = "the build itself"
_ORDER = "calibrated in another order"
_WORKER = "in another process"


@dataclass(frozen=True)
class Case:
    """One file, or one runtime, to be judged."""

    sound: Sound  # what it was made from
    where: str  # `file`, `model` or `runtime`
    kind: str  # of the defect; of a sound rebuild what is other than in the build remembered
    place: str  # where it sits, in words
    build: QuantizedModel = field(repr=False)  # the file with its references
    changed: bool  # whether it changes any code of any activation on any evaluation sample
    runtime: str = "xnnpack"  # what runs it
    ops: frozenset[int] = frozenset()  # right answers for the culprit, as indices in the sound file
    modules: frozenset[str] = frozenset()  # right answers as modules
    # for each op of the file the op of the sound file; empty where they are the same
    origins: tuple[int | None, ...] = ()
    told: bool = False  # the remembered op-dtype map names the culprit, and not `edgeq.localize`
    # what runs the file, for peers; None for LiteRT
    run: Run | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """For lists."""
        return f"{self.sound.name}: {self.kind}: {self.place}"


@dataclass
class Outcome:
    """What became of a case."""

    name: str
    where: str
    kind: str
    changed: bool
    caught: bool = False  # the gate failed; how is its first line, text its first few
    how: str = ""
    text: str = ""
    # it failed with something else than an AssertionError: caught, but not told
    raised: bool = False
    # whether the first answer was right; None where the defect sits in no single layer, changes no
    # code, or was not looked for
    culprit: bool | None = None
    blamed: str = ""  # the first answer, and its sentence
    # whether it is caught with nothing but the file and torch: `edgeq.load`, no memory
    loaded: bool | None = None
    remembered: bool | None = None  # the same with the memory of the sound file, loaded
    loaded_culprit: bool | None = None  # as culprit, of the loaded file
    loaded_blamed: str = ""  # as blamed
    refused: bool = False  # the plugin would not even make the file
    # whether each raised the alarm, None where it cannot tell
    peers: dict[str, bool | None] = field(default_factory=dict)
    seconds: float = 0.0


class Gate:
    """`edgeq.check` with a memory, as in a test."""

    def __init__(
        self,
        directory: Path,
        *,
        threads: int = 1,
        seed: int = 0,
        runtimes: Mapping[str, Runtime] | None = None,
    ) -> None:
        self._owner_file = directory / "test_bench.py"
        self._memory = SnapshotSession(Layout(directory))
        self.maker = Edgeq(
            memory=self._memory,
            threads=threads,
            seed=seed,
            directory=directory,
            runtimes=runtimes,
            runtime=lambda: self._runtime,
        )
        self._runtime = "xnnpack"

    def record(self, accepted: Sound) -> None:
        """Remember a sound build; fails if it does not pass itself."""
        with self._running(accepted, "new"):
            self.maker.check(accepted.quantized, accepted.evaluation)

    def check(self, case: Case) -> tuple[str, bool]:
        """Give the failure's text, empty if the gate lets the case pass, and if it is a crash."""
        with self._running(case.sound, runtime=case.runtime):
            return _failure(lambda: self.maker.check(case.build, case.sound.evaluation))

    def blame(self, case: Case) -> tuple[bool, str]:
        """Tell whether the culprit is right, and who it is."""
        return _blamed(self.maker, case, case.build)

    @contextlib.contextmanager
    def _running(self, of: Sound, *update: str, runtime: str = "xnnpack") -> Iterator[None]:
        self._memory.update = frozenset(update)
        self._runtime = runtime
        owner = Owner(self._owner_file, f"test_{of.name}")
        with self._memory.running(owner, "call"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        self._runtime = "xnnpack"


def _failure(check: Callable[[], None]) -> tuple[str, bool]:
    try:
        check()
    except AssertionError as error:
        return str(error), False
    except Exception as error:  # a test that crashes fails as well; that it did is told
        return f"raised {type(error).__name__}: {error}", True
    return "", False


def _blamed(maker: Edgeq, case: Case, build: QuantizedModel) -> tuple[bool, str]:
    try:
        errors = maker.localize(build, case.sound.evaluation)
    except Exception as error:  # a wrong answer, not the end of the bench
        return False, f"raised {type(error).__name__}: {error}"
    found, cause = errors.culprit, errors.cause
    if found is None:
        return False, f"nobody: {cause}"
    index = case.origins[found.index] if case.origins else found.index
    by_op = bool(case.ops) and index in case.ops
    modules = {found.module}
    if found.op == "DEQUANTIZE":
        # What hands a weight on has no name of its own.
        file, entries = FlatFile(build.tflite), list(build.op_dtypes)
        (made,) = file.operators[found.index].outputs
        modules = {entries[reader].module for reader in file.readers(int(made))}
    # The model itself is no answer: everything is in it.
    by_module = any(module and module in case.modules for module in modules)
    return by_op or by_module, f"{found.op} #{found.index} ({found.module}): {cause}"


class Bench:
    """Runs cases."""

    def __init__(
        self, directory: Path, *, with_peers: bool = True, with_loaded: bool = True
    ) -> None:
        self._with_loaded = with_loaded
        self.gate = Gate(directory)
        # Nothing but a file and a torch module: no flow's own file beside it, no memory.
        self._bare = Edgeq(threads=1, seed=0, directory=directory)
        # The same with a memory.
        self._stranger = Gate(directory / "loaded")
        self._alone: dict[str, str] = {}
        self._switch = defects_runtime.Switch()
        # What is remembered is shared: a board runs the file that was accepted on the desk.
        self._board = Gate(directory, runtimes={defects_runtime.BOARD: self._switch})
        self._with_peers = with_peers
        self._float: dict[tuple[str, int], bytes] = {}
        self._unable: dict[str, frozenset[str]] = {}
        self._directory = directory
        self._worker: ProcessPoolExecutor | None = None

    def sound(self, net: Net, flow: str, seed: int = 0) -> Sound:
        """Make a sound build and let the gate remember it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = sound(self.gate.maker, net, flow, seed)
        self.gate.record(made)
        if not self._with_loaded:
            return made
        loaded = self._loaded(self._stranger.maker, made, made.quantized)
        alone = dataclasses.replace(made, quantized=loaded)
        text, _ = _failure(lambda: self._stranger.record(alone))
        self._alone[made.name] = text
        return made

    def itself(self, of: Sound) -> Outcome:
        """What the gate says of the sound build and its file, and what peers do."""
        case = Case(of, "sound", _ITSELF, "", of.quantized, changed=False)
        outcome = self.judge(case)
        outcome.loaded_blamed = self._alone.get(of.name, "")
        outcome.loaded = bool(outcome.loaded_blamed)
        if self._with_peers:
            outcome.peers = self._ask_peers(case)
        return outcome

    @staticmethod
    def _loaded(maker: Edgeq, of: Sound, build: QuantizedModel) -> QuantizedModel:
        return maker.load(build.tflite, reference=of.module, name=of.net.name)

    def file_cases(self, of: Sound, kinds: Iterable[str], seeds: int) -> Iterator[Case]:
        """Defects in the file."""
        content = of.quantized.tflite
        file = FlatFile(content)
        made = [int(t) for op in file.operators for t in op.outputs]
        modules = [entry.module for entry in of.quantized.op_dtypes]
        for kind, seed in itertools.product(kinds, range(seeds)):
            defect = defects_file.defect(content, kind, seed)
            if defect is None:
                continue
            yield Case(
                of,
                "file",
                kind,
                defect.place,
                of.quantized.with_tflite(defect.tflite),
                changed=not same_codes(content, defect.tflite, made, of.evaluation),
                ops=defect.ops,
                modules=frozenset(m for m in (modules[op] for op in defect.ops) if m),
                origins=defect.origins,
            )

    def model_cases(self, of: Sound, kinds: Iterable[str], seeds: int) -> Iterator[Case | Outcome]:
        """Defects in torch, in the quantizer, in the calibration; refused ones as outcomes."""
        for kind, seed in itertools.product(kinds, range(seeds)):
            if seed and kind not in defects_model.DRAWN:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = defects_model.rebuilt(self.gate.maker, of, kind, seed)
            except defects_model.NotApplicableError:
                continue
            except (ValueError, RuntimeError) as error:
                how = str(error).splitlines()[0]
                name = f"{of.name}: {kind}"
                yield Outcome(name, "model", kind, True, caught=True, how=how, refused=True)
                continue
            yield Case(
                of,
                "model",
                kind,
                made.place,
                made.quantized,
                changed=not _same_build(of, made.quantized),
                modules=made.modules,
                told=kind in defects_model.LEFT_IN_FLOAT,
            )

    def runtime_cases(self, of: Sound) -> Iterator[Case]:
        """Runners that spoil what they give."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = build(self._board.maker, of.net, of.flow, of.module)
        for name, spoil in defects_runtime.SPOILT.items():
            honest, spoilt, fresh = (
                defects_runtime.Bridge(made.path, None, each)
                for each in (defects_runtime.honest, spoil, spoil)
            )
            changed = any(
                {k: v.tobytes() for k, v in honest(inputs).items()}
                != {k: v.tobytes() for k, v in spoilt(inputs).items()}
                for inputs in self._encoded(of)
            )
            self._switch.spoil = spoil
            yield Case(
                of,
                "runtime",
                f"runner: {name}",
                "the outputs",
                # Anew, so that the file is opened on the spoilt runner.
                made.with_tflite(made.tflite),
                changed=changed,
                runtime=defects_runtime.BOARD,
                run=fresh,
            )

    @staticmethod
    def _encoded(of: Sound) -> Iterator[dict[str, Any]]:
        names = of.quantized.input_names
        for sample in of.evaluation:
            yield of.quantized.edge.encode(names, [value.numpy() for value in sample])

    def judge(self, case: Case) -> Outcome:
        """Put a case through the gate and the peers."""
        start = time.perf_counter()
        outcome = Outcome(case.name, case.where, case.kind, case.changed)
        gate = self._board if case.runtime == defects_runtime.BOARD else self.gate
        text, outcome.raised = gate.check(case)
        outcome.caught, outcome.how = bool(text), text.partition("\n")[0]
        outcome.text = "\n".join(text.splitlines()[:_LINES])
        sits = case.changed and bool(case.ops or case.modules) and not case.told
        if case.told and case.changed:
            # A float op has no error that could be measured: the op-dtype map tells.
            outcome.culprit = any(f" {module}" in outcome.text for module in case.modules)
            outcome.blamed = outcome.text
        elif sits:
            outcome.culprit, outcome.blamed = self.gate.blame(case)
        outcome.seconds = time.perf_counter() - start
        # Where a sound file raises the alarm by itself, what is caught of others says nothing.
        judged = self._alone.get(case.sound.name) == "" and case.runtime == "xnnpack"
        if judged and gate is self.gate:
            self._judge_loaded(case, outcome, sits=sits)
        if self._with_peers and case.where != "sound":
            outcome.peers = self._ask_peers(case)
        return outcome

    def _judge_loaded(self, case: Case, outcome: Outcome, *, sits: bool) -> None:
        """The same file as a stranger gives it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = self._loaded(self._bare, case.sound, case.build)
            text, raised = _failure(lambda: self._bare.check(loaded, case.sound.evaluation))
            outcome.loaded, outcome.raised = bool(text), outcome.raised or raised
            again = self._loaded(self._stranger.maker, case.sound, case.build)
            remembered, raised = self._stranger.check(dataclasses.replace(case, build=again))
            outcome.remembered, outcome.raised = bool(remembered), outcome.raised or raised
            if sits:
                outcome.loaded_culprit, outcome.loaded_blamed = _blamed(self._bare, case, loaded)
            elif case.where == "sound":
                outcome.loaded_blamed = text or remembered

    def _ask_peers(self, case: Case) -> dict[str, bool | None]:
        of = case.sound
        if of.name not in self._unable:
            itself = dataclasses.replace(case, build=of.quantized, run=None)
            self._unable[of.name] = peers.unable(self._subject(itself))
        return peers.alarms(self._subject(case), self._unable[of.name])

    def _subject(self, case: Case) -> peers.Subject:
        key = (case.sound.net.name, case.sound.seed)
        if key not in self._float:
            of = case.sound
            self._float[key] = build(self.gate.maker, of.net, None, of.module).tflite
        return peers.Subject(case.sound, case.build, self._float[key], case.run)

    def rebuilds(self, of: Sound, directory: Path, *, orders: int = 1) -> Iterator[Case]:
        """Sound builds that are other than the one remembered in what must not matter."""
        gate = Gate(directory / "rebuilds", threads=2, seed=1)
        make: dict[str, Callable[[], QuantizedModel]] = {
            "again": lambda: build(self.gate.maker, of.net, of.flow, of.module),
            "2 threads, another seed": lambda: build(gate.maker, of.net, of.flow, of.module),
        }
        if "static" in of.flow:
            for number in range(1, orders + 1):
                make[f"{_ORDER} {number}"] = functools.partial(self._reordered, of, number)
        for name, rebuild in make.items():
            kind = _ORDER if name.startswith(_ORDER) else name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield Case(of, "sound", kind, name, rebuild(), changed=False)
        for runtime in defects_runtime.HONEST:
            kind = f"on the {runtime} kernels"
            yield Case(of, "sound", kind, runtime, of.quantized, changed=False, runtime=runtime)

    def _reordered(self, of: Sound, number: int) -> QuantizedModel:
        order = of.net.calibration()
        random.Random(number).shuffle(order)
        return build(self.gate.maker, of.net, of.flow, of.module, calibration=order)

    def rebuilt_in_a_worker(self, of: Sound) -> Outcome:
        """Another process builds and checks, against what this one remembers: as under xdist."""
        name = f"{of.name}: {_WORKER}"
        if self._worker is None:
            # Started anew, not forked: nothing of this process is in it.
            spawn = multiprocessing.get_context("spawn")
            self._worker = ProcessPoolExecutor(1, mp_context=spawn)
        text, raised = self._worker.submit(
            _in_a_worker, self._directory, of.net.name, of.flow, of.seed
        ).result(600)
        return Outcome(
            name, "sound", _WORKER, False, caught=bool(text), how=_first(text), raised=raised
        )


def _in_a_worker(directory: Path, net: str, flow: str, seed: int) -> tuple[str, bool]:
    torch.set_num_threads(1)
    gate = Gate(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of = sound(gate.maker, _net(net), flow, seed)
    return gate.check(Case(of, "sound", _WORKER, "", of.quantized, changed=False))


def _same_build(of: Sound, other: QuantizedModel) -> bool:
    """Whether another build has the same ops and gives the same codes everywhere."""
    ours, theirs = FlatFile(of.quantized.tflite), FlatFile(other.tflite)
    names = [ours.name(i) for i in range(len(ours.operators))]
    if names != [theirs.name(i) for i in range(len(theirs.operators))]:
        return False
    made, others = (
        [int(t) for op in each.operators for t in op.outputs] for each in (ours, theirs)
    )
    return same_codes(of.quantized.tflite, other.tflite, made, of.evaluation, others=others)


# The page. ---------------------------------------------------------------------------------------

_HEAD = """\
<!-- written by `python -m tests.bench.detection.bench`; measured, not promised -->
# Every defect, the right layer, no false alarm

Sound models × defects × seeds, each through the default gate, `edgeq.check`, with what it remembers
of the sound build, and through what people use today. Nothing is tuned to a model.

Measured with {versions}.
`{command}` writes this page anew; which networks and flows it was run for stands in each section.

| word | meaning |
| --- | --- |
| cases | files or runners with this defect, at places drawn by seeds |
| changed | of these, how many change any code of any activation on any evaluation sample; the \
others are counted apart: all codes of all tensors were compared and are equal |
| caught | of those that change a code |
| equal, caught | of those that change none |
| culprit | the first answer of `edgeq.localize` is the right layer; of those that change a code \
and sit in one layer; of a dropped annotation, that the failure of the op-dtype map names it |
| loaded, culprit | the same of a file that `edgeq.load` takes with the torch module and nothing \
else: no file that the flow made beside it, no memory |
| loaded, remembered | caught where the sound file was loaded and remembered before |
| – | the peer does not take such a model |
"""


def page(outcomes: list[Outcome], command: str) -> str:
    """Write the page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    parts = [_HEAD.format(versions=versions, command=command)]
    names = list(peers.PEERS) if any(o.peers for o in outcomes) else []
    for where, title in (
        ("file", "In the file"),
        ("model", "In torch, the quantizer or the calibration"),
        ("runtime", "In the runtime"),
    ):
        here = [o for o in outcomes if o.where == where]
        if not here:
            continue
        parts.append(f"\n## {title}\n\n{_builds(here)}\n\n")
        head = ["defect", "cases", "changed", "caught", "equal, caught", "culprit"]
        head += ["loaded", "culprit", "loaded, remembered", *names]
        parts.append(_row(head) + _row(["---"] * len(head)))
        for kind in dict.fromkeys(o.kind for o in here):
            parts.append(_kind_row(kind, [o for o in here if o.kind == kind], names))
        parts.append(_kind_row("**all**", here, names))
    found = [o for o in outcomes if o.where == "sound"]
    if found:
        parts.append("\n## False alarms\n\n")
        parts.append("Sound builds, and what is other than in the one remembered. ")
        parts.append(f"{_builds(found)}\n\n")
        head = ["rebuilt", "cases", "`edgeq.check`", *names]
        parts.append(_row(head) + _row(["---"] * len(head)))
        for kind in dict.fromkeys(o.kind for o in found):
            alike = [o for o in found if o.kind == kind]
            told = [_share([o.peers.get(n) for o in alike], of_known=True) for n in names]
            ours = str(sum(o.caught for o in alike))
            parts.append(_row([kind, str(len(alike)), ours, *told]))
    parts.append(_lists(outcomes))
    return "".join(parts)


def _builds(outcomes: list[Outcome]) -> str:
    """Which networks these are of, under which flows."""
    builds = list(dict.fromkeys(_build(o)[:2] for o in outcomes))
    told = []
    for net in dict.fromkeys(name for name, _ in builds):
        flows = [flow for name, flow in builds if name == net]
        named = "all flows" if len(flows) == len(FLOWS) else ", ".join(flows)
        told.append(f"{net} under {named}")
    return f"Of {'; '.join(told)}."


def _kind_row(kind: str, alike: list[Outcome], names: list[str]) -> str:
    changed = [o for o in alike if o.changed]
    equal = [o for o in alike if not o.changed]
    return _row(
        [
            kind,
            str(len(alike)),
            str(len(changed)),
            _share([o.caught for o in changed]),
            _share([o.caught for o in equal]),
            _share([o.culprit for o in changed]),
            _share([o.loaded for o in changed]),
            _share([o.loaded_culprit for o in changed]),
            _share([o.remembered for o in changed]),
            *(_share([o.peers.get(n) for o in changed if o.peers], of_known=True) for n in names),
        ]
    )


def _share(values: list[bool | None], *, of_known: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–" if of_known else ""
    return f"{sum(known)} of {len(known)}"


def _row(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |\n"


def _lists(outcomes: list[Outcome]) -> str:
    missed = [o for o in outcomes if o.where != "sound" and o.changed and not o.caught]
    raised = [o for o in outcomes if o.raised]
    wrong = [o for o in outcomes if o.culprit is False]
    false = [o for o in outcomes if o.where == "sound" and (o.caught or o.loaded or o.remembered)]
    parts = []
    for title, found, words in (
        ("Missed", missed, lambda o: o.name),
        ("Caught by a crash", raised, lambda o: f"{o.name}: {o.how}"),
        ("Blamed wrongly", wrong, lambda o: f"{o.name} → {_first(o.blamed)}"),
        (
            "False alarms, one by one",
            false,
            lambda o: f"{o.name}: {o.how or _first(o.loaded_blamed)}",
        ),
    ):
        if found:
            parts.append(f"\n## {title}\n\n" + "".join(f"- {words(o)}\n" for o in found))
    return "".join(parts)


def _first(text: str) -> str:
    return text.partition("\n")[0]


def summary(outcomes: list[Outcome]) -> str:
    """Tell the figures that count in one line."""
    changed = [o for o in outcomes if o.where != "sound" and o.changed]
    false = [o for o in outcomes if o.where == "sound"]
    raised = sum(o.raised for o in changed)
    return (
        f"caught {_share([o.caught for o in changed])} that change a code"
        f"{f' ({raised} by a crash)' if raised else ''}; "
        f"culprit right {_share([o.culprit for o in changed])}; "
        f"loaded: caught {_share([o.loaded for o in changed])}, "
        f"culprit right {_share([o.loaded_culprit for o in changed])}, "
        f"remembered: caught {_share([o.remembered for o in changed])}; "
        f"false alarms {sum(o.caught for o in false)} of {len(false)}, "
        f"loaded {sum(bool(o.loaded or o.remembered) for o in false)}"
    )


def main(arguments: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.detection.bench")
    every = [*NETS, *architectures.ARCHITECTURES]
    parser.add_argument("--full", action="store_true", help="all networks, 200 sound rebuilds")
    parser.add_argument("--seeds", type=int, default=1, help="places a kind of defect")
    parser.add_argument("--net", action="append", choices=every, metavar="NET")
    parser.add_argument("--flow", action="append", choices=FLOWS)
    parser.add_argument("--kind", action="append", help="of defects, as the page names them")
    parser.add_argument("--where", action="append", choices=("file", "model", "runtime", "sound"))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="every case; what it holds is not run again")
    parser.add_argument("--page", type=Path, default=None, help="in place of the page beside this")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = chosen.net or [n for n, net in NETS.items() if chosen.full or not net.large]
    where = chosen.where or ("file", "model", "runtime", "sound")
    outcomes = _known(chosen.json)
    known = {(_build(o), o.where) for o in outcomes}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), with_peers=not chosen.no_peers)
        for name, flow in itertools.product(names, chosen.flow or FLOWS):
            net = _net(name)
            if net.large and flow not in (chosen.flow or _LARGE_FLOWS):
                continue
            if flow in net.unsound:
                continue
            # Rebuilds of other weights, until there are 200 over the small networks.
            weights = range(2 if chosen.full and not net.large else 1)
            for seed in weights:
                left = [w for w in where if ((name, flow, str(seed)), w) not in known]
                if not left or (seed and "sound" not in left):
                    continue
                start = time.perf_counter()
                ours = _run(bench, net, flow, seed, left, chosen, Path(folder))
                outcomes += ours
                took = time.perf_counter() - start
                print(f"{name} {flow} {seed}: {summary(ours)} in {took:.0f} s", flush=True)
                for line in _lists(ours).splitlines():
                    print(f"    {line}" if line else "", flush=True)
                if chosen.json:
                    told = [dataclasses.asdict(o) for o in outcomes]
                    chosen.json.write_text(json.dumps(told, indent=1, ensure_ascii=False))
    command = " ".join(["python -m tests.bench.detection.bench", *_asked(arguments)])
    partial = chosen.net or chosen.flow or chosen.kind or chosen.where
    target = chosen.page or (None if partial else PAGE)
    if target is not None:
        target.write_text(page(outcomes, command), encoding="utf-8")
    print(summary(outcomes))
    return 0


def _net(name: str) -> Net:
    """Return a network of the bench, or an architecture by others."""
    return NETS[name] if name in NETS else architectures.net(name)


def _asked(arguments: list[str]) -> list[str]:
    """What was asked for, without the files that are written."""
    asked, given = [], iter(arguments)
    for argument in given:
        if argument in ("--json", "--page"):
            next(given)
        else:
            asked.append(argument)
    return asked


def _known(path: Path | None) -> list[Outcome]:
    """What a run that was broken off has judged."""
    if path is None or not path.exists():
        return []
    return [Outcome(**each) for each in json.loads(path.read_text())]


def _build(outcome: Outcome) -> tuple[str, ...]:
    """Network, flow and seed of the weights."""
    return tuple(outcome.name.partition(": ")[0].rsplit("-", 2))


def _run(
    bench: Bench, net: Net, flow: str, seed: int, where: Any, chosen: Any, folder: Path
) -> list[Outcome]:
    try:
        of = bench.sound(net, flow, seed)
    except AssertionError as error:
        name = f"{net.name}-{flow}-{seed}: {_ITSELF}"
        return [Outcome(name, "sound", _ITSELF, False, True, _first(str(error)), str(error))]
    except RuntimeError as error:
        if net.name in NETS:  # by others, some are refused by every converter
            raise
        print(f"{net.name} {flow} {seed}: refused: {_first(str(error))}")
        return []
    kinds = chosen.kind
    outcomes: list[Outcome] = []
    if seed == 0:
        cases: list[Iterable[Case | Outcome]] = []
        if "file" in where:
            all_kinds = SOME_KINDS if net.large else defects_file.KINDS
            file_kinds = [k for k in all_kinds if k in (kinds or all_kinds)]
            cases.append(bench.file_cases(of, file_kinds, chosen.seeds))
        if "model" in where:
            model_kinds = [k for k in defects_model.KINDS if kinds is None or k in kinds]
            cases.append(bench.model_cases(of, model_kinds, chosen.seeds))
        if "runtime" in where and kinds is None:
            cases.append(bench.runtime_cases(of))
        for case in itertools.chain(*cases):
            outcomes.append(case if isinstance(case, Outcome) else bench.judge(case))
    if "sound" in where:
        outcomes.append(bench.itself(of))
        for case in bench.rebuilds(of, folder, orders=2 if chosen.full else 1):
            outcomes.append(bench.judge(case))
        outcomes.append(bench.rebuilt_in_a_worker(of))
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
