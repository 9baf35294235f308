"""
Compare a file with its references on samples.

- `quantized`: `QuantizedModel`, the file and its references. `reference` calls the torch model,
  `foreign` Keras models and ONNX sessions.
- `samples`, `sample_source`: what users give as samples, checked and bound.
- `comparer`: one pass over the samples. `measurement` runs one of them and accumulates errors and
  health, `tally` the facts on samples; `parallel` spreads samples over cores.
- `executors`: the same in other processes.
- `file_health`: findings that need no run.
"""
