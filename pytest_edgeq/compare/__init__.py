"""
Compare a file with its references on samples.

- `quantized`: `QuantizedModel`, the file and its references. `reference` calls the torch model,
  `foreign` Keras models and ONNX sessions, `torch_graphs` exports the torch model.
- `samples`: the users' samples, checked and bound to the inputs.
- `comparer`: one pass over the samples. `measurement` runs a sample and accumulates errors, health
  and counts of samples; `parallel` spreads samples over cores.
- `executors`: the same in other processes. `language`: the same for language models.
- `file_health`: findings that need no run of the file, and metadata of its quantization for
  baselines. `failed_samples`: samples for the bundle of a failed test.
"""
