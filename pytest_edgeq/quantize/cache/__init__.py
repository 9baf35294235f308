"""
A content-addressed cache of conversion steps, shared by processes and sessions.

`conversions` is the interface of the flows. Keys: it hashes graphs, `environment` the
libraries, the project's sources and settings; `sample_replay` hashes and replays calibration
samples. Entries: `entries` computes each once, `parts` encodes results, `directory` reads, writes,
locks and evicts them.
"""
