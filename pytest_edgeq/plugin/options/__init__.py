"""
Every option of the plugin, each declared once.

One stem gives three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`. An absent flag is None, unlike one that repeats the default. The command line
beats the marker, the marker beats the ini; but nothing overrides the quantizers of a marker.

- `declared`: every option, and what all came to. `values`: what its text means.
"""
