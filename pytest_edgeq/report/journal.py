"""The calls of `Edgeq` in a test, recorded while it runs, and figures for JUnit XML."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pytest_edgeq.numerics.metric_table import METRICS

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.localize.rows import LayerErrors
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.numerics.findings import Finding
    from pytest_edgeq.quantize.cache.conversions import CachedStep
    from pytest_edgeq.quantize.mixed.results import MixedPrecisionPlan, Sensitivity

EventKind = Literal["quantize", "load", "compare", "localize", "sensitivity", "suggest", "check"]


class PhaseJournal(TypedDict):
    """The calls of one phase of one test: the attribute `edgeq_journal` of its report."""

    models: dict[str, dict[str, Any]]  # the models that its events name, by key
    events: list[dict[str, Any]]  # in order; of the schema's type `event`


@dataclasses.dataclass(slots=True)
class Booking:
    """One call of `Edgeq` while it runs."""

    kind: EventKind  # which method
    model: QuantizedModel | None = None  # the model, once it is known
    comparison: Comparison | None = None  # what a comparison or a check measured
    layers: LayerErrors | None = None  # what localizing measured
    sensitivity: Sensitivity | None = None  # errors with each layer toggled
    plan: MixedPrecisionPlan | None = None  # layers to leave in float
    findings: list[Finding] = dataclasses.field(default_factory=list)  # what a check found
    # of a conversion, and which of them came from the cache
    steps: list[CachedStep] = dataclasses.field(default_factory=list)
    error: str | None = None  # class and first line of what was raised
    seconds: float = 0  # how long it took


@contextlib.contextmanager
def booking(
    journal: Journal | None, kind: EventKind, model: QuantizedModel | None = None
) -> Iterator[Booking]:
    """Note a call when it ends, whether it returns or raises."""
    booked = Booking(kind, model)
    started = time.perf_counter()
    try:
        yield booked
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        booked.error = f"{type(error).__name__}: {first}"
        raise
    finally:
        booked.seconds = time.perf_counter() - started
        if journal is not None:
            journal.add(booked)


class Journal:
    """Collects the calls of one process for the report of the running test."""

    def __init__(self, *, details: bool = False, keeps_calls: bool = False) -> None:
        self.details = details
        self.calls: list[Booking] = []
        self._keeps_calls = keeps_calls
        self._models: dict[str, dict[str, Any]] = {}
        # Every report that names a model describes it: the one before may be lost with its worker.
        self._known: dict[str, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []

    def add(self, booked: Booking) -> None:
        """Add a call that has ended."""
        from pytest_edgeq.numerics.findings import text_of
        from pytest_edgeq.report.facts import comparison_facts

        event: dict[str, Any] = {
            "event": booked.kind,
            "model": None if booked.model is None else self.add_model(booked.model),
            "seconds": round(booked.seconds, 3),
            "error": booked.error,
        }
        if booked.kind == "quantize":
            event["steps"] = [step._asdict() for step in booked.steps]
        if booked.comparison is not None:
            event["comparison"] = comparison_facts(booked.comparison)
        for part in ("layers", "sensitivity", "plan"):
            if (measured := getattr(booked, part)) is not None:
                event[part] = measured.to_dict()
        if booked.kind == "check":
            event["findings"] = [text_of([each]) for each in booked.findings]
            event["records"] = [each.to_dict() for each in booked.findings]
        self._events.append(event)
        if self._keeps_calls:
            self.calls.append(booked)

    def add_model(self, model: QuantizedModel) -> str:
        """Add a model that a test uses, and return its key."""
        from pytest_edgeq.report.facts import model_facts, model_key

        key = model_key(model)
        if key not in self._known:
            self._known[key] = model_facts(model)
        self._models[key] = self._known[key]
        return key

    def take(self) -> PhaseJournal:
        """Return the calls and models added since the last call."""
        taken = PhaseJournal(models=self._models, events=self._events)
        self._models, self._events = {}, []
        return taken


PREFIX = "edgeq."  # of the name of every property


def properties_of(journal: PhaseJournal) -> dict[str, str]:
    """Return the properties of one phase of a test."""
    found: dict[str, str] = {}
    for event in journal["events"]:
        if event["model"] is None:
            continue
        model = journal["models"][event["model"]]
        name = f"{PREFIX}{model['name']}[{model['quantizer'] or model['flow']}]"
        found[f"{name}.size_bytes"] = str(model["size_bytes"])
        floats = sum(op["scheme"] == "float" for op in model["ops"])
        found[f"{name}.float_ops"] = str(floats)
        for stage, errors in event.get("comparison", {"stages": {}})["stages"].items():
            found |= {
                f"{name}.{stage}.{metric}": str(errors[metric])
                for metric in METRICS
                if METRICS[metric].in_junit and errors.get(metric) is not None
            }
    return found
