"""
Files and calls in other processes: workers of this machine, and targets.

- `link`: the process of a worker, and its frames. `remote_worker`: the source of the worker.
  `remote_engine`: a file that is open in a worker, here or elsewhere; `gpu_engine`: on its GPU.
- A worker of this machine keeps a crash of native code from ending the session: `policy` decides
  what runs there, `local_worker` keeps the process, `isolated_file` runs in it, `crash_report` says
  how it ended, `settings` has the limits and the settings of pytest sessions.
- `by_value`: pickles of users' objects for processes that lack their modules.
- A target is a command that starts a Python on another machine or CPU: `target_spec` reads targets
  as users write them, `target` is one of them in a session, `private_root` makes folders with a
  Python for targets: `arm64_root` for 64-bit ARM, which QEMU runs, `gpu_root` with a GPU in
  software.
"""
