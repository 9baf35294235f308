"""Defects of language models: of the loop around a file, and of the reference beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Arrays = dict[str, npt.NDArray[Any]]
Run = Callable[[Arrays], Arrays]
Defect = Callable[[str, Arrays, Run], Arrays]

_HIDDEN = -0.7 * float(np.finfo(np.float32).max)


class Tampered:
    """A runtime of LiteRT's interpreter in which one defect changes inputs or outputs."""

    def __init__(self, defect: Defect) -> None:
        self._defect = defect

    def __call__(self, path: Any, key: str | None) -> Callable[[Mapping[str, Any]], Arrays]:
        """Open a signature of a file."""
        from ai_edge_litert.interpreter import Interpreter

        assert key is not None
        runner = Interpreter(str(path)).get_signature_runner(key)
        return lambda inputs: self._defect(key, dict(inputs), lambda given: runner(**given))


def _masked(inputs: Arrays, seen: Callable[[Any, Any], Any]) -> Arrays:
    """Return inputs with another mask; `seen` has the slots and the positions of the tokens."""
    slots = np.arange(inputs["mask"].shape[-1])[None]
    is_seen = np.broadcast_to(seen(slots, inputs["input_pos"][:, None]), inputs["mask"].shape[-2:])
    return {**inputs, "mask": np.where(is_seen, 0, _HIDDEN).astype(np.float32)[None, None]}


def _late(key: str, x: Arrays, run: Run) -> Arrays:
    if key == "decode":
        x = {**x, "input_pos": np.minimum(x["input_pos"] + 1, x["mask"].shape[-1] - 1)}
        x = _masked(x, lambda slot, at: slot <= at)
    return run(x)


def _hides_itself(key: str, x: Arrays, run: Run) -> Arrays:
    return run(_masked(x, lambda slot, at: slot < np.maximum(at, 1)))


def _one_too_many(key: str, x: Arrays, run: Run) -> Arrays:
    return run(_masked(x, lambda slot, at: slot <= at + 1))


def _sees_all(key: str, x: Arrays, run: Run) -> Arrays:
    return run(_masked(x, lambda slot, at: slot >= 0))


def _sees_32(key: str, x: Arrays, run: Run) -> Arrays:
    if key == "decode":
        x = _masked(x, lambda slot, at: (slot <= at) & (slot > at - 32))
    return run(x)


