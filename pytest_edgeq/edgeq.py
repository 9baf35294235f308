"""`Edgeq`: the value of the fixture `edgeq`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.compare.parallel import torch_threads
from pytest_edgeq.names import CACHE_MODES, ISOLATE_MODES, readable
from pytest_edgeq.report.journal import Booking, booking
from pytest_edgeq.runtimes.workers.settings import (
    DEFAULT_SECONDS,
    available_cores,
    memory_bound,
)
from pytest_edgeq.versions import names_missing_libraries, naming_missing_libraries

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

    from pytest_edgeq.baselines.session import SnapshotSession
    from pytest_edgeq.compare.language.generation import Generation
    from pytest_edgeq.compare.language.model import Tokenizer
    from pytest_edgeq.compare.quantized import QuantizedModel, Reference
    from pytest_edgeq.compare.samples import SampleSource
    from pytest_edgeq.localize.rows import LayerErrors
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.progress import Progress
    from pytest_edgeq.quantize.cache.conversions import ConversionCache
    from pytest_edgeq.quantize.cache.directory import CacheLog
    from pytest_edgeq.quantize.mixed.results import MixedPrecisionPlan, Sensitivity
    from pytest_edgeq.report.journal import Journal
    from pytest_edgeq.runtimes.delegation import Delegation
    from pytest_edgeq.runtimes.registry import Runtimes
    from pytest_edgeq.tflite.runtimes import Runtime
    from pytest_edgeq.tflite.source import TflitePath


class Edgeq:
    """
    Quantize models, load files, compare them with torch, and check baselines.

    Inside pytest the fixture `edgeq` is one of these; outside, `Edgeq()` serves for all but what is
    remembered.

    Args:
        runtime: Runtime of calls that name none, or a callable that returns its name.
        threads: Cores that may be used; all by default. Figures are the same for any number.
        seed: Of the random number generators of torch, numpy and Python while a model is
            quantized.
        directory: Where files are written; a temporary folder by default.
        memory: Stores baselines; given by the plugin.
        runtimes: Runtimes of your own by name (`pytest_edgeq.tflite.runtimes.Runtime`). Inside
            pytest they come from the hook `pytest_edgeq_runtimes`.
        targets: Commands by name, as words, that start a Python with numpy and ai_edge_litert on
            another machine or CPU. Each is a runtime, `NAME` or `NAME:KERNELS` (`xnnpack`,
            `builtin`, `reference`, `gpu`, `gpu_f32`). Inside pytest they come from
            `edgeq_targets`.
        check_targets: Runtimes of targets, `gpu` or `gpu_f32`, that `check` runs as well.
        target_timeout: Seconds without an answer after which a target has failed.
        localize_timeout: Seconds for which a failed check of a comparison looks for the layer to
            blame on the worst samples; 0 for not at all.
        suggest_timeout: Seconds for which a failed budget runs `suggest_mixed_precision`; 0 for
            not at all.
        cache_dir: Keeps finished conversions; processes may share it, and it may be deleted at any
            time. None keeps nothing.
        cache: `on`; `off`; or `refresh`, which replaces what earlier sessions have kept.
        cache_log: Receives the cache's messages; given by the plugin. By default problems of the
            directory are warnings.
        progress: Shows long steps; given by the plugin.
        journal: Records what each call measured; given by the plugin.
        isolate: Which native code runs in a child process. `auto`: the first run of a file that was
            made elsewhere, and of each file on every runtime but `xnnpack`. `on`: conversions and
            all runs. `off`: none. Figures are the same.
        isolate_timeout: Seconds after which one step in the child has failed.
        isolate_memory: Bytes that the child may use, or a text such as `"4G"`; by default half of
            the machine's memory, at least 4 GiB.
        executor: Measures the samples of every call without an executor of its own: `processes:N`,
            `dask:ADDRESS` (`pytest-edgeq[dask]`), or any `concurrent.futures.Executor`. None
            measures in this process. Figures are equal within 1e-12.

    Raises:
        ValueError: An unknown name, a runtime of your own with a built-in one's name, or a number
            out of range.
        TypeError: A number that is not whole, or a runtime that cannot be called.
    """

    def __init__(
        self,
        *,
        runtime: str | Callable[[], str] = "xnnpack",
        threads: int | None = None,
        seed: int = 0,
        directory: Path | None = None,
        memory: SnapshotSession | None = None,
        runtimes: Mapping[str, Runtime] | Runtimes | None = None,
        targets: Mapping[str, Sequence[str]] | None = None,
        check_targets: Sequence[str] = (),
        target_timeout: int = DEFAULT_SECONDS,
        localize_timeout: int = 60,
        suggest_timeout: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache: str = "on",
        cache_log: CacheLog | None = None,
        progress: Progress | None = None,
        journal: Journal | None = None,
        isolate: str = "auto",
        isolate_timeout: int = DEFAULT_SECONDS,
        isolate_memory: int | str | None = None,
        executor: str | Executor | None = None,
    ) -> None:
        with naming_missing_libraries():
            from pytest_edgeq.compare.executors.session_executor import SessionExecutor
            from pytest_edgeq.progress import Progress
            from pytest_edgeq.quantize.cache.directory import CacheLog, Store
            from pytest_edgeq.quantize.session import Session
            from pytest_edgeq.runtimes.registry import Runtimes
            from pytest_edgeq.runtimes.workers.policy import Isolation
            from pytest_edgeq.runtimes.workers.target import make_targets

        threads = available_cores() if threads is None else threads
        for setting, value, least in (
            ("threads", threads, 1),
            ("seed", seed, 0),
            ("localize_timeout", localize_timeout, 0),
            ("suggest_timeout", suggest_timeout, 0),
            ("isolate_timeout", isolate_timeout, 1),
            ("target_timeout", target_timeout, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{setting}: expected a whole number, got {value!r}")
            if setting == "seed" and not 0 <= value < 2**32:
                raise ValueError(f"seed: expected 0 … 2**32 − 1, got {value}")
            if value < least:
                raise ValueError(f"{setting}: expected at least {least}, got {value}")
        for setting, mode, modes in (
            ("isolate", isolate, ISOLATE_MODES),
            ("cache", cache, CACHE_MODES),
        ):
            if mode not in modes:
                raise ValueError(f"{setting}: expected one of {', '.join(modes)}, got {mode!r}")
        if not isinstance(runtimes, Runtimes):
            runtimes = Runtimes(
                {} if runtimes is None else runtimes,
                targets=make_targets(targets or {}, target_timeout),
                check_targets=check_targets,
                seconds=target_timeout,
            )
        if isinstance(runtime, str):
            fixed = runtimes.check(runtime)
            tell: Callable[[], str] = lambda: fixed  # noqa: E731 # a name for one value
        else:
            tell = runtime
        log = CacheLog() if cache_log is None else cache_log
        store = None
        if cache_dir is not None and cache != "off":
            store = Store(Path(cache_dir), log.warn)
        refresh = cache == "refresh"
        isolation = Isolation(
            isolate,
            seconds=isolate_timeout,
            memory=memory_bound(isolate_memory),
            store=store,
            refresh=refresh,
            note=log.note,
        )
        runtimes = runtimes.isolated(isolation)

        def open_cache() -> ConversionCache:
            from pytest_edgeq.quantize.cache.conversions import ConversionCache

            return ConversionCache(store, log.note, refresh=refresh, seed=seed)

        self._note = log.note
        self._session = Session(
            tell,
            threads,
            seed,
            directory,
            runtimes,
            localize_timeout,
            open_cache,
            Progress() if progress is None else progress,
            isolation.native,
            SessionExecutor(executor),
        )
        self._memory = memory
        self._journal = journal
        self._suggest_timeout = suggest_timeout

    @names_missing_libraries
    def quantize(
        self,
        model: torch.nn.Module
        | torch.export.ExportedProgram
        | Mapping[str, torch.nn.Module | torch.export.ExportedProgram],
        sample_inputs: Any = None,
        *,
        quantizer: Any = "pt2e_static_int8",
        calibration: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        sample_kwargs: Mapping[str, torch.Tensor] | None = None,
        train: Callable[[torch.fx.GraphModule], Any] | None = None,
        dynamic_shapes: Any = None,
        strict_export: bool = True,
        name: str | None = None,
    ) -> QuantizedModel:
        """
        Quantize a torch model and convert it to `.tflite`.

        The model is left as it was: parameters, buffers, training flag and hooks.

        Dicts by signature make a file with several signatures: `sample_inputs={"small": (x,),
        "large": (y,)}`, `calibration` and `dynamic_shapes` likewise; `model` is one for all or a
        dict, too. `quantized.signature("small")` runs and compares one of them.

        Args:
            model: A module in eval mode; or an exported program or its `.module()`, which PT2E
                flows do not export again; or a graph that PT2E has prepared and calibrated, or
                converted, which is converted as it is. The float reference of such a graph is the
                graph without its observers or its rounding.
            sample_inputs: A tuple of tensors that the model is traced with.
            quantizer: A preset's name (`pytest_edgeq.names.PRESETS`), a torchao PT2E `Quantizer`
                instance, a torchao `AOBaseConfig` (as for `quantize_`; `FqnToConfig` chooses
                layers), an ai-edge-quantizer recipe (list of dicts, or a `.json` path), or None for
                plain float.
            calibration: Any iterable of samples, each a tensor, a tuple of tensors or a dict;
                read once, in order, and only by quantizers that need it.
            sample_kwargs: Keyword inputs to trace with.
            train: Of quantization-aware training, with `pt2e_qat_int8` or a quantizer of fake
                quantizers: called once with the prepared graph, to train it in place. The graph
                shares nothing with the model, accepts batches of any size where the model does,
                is in eval mode, and has `train()` and `eval()`. No calibration is read. Errors are
                measured against the model as it was given; `load(quantized.path,
                reference=trained)` compares the file with the trained weights.
            dynamic_shapes: As for `torch.export.export`.
            strict_export: Of PT2E flows. A model that strict export refuses is exported
                non-strictly with a warning.
            name: For texts and files; the class's name by default.

        Returns:
            The file with its references.

        Raises:
            TypeError: Not a module, not a quantizer, or a sample of another kind or dtype.
            ValueError: A model in train mode, missing or bad calibration data, an unknown preset,
                `train` missing or without effect, or a model in which nothing was quantized.
            FileNotFoundError: The recipe's path does not exist.
            RuntimeError: torch.export, the converter or the kernels refuse the model.
        """
        from pytest_edgeq import litert
        from pytest_edgeq.quantize.arguments import make_request
        from pytest_edgeq.quantize.resolve import describe, run_flow
        from pytest_edgeq.runtimes.process_state import frozen_heap, seeded

        request = make_request(
            model,
            sample_inputs,
            sample_kwargs=sample_kwargs,
            calibration=calibration,
            train=train,
            dynamic_shapes=dynamic_shapes,
            strict_export=strict_export,
            name=name,
            quantizer=describe(quantizer),
            session=self._session,
        )
        seed, threads = self._session.seed, self._session.threads
        litert.load_exporter()
        with booking(self._journal, "quantize") as booked:
            booked.steps = self._session.cache.steps = []
            with seeded(seed), torch_threads(threads), frozen_heap():
                booked.model = run_flow(request, quantizer)
        return booked.model

    @names_missing_libraries
    def load(
        self,
        tflite: TflitePath | bytes,
        *,
        reference: Reference | Mapping[str, Reference] | None = None,
        float_tflite: TflitePath | bytes | None = None,
        name: str | None = None,
        layout: str | Mapping[str, str] | None = None,
        section: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> QuantizedModel:
        """
        Open a `.tflite` file made elsewhere, or a model in a `.litertlm` or `.task` bundle.

        A file of a language model (`prefill_N` and `decode` with a key-value cache, bare or in a
        `.litertlm`) is a `LanguageModel`: its samples are sequences of token ids, and its reference
        is the Hugging Face module.

        Args:
            tflite: Path or content.
            reference: A torch module in eval mode, an exported program, a Keras model,
                `onnx_reference(session)`, or any other callable, which gets numpy arrays, tensors
                if it fails on arrays, and inputs by name if it has `**kwargs`. Or another file: its
                path, bytes or `QuantizedModel`; `localize` compares the ops with those of a float
                one. A reference that quantizes activations itself is compared at the outputs alone,
                a graph of `convert_pt2e` also by its weights. A file with several signatures needs
                a dict by signature, or a file with the same ones.
            float_tflite: Path or content of the float file that it was quantized from. `compare`
                then has the stages `conversion` and `quantization`, and `localize` compares the ops
                with those of that file. Alone it is the reference.
            name: For texts and files; by default the file's stem, of bytes the class of a torch
                reference.
            layout: `"nhwc"`: inputs and outputs of four dimensions have their channels last in the
                file and first in the reference; `"nchw"`: the other way round. A dict sets single
                ones by their names in the file, also of three or five dimensions (`"nwc"`,
                `"ndhwc"`, …). Samples and the outputs of `run` have the reference's layout.
            section: The model to open of a bundle with several, such as `embedder`; `edgeq show`
                lists them. Another bundle, as float file or reference, is opened at the same one.
            tokenizer: Of a language model, for sequences that are text: a callable that returns
                token ids, such as a Hugging Face tokenizer.

        Raises:
            FileNotFoundError: No such file.
            ValueError: Not a whole `.tflite` file, a reference in train mode, a layout that fits
                nothing in the file, a float file with other signatures, inputs or outputs, or an
                unknown or missing section.
            TypeError: Neither a path nor bytes, or a reference that cannot be called.
            ModuleNotFoundError: The package that reads `.litertlm` is not installed.
        """
        from pytest_edgeq.compare.file_health import conformance_findings
        from pytest_edgeq.quantize.prebuilt import load_prebuilt

        if name is None:
            stem = None
            if isinstance(tflite, (str, os.PathLike)):
                stem = Path(tflite).stem if section is None else f"{Path(tflite).name}:{section}"
            name = stem or _class_name(reference) or "model"
        name = readable(name)
        with booking(self._journal, "load") as booked:
            booked.model = load_prebuilt(
                tflite, reference, name, self._session, layout, float_tflite, section, tokenizer
            )
        for warnings in (False, True):
            for each in conformance_findings(booked.model.edge, warnings=warnings):
                self._note(f"{name}: {each}")
        return booked.model

    @names_missing_libraries
    def compare(
        self,
        quantized: QuantizedModel,
        inputs: Iterable[Any],
        *,
        runtime: str | None = None,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Comparison:
        """
        Measure the errors of every stage on the same samples.

        Args:
            quantized: From `quantize` or `load`.
            inputs: Any iterable of samples; read once, in order; each core has one in memory. Of a
                file with the signatures `encode` and `decode` and a reference for each a sample
                is a pair: inputs of `encode`, and the tokens for `decode`, fed one by one.
            runtime: What runs the file: `xnnpack`, `builtin`, `reference`, `compiled`,
                `tensorflow`, `gpu`, `gpu_f32`, `TARGET` or `TARGET:KERNELS`, or one of your own;
                the session's own by default.
            executor: Any `concurrent.futures.Executor`, which measures the samples; the session's
                own by default. A model whose samples depend on those before them is measured in
                this process, with a warning.
            tokenizer: Of a language model, for sequences that are text; that of `load` by default.

        Raises:
            ValueError: No sample, one that does not fit, no reference, an unknown runtime, or
                outputs that differ from the reference's in number or shape.
            TypeError: A sample of another kind or dtype, or an object that cannot be sent to the
                workers of an executor.
            RuntimeError: The kernels cannot allocate the file, or every worker died.
            ModuleNotFoundError: The runtime needs a package that is not installed.
        """
        from pytest_edgeq.compare.comparer import compare
        from pytest_edgeq.localize import with_explanation

        quantized, inputs = _checked("compare", quantized, inputs, tokenizer)
        engine = self._session.executor.engine(executor)

        def on_localized(layers: LayerErrors, seconds: float) -> None:
            if self._journal is not None:
                self._journal.add(Booking("localize", quantized, layers=layers, seconds=seconds))

        with booking(self._journal, "compare", quantized) as booked:
            comparison = compare(
                quantized,
                inputs,
                runtime=runtime or self._session.runtime(),
                threads=self._session.threads,
                keeps_points=self._keeps_points,
                progress=self._session.progress,
                engine=engine,
            )
            booked.comparison = replace(
                with_explanation(
                    comparison, self._session.localize_seconds, self._session.progress, on_localized
                ),
                suggest=self._suggestion(quantized, inputs, comparison),
            )
        return booked.comparison

    def _suggestion(
        self, quantized: QuantizedModel, inputs: Iterable[Any], comparison: Comparison
    ) -> Callable[[Budget], str] | None:
        """Return what a failed budget says of layers to leave in float; None if none can be."""
        if not quantized.has_layers_to_choose:
            return None
        # An iterator is used up.
        is_left = not isinstance(inputs, Iterator)
        worst = (each.inputs for each in comparison.worst_samples)
        samples = inputs if is_left else [(each.args, each.kwargs) for each in worst]

        def suggest(budget: Budget) -> str:
            if not self._suggest_timeout:
                return (
                    "`edgeq.suggest_mixed_precision` finds layers to leave in float; with "
                    "--edgeq-suggest it runs here"
                )
            where = "" if is_left else ", on the worst samples, as the others are used up"
            try:
                plan = self.suggest_mixed_precision(
                    quantized,
                    samples,
                    budget,
                    runtime=comparison.runtime,
                    seconds=self._suggest_timeout,
                )
            except Exception as error:  # the text of a failure must not hide the failure
                first = (str(error).splitlines() or [""])[0]
                return f"edgeq.suggest_mixed_precision failed{where}: {first}"
            return f"edgeq.suggest_mixed_precision{where}:\n{plan}"

        return suggest

    @names_missing_libraries
    def generate(
        self,
        lm: QuantizedModel,
        prompts: Iterable[Any],
        *,
        steps: int = 64,
        runtime: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Generation:
        """
        Generate greedily with a language model's file and its reference, and compare the tokens.

        The file reads a prompt as LiteRT-LM does, by its prefill signatures. The reference is the
        Hugging Face module, or else the float file; no stop token ends it and no penalty applies.
        `assert generation.first_difference is None, generation` shows where the tokens differ, and
        whether rounding decided there.

        Args:
            lm: A language model from `load`.
            prompts: Token ids or text of each prompt; at least 2 tokens.
            steps: Tokens to generate after each prompt.
            runtime: As for `compare`; or `litert_lm`, which runs a `.litertlm` by LiteRT-LM's
                own engine (`pip install litert-lm-api`), and without a reference compares it with
                this package's own steps. It ends at a stop token, reads text, and adds the bundle's
                start token, with which prompts must begin.
            tokenizer: As for `compare`.

        Raises:
            ValueError: No prompt, no reference, an unknown runtime, or a prompt that does not fit
                into the cache or, with `litert_lm`, that its tokenizer cannot write.
            ModuleNotFoundError: The runtime needs a package that is not installed.
            TypeError: No language model, or a prompt that is neither token ids nor text.
        """
        from pytest_edgeq.compare.language.generation import generate
        from pytest_edgeq.compare.language.model import LanguageModel

        _require_model("generate", lm, prompts)
        if not isinstance(lm, LanguageModel):
            raise TypeError(f"generate: {lm.name} is no language model with a key-value cache")
        return generate(
            lm.with_tokenizer(tokenizer),
            prompts,
            steps,
            runtime=runtime or self._session.runtime(),
            progress=self._session.progress,
        )

    @names_missing_libraries
    def localize(
        self,
        quantized: QuantizedModel,
        inputs: Iterable[Any],
        *,
        runtime: str = "builtin",
        executor: Executor | None = None,
        positions: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> LayerErrors:
        """
        Measure every op of the file in isolation, and name the one to blame.

        The float counterpart of each op runs on the op's own inputs, dequantized: with the
        quantized parameters, from which a sound op differs by its rounding alone, and with the
        float ones, which shows what quantizing the layer costs. Errors of earlier ops change
        neither. The float form itself is compared with torch.

        Of a language model, `decode` is measured at some positions of each sequence, with the cache
        that the file itself filled up to there, against its float file (`float_tflite`). A
        composite, such as `odml.rms_norm`, is one op. An embedder in a section of its own is
        measured if no op of `decode` is to blame.

        Args:
            quantized: From `quantize` or `load`, with a reference. Of one that is no torch module,
                or cannot be converted in float (a warning), the constants are not known.
            inputs: Any iterable of samples; read once, in order; each core has one in memory.
            runtime: `builtin` or `reference`, or those of a target (`TARGET:builtin`), which keep
                every tensor.
            executor: As for `compare`. The first sample is measured in this process.
            positions: Of a language model, the positions at which every sequence is measured, from
                0; by default the first, the last and three between them.
            tokenizer: As for `compare`.

        Raises:
            ValueError: No sample, one that does not fit, no reference, another runtime, or a
                position that a sequence does not have.
            TypeError: A sample of another kind or dtype.
            RuntimeError: The kernels cannot allocate the file.
        """
        from pytest_edgeq.localize import localize

        quantized, inputs = _checked("localize", quantized, inputs, tokenizer)
        engine = self._session.executor.engine(executor)
        with booking(self._journal, "localize", quantized) as booked:
            booked.layers = localize(
                quantized,
                inputs,
                runtime=runtime,
                threads=self._session.threads,
                progress=self._session.progress,
                engine=engine,
                positions=positions,
            )
        return booked.layers

    @names_missing_libraries
    def sensitivity(
        self,
        quantized: QuantizedModel,
        inputs: Iterable[Any],
        *,
        calibration: Iterable[Any] | None = None,
        executor: Executor | None = None,
    ) -> Sensitivity:
        """
        Measure what each layer costs: the model with it alone in float, and alone quantized.

        Layers of one module, and layers whose results have one scale, are also measured together.
        Of a recipe the float file is quantized again for each layer. Of other flows no file is
        made: torch runs the layers in float or with the quantizer's rounding.

        Args:
            quantized: From `quantize`, of one signature and without `train`.
            inputs: Any iterable of samples; kept in memory while they are measured.
            calibration: As for `quantize`, of a recipe whose samples were an iterator.
            executor: As for `compare`.

        Returns:
            A row a layer, the one that costs most first; then a row for layers together.

        Raises:
            ValueError: No sample, one that does not fit, or a model that was not quantized here.
            TypeError: A sample of another kind or dtype.
        """
        from pytest_edgeq.quantize.mixed.suggest import sensitivity

        _require_model("sensitivity", quantized, inputs)
        engine = self._session.executor.engine(executor)
        with booking(self._journal, "sensitivity", quantized) as booked:
            booked.sensitivity = sensitivity(
                quantized, inputs, calibration=calibration, executor=engine
            )
        return booked.sensitivity

    @names_missing_libraries
    def suggest_mixed_precision(
        self,
        quantized: QuantizedModel,
        inputs: Iterable[Any],
        budget: Budget | None = None,
        *,
        metric: Callable[[Any, Any], Any] | None = None,
        max_drop: float = 0.01,
        runtime: str | None = None,
        calibration: Iterable[Any] | None = None,
        executor: Executor | None = None,
        seconds: float = math.inf,
    ) -> MixedPrecisionPlan:
        """
        Find layers to leave in float so that the file keeps a budget, and convert that file.

        Layers are ranked by what they lose for each byte that they add in float. The fewest of them
        that meet the budget are pruned until each is needed. The file is then converted and
        measured on all samples; where it misses the budget, the search goes on.

        Args:
            quantized: From `quantize`, of one signature and without `train`.
            inputs: Any iterable of samples, with `metric` of pairs (sample, label); kept in memory
                while the search runs.
            budget: Bounds on the errors of the file against torch, the stage `total`.
            metric: In place of a budget, the score that the file must keep, as for
                `assert_accuracy_drop`.
            max_drop: Of that score, as for `assert_accuracy_drop`.
            runtime: What runs the file, as for `compare`.
            calibration: As for `quantize`; needed if its samples were an iterator.
            executor: As for `compare`.
            seconds: After this time no further choice of layers is measured.

        Returns:
            Layers, file, errors, and the code of the quantizer. If no choice of layers meets the
            budget, the best file, and what limits it.

        Raises:
            ValueError: No sample, one that does not fit, a model that was not quantized here, or
                not one of `budget` and `metric`.
            TypeError: A sample of another kind or dtype.
        """
        from pytest_edgeq.check.assertions.accuracy import DropCriterion
        from pytest_edgeq.quantize.mixed.criteria import BudgetCriterion, Criterion
        from pytest_edgeq.quantize.mixed.suggest import read, suggest

        _require_model("suggest_mixed_precision", quantized, inputs)
        if (budget is None) == (metric is None):
            raise ValueError(
                "suggest_mixed_precision needs a goal: budget=Budget(sqnr_db=25), or metric= and "
                "max_drop= for a score"
            )
        goal: Criterion
        engine = self._session.executor.engine(executor)
        with booking(self._journal, "suggest", quantized) as booked:
            if budget is not None:
                samples, goal = read(quantized, inputs), BudgetCriterion(budget)
            else:
                goal = DropCriterion(quantized, inputs, metric, max_drop)
                samples = goal.samples
            booked.plan = suggest(
                quantized,
                samples,
                goal,
                runtime=runtime,
                calibration=calibration,
                executor=engine,
                seconds=seconds,
            )
        return booked.plan

    @names_missing_libraries
    def check(
        self,
        quantized: QuantizedModel,
        inputs: Iterable[Any],
        *,
        name: str | None = None,
        executor: Executor | None = None,
        states: Mapping[str, str] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """
        Run the default gate: every check that this package has for a model.

        The file allocates and runs on every runtime that is installed and has its ops, and they
        agree within what kernels round (on the first 4 samples; op by op where outputs differ).
        So do the targets that `check_targets` or `edgeq_check_targets` names.
        Every op computes what torch does on the same inputs, up to rounding (on the first 2 samples
        and on those with the largest errors so far). Every output has one bit of precision or more
        (of labels and sorted boxes: the scores behind them), and so has the change that each of
        several inputs makes in it (swapped between two of the first 4 samples). Health is clean,
        the ranges inside clip no more than on calibration samples, and no sample was calibrated
        with. Op dtypes and errors are those of the baselines. A file of `with_tflite` has the ops,
        wiring, options, inputs, outputs and scales of the one that the flow made.

        Checks that are skipped are reported as warnings: baselines outside the body of a test,
        kernels that lack an op. The reference kernels run only as the session's
        runtime, or as those of a target to check.

        Of a language model, `decode` and every `prefill_N` of the file and of its float file
        compute the same cache (on the first 2 sequences): padded, behind another sequence, and up
        to the end of the cache. The logits have the precision of the file at every position, the
        file has all signatures of the float file, and its start token is the tokenizer's.

        Args:
            quantized: From `quantize` or `load`.
            inputs: Any iterable of samples that the calibration has not seen; read once, in order,
                one in memory at a time, and of a model with several inputs the first 4.
            name: Of the baselines; needed where a test checks several models.
            executor: As for `compare`. The first 4 samples are measured in this process.
            states: Input names by the names of the outputs whose codes they receive, of any
                signature: scales and zero points must be equal. An output and an input of another
                signature that have the same name are compared without it.
            tokenizer: As for `compare`.

        Raises:
            AssertionError: Lists all that is wrong, the most telling first.
            ValueError: No sample, one that does not fit, or no reference.
            TypeError: A sample of another kind or dtype.
        """
        from pytest_edgeq.check.gate import CheckResult, check

        quantized, inputs = _checked("check", quantized, inputs, tokenizer)
        engine = self._session.executor.engine(executor)
        names = (None, None) if name is None else (f"{name}_op_dtypes", f"{name}_errors")

        def claims(comparison: Comparison | None) -> Iterator[Callable[[], None]]:
            yield lambda: self.check_op_dtypes(quantized, name=names[0])
            if comparison is not None:
                yield lambda: self._check_errors(comparison, names[1], names[0] or "op_dtypes")

        with booking(self._journal, "check", quantized) as booked:

            def on_result(result: CheckResult) -> None:
                booked.comparison, booked.layers = result.comparison, result.layers
                booked.findings = result.findings

            check(
                quantized,
                inputs,
                runtime=self._session.runtime(),
                threads=self._session.threads,
                claims=claims,
                writes=self._memory is not None and bool(self._memory.update),
                on_result=on_result,
                keeps_points=self._keeps_points,
                progress=self._session.progress,
                engine=engine,
                states=states,
            )

    @property
    def _keeps_points(self) -> bool:
        return self._journal is not None and self._journal.details

    def close(self) -> None:
        """
        Close files that are open on a runtime of your own, and end targets and processes.

        Models of this session cannot be run on such a runtime any more. Inside pytest the fixture
        calls it.
        """
        self._session.executor.close()
        self._session.runtimes.close()

    @staticmethod
    def samples(factory: Callable[[range], Iterable[Any]], n: int) -> SampleSource:
        """
        Create n lazy samples, read by the workers of an executor, or in this process.

        Args:
            factory: Called with a range of indices, returns their samples in order: a function
                that reads files, for instance. It is sent to the workers, so it holds paths and no
                open files, and an index always has the same sample.
            n: Number of samples.

        Returns:
            An iterable for any argument that accepts samples (or pairs of sample and label).

        Raises:
            TypeError: A factory that cannot be called, or a number that is none.
            ValueError: A negative number.
        """
        from pytest_edgeq.compare.samples import SampleSource

        return SampleSource(factory, n)

    def delegation(self, quantized: QuantizedModel, runtime: str = "gpu") -> Delegation:
        """
        Return which ops LiteRT's GPU engine runs, and its reasons for the others.

        The file is compiled on the runtime. Ops that it does not run are also compiled one by one.
        No sample is run.

        Args:
            quantized: From `quantize` or `load`.
            runtime: `gpu`, `gpu_f32`, or those of a target (`TARGET:gpu`).

        Raises:
            ValueError: Unknown runtime, or one that does not use a GPU.
            RuntimeError: There is no GPU, or its process ended.
        """
        from pytest_edgeq.runtimes.delegation import delegation_of

        _require_model("delegation", quantized)
        return delegation_of(quantized.edge, runtime)

    def check_op_dtypes(
        self,
        quantized: QuantizedModel,
        *,
        name: str | None = None,
        delegation: bool | str = False,
    ) -> None:
        """
        Compare the op-dtype map with the baseline of this test.

        Args:
            quantized: From `quantize` or `load`.
            name: Of the baseline; needed where a test remembers several models.
            delegation: Whether the map also holds what `delegation` returns: True for the runtime
                `gpu`, or the name of another runtime on a GPU, such as `TARGET:gpu`.

        Raises:
            AssertionError: Nothing is remembered yet, or the map has changed.
            ValueError: The baseline cannot be read, or the runtime does not use a GPU.
            RuntimeError: Not called from the body of a test, or there is no GPU.
        """
        _require_model("check_op_dtypes", quantized)
        memory = self._remembering("check_op_dtypes")
        data = quantized.op_dtypes.to_dict()
        if delegation:
            found = self.delegation(quantized, "gpu" if delegation is True else delegation)
            data["delegation"] = found.runtime
            for row, op in zip(data["ops"], found.ops, strict=True):
                row["delegation"] = str(op)
        memory.check("op_dtype_map", name or "op_dtypes", data, options=quantized.options)

    def check_errors(self, comparison: Comparison, *, name: str | None = None) -> None:
        """
        Compare the errors of every stage and output with the baseline of this test.

        Errors worse than the stored margin fail. Better ones are reported at the end of the run,
        and stored by `--edgeq-update=tighten`. Few, equal or constant samples are reported there,
        too.

        Errors with which a baseline can hardly fail are not stored: an all-zero output would pass
        its SQNR limit, or the error is as large as the signal. One that was stored before is
        reported at the end of the run.

        Args:
            comparison: From `compare`, on the same samples in the same order as remembered.
            name: Of the baseline; needed where a test remembers several models.

        Raises:
            AssertionError: There is no baseline, or must be none, a metric regressed, a stage, an
                output or a metric came or went, the data differ, or an output is not finite or zero
                on both sides.
            TypeError: Not a comparison.
            ValueError: The baseline cannot be read.
            RuntimeError: Not called from the body of a test.
        """
        self._check_errors(comparison, name)

    def _remembering(self, method: str) -> SnapshotSession:
        if self._memory is None:
            text = f"{method} remembers by test: call it on the fixture `edgeq` in a test"
            raise RuntimeError(text)
        return self._memory

    def _check_errors(
        self, comparison: Comparison, name: str | None, dtypes: str | None = None
    ) -> None:
        """Check errors; `dtypes` is the name of the op-dtype map that may explain them."""
        from pytest_edgeq.baselines.errors import is_explained_by
        from pytest_edgeq.baselines.precision import explains_errors
        from pytest_edgeq.check.remember import Evaluation, build_to_remember, errors_to_remember
        from pytest_edgeq.errors import failure, findings_of
        from pytest_edgeq.numerics.findings import (
            ERRORS_REGRESSED,
            LOSSY_EVERYWHERE,
            UNEXPLAINED,
            Finding,
            input_findings,
        )

        _require_comparison("check_errors", comparison)
        memory = self._remembering("check_errors")
        options = {} if comparison.quantized is None else comparison.quantized.options
        try:
            measured = errors_to_remember(comparison)
        except AssertionError as error:
            build = build_to_remember(comparison)
            since = memory.changes("errors", name or "errors", build, options)
            raise failure([replace(each, since=since) for each in findings_of(error)]) from None

        claim = None if dtypes is None else memory.claim(dtypes)

        def explain(change: Finding, baseline: Mapping[str, Any]) -> tuple[Finding, ...]:
            if change.kind != ERRORS_REGRESSED:
                return ()
            if causes := input_findings(comparison.health):
                return causes
            blamed = None if comparison.explain is None else comparison.explain()
            if claim is not None and claim.found is not None and comparison.quantized is not None:
                ops, was = claim.found
                edge = comparison.quantized.edge
                if explains_errors((was, claim.data), edge, blamed, baseline, measured):
                    return (ops,)
            if blamed is None:
                return ()
            if blamed.kind in UNEXPLAINED and change.is_explained:
                return ()
            # Most ranges are too narrow; the change already names those that moved.
            if blamed.kind == LOSSY_EVERYWHERE and change.causes:
                return ()
            if not is_explained_by(blamed, baseline, measured):
                return ()
            # Without its own fix if the fix is to undo what changed.
            return (replace(blamed, fix="") if change.since else blamed,)

        memory.check(
            "errors",
            name or "errors",
            measured,
            explain=explain,
            judge=Evaluation(comparison),
            options=options,
        )

    def suggest_budget(self, comparison: Comparison) -> Budget:
        """
        Return and print the budget for the stage `total` that this measurement supports.

        Each bound is the worst that a rebuild of the same model explains (as `check_errors`
        derives it), rounded outward to 3 digits: of `sqnr_db`, `cosine_similarity`, `max_lsb_error`
        (`max_abs_error` where an output has no LSB) and `top1_agreement` (where every sample is one
        row of classes); of a language model of `sqnr_db`, `top1_agreement`, `kl` and
        `perplexity_ratio`. Bounds that are not defined at every output, or that an all-zero output
        or a guess of the class meets, are left out. Comments say what was left out and why, and
        whether samples are few, equal or constant.

        Args:
            comparison: From `compare`.

        Raises:
            AssertionError: An output is not finite, or zero on both sides.
            TypeError: Not a comparison.
            ValueError: The error is as large as the signal, or no bound could fail.
        """
        from pytest_edgeq.check.remember import budget_to_suggest

        _require_comparison("suggest_budget", comparison)
        budget, notes = budget_to_suggest(comparison)
        print(budget, *(f"# {note}" for note in notes), sep="\n")  # to be pasted
        return budget


def _class_name(reference: object) -> str:
    """Of a torch module; nothing of anything else, and where torch is not even loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(reference, torch.nn.Module):
        return ""
    from pytest_edgeq.compare.reference import model_name

    return model_name(reference)


