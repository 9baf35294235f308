"""
The layout of a language model's file, recognised by the names of its signatures and inputs.

The names are those that `litert_torch.generative.export_hf` writes and LiteRT-LM reads
(`runtime/executor/litert_compiled_model_executor_utils.cc`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_edgeq.names import readable
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.subgraph import SignatureTensor, Tensor

_STEP = re.compile(r"(?P<kind>prefill|decode)(?P<length>_\d+)?(?P<cache>_cache_\d+)?")
_HELPER = re.compile(
    r"(prefill|decode)_(?P<role>embedder|mask|rope|cache_update)(?P<length>_\d+)?(_cache_\d+)?"
)
_CACHE = re.compile(r"kv_cache_(?P<kind>[kv])_(?P<layer>\d+)")
_INPUT = re.compile(r"tokens|embeddings|input_pos|mask(_global|_local)?|pos_emb_(local_)?(cos|sin)")


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One signature that reads tokens, and the signatures that compute inputs for it."""

    length: int  # tokens that it reads at once
    edge: EdgeFile
    # by role (`embedder`, `mask`, `rope`, `cache_update`), signatures of other sections
    helpers: Mapping[str, EdgeFile] = field(default_factory=dict)

    def inputs(self) -> dict[str, SignatureTensor]:
        """Return the inputs by name."""
        return {each.name: each for each in self.edge.signature.inputs}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a file is fed."""

    name: str  # `default`, `external embedder` or `split cache`
    decode: TokenStep
    prefills: Mapping[int, TokenStep]  # by their length
    cache_length: int  # positions that the cache has room for
    axes: Mapping[str, int]  # by name of a cache tensor, the axis of its positions

    @property
    def caches(self) -> dict[str, SignatureTensor]:
        """The cache tensors as the file returns them."""
        writer = self.decode.helpers.get("cache_update", self.decode.edge)
        return {each.name: each for each in writer.signature.outputs if each.name in self.axes}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the section that decodes."""
        return [each for graph in self.decode.edge.graph.subgraphs for each in graph.tensors]

    @property
    def steps(self) -> tuple[TokenStep, ...]:
        """All steps, `decode` first, then by length."""
        return (self.decode, *(self.prefills[length] for length in sorted(self.prefills)))


def holds_language_model(sections: Mapping[str, EdgeFile]) -> bool:
    """Return whether one of the sections decodes with a key-value cache."""
    return any(
        each.key is not None
        and each.key.startswith("decode")
        and any(io_tensor.name.startswith("kv_cache") for io_tensor in each.inputs)
        for edge in sections.values()
        for each in edge.graph.signatures
    )


def layouts_of(sections: Mapping[str, EdgeFile], name: str) -> dict[int, CacheLayout]:
    """Return the layouts of the files of a bundle by the length of their cache, longest first."""
    signatures = dict(_signatures(sections, name))
    tails = dict.fromkeys(
        found["cache"] or "" for key in signatures if (found := _STEP.fullmatch(key))
    )
    layouts = [_layout(signatures, tail, name) for tail in tails]
    layouts.sort(key=lambda each: each.cache_length, reverse=True)
    return {each.cache_length: each for each in layouts}


def _signatures(sections: Mapping[str, EdgeFile], name: str) -> Iterator[tuple[str, EdgeFile]]:
    for section in sections:
        if section.startswith(("vision", "audio")):
            raise ValueError(
                f"{name}: section {section!r} is not known: sequences are of text, without images "
                "or audio; open one section: edgeq.load(path, section=…)"
            )
    for section, edge in sections.items():
        for key in (each.key or "" for each in edge.graph.signatures):
            if not (_STEP.fullmatch(key) or _HELPER.fullmatch(key)):
                raise ValueError(
                    f"{name}: signature {readable(key)!r} of section {section!r} is not known: "
                    "expected prefill_N, decode, and their embedder, mask, rope and cache_update"
                )
            yield key, edge.at(key)


