"""Ops that no torch call can have become, by what torch does with the values that they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_edgeq.localize.alike import changes_nothing
from pytest_edgeq.localize.kinds import (
    CLAMPS,
    HEAVY,
    HEAVY_OPS,
    IDENTITIES,
    VIEWS,
    base_name,
    is_dequantize,
    is_quantize,
)
from pytest_edgeq.localize.matches import Match
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph
from pytest_edgeq.tflite.roles import StoredTensor, roles_of, stored_constant

if TYPE_CHECKING:
    from pytest_edgeq.localize.local import Step

__all__ = ["clamp_findings", "foreign_findings", "pad_findings"]

Node = torch.fx.Node

_ARITHMETIC = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "neg"}
_MEANS = {"mean", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"}
_MOST = {"max_pool1d", "max_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d"}
_ROOTS = {"sqrt", "rsqrt", "div", "div_", "pow", "norm", "linalg_vector_norm", "reciprocal"}

# By op, the functions that the converter makes it of, or of it and others.
_COMES_FROM: dict[str, set[str]] = {
    "LOGISTIC": {"sigmoid", "sigmoid_"},
    "TANH": {"tanh", "tanh_"},
    "RELU": {*CLAMPS, "maximum"},
    "RELU6": {*CLAMPS, "minimum"},
    "RELU_N1_TO_1": {*CLAMPS},
    "RELU_0_TO_1": {*CLAMPS},
    "ELU": {"elu", "elu_", "exp", "ge", "where"},
    "GELU": {"gelu", "mul", "mul_", "div", "div_", "pow"},
    # x·relu6(x + 3)/6, as which the reference has it.
    "HARD_SWISH": {"hardswish", "hardswish_", "add", "add_"},
    "LEAKY_RELU": {"leaky_relu", "leaky_relu_", "mul", "mul_", "gt", "ge", "where", "maximum"},
    "PRELU": {"prelu", "_prelu_kernel", *CLAMPS, "mul", "mul_", "neg"},
    "ABS": {"abs", "abs_", "norm", "linalg_vector_norm"},
    "EXP": {"exp", "exp_", "softmax", "_softmax", "expm1"},
    "LOG": {"log", "log_", "log1p"},
    "SQRT": _ROOTS,
    "RSQRT": _ROOTS,
    "SIN": {"sin"},
    "COS": {"cos"},
    "MEAN": _MEANS,
    "SUM": {"sum", "norm", "linalg_vector_norm", "softmax", "_softmax", *_MEANS},
    "REDUCE_MAX": {"amax", "max", "softmax", "_softmax", *_MOST},
    "REDUCE_MIN": {"amin", "min"},
    "SOFTMAX": {"softmax", "_softmax", "amax"},
    "MAX_POOL_2D": _MOST,
    "AVERAGE_POOL_2D": _MEANS,
    "RESIZE_BILINEAR": {"upsample_bilinear2d"},
    "RESIZE_NEAREST_NEIGHBOR": {"upsample_nearest2d", "upsample_nearest1d"},
}

# Ops of two activations or more.
_PAIRS = {
    *("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"),
    *("CONCATENATION", "PACK", "SELECT", "SELECT_V2"),
}

# Functions that leave no arithmetic in the file, with constants either.
_BARE = {
    *("exp", "log", "sigmoid", "tanh", "sin", "cos", "sqrt", "rsqrt", "abs", "relu", "where"),
    *("ge", "gt", "le", "lt", "eq", "ne", "minimum", "maximum", "amax", "amin", "cat", "stack"),
    *(set(HEAVY) - {"scaled_dot_product_attention"}),
}

# What lays out anew or takes a part: what stands behind it may come first in the file.
_PASSED = {
    *VIEWS,
    *("slice", "select", "getitem", "narrow", "split", "split_with_sizes", "chunk"),
    *("pad", "constant_pad_nd", "unbind"),
}

# Ops that choose one of two values, and what they choose by.
_CHOOSES = ("SELECT", "SELECT_V2")
_CHOOSING = {"where", "ge", "gt", "le", "lt", "eq", "ne"}

# Functions of which it is known what they become. Of others an op may be a part.
_KNOWN = {
    *set().union(*_COMES_FROM.values()),
    *_ARITHMETIC,
    *HEAVY,
    *("cat", "stack", "upsample_bicubic2d", "embedding", "minimum"),
} - {"where", "norm", "linalg_vector_norm", "max", "min", "scaled_dot_product_attention"}


def foreign_findings(
    graph: OpGraph,
    subgraph: int,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    vague: Container[int],
) -> dict[int, tuple[str, ...]]:
    """
    Tell of ops of which torch has none: what it does with what they take is not what they do.

    Only of those whose result is not what some node gives: what computes the same is no error.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
        matches: What each matched tensor stands for.
        reference: The torch graph.
        vague: Tensors whose values hardly tell a node.

    Returns:
        Findings by the index of the op.
    """
    whole = graph.subgraphs[subgraph]
    covered = {index for match in matches.values() for index in match.ops}
    # What is nearest of all that an op might be tells nothing of what is in between.
    explained = {i for match in matches.values() if not match.forced for i in match.ops}
    found: dict[int, tuple[str, ...]] = {}
    for op in whole.ops:
        taken = [i for i in op.inputs if i >= 0 and stored_constant(whole, i) is None]
        heavy = op.name in HEAVY_OPS
        if op.name not in _COMES_FROM and op.name not in _PAIRS and not heavy:
            continue
        if not taken or any(i not in matches for i in taken) or _is_explained(op, matches):
            continue
        if any(i in vague or _is_guessed(matches[i]) for i in taken):
            continue
        if _is_share_of_one(whole, op):
            continue
        users = [set(_users(matches[i], reference)) for i in taken]
        known = _KNOWN | _CHOOSING if op.name in _CHOOSES or len(taken) < 2 else _KNOWN
        if not all(base_name(n) in known or n.op == "output" for n in set().union(*users)):
            continue
        blamed, text = op, None
        if heavy:
            text = _product(graph, op, users, reference)
        elif op.name in _COMES_FROM:
            text = _function(whole, op, users[0])
        elif len(taken) > 1:
            text = _pair(op, taken, users, _through(op, covered, reference))
            blamed = _hander(whole, op, _odd(taken, users)) if text else op
        elif op.index not in explained:
            if _takes_no_constant(op, users[0], reference):
                text = _NOTHING + _done(users[0])
            else:
                text = _other_number(graph, op, users[0])
        if text is not None:
            where = "" if blamed is op else f"behind it, at {op.name} #{op.index}, "
            found[blamed.index] = (f"{where}{text}",)
    return {**_repeated(whole, matches, reference), **found}


def _takes_no_constant(op: Op, users: set[Node], reference: ReferenceGraph) -> bool:
    """Whether torch takes a value with no constant that could be this op's, in any order."""
    kinds = _IN_ORDER.get(op.name, ())
    for node in _through_arithmetic(users, lambda each: base_name(each) in kinds):
        if base_name(node) in _BARE or base_name(node) in _PASSED:
            continue
        if base_name(node) not in _ARITHMETIC or sum(map(reference.varies, _operands(node))) < 2:
            return False
    return True


