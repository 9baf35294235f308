"""
Finished conversion steps, content-addressed, in a directory that processes and sessions share.

`conversions` is the interface of the flows. Keys: `trace` hashes graphs, `environment` the
libraries, the project's sources and settings; `sample_replay` hashes and replays calibration
samples. Entries: `entries` makes each once, `parts` encodes results, `directory` reads, writes,
locks and evicts them. `log` takes messages.
"""
