from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.baselines import session
from pytest_edgeq.baselines.build import option_changes
from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.session import SnapshotSession
from tests.baselines.op_maps import borders, residual

GOLDEN = Path(__file__).parent / "golden"

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test the same versions."""
    monkeypatch.setattr(session, "producer", lambda: {"pytest-edgeq": "0.1.0", "torch": "2.13.0"})


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    """A test with parameters in a class."""
    return Owner(tmp_path / "tests" / "test_x.py", "TestX::test_y[int8]")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of that test's claim."""
    return tmp_path / "tests" / "__edgeq__" / "test_x" / "TestX.test_y[int8].op_dtypes.json"


@pytest.fixture
def check(tmp_path: Path, owner: Owner) -> Make:
    """Claim values one after the other in the body of one test; give what was recorded."""

    def run(
        *values: dict[str, Any], update: str = "", options: dict[str, str] | None = None
    ) -> list[tuple[str, bool, str]]:
        memory = SnapshotSession(Layout(tmp_path), update=[u for u in update.split(",") if u])
        with memory.running(owner, "setup"):
            pass
        with memory.running(owner, "call"):
            for value in values:
                memory.check("op_dtype_map", "op_dtypes", value, options=options)
        claims = memory.record(owner)
        return [(claim["category"], claim["written"], claim["note"]) for claim in claims]

    return run


def test_a_missing_file_is_a_failure_that_shows_what_would_be_stored(
    check: Make, path: Path
) -> None:
    """The golden text of a claim without a file; and nothing is written."""
    with pytest.raises(AssertionError) as caught:
        check(residual())

    assert f"{caught.value}\n" == (GOLDEN / "missing.txt").read_text("utf-8")
    assert not path.exists()


def test_a_change_is_a_failure_that_shows_how_to_accept_it(
    check: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden text of a change, with the upgrade since; and the file stays as it was."""
    stored = residual()
    check(stored, update="new")
    before = path.read_bytes()
    monkeypatch.setattr(session, "producer", lambda: {"pytest-edgeq": "0.1.0", "torch": "2.14.0"})
    now = {**stored, "ops": [*stored["ops"][:2], *borders(stored["ops"][2]), *stored["ops"][3:]]}

    with pytest.raises(AssertionError) as caught:
        check(now)

    assert f"{caught.value}\n" == (GOLDEN / "changed.txt").read_text("utf-8")
    assert path.read_bytes() == before


def test_each_category_writes_its_own_only(check: Make, path: Path) -> None:
    """`changed` stores nothing new, `new` rewrites nothing."""
    with pytest.raises(AssertionError, match="no baseline is stored yet"):
        check(residual(), update="changed,prune")
    assert check(residual(), update="new") == [("new", True, "")]
    before = path.read_bytes()
    with pytest.raises(AssertionError, match="disappeared"):
        check(residual(1), update="new,prune")
    assert path.read_bytes() == before
    assert check(residual(1), update="changed") == [("changed", True, "")]
    assert check(residual(1)) == [("unchanged", False, "")]


def test_an_unchanged_value_does_not_touch_its_file(
    check: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another build of torch nor another module name churns files on update."""
    check(residual(), update="new")
    before = path.read_bytes()
    monkeypatch.setattr(session, "producer", lambda: {"torch": "2.13.0+cpu"})
    renamed = residual()
    for row in renamed["ops"]:
        row["module"] = "other"

    assert check(renamed, update="new,changed") == [("unchanged", False, "")]
    assert path.read_bytes() == before


def test_one_name_may_be_claimed_twice(check: Make) -> None:
    """The same value under one name is one claim, with update and without."""
    assert check(residual(), residual(), update="new") == [("new", True, "")]
    assert check(residual(), residual()) == [("unchanged", False, "")]


def test_two_values_for_one_name_put_the_old_file_back(check: Make, path: Path) -> None:
    """Which one was meant is not known, and nothing that was accepted before is lost."""
    check(residual(3), update="new")
    before = path.read_bytes()

    with pytest.raises(ValueError, match=r"two different values as op-dtype map") as caught:
        check(residual(2), residual(1), update="changed")

    assert "give each claim a name of its own" in str(caught.value)
    assert path.read_bytes() == before


def test_a_claim_without_a_test(tmp_path: Path) -> None:
    """Outside of any test there is no owner either."""
    with pytest.raises(RuntimeError, match="while no test was running: check it in the body"):
        SnapshotSession(Layout(tmp_path)).check("op_dtype_map", "op_dtypes", residual())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda made: made["data"].pop("ops"), "is no whole op-dtype map.*data lacks ops"),
        (
            lambda made: made["data"]["inputs"][0].update(shape=["x"]),
            r"is no whole op-dtype map.*shape\[0\] is not a whole number",
        ),
        (
            lambda made: made["data"]["ops"][0].update(module=[["x"]]),
            "is no whole op-dtype map.*module is not a text or null",
        ),
        (
            lambda made: made["data"]["ops"][0].update(subgraph=True),
            "is no whole op-dtype map.*subgraph is not a whole number",
        ),
        (
            lambda made: made.update(kind="errors"),
            "holds a 'errors'.*two claims of one test share a name",
        ),
        (
            lambda made: made["owner"].update(test="Testx::test_y[int8]"),
            r"differs from .* in upper and lower case only",
        ),
    ],
)
def test_a_file_that_is_not_the_claims(
    check: Make, path: Path, spoil: Callable[[Any], object], said: str
) -> None:
    """An error, not a difference: update neither hides it nor overwrites the file."""
    check(residual(), update="new")
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    before = path.read_bytes()

    with pytest.raises(ValueError, match=f"(?s){said}"):
        check(residual(), update="new,changed")
    assert path.read_bytes() == before