def _other_number(graph: OpGraph, op: Op, users: set[Node]) -> str | None:
    """Of a product with a number: it must be torch's, as far as the file's scale rounds it."""
    held = [graph.tensor(op, i) for i in op.inputs if graph.tensor(op, i).is_constant]
    if op.name not in ("MUL", "DIV") or len(held) != 1 or math.prod(held[0].shape) != 1:
        return None
    wanted: dict[float, Node] = {}
    for user in users:
        if base_name(user) not in _PRODUCTS:
            return None
        node, product = user, 1.0
        while base_name(node) in _PRODUCTS and len(node.args) == 2:
            number: Any = node.args[1]
            if not isinstance(number, (int, float)) or not number:
                break
            product *= 1 / number if base_name(node).startswith("div") else number
            wanted[abs(product)] = node
            if len(node.users) != 1:
                break
            node = next(iter(node.users))
    if not wanted:
        return None
    stored = read_constant(graph, op, StoredTensor(held[0], False, held[0]))
    got = abs(float(stored.floats.flat[0]))
    got = 1 / got if op.name == "DIV" and got else got
    half = 0.0 if stored.scales is None else 0.5 * float(stored.scales.max())
    # What float32 makes of a product of some, and of the quotient by the scale.
    if any(abs(got - each) <= half * (1 + 2.0**-10) + each * 2.0**-20 for each in wanted):
        return None
    number, node = next(iter(wanted.items()))
    return f"it multiplies by {got:.6g}, where torch does by {number:.6g} ({node.name})"


