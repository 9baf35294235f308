"""
Score two models on the same samples.

- `scores`: the protocol of a scorer, and its result.
- `function`: by a function of outputs and label. `metric`: by a torchmetrics Metric.
"""