def _checked(
    method: str, quantized: QuantizedModel, inputs: Any, tokenizer: Tokenizer | None
) -> tuple[QuantizedModel, Any]:
    """Return a model and its samples: of a language model with a tokenizer, and as sequences."""
    from pytest_edgeq.compare.language.model import LanguageModel, as_sequences

    _require_model(method, quantized, inputs)
    if isinstance(quantized, LanguageModel):
        return quantized.with_tokenizer(tokenizer), as_sequences(inputs)
    if tokenizer is not None:
        raise ValueError(f"tokenizer: {quantized.name} is no language model")
    return quantized, inputs


def _require_comparison(method: str, comparison: object) -> None:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.numerics.arrays import kind_of
    from pytest_edgeq.numerics.comparison import Comparison

    if not isinstance(comparison, Comparison):
        is_model = isinstance(comparison, QuantizedModel)
        hint = "; compare it first: edgeq.compare(quantized, samples)" if is_model else ""
        raise TypeError(
            f"{method}: expected a result of edgeq.compare, got {kind_of(comparison)}{hint}"
        )


def _require_model(method: str, quantized: object, inputs: object = None) -> None:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.numerics.arrays import kind_of

    if not isinstance(quantized, QuantizedModel):
        hint = ""
        if isinstance(inputs, QuantizedModel):
            hint = f"; the arguments are swapped: edgeq.{method}(quantized, samples)"
        elif isinstance(quantized, (str, bytes, os.PathLike)):
            hint = "; load the file first: edgeq.load(path, reference=model)"
        elif _class_name(quantized):
            hint = "; quantize the model first: edgeq.quantize(model, sample_inputs)"
        raise TypeError(
            f"{method}: expected a result of edgeq.quantize or edgeq.load, got "
            f"{kind_of(quantized)}{hint}"
        )