def test_a_file_that_is_deleted_or_edited_meanwhile(tmp_path: Path, owner: Owner) -> None:
    """It is read when it is compared: what is seen then is told."""
    memory = SnapshotSession(Layout(tmp_path), update=["new"])
    layout = Layout(tmp_path)
    with memory.running(owner, "call"):
        memory.check("op_dtype_map", "op_dtypes", residual())
    path = layout.path(owner, "op_dtypes")
    whole, memory = path.read_text("utf-8"), SnapshotSession(layout)
    with memory.running(owner, "call"):
        memory.check("op_dtype_map", "op_dtypes", residual())
        path.write_text(whole[:-20], "utf-8")
        with pytest.raises(ValueError, match=r"op_dtypes\.json is not valid JSON"):
            memory.check("op_dtype_map", "op_dtypes", residual())
        path.unlink()
        with pytest.raises(AssertionError, match="no baseline is stored yet"):
            memory.check("op_dtype_map", "op_dtypes", residual())
        path.parent.rmdir()
        with pytest.raises(AssertionError, match="no baseline is stored yet"):
            memory.check("op_dtype_map", "op_dtypes", residual())


def test_a_set_up_starts_a_new_record(tmp_path: Path, owner: Owner) -> None:
    """A test that is run again does not carry the claims of its first run."""
    memory = SnapshotSession(Layout(tmp_path), update=["new"])
    for claims in (1, 0):
        with memory.running(owner, "setup"):
            pass
        with memory.running(owner, "call"):
            for _ in range(claims):
                memory.check("op_dtype_map", "op_dtypes", residual())
        assert len(memory.record(owner)) == claims


