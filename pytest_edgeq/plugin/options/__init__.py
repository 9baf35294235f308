"""
Every option of the plugin, each declared once.

One stem gives three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`.
An absent flag is None, which distinguishes it from one that repeats the default;
the default stands in the ini.
The command line beats the marker, the marker beats the ini; but the quantizers that a marker names
belong to what the test asserts, and nothing overrides them.

- `declared`: every option, and what all came to. `values`: what its text means.
"""
