"""`LanguageModel`: a file that decodes with a cache, its float file and its Hugging Face module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from pytest_edgeq.compare.foreign import FileReference
from pytest_edgeq.compare.language.layout import CacheLayout, layouts_of
from pytest_edgeq.compare.quantized import QuantizedModel, SignatureReference
from pytest_edgeq.compare.samples import InputSpec, Sample, SampleSpec, as_array, is_tensor
from pytest_edgeq.names import readable
from pytest_edgeq.numerics.arrays import kind_of
from pytest_edgeq.runtimes.edge import EdgeFile

Tokenizer = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class SequenceSpec(SampleSpec):
    """A sample is one sequence: token ids, or text where there is a tokenizer."""

    tokenizer: Tokenizer | None = None
    vocabulary: int = 0
    room: int = 0

    @classmethod
    def of(cls, vocabulary: int, room: int, tokenizer: Tokenizer | None = None) -> SequenceSpec:
        """Return the spec of sequences of at most `room` tokens."""
        ids = InputSpec("tokens", (1, -1), "int64", any_integer=True)
        return cls((ids,), {}, ("tokens",), tokenizer=tokenizer, vocabulary=vocabulary, room=room)

    def bind(self, sample: Any, where: str) -> Sample:
        """Return the sequence as token ids [1, length], checked."""
        if isinstance(sample, str):
            if self.tokenizer is None:
                raise TypeError(
                    f"{where}: expected token ids, got text; give the tokenizer: tokenizer="
                )
            sample = self.tokenizer(sample)
        if isinstance(sample, Mapping):  # as a tokenizer returns it
            sample = sample.get("input_ids", sample)
        if isinstance(sample, (tuple, list)) and len(sample) == 1:
            (sample,) = sample
        ids = np.atleast_2d(as_array(sample) if is_tensor(sample) else np.asarray(sample))
        if ids.dtype.kind not in "iu" or ids.ndim != 2 or len(ids) != 1:
            raise TypeError(
                f"{where}: expected one sequence of token ids, got {kind_of(sample)} of "
                f"{ids.dtype} {list(ids.shape)}"
            )
        ids = ids.astype(np.int64)
        if ids.size < 2:
            raise ValueError(f"{where}: expected 2 tokens or more, got {ids.size}")
        if not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise ValueError(
                f"{where}: expected token ids from 0 to {self.vocabulary - 1}, got "
                f"{ids.min()} … {ids.max()}"
            )
        if ids.size > self.room:
            raise ValueError(
                f"{where}: {ids.size} tokens, and the file's cache has {self.room} positions: "
                "give shorter sequences, or export it with a longer cache (cache_length=)"
            )
        return Sample((ids,), {})


def as_sequences(inputs: Any) -> Any:
    """Return the rows of an array of token ids as sequences; anything else as it is."""
    return list(inputs) if getattr(inputs, "ndim", 0) == 2 else inputs


class LanguageModel(QuantizedModel):
    """
    A file of a language model, with the references that it is compared with.

    Ops, dtypes and sizes are those of the section that decodes.
    """

    def __init__(
        self,
        *,
        name: str,
        sections: Mapping[str, EdgeFile],
        float_sections: Mapping[str, EdgeFile],
        reference: Callable[..., Any] | None,
        tokenizer: Tokenizer | None = None,
        metadata: Any = None,
        bundle: Path | None = None,
        **rest: Any,
    ) -> None:
        self.name = name
        self._open(sections, float_sections)
        self.metadata = metadata  # start and stop tokens of a `.litertlm`
        self.bundle = bundle  # its path
        self.tokenizer = tokenizer  # for sequences that are text, or None
        steps, float_steps = self.steps, self.float_steps
        super().__init__(
            steps.decode.edge,
            name=name,
            flow="prebuilt",
            float_edge=None if float_steps is None else float_steps.decode.edge,
            references={steps.decode.edge.key: SignatureReference(self.spec, reference)},
            **rest,
        )

    def _open(
        self, sections: Mapping[str, EdgeFile], float_sections: Mapping[str, EdgeFile]
    ) -> None:
        # by name, all files of a bundle, or a bare one
        self.sections, self.float_sections = sections, float_sections
        # by the length of their cache, the longest first
        self.layouts = layouts_of(sections, self.name)
        self.float_layouts: dict[int, CacheLayout] = {}
        if not float_sections:
            return
        self.float_layouts = layouts_of(float_sections, f"{self.name}: float_tflite")
        if (length := self.steps.cache_length) not in self.float_layouts:
            raise ValueError(
                f"{self.name}: float_tflite: expected a cache of {length} positions, got "
                f"{list(self.float_layouts)}: export both files with the same cache_length="
            )

    @property
    def layout(self) -> str:
        """How the file is fed: `default`, `external embedder` or `split cache`."""
        return self.steps.name

    @property
    def steps(self) -> CacheLayout:
        """The signatures with the longest cache."""
        return next(iter(self.layouts.values()))

    @property
    def float_steps(self) -> CacheLayout | None:
        """The signatures of the float file with a cache of that length."""
        return self.float_layouts.get(self.steps.cache_length)

    @property
    def spec(self) -> SampleSpec:
        """A sequence of token ids."""
        outputs = {each.name: each for each in self.steps.decode.edge.signature.outputs}
        vocabulary = int(outputs["logits"].tensor.shape[-1])
        return SequenceSpec.of(vocabulary, self.steps.cache_length, self.tokenizer)

    @property
    def is_float_file_reference(self) -> bool:
        """Whether the float file is the only reference."""
        return self.float_model is None and self.float_steps is not None

    @property
    def has_reference(self) -> bool:
        """Whether there is a module or a float file."""
        return self.float_model is not None or self.float_steps is not None

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> LanguageModel:
        """Return the model with a tokenizer for sequences that are text."""
        if tokenizer is None:
            return self
        return cast("LanguageModel", self._with_edge(self.edge, tokenizer=tokenizer))

    def clone(self) -> LanguageModel:
        """Return the same model with interpreters of its own."""
        other = cast("LanguageModel", super().clone())
        other._open(
            {key: each.clone() for key, each in self.sections.items()},
            {key: each.clone() for key, each in self.float_sections.items()},
        )
        other.edge = other.steps.decode.edge
        other.float_edge = None if (of_float := other.float_steps) is None else of_float.decode.edge
        return other

    def signature(self, name: str) -> QuantizedModel:
        """Choose one signature of a section, to run it by itself or against the float file."""
        edge = (_section(self.sections, name) or self.edge).at(name)
        float_edge = _section(self.float_sections, name)
        reference = None
        if float_edge is not None:
            float_edge = float_edge.at(name)
            reference = FileReference(float_edge, is_form=True)
        spec = SampleSpec.of_signature(edge.signature)
        return QuantizedModel(
            edge,
            name=f"{self.name}[{readable(name)}]",
            flow=self.flow,
            float_edge=float_edge,
            references={edge.signature.key: SignatureReference(spec, reference)},
            runtime=self._runtime,
            directory=self._directory,
            threads=self.threads,
            executor=self._executor,
        )


def _section(sections: Mapping[str, EdgeFile], name: str) -> EdgeFile | None:
    """Return the section that has a signature of this name, with interpreters of its own."""
    for edge in sections.values():
        if any(each.key == name for each in edge.graph.signatures):
            return EdgeFile(edge.graph, modules=edge.modules, runtimes=edge.runtimes, foreign=True)
    return None
