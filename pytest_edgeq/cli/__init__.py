"""
The command line `edgeq`: inspect and compare `.tflite` files outside of a test.

Each command is a module of `commands`, imported when it is used; `group.py` finds it by its name.
`trouble.py` turns errors into sentences, `text.py` and `document.py` print, and the other modules
do what a command needs and a test does not.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    from pytest_edgeq.cli.group import edgeq
    from pytest_edgeq.cli.trouble import output_lost

    try:
        # The same usage and the same completion variable for `edgeq` and `python -m pytest_edgeq`.
        edgeq.main(prog_name="edgeq", complete_var="_EDGEQ_COMPLETE")
    except OSError as error:
        # Commands tell errors of the files that they read and write themselves.
        output_lost(error)
