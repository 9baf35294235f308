"""
Read, name, compare and write `.tflite` files.

- `source` opens a file (`mapped`, or in one of the `bundles`), `verify` checks it before any kernel
  sees it, `graph`, `subgraph`, `roles`, `constants`, `sparse` and `flatbuffer` read it; `modules`
  names ops after torch modules, `op_dtypes` maps their dtypes, `boundary` quantizes and
  dequantizes, `ends` finds where the file does, and outputs that hold a choice, `layout` permutes
  channels.
- `ops` is the table of facts of each op, `conformance` checks a file against it.
- `same` compares two files, `differences` two constants.
- `cut`, `float_form` and `writing` write other files from one.
- `runtimes`: the protocol of a user's own runtime.
"""
