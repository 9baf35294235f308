"""
Encoder-decoder files: signatures `encode` and `decode`, measured position by position.

The encoder runs once for each sample. What `decode` takes from it, and the state that `decode`
returns, are passed by name; each side, file or reference, passes its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.language.model import SequenceSpec
from pytest_edgeq.compare.language.runner import Pass, SequenceOutputs
from pytest_edgeq.compare.language.stepping import attention_mask
from pytest_edgeq.compare.measurement import float_file_between
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference, in_file_order
from pytest_edgeq.compare.samples import Sample, SampleSpec
from pytest_edgeq.names import readable
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Call = Callable[[str, Arrays], Arrays]  # runs a signature on inputs by name

ENCODE, DECODE = "encode", "decode"


@dataclass(frozen=True, slots=True)
class Wiring:
    """How `decode` is fed, by names of its inputs."""

    tokens: str
    length: int  # number of tokens that it takes at once
    encoded: Mapping[str, str]  # outputs of `encode` by the inputs that take them
    state: Sequence[str]  # inputs that are outputs as well: zeros at first
    positions: str | None
    mask: str | None  # in float, added to scores, or bool
    room: int  # number of tokens that fit
    logits: str
    vocabulary: int  # number of logits at each position

    @classmethod
    def of(cls, encode: Signature, decode: Signature, name: str) -> Wiring | None:
        """Return the wiring; None without an input for tokens, or one for encoder outputs."""
        outputs = {each.name: each for each in decode.outputs}
        state = [e.name for e in decode.inputs if _kind(e) == _kind(outputs.get(e.name))]
        logits = [each for each in decode.outputs if each.name not in state]
        rest = [each for each in decode.inputs if each.name not in state]
        rows = [each for each in rest if _is_integer(each) and len(_shape(each)) == 2]
        named = [each for each in rows if "token" in each.name or "ids" in each.name]
        encoded = _encoded(encode, decode.inputs)
        if not rows or not encoded or len(logits) != 1:
            return None
        tokens = (named or rows)[0]
        length = int(_shape(tokens)[-1])
        rest = [each for each in rest if each is not tokens and each.name not in encoded]
        positions = mask = None
        for each in sorted(rest, key=lambda each: "pos" not in each.name):
            if positions is None and _is_integer(each) and math.prod(_shape(each)) == 1:
                positions = each.name
            elif (
                mask is None
                and not _is_integer(each)
                and math.prod(_shape(each)) == length * _shape(each)[-1]
            ):
                mask = each
            else:
                raise ValueError(
                    f"{name}: input {readable(each.name)!r} of signature 'decode' is not known: "
                    "expected tokens, outputs of 'encode', outputs of 'decode' by the same name, "
                    "a position and a mask"
                )
        room = length if length > 1 else sys.maxsize
        if state:
            room = sys.maxsize if mask is None else int(_shape(mask)[-1])
        return cls(
            tokens.name,
            length,
            encoded,
            state,
            positions,
            None if mask is None else mask.name,
            room,
            logits[0].name,
            int(_shape(logits[0])[-1]),
        )


def _shape(io_tensor: SignatureTensor) -> tuple[int, ...]:
    return tuple(io_tensor.tensor.shape)


def _kind(io_tensor: SignatureTensor | None) -> tuple[tuple[int, ...], str] | None:
    return None if io_tensor is None else (_shape(io_tensor), io_tensor.tensor.dtype)


def _is_integer(io_tensor: SignatureTensor) -> bool:
    return io_tensor.tensor.dtype in ("int32", "int64")


def _encoded(encode: Signature, inputs: Sequence[SignatureTensor]) -> dict[str, str]:
    """Pair inputs of `decode` with outputs of `encode`: by name, or by shape in their order."""
    names = {each.name for each in encode.outputs}
    if found := {each.name: each.name for each in inputs if each.name in names}:
        return found
    left = list(encode.outputs)
    for each in inputs:
        match = next((o for o in left if _kind(o) == _kind(each) and not _is_integer(o)), None)
        if match is not None:
            found[each.name] = match.name
            left.remove(match)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec(SampleSpec):
    """A sample is what the encoder reads, and the tokens that the decoder is fed."""

    encoder: SampleSpec
    decoder: SequenceSpec

    @classmethod
    def of(cls, encoder: SampleSpec, wiring: Wiring) -> PairSpec:
        """Return the spec of samples for both signatures."""
        decoder = SequenceSpec.of(wiring.vocabulary, wiring.room)
        return cls((*encoder.inputs, *decoder.inputs), {}, encoder=encoder, decoder=decoder)

    def bind(self, sample: Any, where: str) -> Sample:
        """Return the encoder's inputs and the token ids, checked."""
        if isinstance(sample, Mapping) and set(sample) == {ENCODE, DECODE}:
            sample = (sample[ENCODE], sample[DECODE])
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(
                f"{where}: expected a pair (inputs of 'encode', tokens of 'decode'), or a dict "
                "{'encode': inputs, 'decode': tokens}"
            )
        encoder = self.encoder.bind(sample[0], f"{where}, signature 'encode'")
        decoder = self.decoder.bind(sample[1], f"{where}, signature 'decode'")
        return Sample((*encoder.arrays(), *decoder.args), {})


