"""The nearest names for one that matches nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

# By the name in torch, Keras or ONNX, without separators; those that are spelt alike are found.
_OPS_BY_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "adaptiveavgpool2d": ("AVERAGE_POOL_2D", "MEAN"),
    "addmm": ("FULLY_CONNECTED",),
    "amax": ("REDUCE_MAX",),
    "amin": ("REDUCE_MIN",),
    "avgpool2d": ("AVERAGE_POOL_2D",),
    "bmm": ("BATCH_MATMUL",),
    "cat": ("CONCATENATION",),
    "clamp": ("RELU6", "MINIMUM", "MAXIMUM"),
    "clip": ("RELU6", "MINIMUM", "MAXIMUM"),
    "conv1d": ("CONV_2D", "DEPTHWISE_CONV_2D"),
    "deconv": ("TRANSPOSE_CONV",),
    "dense": ("FULLY_CONNECTED",),
    "embedding": ("EMBEDDING_LOOKUP", "GATHER"),
    "expand": ("BROADCAST_TO",),
    "flatten": ("RESHAPE",),
    "flip": ("REVERSE_V2",),
    "gemm": ("FULLY_CONNECTED",),
    "globalaveragepool": ("MEAN", "AVERAGE_POOL_2D"),
    "globalaveragepooling2d": ("MEAN", "AVERAGE_POOL_2D"),
    "indexselect": ("GATHER",),
    "interpolate": ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
    "linear": ("FULLY_CONNECTED",),
    "matmul": ("FULLY_CONNECTED", "BATCH_MATMUL"),
    "mm": ("FULLY_CONNECTED", "BATCH_MATMUL"),
    "permute": ("TRANSPOSE",),
    "pixelshuffle": ("DEPTH_TO_SPACE",),
    "pixelunshuffle": ("SPACE_TO_DEPTH",),
    "prod": ("REDUCE_PROD",),
    "repeat": ("TILE",),
    "resize": ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
    "sigmoid": ("LOGISTIC",),
    "silu": ("LOGISTIC", "MUL"),
    "stack": ("PACK",),
    "swish": ("LOGISTIC", "MUL"),
    "unbind": ("UNPACK",),
    "unsqueeze": ("EXPAND_DIMS", "RESHAPE"),
    "unstack": ("UNPACK",),
    "upsample": ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
    "view": ("RESHAPE",),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """
    Return ` (did you mean a or b?)`, or an empty string where nothing is near.

    Near are names that are spelt alike, else those that contain each word of the one given.
    """
    # The module path "" (the model itself) is nothing to suggest.
    folded = {candidate.lower(): candidate for candidate in known if candidate}
    # A lower cutoff than difflib's 0.6: 'CONV2D' against 'DEPTHWISE_CONV_2D' is worth showing.
    found = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    if not found:
        words = re.findall(r"[a-z0-9]{3,}", name.lower())
        found = [each for each in folded if words and all(word in each for word in words)][:3]
    return _hint([folded[match] for match in found])


def nearest_op(name: str, known: Collection[str]) -> str:
    """Return the same for an operator, which may be named as in torch, Keras or ONNX."""
    for part in reversed(name.lower().split(".")):  # `aten.linear.default`
        other_name = re.sub(r"[^a-z0-9]", "", part)
        found = [op for op in _OPS_BY_OTHER_NAMES.get(other_name, ()) if op in known]
        if found:
            return _hint(found)
    return nearest(name, known)


def _hint(found: Iterable[str]) -> str:
    names = " or ".join(found)
    return f" (did you mean {names}?)" if names else ""
