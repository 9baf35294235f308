"""
Baselines: record, store, compare, update policy, obsolete.

- `claims`: who owns a file, what a test claimed.
- `paths`: where a file lives. `store`: how it is written and read, as a regular file
  (`regular_files`). `shape`: what it may hold.
- `kinds`: what is remembered. Op dtypes: `align` and `op_changes` are the text of a change. Errors:
  `errors` compares, `paired_limits` has the limits, `precision` and `build` find the change that
  explains worse errors.
- `session`: the memory of one run, with its update policy.
- `obsolete` and `summary`: what the run says at its end.

Nothing here imports pytest, torch or numpy.
"""
