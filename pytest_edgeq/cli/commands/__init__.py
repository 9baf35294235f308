"""
The commands of `edgeq`: one module `NAME_command` each, with a `click.Command` in `command`.

Imported to list the commands, so a module imports nothing but click and `cli` at its top.
"""
