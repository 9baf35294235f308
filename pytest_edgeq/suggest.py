"""The nearest names for one that matches nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from pytest_edgeq.tflite.ops import OPS


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
        places = {
            op: facts.called.index(other_name)
            for op, facts in OPS.items()
            if other_name in facts.called and op in known
        }
        found = sorted(places, key=places.__getitem__)
        if found:
            return _hint(found)
    return nearest(name, known)


def _hint(found: Iterable[str]) -> str:
    names = " or ".join(found)
    return f" (did you mean {names}?)" if names else ""
