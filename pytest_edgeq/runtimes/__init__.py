"""
Run `.tflite` files.

- `edge`: `EdgeFile`, a file with its graph, its signature and its runtimes.
- `registry` names runtimes, `runner` opens and runs a file, `engines` are the interpreters.
- `refusals` and `unsafe` explain what kernels cannot run.
- `bounds`: error bounds of sound kernels. `workers`: files in other processes.
"""
