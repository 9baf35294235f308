"""
Compare the results of the installed runtimes, up to the rounding of kernels.

Kernels round differently, and the difference grows from layer to layer: end to end two sound
runtimes may differ by tens of LSB. So if outputs differ, each op is run alone on the inputs that it
has in the builtin kernels, and there a code may differ by one, and only if the real value is near a
tie.

- `agreement`: all runtimes on the first samples, and again.
- `pair`: one output of an op that was run alone on two runtimes.
- `kernels_apart`: the first op that two machines round differently.
"""
