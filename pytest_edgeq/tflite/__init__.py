"""
Read, name, compare and write `.tflite` files.

- `source` opens a file, `verify` checks it before any kernel sees it, `graph`,
  `subgraph`, `roles` and `sparse` read it; `modules` names ops after torch modules, `op_dtypes`
  maps their dtypes, `boundary` quantizes and dequantizes, `layout` permutes channels.
- `ops` is the table of facts of each op, `conformance` checks a file against it.
- `same` compares two files, `differences` two constants.
- `cut`, `float_form` and `writing` write other files from one.
- `runtimes`: the protocol of a user's own runtime.
"""
