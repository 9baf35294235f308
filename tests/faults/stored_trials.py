"""What is tried with a damaged baseline, cache entry or record of a run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.cases import Case
from tests.faults.sentences import is_sentence

Stage = Callable[[str], None]

_HTML_EACH = 40
"""A page takes half a second: it is written of every so many-th record that can be read."""


def try_baseline(case: Case, stage: Stage) -> str:
    """Check what a test measured against the file, and accept changes, as three runs would."""
    from pytest_edgeq.baselines.paths import Layout
    from pytest_edgeq.baselines.record import Owner
    from pytest_edgeq.baselines.session import SnapshotSession
    from tests.faults.stored_seeds import OWNER_TEST, measured

    root = Path.cwd()
    owner = Owner(root / "test_x.py", OWNER_TEST)
    name = {"op_dtype_map": "op_dtypes", "errors": "errors"}[case.origin]
    layout = Layout(root)
    path = layout.path(owner, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    told = "passed"
    for update in ((), ("changed",), ("tighten",)):
        path.write_bytes(case.content)
        memory = SnapshotSession(layout, update=update)
        stage(f"check, update {update}")
        try:
            with memory.running(owner, "call"):
                memory.check(case.origin, name, measured()[case.origin])
        except (AssertionError, ValueError) as error:
            if not is_sentence(error) or path.name not in str(error):
                raise
            told = "refused" if isinstance(error, ValueError) else "told as a change"
        stage(f"record, update {update}")
        memory.record(owner)
    return told


def try_cache(case: Case, stage: Stage) -> str:
    """Read the entry as its step does: it is a miss that is reported, or it can be decoded."""
    from pytest_edgeq.quantize.cache.conversions import ConversionCache
    from pytest_edgeq.quantize.cache.directory import Store
    from pytest_edgeq.quantize.cache.parts import read_file, read_key, read_ranges, read_simulation

    decoders: dict[str, Callable[[Any], Any]] = {
        "export": read_key,
        "calibrate": read_simulation,
        "ranges": read_ranges,
        "quantize": read_file,
    }
    shutil.rmtree("cache", ignore_errors=True)
    said: list[str] = []
    store = Store(Path("cache"), said.append)
    assert case.parts is not None
    store.write(case.origin, "a", case.parts)
    dice = random.Random(case.number)
    if dice.random() < 0.3:
        # The entry's own hashes see any other byte.
        path = Path("cache", case.origin, "a.entry")
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
    stage("read")
    result = ConversionCache(store).read(case.origin, "a", decoders[case.origin])
    if result is None:
        assert len(said) == 1, f"{len(said)} reports of a miss"
        assert "runs again" in said[0]
        return "missed"
    if case.origin == "calibrate":
        stage("graph")
        result.graph()
    return "read"


def try_report(case: Case, stage: Stage) -> str:
    """Show the record as `edgeq report` does, with its pages."""
    from click.exceptions import ClickException, Exit

    from pytest_edgeq.cli.commands.report_command import command

    Path("run.json").write_bytes(case.content)
    arguments = ["run.json", "--markdown", "run.md"]
    if case.number % _HTML_EACH < 2:
        arguments += ["--html", "run.html"]
    stage(" ".join(arguments))
    try:
        command.main(arguments, standalone_mode=False)
    except Exit:
        return "shown"
    except ClickException as error:
        if error.__cause__ is None or not is_sentence(error.__cause__):
            raise
        return "refused"
    return "shown"