def _operands(node: Node) -> list[Node]:
    """What a node takes, as often as it takes it."""
    return [each for each in node.args if isinstance(each, Node)]


def _repeated(
    whole: Subgraph, matches: Mapping[int, Match], reference: ReferenceGraph
) -> dict[int, tuple[str, ...]]:
    """
    Tell of ops that do once more what another does, where torch does something else beside.

    Each is what the one torch call gives; that nothing gives the other call is told by counting.
    """
    found: dict[int, tuple[str, ...]] = {}
    for index, match in matches.items():
        if match.same is not None:
            continue
        users = [each for each in _users(match, reference) if base_name(each) in _TWIN_OF]
        if len(users) < 2:
            continue
        takers = [op for op in _takers(whole, index) if op.name in _COMES_FROM]
        for name in {op.name for op in takers}:
            alike = [op for op in takers if op.name == name]
            own = [each for each in users if _TWIN_OF[base_name(each)] == name]
            others = [
                each
                for each in users
                if each not in own
                and not any(base_name(each) in _COMES_FROM[op.name] for op in takers)
            ]
            if not own or len(alike) != len(own) + 1 or len(others) != 1:
                continue
            # Ops stand in torch's order.
            nodes = sorted([*own, *others], key=reference.order)
            op = alike[nodes.index(others[0])]
            again = next(each for each in alike if each is not op)
            found[op.index] = (
                f"it gives {own[0].name} as {again.name} #{again.index} does, and no op gives "
                f"{others[0].name}, which torch takes from the same value",
            )
    return found


# By function, the op that does nothing else.
_TWIN_OF = {
    **{name: name.upper() for name in ("sin", "cos", "exp", "log", "sqrt", "rsqrt", "tanh", "abs")},
    **{name: name.upper() for name in ("mean", "sum")},
    "sigmoid": "LOGISTIC",
    "amax": "REDUCE_MAX",
    "amin": "REDUCE_MIN",
}


def _takers(whole: Subgraph, index: int) -> Iterator[Op]:
    """The ops that take a tensor, or what only holds it in another way, in order."""
    held = {index}
    for op in whole.ops:
        if held.isdisjoint(op.inputs):
            continue
        if op.name in IDENTITIES:
            held.update(op.outputs)
        else:
            yield op


def pad_findings(graph: OpGraph, steps: Iterable[Step]) -> dict[int, tuple[str, ...]]:
    """
    Tell of a PAD in front of a convolution that is not the padding of torch's.

    Returns:
        Findings by the index of the PAD.
    """
    found: dict[int, tuple[str, ...]] = {}
    for step in steps:
        subgraph = graph.subgraphs[step.op.subgraph]
        pads = [subgraph.ops[i] for i in step.match.ops if subgraph.ops[i].name == "PAD"]
        products = [each for each in step.nodes if base_name(each) in _CONVOLUTIONS]
        if len(pads) != 1 or len(products) != 1 or any("pad" in base_name(n) for n in step.nodes):
            continue
        amounts = graph.tensor(pads[0], pads[0].inputs[1])
        padding = products[0].args[4] if len(products[0].args) > 4 else 0
        if not amounts.is_constant or isinstance(padding, str):
            continue
        wanted = padding if isinstance(padding, (list, tuple)) else [padding]
        values = read_constant(graph, pads[0], StoredTensor(amounts, False, amounts)).values
        got = [each for each in values.tolist() if any(each)]
        if sorted(got) != sorted([each, each] for each in wanted if each):
            found[pads[0].index] = (
                f"it pads by {values.tolist()}, where {products[0].name} pads by {list(wanted)}",
            )
    return found


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def clamp_findings(steps: Iterable[Step]) -> dict[int, tuple[str, ...]]:
    """
    Tell of ops with a fused clamp that stand for nodes of which none clamps.

    Returns:
        Findings by the index of the op.
    """
    found: dict[int, tuple[str, ...]] = {}
    for step in steps:
        kind = step.op.fused_activation
        nodes = [*step.nodes, *(each.node for each in step.match.readings)]
        names = {
            base_name(each) for each in nodes if not (is_quantize(each) or is_dequantize(each))
        }
        if kind not in ("RELU", "RELU6", "RELU_N1_TO_1") or step.match.same is not None:
            continue
        if names and names <= (_KNOWN - _CLAMPING) | _PASSED:
            found[step.op.index] = (
                f"it has a fused {kind}, and torch clamps nothing in {step.reading.node.name}",
            )
    return found