def _layout(signatures: Mapping[str, EdgeFile], tail: str, name: str) -> CacheLayout:
    if f"decode{tail}" not in signatures:
        raise ValueError(f"{name}: expected a signature 'decode{tail}', got {sorted(signatures)}")
    decode = _step(signatures, "decode", "", tail, name)
    prefills = {}
    for key in signatures:
        found = _STEP.fullmatch(key)
        if found and found["kind"] == "prefill" and (found["cache"] or "") == tail:
            step = _step(signatures, "prefill", found["length"] or "", tail, name)
            prefills[step.length] = step
    inputs = decode.inputs()
    caches = {key: each for key, each in inputs.items() if _CACHE.fullmatch(key)}
    if not caches:
        raise ValueError(f"{name}: expected inputs kv_cache_k_0, …, got {list(inputs)}")
    for key, each in caches.items():
        if numpy_dtype(each.tensor.dtype) is None:
            raise ValueError(
                f"{name}: input {key!r} is {each.tensor.dtype}, which numpy does not have: export "
                "it with a cache in float32 or float16"
            )
    if "logits" not in (each.name for each in decode.edge.signature.outputs):
        raise ValueError(f"{name}: expected an output 'logits' of 'decode{tail}'")
    length = _cache_length(inputs, caches)
    kind = "external embedder" if "embeddings" in inputs else "default"
    return CacheLayout(
        "split cache" if "pos_emb_cos" in inputs else kind,
        decode,
        prefills,
        length,
        {key: _axis(name, key, each, length) for key, each in caches.items()},
    )


def _step(
    signatures: Mapping[str, EdgeFile], kind: str, length: str, tail: str, name: str
) -> TokenStep:
    edge = signatures[f"{kind}{length}{tail}"]
    inputs = {each.name: each for each in edge.signature.inputs}
    unknown = [key for key in inputs if not (_INPUT.fullmatch(key) or _CACHE.fullmatch(key))]
    if unknown:
        raise ValueError(
            f"{name}: input {readable(unknown[0])!r} of signature {edge.key!r} is not known"
            f"{f', nor are {unknown[1:]}' if unknown[1:] else ''}: expected tokens or embeddings, "
            "input_pos, mask, and kv_cache_k_N and kv_cache_v_N"
        )
    helpers = {}
    for role in ("embedder", "mask", "rope", "cache_update"):
        names = (f"{kind}_{role}{length}{tail}", f"{kind}_{role}{length}")
        key = next((each for each in names if each in signatures), None)
        if key is not None:
            helpers[role] = signatures[key]
    for prefix, role in (("embeddings", "embedder"), ("mask_", "mask"), ("pos_emb", "rope")):
        computed = [key for key in inputs if key.startswith(prefix)]
        if computed and role not in helpers:
            raise ValueError(
                f"{name}: input {computed[0]!r} of signature {edge.key!r} comes from a signature "
                f"{kind}_{role}{length} of another file: load the whole .litertlm bundle"
            )
    ids = inputs.get("tokens") or inputs.get("embeddings")
    if ids is None:
        raise ValueError(f"{name}: {edge.key!r} has neither tokens nor embeddings as an input")
    return TokenStep(int(ids.tensor.shape[1]), edge, helpers)


def _cache_length(
    inputs: Mapping[str, SignatureTensor], caches: Mapping[str, SignatureTensor]
) -> int:
    if "mask" in inputs:
        return int(inputs["mask"].tensor.shape[-1])
    if "mask_global" in inputs:  # of the cache and of the token itself
        return int(inputs["mask_global"].tensor.shape[-1]) - 1
    return max(int(length) for each in caches.values() for length in each.tensor.shape)


def _axis(name: str, key: str, cache: SignatureTensor, length: int) -> int:
    """Return the axis of positions: by default the last but one of K, and the last of V."""
    shape = cache.tensor.shape
    default = (2, 3, 1) if _CACHE.fullmatch(key)["kind"] == "k" else (3, 2, 1)  # type: ignore[index]
    for axis in default:
        if axis < len(shape) and shape[axis] == length:
            return axis
    raise ValueError(
        f"{name}: input {key!r}: expected an axis of {length} positions, got shape {list(shape)}: "
        "ring buffers are not known; export with sliding_window_ring_buffer_size=None"
    )