class EncoderDecoder(QuantizedModel):
    """Both signatures of a file, compared as one model."""

    wiring: Wiring

    @classmethod
    def of(cls, model: QuantizedModel) -> EncoderDecoder | None:
        """Return both signatures of a model; None where it is no encoder with a decoder."""
        signatures = {each.key: each for each in model.edge.signatures}
        if set(signatures) != {ENCODE, DECODE}:
            return None
        wiring = Wiring.of(signatures[ENCODE], signatures[DECODE], model.name)
        if wiring is None:
            return None
        missing = [key for key, each in model._references.items() if each.float_model is None]
        if len(missing) == 1:
            raise ValueError(
                f"{model.name} has no reference for its signature {missing[0]!r}: load it with "
                "reference={'encode': encoder, 'decode': decoder}, or compare "
                "model.signature(…)"
            )
        float_edge = None if model.float_edge is None else model.float_edge.at(DECODE)
        both = cls.__new__(cls)
        decoder = model._with_edge(model.edge.at(DECODE), float_edge=float_edge, wiring=wiring)
        vars(both).update(vars(decoder))
        return both

    @property
    def spec(self) -> SampleSpec:
        """The inputs of `encode` and the tokens."""
        return PairSpec.of(self._references[ENCODE].spec, self.wiring)

    @property
    def simulated(self) -> None:
        """None: the quantized torch graphs are not run."""


class EncoderDecoderRunner:
    """A file, its float file and its references with interpreters of their own."""

    def __init__(self, model: EncoderDecoder, runtime: str) -> None:
        self._model, self._runtime = model, runtime

    def run(self, sample: Sample, index: int) -> SequenceOutputs:
        """Run one sample."""
        model = self._model
        values = {
            "float": self._run(self._call_reference, sample),
            "edge": self._run(self._caller(model.edge), sample),
        }
        if (float_edge := float_file_between(model)) is not None:
            values["float_tflite"] = self._run(self._caller(float_edge), sample)
        found = SequenceOutputs(sample.arrays()[-1][0], values)
        return found.checked(f"{model.name}, evaluation sample {index}")

    def _caller(self, edge: EdgeFile) -> Call:
        """Return the function that runs a file."""

        def call(key: str, inputs: Arrays) -> Arrays:
            at = edge.at(key)
            found = at.decode(at.run(list(inputs), list(inputs.values()), self._runtime))
            return dict(zip(_names(at.signature.outputs), found, strict=True))

        return call

    def _call_reference(self, key: str, inputs: Arrays) -> Arrays:
        """Run the reference of a signature; return its outputs by the file's names."""
        known = self._model._references[key]
        assert known.float_model is not None, "unreachable because of() has looked"
        sample = Sample(
            tuple(inputs[each.name] for each in known.spec.args),
            {name: inputs[each.name] for name, each in known.spec.kwargs.items()},
        )
        names = _names(self._model.edge.at(key).signature.outputs)
        outputs = call_reference(known.float_model, sample)
        return dict(zip(names, in_file_order(outputs, names, self._model.name), strict=True))

    def _run(self, call: Call, sample: Sample) -> Pass:
        """Encode once, and decode the tokens one after the other, each with the state before."""
        *given, ids = sample.arrays()
        wiring, tokens = self._model.wiring, ids[0]
        specs = {each.name: each for each in self._model._references[DECODE].spec.inputs}
        inputs_of_encode = self._model._references[ENCODE].spec.inputs
        encoded = call(ENCODE, {e.name: a for e, a in zip(inputs_of_encode, given, strict=True)})
        state = {name: np.zeros(specs[name].shape, specs[name].dtype) for name in wiring.state}
        inputs = {**state, **{to: encoded[name] for to, name in wiring.encoded.items()}}
        rows = []
        for start in range(0, len(tokens), wiring.length):
            chunk = tokens[start : start + wiring.length]
            at = start + np.arange(wiring.length)
            padded = np.pad(chunk, (0, wiring.length - len(chunk)))
            fed = {wiring.tokens: padded, wiring.positions: at[:1]}
            if wiring.mask is not None:
                mask = specs[wiring.mask]
                fed[wiring.mask] = attention_mask(mask.dtype, at, mask.shape[-1])
            for name in filter(None, fed):
                inputs[name] = fed[name].astype(specs[name].dtype).reshape(specs[name].shape)
            outputs = call(DECODE, inputs)
            inputs |= {name: outputs[name] for name in wiring.state}
            logits = outputs[wiring.logits]
            rows.append(logits.reshape(-1, logits.shape[-1])[: len(chunk)].astype(np.float32))
        return Pass(np.concatenate(rows))


def _names(io_tensors: Sequence[SignatureTensor]) -> list[str]:
    return [each.name for each in io_tensors]
