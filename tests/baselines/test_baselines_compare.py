from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.baselines.op_changes import describe_change
from pytest_edgeq.numerics.findings import text_of
from tests.baselines.op_maps import OpMap, borders, op, op_map, residual

DTYPES = ("float32", "float16", "int4", "int8", "int16", "int32")
GOLDEN = Path(__file__).parent / "golden"

dtypes = st.sampled_from(DTYPES)
names = st.sampled_from(["CONV_2D", "ADD", "RELU", "QUANTIZE", "DEQUANTIZE", "FULLY_CONNECTED"])
ops = st.fixed_dictionaries(
    {
        "subgraph": st.integers(0, 1),
        "op": names,
        "module": st.none() | st.sampled_from(["", "stem", "layer1.0", "layer1.1"]),
        "inputs": st.lists(dtypes, max_size=3),
        "weight": st.none() | dtypes,
        "bias": st.none() | dtypes,
        "outputs": st.lists(dtypes, min_size=1, max_size=2),
        "granularity": st.sampled_from([None, "per_tensor", "per_channel", "blockwise_32"]),
        "scheme": st.sampled_from(
            ["int8", "int16x8", "dynamic", "weight_only", "float16", "float"]
        ),
    }
)
borders_of_model = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["a", "b", "c"]),
            "dtype": dtypes,
            "shape": st.lists(st.integers(1, 4), max_size=3),
        }
    ),
    max_size=3,
    unique_by=lambda row: str(row["name"]),
)
maps = st.fixed_dictionaries(
    {"inputs": borders_of_model, "outputs": borders_of_model, "ops": st.lists(ops, max_size=12)}
)


def text_of_change(stored: OpMap, now: OpMap) -> str:
    """Return the text of the change; empty where there is none."""
    found = describe_change(stored, now)
    return "" if found is None else text_of([found])


@given(maps)
def test_a_map_does_not_differ_from_itself(stored: OpMap) -> None:
    """Equal maps: not a word."""
    assert describe_change(stored, copy.deepcopy(stored)) is None


@given(maps, st.data())
def test_renamed_modules_do_not_count(stored: OpMap, data: st.DataObject) -> None:
    """Renaming attributes of the torch model changes nothing in the file."""
    renamed = copy.deepcopy(stored)
    for row in renamed["ops"]:
        row["module"] = data.draw(st.none() | st.text(max_size=5))

    assert describe_change(stored, renamed) is None


@given(maps.filter(lambda made: made["ops"]), st.data())
def test_any_change_of_one_op_names_the_op(stored: OpMap, data: st.DataObject) -> None:
    """Whatever field of whatever op changes, line one names the op."""
    changed = copy.deepcopy(stored)
    row = data.draw(st.sampled_from(changed["ops"]))
    field = data.draw(st.sampled_from(sorted(set(row) - {"module"})))
    before = copy.deepcopy(row)
    other = data.draw(ops.map(lambda made: made[field]).filter(lambda value: value != row[field]))
    row[field] = other

    first = text_of_change(stored, changed).splitlines()[0]

    assert before["op"] in first or row["op"] in first


@given(maps.filter(lambda made: made["outputs"]), st.data())
def test_any_change_of_an_output_names_it(stored: OpMap, data: st.DataObject) -> None:
    """Whatever changes in an output of the model, the text names the output."""
    changed = copy.deepcopy(stored)
    row = data.draw(st.sampled_from(changed["outputs"]))
    before = row["name"]
    field = data.draw(st.sampled_from(["dtype", "shape"]))
    row[field] = "bool" if field == "dtype" else [99]

    text = text_of_change(stored, changed)

    assert text.startswith(f"output '{before}'")
    assert "99" in text or "bool" in text


@given(maps, maps)
def test_any_two_maps_are_distinguished(stored: OpMap, now: OpMap) -> None:
    """Nothing is said exactly if only modules differ; and what is said has no empty line one."""

    def counting(made: OpMap) -> OpMap:
        made = copy.deepcopy(made)
        for row in made["ops"]:
            del row["module"]
        return made

    text = text_of_change(stored, now)

    assert bool(text) == (counting(stored) != counting(now))
    assert not text or text.splitlines()[0].strip()


@given(maps, st.permutations(range(3)))
def test_the_order_of_outputs_counts(stored: OpMap, order: list[int]) -> None:
    """Outputs that change places are reported, because callers take them by position."""
    names = [str(index) for index in range(3)]
    stored["outputs"] = [{"name": name, "dtype": "int8", "shape": []} for name in names]
    now = {**stored, "outputs": [stored["outputs"][index] for index in order]}

    text = text_of_change(stored, now)

    assert ("the order of the outputs went from 0, 1, 2" in text) == (order != [0, 1, 2])


def _float_add(stored: OpMap) -> OpMap:
    ops = stored["ops"]
    return {**stored, "ops": [*ops[:2], *borders(ops[2]), *ops[3:]]}