# Functions of which a clamp may be a part.
_CLAMPING = {*CLAMPS, "maximum", "minimum", "where", "hardswish", "hardswish_", "elu", "elu_"}


def _is_share_of_one(whole: Subgraph, op: Op) -> bool:
    """Whether an op divides an exponential by itself: the softmax of one value, taken apart."""
    maker = whole.producer.get(op.inputs[0])
    return op.name == "DIV" and len({*op.inputs}) == 1 and maker is not None and maker.name == "EXP"


def _odd(taken: Sequence[int], users: list[set[Node]]) -> list[int]:
    """Those of an op's operands that torch does not take together with the others."""
    if len(taken) < 3:
        return list(taken)
    others = (users[:i] + users[i + 1 :] for i in range(len(users)))
    odd = [i for i, rest in zip(taken, others, strict=True) if set.intersection(*rest)]
    return odd or list(taken)


def _hander(whole: Subgraph, op: Op, odd: Sequence[int]) -> Op:
    """
    The op that hands an op the wrong operand: itself, or the one QUANTIZE in front of it alone.

    Had the op been wired to another's QUANTIZE, that one would have two readers.
    """
    makers = [whole.producer[i] for i in odd if i in whole.producer]
    handing = [each for each in makers if each.name in ("QUANTIZE", "DEQUANTIZE")]
    if len(handing) != 1 or sum(handing[0].outputs[0] in each.inputs for each in whole.ops) > 1:
        return op
    return handing[0]


def _is_guessed(match: Match) -> bool:
    """Whether a node was told by kind alone; one that clamps was told by what stands before it."""
    return match.forced and not any(base_name(each.node) in CLAMPS for each in match.readings)


def _is_explained(op: Op, matches: Mapping[int, Match]) -> bool:
    """Whether what the op gives is what some node gives, as far as rounding goes."""
    made = [matches[i] for i in op.outputs if i in matches]
    return any(not match.forced and match.ops == (op.index,) for match in made)


def _users(match: Match, reference: ReferenceGraph) -> Iterator[Node]:
    """What torch does with a tensor."""
    own = {reading.node for reading in match.readings}
    queue = list(own)
    seen = set(own)
    while queue:
        for user in queue.pop().users:
            if user in seen:
                continue
            seen.add(user)
            passed = base_name(user) in _PASSED or changes_nothing(reference, user)
            if passed or is_quantize(user) or is_dequantize(user):
                queue.append(user)
            else:
                yield user


_NOTHING = "no torch call gives what it gives: torch goes on from its input with "


def _function(whole: Subgraph, op: Op, users: Iterable[Node]) -> str | None:
    """Of an op that does what one function does."""
    fitting = [each for each in users if base_name(each) in _COMES_FROM[op.name]]
    if op.name == "SUM" and not _is_divided(whole, op):
        fitting = [each for each in fitting if base_name(each) not in _MEANS]
    if op.name == "HARD_SWISH":
        fitting = [each for each in fitting if base_name(each) not in _ARITHMETIC or 3 in each.args]
    if fitting:
        return None
    return _NOTHING + _done(users)