def test_another_release_is_told_and_written_where_asked(
    check: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update changes the versions in the file, and nothing that was measured."""
    check(residual(), update="new")
    before = json.loads(path.read_text("utf-8"))
    monkeypatch.setattr(session, "producer", lambda: {"pytest-edgeq": "0.1.0", "torch": "2.14.0"})

    assert check(residual(), update="new,tighten") == [("unchanged", False, "")]
    assert json.loads(path.read_text("utf-8")) == before
    assert check(residual(), update="changed") == [("changed", True, "")]
    after = json.loads(path.read_text("utf-8"))

    assert after.pop("producer") == {"pytest-edgeq": "0.1.0", "torch": "2.14.0"}
    assert after == {key: value for key, value in before.items() if key != "producer"}
    assert check(residual(), update="changed") == [("unchanged", False, "")]


def test_options_are_stored_and_a_failure_names_those_that_changed(check: Make, path: Path) -> None:
    """Near miss: a baseline without options, as earlier releases wrote it, names none."""
    stored = {"quantizer": "pt2e_static_int8", "strict_export": "True"}
    now = {**stored, "strict_export": "False"}
    check(residual(), update="new")
    without = path.read_text("utf-8")
    assert "options" not in json.loads(without)
    with pytest.raises(AssertionError) as nothing_known:
        check(residual(1), options=now)
    assert "strict_export" not in str(nothing_known.value)

    assert check(residual(), options=stored, update="changed") == [("changed", True, "")]
    assert json.loads(path.read_text("utf-8"))["options"] == stored
    assert check(residual(), options=now) == [("unchanged", False, "")]
    with pytest.raises(AssertionError, match=r"^strict_export: True → False; .* disappeared"):
        check(residual(1), options=now)
    with pytest.raises(AssertionError) as same:
        check(residual(1), options=stored)
    assert "strict_export" not in str(same.value)


def test_which_options_are_named() -> None:
    """Of another quantizer the settings that its user chose; of the same one every setting."""
    preset = {"quantizer": "pt2e_static_int8", "strict_export": "True"}
    own = {
        "quantizer": "PT2EQuantizer",
        "quantizer.global_config.weight.qscheme": "torch.per_channel_symmetric",
        "quantizer.module_name_config.stem": "None",
        "strict_export": "True",
    }
    other = {**own, "quantizer.global_config.weight.qscheme": "torch.per_tensor_symmetric"}

    assert option_changes(preset, preset) == []
    assert option_changes(preset, own) == [
        "quantizer: pt2e_static_int8 → PT2EQuantizer",
        "quantizer: 'stem' left in float",
    ]
    assert option_changes(own, other) == [
        "quantizer.global_config.weight.qscheme: torch.per_channel_symmetric → "
        "torch.per_tensor_symmetric"
    ]
    assert option_changes({}, own) == option_changes(own, {}) == []
    assert option_changes(preset, {"quantizer": "recipe_static_wi8_ai8"}) == [
        "quantizer: pt2e_static_int8 → recipe_static_wi8_ai8"
    ]


FLOAT = {"": "None"}
OWN = {".weight.dtype": "torch.int8", ".weight.quant_max": "127", ".bias": "None"}
WIDE = {**OWN, ".weight.dtype": "torch.int16"}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (OWN, FLOAT, "{} left in float"),
        (FLOAT, {}, "{} no longer left in float"),
        ({}, OWN, "{} with settings of its own"),
        (OWN, {}, "{} no longer with settings of its own"),
        (OWN, WIDE, "{}: weight.dtype: torch.int8 → torch.int16"),
    ],
)
def test_an_option_of_a_module_says_what_becomes_of_it(
    before: dict[str, str], after: dict[str, str], expected: str
) -> None:
    """Not each setting that it has by itself, and no `None`."""
    for key, name in (
        ("quantizer.module_name_config.layer1.0.conv", "'layer1.0.conv'"),
        ("quantizer.quantizers[0].operator_type_config.aten.add.Tensor", "aten.add.Tensor"),
    ):
        rest = {"quantizer": "PT2EQuantizer", f"{key}_2": "None"}
        old, new = (
            {**rest, **{key + end: v for end, v in each.items()}} for each in (before, after)
        )
        assert option_changes(old, new) == [f"quantizer: {expected.format(name)}"]


def test_a_rule_of_a_recipe_comes_or_goes_as_a_whole() -> None:
    """One that stays is named with the setting that changed."""
    one = {"quantizer.[0].operation": "*", "quantizer.[0].op_config.num_bits": "8"}
    two = {"quantizer.[1].operation": "ADD", "quantizer.[1].algorithm_key": "no_quantize"}
    assert option_changes(one, {**one, **two}) == ["quantizer: rule 2 added"]
    assert option_changes({**one, **two}, one) == ["quantizer: rule 2 removed"]
    assert option_changes(one, {**one, "quantizer.[0].op_config.num_bits": "4"}) == [
        "quantizer: rule 1: op_config.num_bits: 8 → 4"
    ]
