"""
Implementation of `edgeq.check`: judge a model and report all defects in one text.

- `gate` is the interface and judges the results, `measuring` runs the samples, `verdict` holds the
  findings and formats the failure. `language` checks language models.
- `agreement` compares the runtimes: `runtime_results` one with another, `op_pairs` outputs of
  single ops, `gpu_ops` those of a GPU.
- Further checks: `influence` of each input, `clipping` of intermediate ranges, `near_ties` of
  selections.
- `remember` decides which errors are stored as baselines; `assertions` are those of tests.
"""
