"""
Remembered files: record, store, compare, update policy, obsolete.

- `record`: who owns a file, what a test claimed.
- `layout`: where a file lives. `store`: how it is written and read.
- `kinds`: what is remembered. `align` and `compare`: the text of a change.
- `session`: the memory of one run, with its update policy.
- `obsolete` and `summary`: what the run says at its end.

Nothing here imports pytest, torch or numpy.
"""

from __future__ import annotations

from pytest_edgeq.snapshots.compare import describe_change
from pytest_edgeq.snapshots.layout import Layout
from pytest_edgeq.snapshots.record import Owner
from pytest_edgeq.snapshots.session import SnapshotSession

__all__ = ["Layout", "Owner", "SnapshotSession", "describe_change"]
