"""assert_within_budget ends with layers to leave in float, or with the method that finds them."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures import digits
from pytest_edgeq import Budget, Edgeq, QuantizedModel, assert_within_budget
from tests.quantize.mixed import nets

HINT = (
    "`edgeq.suggest_mixed_precision` finds layers to leave in float; with --edgeq-suggest it runs "
    "here"
)
TIGHT = Budget(sqnr_db=40)


def _failure(
    maker: Edgeq, quantized: QuantizedModel, samples: Any, *budgets: Any, **others: Any
) -> list[str]:
    """Return the lines of a budget that fails."""
    measured = maker.compare(quantized, samples)
    with pytest.raises(AssertionError) as caught:
        assert_within_budget(measured, *budgets, **others)
    return str(caught.value).splitlines()


def test_the_last_line_names_the_method(reader: QuantizedModel) -> None:
    """After a blank line, and without a search."""
    lines = _failure(Edgeq(), reader, nets.held_out(16), TIGHT)
    assert lines[-2:] == ["", HINT]


@pytest.mark.parametrize(
    "budgets",
    [
        {"quantization": TIGHT},
        {"total": Budget(sqnr_db=1), "quantization": TIGHT},
        {"total": {"output_0": TIGHT}},
    ],
    ids=["stage", "total is kept", "by output"],
)
def test_only_a_budget_of_the_total_is_searched_for(reader: QuantizedModel, budgets: Any) -> None:
    """The goal of a search is one budget for the whole file."""
    assert HINT not in _failure(Edgeq(), reader, nets.held_out(16), **budgets)


def test_not_of_a_file_made_elsewhere(reader: QuantizedModel) -> None:
    """It is not known how to quantize it again."""
    loaded = Edgeq().load(reader.path, reference=digits.trained())
    assert HINT not in _failure(Edgeq(), loaded, nets.held_out(16), TIGHT)


def test_not_where_inputs_are_the_cause(reader: QuantizedModel) -> None:
    """Clipped inputs cost as much with any layer in float."""
    lines = _failure(Edgeq(), reader, [10 * each for each in nets.held_out(16)], TIGHT)
    assert any(line.startswith("cause: input ") for line in lines)
    assert HINT not in lines


def test_the_plan_stands_at_the_end() -> None:
    """It ends with the quantizer, to paste."""
    maker = Edgeq(suggest_timeout=300)
    quantized = nets.quantized_digits(maker)
    budget = nets.budget_of_two_layers(maker, quantized)
    lines = _failure(maker, quantized, nets.held_out(), budget)
    start = lines.index("edgeq.suggest_mixed_precision:")
    assert lines[start - 1] == ""
    assert lines[start + 1].startswith(f"DigitsNet: meets {budget!r} with 2 layers in float")
    assert lines[-6:] == [
        "quantizer = (",
        "    PT2EQuantizer()",
        "    .set_global(config)",
        '    .set_module_name("conv1", None)',
        '    .set_module_name("fc", None)',
        ")",
    ]
    assert HINT not in lines


def test_of_an_iterator_the_worst_samples_are_left() -> None:
    """The comparison keeps them."""
    maker = Edgeq(suggest_timeout=300)
    lines = _failure(maker, nets.quantized_digits(maker), iter(nets.held_out(16)), TIGHT)
    said = "edgeq.suggest_mixed_precision, on the worst samples, as the others are used up:"
    plan = lines[lines.index(said) :]
    assert any(line.startswith("file: ") and "; 3 samples, " in line for line in plan)


def test_a_search_that_fails_is_one_line(reader: QuantizedModel) -> None:
    """Here the calibration samples were an iterator."""
    lines = _failure(Edgeq(suggest_timeout=300), reader, nets.held_out(16), TIGHT)
    said = "edgeq.suggest_mixed_precision failed: DigitsNet: its calibration samples were a "
    assert lines[-1].startswith(said)
