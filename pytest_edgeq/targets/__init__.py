"""
Run files on another machine or CPU: a command that starts a Python there is a runtime.

- `target_spec`: targets as users write them.
- `target`: one of them in a session. `target_engine`: a file that is open there.
- `link`: the process and its frames. `far_side`: what is sent, and runs there.
- `target_errors`: what a test is told.
- `trial`: tries one by a file of one op.
- `emulated_root`: makes a root for 64-bit ARM, which QEMU runs. `private_apt` and `programs` serve
  it.
"""
