"""
A content-addressed cache of conversion steps, shared by processes and sessions.

`conversions` is the interface of the flows: it computes each step once. Keys: it hashes graphs,
`environment` the libraries, the project's sources and settings; `sample_replay` hashes and replays
calibration samples. Entries: `parts` encodes results, `directory` reads, writes, locks and evicts.
"""
