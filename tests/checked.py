"""What `edgeq.check` says of a model."""

from __future__ import annotations

import warnings
from typing import Any

from pytest_edgeq import Edgeq, QuantizedModel


def checked(
    model: QuantizedModel, inputs: Any, edgeq: Edgeq | None = None
) -> tuple[str, list[str]]:
    """Return the text of the failure, empty of a model that passes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            (edgeq or Edgeq()).check(model, inputs)
        except AssertionError as error:
            return str(error), [str(each.message) for each in caught]
    return "", [str(each.message) for each in caught]
