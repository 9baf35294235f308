"""
Whether the runtimes that are installed give the same results, up to what kernels may round.

Kernels round differently, and from layer to layer it grows: end to end two sound runtimes may be
tens of LSB apart. So where outputs differ, each op is run alone on the inputs that the builtin
kernels gave it, and there a code may be one off, and only where the real value is near to a tie.

- `agreement`: all runtimes on the first samples, and again.
- `runtime_results`: what one runtime gives beside another.
- `alone`: the ops standing alone. `pair`: one output of one of them on two runtimes.
"""

from __future__ import annotations

from pytest_edgeq.check.agreement.agreement import (
    SAMPLES,
    Agreement,
    AgreementResult,
    compared_runtimes,
)

__all__ = ["SAMPLES", "Agreement", "AgreementResult", "compared_runtimes"]
