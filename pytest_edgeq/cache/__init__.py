"""
Finished conversion steps, content-addressed, in a directory that processes and sessions share.

`conversions.py` is the interface of the flows. Keys: `digest.py` hashes what determines a result,
`trace.py` graphs, `environment.py` the libraries, the project's sources and settings;
`sample_replay.py` hashes and replays calibration samples. Entries: `entries.py` makes each once,
`parts.py` encodes results, `graphs.py` (with `node_metadata.py`) torch graphs without running code,
`directory.py` reads, writes, locks and evicts them. `log.py` takes messages.
"""
