"""One pass over the samples: every op of the file beside the torch nodes that it stands for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.addends import is_subtracted, join_biases, move_biases
from pytest_edgeq.localize.clamps import move_clamps
from pytest_edgeq.localize.decompose import decompose, sliced_joins
from pytest_edgeq.localize.fold import fold_batch_norms, part_biases, turn_products
from pytest_edgeq.localize.in_front import fold_in_front, fold_signs
from pytest_edgeq.localize.local import Step
from pytest_edgeq.localize.masks import mask_findings
from pytest_edgeq.localize.match import Matcher
from pytest_edgeq.localize.measured import Measured
from pytest_edgeq.localize.movers import mover_findings
from pytest_edgeq.localize.numbers import fold_numbers
from pytest_edgeq.localize.outputs import output_findings
from pytest_edgeq.localize.precomputed import (
    computed_behind,
    computed_from_constants,
    constant_starts,
    precomputed_constants,
)
from pytest_edgeq.localize.reference import ReferenceGraph, export
from pytest_edgeq.localize.results import Plan, layer_errors
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.localize.steps import make_steps
from pytest_edgeq.localize.sums import Beside, summed
from pytest_edgeq.localize.tensors import Limits, Tensors
from pytest_edgeq.localize.weights import rounded_constants
from pytest_edgeq.reference import as_tensor, torch_module, undisturbed
from pytest_edgeq.tflite.graph import Op

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.samples import Sample

Node = torch.fx.Node

# Elements that are held at once to be summed up together, of several small tensors.
_TOGETHER = 1 << 16


class Localizer:
    """
    Measures op by op: one sample after the other, or of a small model some at a time.

    Args:
        quantized: The file and its references.
        runtime: Kernels that keep intermediate tensors: `builtin` or `reference`.

    Raises:
        ValueError: No torch reference, or a runtime that keeps no intermediate tensors.
        RuntimeError: The kernels cannot allocate the file.
    """

    def __init__(self, quantized: QuantizedModel, runtime: str = "builtin") -> None:
        reference = quantized.float_model
        if reference is None or torch_module(reference) is None:
            kind = "none" if reference is None else f"a {type(reference).__name__}"
            raise ValueError(
                f"{quantized.name}: localize matches ops to the nodes of a torch module, and the "
                f"reference is {kind}: give one, edgeq.load(tflite, reference=module)"
            )
        self._quantized = quantized
        self._reference = reference
        quantized.edge.restart()
        self._runner = quantized.edge.runner(runtime, keep=True)
        subgraph = quantized.graph.subgraphs[quantized.edge.signature.subgraph]
        self._limits = Limits(subgraph.tensors)
        self._plans: dict[tuple[tuple[int, ...], ...], Plan] = {}
        self._measured: dict[int, Measured] = {}
        self._stack = _Stack()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Localizer:  # noqa: PYI034 # Self came with Python 3.11
        self._open.enter_context(undisturbed(self._reference, self._quantized.name))
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def update(self, sample: Sample) -> None:
        """
        Take one sample in; of a small model it is measured with those behind it.

        Raises:
            RuntimeError: torch.export refuses the reference, or the kernels fail.
            ValueError, TypeError: The sample does not fit the file.
        """
        arrays = sample.arrays()
        quantized = self._quantized
        shapes = tuple(array.shape for array in arrays)
        inputs = [as_tensor(value).detach() for value in sample.tensors]
        self._runner.run(quantized.edge.encode(quantized.input_names, arrays))
        plan = self._plans.get(shapes)
        if plan is None:
            with torch.no_grad():
                plan = self._plans[shapes] = self._plan(sample, inputs)
        fed = self._fed(plan.reference.placeholders, inputs)
        if plan.together == 1:
            run = plan.program.start(fed)
            self._measure(plan, Tensors(self._stored, self._limits, 1), run.take)
            return
        if self._stack.plan is not plan:
            self.finish()
            self._stack.plan = plan
        # Who gives samples may write the next one over this one.
        self._stack.inputs.append([each.clone() for each in fed])
        self._stack.stored.append({i: self._runner.tensor(i) for i in plan.tensors})
        if len(self._stack.inputs) == plan.together:
            self.finish()

    def _stored(self, index: int) -> npt.NDArray[Any]:
        """A tensor of the last run, as a stack of one."""
        return np.asarray(self._runner.tensor(index))[None]

    def _measure(self, plan: Plan, tensors: Tensors, whole: Callable[[Node], torch.Tensor]) -> None:
        """Hold all that was run against torch; `whole` gives what the float model gives."""
        with torch.inference_mode():
            open_steps: list[tuple[Step, Beside | None]] = []
            elements = 0
            for step in plan.steps:
                beside = step.measure(plan.reference, tensors, whole(step.reading.node))
                open_steps.append((step, beside))
                count = step.elements * tensors.count
                if beside is not None or count > _TOGETHER:
                    elements += count
                if elements > _TOGETHER:
                    _judge(open_steps, plan.reference, tensors)
                    open_steps, elements = [], 0
            _judge(open_steps, plan.reference, tensors)

    def finish(self) -> None:
        """
        Measure the samples that were taken in and not measured yet; `result` does it as well.

        Raises:
            RuntimeError: torch fails on one of them.
        """
        plan, inputs, stored = self._stack.plan, self._stack.inputs, self._stack.stored
        self._stack = _Stack()
        if plan is None:
            return
        with torch.inference_mode():
            given = (torch.stack(each) for each in zip(*inputs, strict=True))
            whole = plan.program.run_together(list(given))
        tensors = Tensors(
            lambda index: np.stack([each[index] for each in stored]), self._limits, len(stored)
        )
        self._measure(plan, tensors, whole.__getitem__)

    def result(self) -> LayerErrors:
        """
        Give what was measured.

        Raises:
            ValueError: No sample was taken in.
        """
        if not self._plans:
            raise ValueError(f"{self._quantized.name}: localize: no sample in inputs")
        self.finish()
        # Sorted by input shapes: the order of the samples must not show.
        return layer_errors(
            self._quantized, [self._plans[shapes] for shapes in sorted(self._plans)]
        )

    def _fed(
        self, placeholders: Sequence[Node], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """A value for each placeholder: positional ones first, then those known by name."""
        names = list(self._quantized.input_names)
        by_name = dict(zip(names, inputs, strict=True))
        rest = placeholders[len(self._spec_args) :]
        if all(node.name in by_name for node in rest):
            first = inputs[: len(self._spec_args)]
            return [*first, *(by_name[node.name] for node in rest)]
        return list(inputs)

    @property
    def _spec_args(self) -> tuple[Any, ...]:
        return self._quantized.spec.args

    def _plan(self, sample: Sample, inputs: Sequence[torch.Tensor]) -> Plan:
        quantized = self._quantized
        tensors = Tensors(self._stored, self._limits, 1)

        def read(index: int) -> torch.Tensor:
            return tensors.read(index)[0]

        graph, signature = quantized.graph, quantized.edge.signature
        given = self._module(sample)
        placeholders = [node for node in given.graph.nodes if node.op == "placeholder"]
        fed = self._fed(placeholders, inputs)
        module = decompose(
            given,
            fed,
            is_subtracted(graph, signature.subgraph),
            sliced=sliced_joins(graph, signature.subgraph),
        )
        move_clamps(module, graph, signature.subgraph)
        part_biases(module, graph, signature.subgraph)
        fold_in_front(module, graph, signature.subgraph)
        fold_numbers(module, graph, signature.subgraph)
        fold_signs(module, graph, signature.subgraph)
        reference = ReferenceGraph(module)
        names = list(quantized.input_names)
        borders = {}
        known = {border.name for border in signature.inputs} == set(names)
        for position, border in enumerate(signature.inputs):
            place = names.index(border.name) if known else position
            borders[border.tensor.index] = (reference.placeholders[place], fed[place])

        ops = graph.subgraphs[signature.subgraph].ops
        computed = computed_from_constants(graph, ops)
        starts = constant_starts(graph, ops, reference, read, computed)
        reference.compute_anew(list(computed_behind(reference, starts)))

        def weights(op: Op, given: Iterable[Node]) -> dict[Node, torch.Tensor]:
            given = set(given)
            return {
                **precomputed_constants(graph, op, reference, given, read, computed),
                **rounded_constants(graph, op, reference, given),
            }

        matcher = Matcher(
            graph,
            signature.subgraph,
            reference,
            read,
            borders,
            self._module_of,
            weights,
            starts,
            computed,
        )
        matches = matcher.run()
        steps = make_steps(graph, matches, reference, weights, self._measured)
        program = reference.program(Counter(step.reading.node for step in steps))
        misplaced = output_findings(
            given,
            reference,
            fed,
            matches,
            signature.outputs,
            graph.subgraphs[signature.subgraph],
            read,
            turned={each.name for each in signature.outputs if quantized.edge.layouts.of(each)},
        )
        masks = mask_findings(graph, signature.subgraph, matches, reference, read)
        moved = mover_findings(graph, signature.subgraph, matches, reference, read)
        broken = {**moved, **masks, **misplaced, **matcher.broken}
        return Plan(reference, matches, steps, program, broken, computed)

    def _module_of(self, op: Op) -> str | None:
        modules = self._quantized.edge.modules
        return None if modules is None else modules.path_of(self._quantized.graph, op)

    def _module(self, sample: Sample) -> torch.fx.GraphModule:
        simulated = self._quantized.simulated
        if isinstance(simulated, torch.fx.GraphModule):
            return simulated
        args = tuple(as_tensor(value) for value in sample.args)
        kwargs = {name: as_tensor(value) for name, value in sample.kwargs.items()}
        module = self._reference
        if not isinstance(module, torch.nn.Module):
            module = _Called(module)
        try:
            exported = export(module, args, kwargs)
        except Exception as error:
            raise RuntimeError(
                f"{self._quantized.name}: localize needs the reference's graph, and torch.export "
                f"refuses it\n{type(error).__name__}: {error}"
            ) from error
        graph, subgraph = self._quantized.graph, self._quantized.edge.signature.subgraph
        turn_products(exported)
        fold_batch_norms(exported, graph, subgraph)
        move_biases(exported, graph, subgraph)
        join_biases(exported, graph, subgraph)
        return exported


def _judge(
    steps: Sequence[tuple[Step, Beside | None]], reference: ReferenceGraph, tensors: Tensors
) -> None:
    """Sum up what several steps are held against, and let go of what is done with."""
    found = iter(summed([beside for _, beside in steps if beside is not None]))
    for step, beside in steps:
        step.judge(beside, None if beside is None else next(found), reference, tensors)
    for step, _ in steps:
        for index in step.done:
            tensors.drop(index)


@dataclass(slots=True, eq=False)
class _Stack:
    """
    Samples that were run and are not measured yet.

    Attributes:
        plan: How they will be.
        inputs: By sample, a value for each of torch's placeholders.
        stored: By sample, tensors of the file.
    """

    plan: Plan | None = None
    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    stored: list[dict[int, npt.NDArray[Any]]] = field(default_factory=list)


class _Called(torch.nn.Module):
    """A method of a module, or a partial of one, as a module that can be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.owner = torch_module(function)
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)
