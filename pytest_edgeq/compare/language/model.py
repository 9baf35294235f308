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
from pytest_edgeq.compare.samples import InputSpec, Sample, SampleSpec
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
    def of(cls, layout: CacheLayout, tokenizer: Tokenizer | None) -> SequenceSpec:
        """Return the spec of the sequences that a file can read."""
        logits = next(e for e in layout.decode.edge.signature.outputs if e.name == "logits")
        return cls(
            (InputSpec("tokens", (1, -1), "int64", any_integer=True),),
            {},
            ("tokens",),
            tokenizer=tokenizer,
            vocabulary=int(logits.tensor.shape[-1]),
            room=layout.cache_length,
        )

    def bind(self, sample: Any, where: str) -> Sample:
        """Return the sequence as token ids [1, length], checked."""
        if isinstance(sample, str):
            if self.tokenizer is None:
                raise TypeError(
                    f"{where}: expected token ids, got text; give the tokenizer: tokenizer="
                )
            found = self.tokenizer(sample)
            sample = found["input_ids"] if isinstance(found, Mapping) else found
        elif isinstance(sample, Mapping) and "input_ids" in sample:  # as a tokenizer returns it
            sample = sample["input_ids"]
        if isinstance(sample, (tuple, list)) and len(sample) == 1 and not np.isscalar(sample[0]):
            sample = sample[0]
        if hasattr(sample, "detach"):
            sample = sample.detach().cpu().numpy()
        ids = np.asarray(sample)
        if (
            ids.dtype.kind not in "iu"
            or ids.ndim not in (1, 2)
            or (ids.ndim == 2) > (len(ids) == 1)
        ):
            raise TypeError(
                f"{where}: expected one sequence of token ids, got {kind_of(sample)} of "
                f"{ids.dtype} {list(ids.shape)}"
            )
        ids = ids.reshape(1, -1).astype(np.int64)
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

    Attributes:
        sections: All `.tflite` files of the bundle by name; of a bare file one.
        float_sections: The same of the float file; empty without one.
        layouts: How the file is fed, by the length of its cache, the longest first.
        float_layouts: The same of the float file.
        metadata: Start and stop tokens of a `.litertlm`; None without.
        bundle: Path of the bundle; None of a bare file.

    Raises:
        ValueError: A signature or an input is not known, or the caches differ in length.
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
        self.metadata, self.bundle = metadata, bundle
        self._torch = reference
        self._tokenizer = tokenizer
        steps, float_steps = self.steps, self.float_steps
        super().__init__(
            steps.decode.edge,
            name=name,
            flow="prebuilt",
            float_edge=None if float_steps is None else float_steps.decode.edge,
            references={
                each.key: SignatureReference(SampleSpec.of_signature(each))
                for each in steps.decode.edge.graph.signatures
            },
            **rest,
        )

    def _open(
        self, sections: Mapping[str, EdgeFile], float_sections: Mapping[str, EdgeFile]
    ) -> None:
        self.sections, self.float_sections = sections, float_sections
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
        return SequenceSpec.of(self.steps, self._tokenizer)

    @property
    def float_model(self) -> Callable[..., Any] | None:
        """The Hugging Face module, or any callable from token ids to logits."""
        return self._torch

    @property
    def is_float_file_reference(self) -> bool:
        """Whether the float file is the only reference."""
        return self._torch is None and self.float_steps is not None

    @property
    def has_reference(self) -> bool:
        """Whether there is a module or a float file."""
        return self._torch is not None or self.float_steps is not None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        return self._tokenizer

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> LanguageModel:
        """Return the model with a tokenizer for sequences that are text."""
        if tokenizer is None:
            return self
        return cast("LanguageModel", self._with_edge(self.edge, _tokenizer=tokenizer))

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
        """
        Choose one signature of a section, to run it by itself.

        Its reference is that of the float file.
        """
        edge = _section(self.sections, name) or _whole(self.edge)
        float_edge = _section(self.float_sections, name)
        known = () if float_edge is None else [each.key for each in float_edge.graph.signatures]
        plain = QuantizedModel(
            edge,
            name=self.name,
            flow=self.flow,
            float_edge=float_edge,
            references={
                each.key: SignatureReference(
                    SampleSpec.of_signature(each),
                    FileReference(float_edge.at(each.key), is_form=True)
                    if float_edge is not None and each.key in known
                    else None,
                )
                for each in edge.graph.signatures
            },
            runtime=self._runtime,
            directory=self._directory,
            threads=self.threads,
            executor=self._executor,
        )
        return plain.signature(name)


def _section(sections: Mapping[str, EdgeFile], name: str) -> EdgeFile | None:
    """Return the section that has a signature of this name."""
    found = (e for e in sections.values() if any(each.key == name for each in e.graph.signatures))
    return next(map(_whole, found), None)


def _whole(edge: EdgeFile) -> EdgeFile:
    """Return a file with no signature chosen, and interpreters of its own."""
    return EdgeFile(edge.graph, modules=edge.modules, runtimes=edge.runtimes, foreign=True)
