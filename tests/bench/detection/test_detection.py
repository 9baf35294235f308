"""
The bench at a small size.

All of it: `python -m tests.bench.detection.bench`, whose page is `README.md` beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.bench.detection import defects_file
from tests.bench.detection.bench import SOME_KINDS, Bench, Outcome, summary
from tests.bench.detection.defects_runtime import SPOILT
from tests.bench.detection.sound import NETS, Sound

# A network is built and checked with one defect after the other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SELECTION = (
    ("Mlp", "recipe_static_wi8_ai8"),
    ("Mlp", "recipe_dynamic_wi8_afp32"),
    ("ResidualNet", "pt2e_static_int8"),
)

# Each costs a conversion; the bench has them all.
REBUILT = (
    *("annotation dropped", "symmetric → asymmetric weights", "calibrated on 0.05 ×"),
    *("calibrated on one sample", "non-strict export", "made for BGR"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Without peers and without loaded files: what they miss is the page's business."""
    return Bench(tmp_path_factory.mktemp("remembered"), with_peers=False, with_loaded=False)


@pytest.fixture(
    scope="module",
    params=SELECTION,
    ids="-".join,
)
def of(request: pytest.FixtureRequest, bench: Bench) -> Sound:
    """A sound build, remembered; the gate has let it pass."""
    net, flow = request.param
    return bench.sound(NETS[net], flow)


def _misses(outcomes: Iterable[Outcome]) -> list[str]:
    return [o.name for o in outcomes if o.changed and not o.caught]


def _wrong(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{o.name} → {o.blamed}" for o in outcomes if o.culprit is False]


@pytest.mark.parametrize(
    "kinds", [[*SOME_KINDS], pytest.param([*defects_file.KINDS], marks=pytest.mark.full)], ids=len
)
def test_defects_in_files_are_caught_and_blamed(bench: Bench, of: Sound, kinds: list[str]) -> None:
    """Every one that changes a code; 98 % of them on the right layer."""
    outcomes = [bench.judge(case) for case in bench.file_cases(of, kinds, 1)]
    judged = [o.culprit for o in outcomes if o.culprit is not None]

    assert len(judged) >= len(kinds) // 3
    assert not _misses(outcomes), summary(outcomes)
    assert sum(judged) >= 0.98 * len(judged), _wrong(outcomes)


def test_defects_in_the_build_are_caught(bench: Bench, of: Sound) -> None:
    """Where the flow has them; what changes no code is none of these."""
    outcomes = [
        case if isinstance(case, Outcome) else bench.judge(case)
        for case in bench.model_cases(of, REBUILT, 1)
    ]

    assert outcomes
    assert not _misses(outcomes), summary(outcomes)
    assert not _wrong(outcomes)


def test_a_spoilt_runner_is_caught(bench: Bench, of: Sound) -> None:
    """A sound file on a runner that gives something else than its kernels."""
    outcomes = [bench.judge(case) for case in bench.runtime_cases(of)]

    assert len(outcomes) == len(SPOILT)
    assert any(o.changed for o in outcomes)
    assert not _misses(outcomes), summary(outcomes)


def test_sound_rebuilds_raise_no_alarm(
    bench: Bench, of: Sound, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Another order of calibration, more threads, another seed, other kernels."""
    folder = tmp_path_factory.mktemp("rebuilds")
    outcomes = [bench.judge(case) for case in bench.rebuilds(of, folder)]

    assert len(outcomes) >= 4
    assert not [f"{o.name}: {o.how}" for o in outcomes if o.caught]