def _first_chunk_only(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode" and x["input_pos"][0] > 0:
        y |= {name: each for name, each in x.items() if name in y}
    return y


def _heads_swapped(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode":
        y["kv_cache_k_1"] = y["kv_cache_k_1"][:, ::-1].copy()
    return y


def _lost_from_40(key: str, x: Arrays, run: Run) -> Arrays:
    y, at = run(x), int(x["input_pos"][0])
    if at >= 40:
        y["kv_cache_v_0"] = y["kv_cache_v_0"].copy()
        y["kv_cache_v_0"][..., at] = 0
    return y


def _rounded(round_cache: Callable[[Any], Any]) -> Defect:
    def defect(key: str, x: Arrays, run: Run) -> Arrays:
        return {
            name: round_cache(each) if name.startswith("kv_cache") else each
            for name, each in run(x).items()
        }

    return defect


def _int8(values: Any) -> Any:
    step = max(np.abs(values).max(), 1e-9) / 127
    return (np.round(values / step) * step).astype(np.float32)


def _float16(values: Any) -> Any:
    return values.astype(np.float16).astype(np.float32)


def _layers_swapped(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode":
        y["kv_cache_v_0"], y["kv_cache_v_1"] = y["kv_cache_v_1"], y["kv_cache_v_0"]
    return y


def _prefill_one_early(key: str, x: Arrays, run: Run) -> Arrays:
    if key != "decode" and x["input_pos"][0] > 0:
        x = {**x, "input_pos": x["input_pos"] - (x["input_pos"] > 0)}
    return run(x)


def _zeros_at_48(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode" and x["input_pos"][0] in (48, 64):
        at = x["input_pos"][0]
        for name, each in y.items():
            y[name] = each.copy()
            part = (
                (..., slice(at, at + 8)) if "_v_" in name else (..., slice(at, at + 8), slice(None))
            )
            y[name][part] = 0
    return y


def _slots_lost(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode" and x["input_pos"][0] >= 48:
        y["kv_cache_k_0"] = y["kv_cache_k_0"].copy()
        y["kv_cache_k_0"][:, :, :16] = 0
    return y


def _padding_overwrites(key: str, x: Arrays, run: Run) -> Arrays:
    y, at = run(x), x["input_pos"]
    if key != "decode" and at[0] > 0 and at[-1] == 0:
        y["kv_cache_k_0"] = y["kv_cache_k_0"].copy()
        y["kv_cache_k_0"][:, :, 0] = 0
    return y


def _even_starts_only(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    if key != "decode" and x["input_pos"][0] % 8:
        y |= {name: each for name, each in x.items() if name in y}
    return y


class _FromEmpty:
    """Prefill behind `decode` forgets what was read before."""

    decoded = False

    def __call__(self, key: str, x: Arrays, run: Run) -> Arrays:
        """Run one signature."""
        if key != "decode" and x["input_pos"][0] > 0 and self.decoded:
            x = {n: each * 0 if n.startswith("kv_cache") else each for n, each in x.items()}
        self.decoded = key == "decode"
        return run(x)


def _float16_behind_prefill(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    return y if key == "decode" else {name: _float16(each) for name, each in y.items()}


#: By name: the defect, the stage that shows it, and the output.
OF_THE_LOOP: dict[str, Defect] = {
    "decode one position late": _late,
    "mask hides the token itself": _hides_itself,
    "mask shows one slot too many": _one_too_many,
    "mask shows everything": _sees_all,
    "decode sees 32 positions only": _sees_32,
    "only the first chunk is kept": _first_chunk_only,
    "heads of layer 1 swapped after prefill": _heads_swapped,
    "V of layer 0 lost from position 40": _lost_from_40,
    "cache in int8": _rounded(_int8),
    "cache in float16": _rounded(_float16),
    "caches of two layers swapped after prefill": _layers_swapped,
    "later chunks one position early": _prefill_one_early,
    "chunks at 48 and 64 write zeros": _zeros_at_48,
    "first slots lost once a chunk begins at 48": _slots_lost,
    "a padded later chunk overwrites slot 0": _padding_overwrites,
    "a chunk at an uneven start writes nothing": _even_starts_only,
    "prefill behind decode starts from an empty cache": _FromEmpty(),
    "cache in float16 behind prefill": _float16_behind_prefill,
}


def _each(module: torch.nn.Module, attribute: str) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, attribute)]


def _theta(m: Any) -> None:
    m.model.rotary_emb.inv_freq.copy_(1 / 12000 ** (torch.arange(0, 16, 2) / 16))


def _interleaved(m: Any) -> None:
    weight = m.model.layers[1].self_attn.q_proj.weight.data
    weight.copy_(weight.view(-1, 2, 8, 64).transpose(1, 2).reshape(-1, 64))


def _epsilon(value: float) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        for each in _each(m, "variance_epsilon"):
            each.variance_epsilon = value

    return change


def _scaling(layers: slice, factor: float) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        for layer in m.model.layers[layers]:
            layer.self_attn.scaling *= factor

    return change


def _query_heads(m: Any) -> None:
    weight = m.model.layers[1].self_attn.o_proj.weight.data
    weight.copy_(weight.view(64, 4, 16)[:, [1, 0, 2, 3]].reshape(64, 64))


def _gelu(m: Any) -> None:
    m.model.layers[0].mlp.act_fn = torch.nn.GELU()


def _clipped_head(m: Any) -> None:
    most = m.lm_head.weight.abs().max() / 2
    m.lm_head.weight.data[:20].clamp_(-most, most)


def _scaled_up(m: Any) -> None:
    m.model.layers[1].mlp.up_proj.weight.data.mul_(1.05)


def _gate_of_layer_0(m: Any) -> None:
    first, second = (layer.mlp.gate_proj.weight.data for layer in m.model.layers)
    second.copy_(first)


def _no_separator(m: Any) -> None:
    m.model.embed_tokens.weight.data[251].zero_()


OF_THE_REFERENCE: dict[str, Callable[[Any], None]] = {
    "rope theta 10000 → 12000": _theta,
    "rope interleaved in layer 1": _interleaved,
    "norm epsilon 1e-6 → 1e-5": _epsilon(1e-5),
    "norm epsilon 1e-6 → 1e-2": _epsilon(1e-2),
    "attention scale × 1.1 in layer 1": _scaling(slice(1, 2), 1.1),
    "attention scale of 1/√32": _scaling(slice(None), 2**-0.5),
    "two query heads swapped in layer 1": _query_heads,
    "GELU for SiLU in layer 0": _gelu,
    "part of the head clipped": _clipped_head,
    "up_proj of layer 1 × 1.05": _scaled_up,
    "gate of layer 1 from layer 0": _gate_of_layer_0,
    "embedding of one token zero": _no_separator,
}


def changed(module: Any, change: Callable[[Any], None]) -> Any:
    """Return a copy of a reference with a defect."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        change(other)
    return other.eval()


def with_window(module: Any, window: int) -> Any:
    """Return a copy of a Gemma 3 with another sliding window."""
    other = copy.deepcopy(module)
    other.config.sliding_window = window
    for layer in other.model.layers:
        if getattr(layer.self_attn, "sliding_window", None):
            layer.self_attn.sliding_window = window
    return other
