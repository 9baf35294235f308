"""
Finished conversion steps, content-addressed, in a directory that processes and sessions share.

`store.py` is the directory; `digest.py` hashes what determines a result, `environment.py` the
libraries and settings, `trace.py` the code that a forward runs; `graphs.py` writes and reads torch
graphs without running code; `samples.py` replays calibration samples; `parts.py` encodes results;
`log.py` takes messages; `conversions.py` is the interface of the flows.
"""
