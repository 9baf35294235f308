"""
Error metrics, budgets on them, health findings: numpy and scipy alone.

- `metric_table` has a row for each metric, `metrics` the formulas, `error_sums` accumulates
  samples, `results` and `comparison` hold the errors; `token_errors` are those of
  language models.
- `budget`: bounds. `bootstrap`: margins for stored errors. `paired`: the confidence of a difference
  of scores.
- `findings`: the record of a defect. `health` finds defects in outputs, `static_health` without
  inference; `samples` recognizes samples of the calibration.
- `arrays`: memory layout. `target_machine`: the machine whose kernels were measured.
"""
