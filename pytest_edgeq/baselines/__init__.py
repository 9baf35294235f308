"""
Baselines: record, store, compare, update policy, obsolete.

- `claims`: who owns a file, what a test claimed.
- `paths`: where a file lives. `store`: how it is written and read. `shape`: what it may hold.
- `kinds`: what is remembered. `align` and `op_changes`: the text of a change.
- `session`: the memory of one run, with its update policy.
- `obsolete` and `summary`: what the run says at its end.

Nothing here imports pytest, torch or numpy.
"""