def _per_tensor(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    changed["ops"][0]["granularity"] = "per_tensor"
    return changed


def _dynamic(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    for row in changed["ops"]:
        if row["op"] == "CONV_2D":
            row.update(scheme="dynamic", inputs=["float32"], bias="float32", outputs=["float32"])
    return changed


def _all_float(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    for row in changed["ops"]:
        row.update(scheme="float", inputs=["float32"] * len(row["inputs"]), outputs=["float32"])
    for part in ("inputs", "outputs"):
        changed[part][0]["dtype"] = "float32"
    return changed


def _float_output(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    changed["outputs"][0]["dtype"] = "float32"
    ops = changed["ops"]
    ops.append({**ops[2], "op": "DEQUANTIZE", "module": None, "outputs": ["float32"]})
    return changed


def _other_op(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    changed["ops"][3]["op"] = "MINIMUM"
    return changed


def _one_of_two(stored: OpMap) -> OpMap:
    changed = _other_op(stored)
    # In place, as the stored map is to have two ops of one name and one module as well.
    stored["ops"].append(copy.deepcopy(stored["ops"][3]))
    changed["ops"].append(copy.deepcopy(stored["ops"][3]))
    return changed


def _another_activation(stored: OpMap) -> OpMap:
    """A SiLU in place of what was fused, which PT2E leaves in float."""
    ops = stored["ops"]
    into, float_op, out_of = borders(ops[2])[-3:]
    logistic = {**float_op, "op": "LOGISTIC", "inputs": ["float32"], "module": None}
    silu = [into, logistic, {**float_op, "op": "MUL", "module": None}, out_of]
    return {**stored, "ops": [*ops[:2], *silu, *ops[2:]]}


def _moved(stored: OpMap) -> OpMap:
    ops = stored["ops"]
    return {**stored, "ops": [*ops[:3], *ops[4:6], ops[3], *ops[6:]]}


def _outputs(stored: OpMap) -> OpMap:
    changed = copy.deepcopy(stored)
    changed["outputs"] = [
        {"name": "boxes", "dtype": "float32", "shape": [1, 4]},
        *changed["outputs"],
    ]
    return changed


def _on_gpu(stored: OpMap, runtime: str = "gpu") -> OpMap:
    """The same map with delegation: all ops on the GPU."""
    ops = [{**row, "delegation": "on the GPU"} for row in stored["ops"]]
    return {**stored, "ops": ops, "delegation": runtime}


def _delegation(stored: OpMap) -> OpMap:
    """A version of ADD that the engine does not support; the op before follows to the CPU."""
    changed = _on_gpu(stored)
    words = "Max version supported: 2. Requested version 3."
    changed["ops"][1]["delegation"] = (
        "on the CPU: supported, but unsupported ops split the graph, and only the largest part "
        "runs on the GPU"
    )
    changed["ops"][2]["delegation"] = f"on the CPU: {words}"
    return changed


CASES = {
    "delegation": _delegation,
    "add_to_float": _float_add,
    "weights_per_tensor": _per_tensor,
    "convolutions_dynamic": _dynamic,
    "all_to_float": _all_float,
    "float_output": _float_output,
    "activation_in_float": _another_activation,
    "op_replaced_one_of_two": _one_of_two,
    "op_moved": _moved,
    "output_added": _outputs,
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_golden_one(case: str) -> None:
    """The texts that users read, kept as files so that a change of them is reviewed as one."""
    stored = residual(4 if case == "all_to_float" else 2)
    stored = _on_gpu(stored) if case == "delegation" else stored

    text = text_of_change(stored, CASES[case](stored))

    assert text + "\n" == (GOLDEN / f"{case}.txt").read_text("utf-8")


def test_delegation_of_another_runtime_is_one_change() -> None:
    """Or where one side has it; other changes are reported with it."""
    stored = residual()
    assert text_of_change(stored, _on_gpu(stored)).startswith("delegation went from none to gpu\n")
    assert text_of_change(_on_gpu(stored), stored).startswith("delegation went from gpu to none\n")
    elsewhere = _delegation(stored) | {"delegation": "pi:gpu"}
    assert text_of_change(_on_gpu(stored), elsewhere).startswith(
        "delegation went from gpu to pi:gpu\n"
    )
    changed = copy.deepcopy(stored)
    changed["ops"][2]["op"] = "SUB"
    text = text_of_change(changed, _outputs(_on_gpu(stored)))
    assert "became ADD; delegation went from none to gpu (" in text.splitlines()[0]


def test_ops_of_a_second_subgraph_are_numbered_by_themselves() -> None:
    """As in every other text: the map lists them behind those of the first."""
    body = [op("NEG", subgraph=1), op("ADD", "body", subgraph=1)]
    now = [body[0], op("ADD", "body", "float", subgraph=1)]
    text = text_of_change(op_map(op("ADD", "stem"), *body), op_map(op("ADD", "stem"), *now))
    assert text.startswith("ADD #1:1 (body) went from int8 to float32\n")
    assert "\n  ADD #1:1  body    scheme int8 → float" in text
