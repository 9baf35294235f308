"""Idioms that the converter rewrites: sound files are not blamed, and defects in them are found."""

from __future__ import annotations

import itertools

import pytest

from fixtures.models import seeded
from fixtures.models.idioms import IDIOMS
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING
from tests.bench.detection import sound
from tests.bench.detection.bench import Bench
from tests.localize.builds import DYNAMIC, PT2E, STATIC, blamed, localized
from tests.localize.rows import culprit

pytestmark = pytest.mark.slow

#: What is wrong with builds that the flow damages.
DAMAGED = {
    ("queries_among_themselves", STATIC): "scales, expected 1; its kernels of int8 read one scale",
    (
        "queries_among_themselves",
        DYNAMIC,
    ): "its dtypes are input int8, weight int8, its output float",
    ("causal", STATIC): "the mask is lost: −inf in torch is 0 in the file",
}

#: Builds without a sound file, each for its reason.
NOT_SOUND = DAMAGED | {
    ("queries_among_themselves", PT2E): "the converter refuses it",
    ("computed_bias", PT2E): "the kernels refuse a LOGISTIC in the file",
    ("learned_queries", PT2E): "the kernels refuse a FULLY_CONNECTED in the file",
    ("buckets", PT2E): "the observers refuse the −inf of log(0)",
    ("grouped", PT2E): "a transposed convolution in groups has a scale a channel of one group",
}

#: Of `defects_file.KINDS`, one of each sort of change.
KINDS = (
    *("weight: sign of the largest", "channels swapped", "bias ± 16", "fused activation dropped"),
    *("softmax sharper", "operands exchanged", "operand replaced", "transpose permuted"),
    "constant: largest zeroed",
)


# The flows take turns over all idioms.
BUILDS = [
    each
    for each in zip(IDIOMS, itertools.cycle((DYNAMIC, STATIC, sound.FLOAT, PT2E)), strict=False)
    if each not in NOT_SOUND
]


def built(maker: Edgeq, name: str, flow: str) -> QuantizedModel:
    """Build an idiom as the bench does, so that both are converted once."""
    return sound.sound(maker, sound.small(IDIOMS[name]), flow).quantized


# A recipe keeps the float file that it quantizes; what PT2E does is told by the file alone.
MORE_OF_PT2E = [(name, PT2E) for name in list(IDIOMS)[::4] if (name, PT2E) not in NOT_SOUND]


@pytest.mark.parametrize(
    ("name", "flow"),
    [*BUILDS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_OF_PT2E)],
)
def test_every_op_is_compared_and_none_is_blamed(maker: Edgeq, name: str, flow: str) -> None:
    """Sound builds have no finding, nor has `load` on the file and the module alone."""
    kind, quantized = IDIOMS[name], built(maker, name, flow)
    for each in (quantized, maker.load(quantized.tflite, reference=seeded(kind))):
        errors = localized(maker, each, kind)

        assert [row.name for row in errors.rows if not row.matched] == [], errors
        assert blamed(errors) == {}


@pytest.mark.parametrize(("name", "flow"), DAMAGED)
def test_what_a_flow_damages_is_told(maker: Edgeq, name: str, flow: str) -> None:
    """It converts without a word, and computes something else."""
    errors = localized(maker, built(maker, name, flow), IDIOMS[name])

    assert culprit(errors).verdict == LOWERING
    assert DAMAGED[name, flow] in errors.cause


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Judge cases without peers and without loaded files."""
    return Bench(tmp_path_factory.mktemp("idioms"), with_peers=False, with_loaded=False)


# 15 of 51 have each flow three times, and each kind.
@pytest.mark.sweep(0, slow=15)
@pytest.mark.parametrize(("name", "flow"), BUILDS)
def test_a_defect_is_caught_and_its_op_is_named(bench: Bench, name: str, flow: str) -> None:
    """Two kinds, which take turns, a place of each; what changes no code is not a defect."""
    of = bench.sound(sound.small(IDIOMS[name]), flow)
    # 4 is prime to the number of kinds, so that each flow, one idiom in four, begins with each.
    first = list(IDIOMS).index(name) % len(KINDS)
    cases = bench.file_cases(of, KINDS[first:] + KINDS[:first], 1)
    outcomes = [bench.judge(case) for case in itertools.islice((c for c in cases if c.changed), 2)]

    assert outcomes
    assert [o.name for o in outcomes if not o.caught] == []
    assert [f"{o.name} → {o.blamed}" for o in outcomes if o.culprit is False] == []
