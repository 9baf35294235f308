"""
Files that are open in another process: a child of this one, or a target.

A child process keeps a crash of native code from ending the session: `policy` decides what runs
there, `child_process` starts and ends the child, `child` runs in it, `engine` is a file that is
open there, `death` explains a crash, `bounds` has the limits, `sessions` the settings of pytest
sessions, `sending` sends a user's own runtime.

A target is a command that starts a Python on another machine or CPU: `target_spec` reads targets
as users write them, `target` is one of them in a session, `target_engine` a file that is open
there, `link` the process and its frames, `far_side` the script that is sent and runs there,
`target_errors` the failures, `trial` tries one by a file of one op. `emulated_root` makes a root
for 64-bit ARM, which QEMU runs, by `private_apt` and `programs`.
"""