def _product(
    graph: OpGraph, op: Op, users: Sequence[set[Node]], reference: ReferenceGraph
) -> str | None:
    """Of a matrix product: torch must have one behind, with a weight of this size."""
    (size,) = {math.prod(each.tensor.shape) for each in roles_of(graph, op).weights} or {0}
    for node in set.intersection(*({*_through_arithmetic(each)} for each in users)):
        if base_name(node) not in HEAVY:
            continue
        turned = base_name(node).startswith("conv_transpose")
        fixed = [each for each in node.all_input_nodes if not reference.varies(each)]
        own = [reference.constant(each, quantized=False).numel() for each in fixed]
        if (not size or size in own) and (turned or op.name != "TRANSPOSE_CONV"):
            return None
    told = _done(set().union(*users))
    return f"torch makes no such product of its input, but goes on from it with {told}"


def _behind_one_product(users: Sequence[set[Node]]) -> list[set[Node]]:
    """What torch makes of products by one matrix, too: the converter joins in front of these."""
    products = [{n.args[1]: n for n in each if base_name(n) in ("linear", "mm")} for each in users]
    common = set.intersection(*map(set, products))
    return [
        each.union(*(own[matrix].users for matrix in common))
        for each, own in zip(users, products, strict=True)
    ]


def _is_divided(whole: Subgraph, op: Op) -> bool:
    """Whether a sum is made a mean of behind."""
    made = {op.outputs[0]}
    for each in whole.ops[op.index + 1 :]:
        if made.intersection(each.inputs):
            if each.name in ("MUL", "DIV"):
                return True
            if each.name in IDENTITIES:
                made.update(each.outputs)
    return False


def _pair(
    op: Op, taken: Sequence[int], users: Sequence[set[Node]], through: Callable[[Node], bool]
) -> str | None:
    """Of an op that takes several activations: torch must take them together somewhere."""
    for i, index in enumerate(taken):
        if index in taken[:i] and not any(map(_takes_twice, users[i])):
            return f"it takes one value twice, and torch goes on from it with {_done(users[i])}"
    behind = _behind_one_product(users) if op.name in ("CONCATENATION", "PACK") else users
    reached = [{*_through_arithmetic(each, through)} for each in behind]
    if set.intersection(*reached):
        return None
    told = "; ".join(dict.fromkeys(map(_done, users)))
    return f"torch takes its inputs nowhere together, but goes on from them with {told}"


def _takes_twice(node: Node) -> bool:
    """Whether a node makes something of a value and itself, or a multiple of it."""
    if base_name(node) in ("cat", "stack"):
        return len(node.all_input_nodes) < len(node.args[0])  # type: ignore[arg-type]
    if base_name(node) in ("pow", "square", "mul", "mul_", "add", "add_", "var", "norm"):
        operands = [each for each in node.args[:2] if isinstance(each, Node)]
        return len(operands) < 2 or operands[0] is operands[1]
    return False


def _through(op: Op, covered: Container[int], reference: ReferenceGraph) -> Callable[[Node], bool]:
    """
    What tells which sums and products what an op takes may have gone through in torch.

    An op that stands for nothing, not with others either, adds up what is added, or multiplies what
    is multiplied, in another order at most; a constant may be a factor of a constant elsewhere.
    """
    kinds = _IN_ORDER.get(op.name) if op.index not in covered else None

    def passes(node: Node) -> bool:
        if op.name in _CHOOSES:
            return False
        if kinds is None or base_name(node) in kinds:
            return True
        return sum(map(reference.varies, node.all_input_nodes)) < 2

    return passes


_SUMS = ("add", "add_", "sub", "sub_", "rsub", "neg")
_PRODUCTS = ("mul", "mul_", "div", "div_", "neg")
_IN_ORDER = {"ADD": _SUMS, "SUB": _SUMS, "MUL": _PRODUCTS, "DIV": _PRODUCTS}


def _through_arithmetic(
    users: Iterable[Node], through: Callable[[Node], bool] = lambda _: True
) -> Iterator[Node]:
    """Nodes, and those behind that are sums and products: sums may be added up in another order."""
    queue = list(users)
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        if base_name(node) not in _ARITHMETIC and base_name(node) not in _PASSED:
            continue
        if not through(node):
            continue
        for user in node.users:
            if user not in seen:
                seen.add(user)
                queue.append(user)


def _done(users: Iterable[Node]) -> str:
    names = sorted({"the output" if each.op == "output" else each.name for each in users})
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "nothing"
