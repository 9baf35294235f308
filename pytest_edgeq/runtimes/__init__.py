"""
Run `.tflite` files.

- `edge`: `EdgeFile`, a file with its graph, its signature and its runtimes.
- `registry` names runtimes, `runner` opens and runs a file, `engines` are the interpreters.
- `refusals`, `gpu_refusals` and `unsafe` explain what kernels cannot run; `delegation` finds the
  ops that run on a GPU, `gpu_known` has those that it computes wrongly.
- `bounds`: error bounds of sound kernels. `workers`: files in other processes. `process_state`: CPU
  and state of this process.
"""
