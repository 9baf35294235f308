"""
Native code in a child process, so that its crash fails a test and not the session.

`policy.py` decides what runs there, `child_process.py` keeps the child, `child.py` is what runs in
it, and `death.py` says how it died. `tflite` and `litert` know none of it: a session hands them an
`Isolation`.
"""
