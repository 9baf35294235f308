"""Verify a `.tflite` file that may come from a stranger, before any kernel sees it."""

from pytest_edgeq.tflite.verify.file import verify
from pytest_edgeq.tflite.verify.unbuilt import problem_unbuilt

__all__ = ["problem_unbuilt", "verify"]
