"""Names that come from outside: of models, modules, signatures, and of what stands in files."""

from __future__ import annotations

import hashlib

LONGEST_NAME = 200
"""Characters of a name in texts; a path of modules is rarely as long."""


def printable(line: str) -> str:
    r"""
    Return a line with Python's escapes, such as `\x1b`, in place of what cannot be printed.

    Names are shown on terminals, in XML and in logs of CI, where an escape sequence would be
    obeyed, a control character would damage the file and a line break would forge a line.
    """
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


def readable(name: str) -> str:
    """
    Return a name that any text can hold: printable, and cut where it is too long.

    Names that differ stay different: one that is cut ends in a part of its hash. A readable name is
    returned as it is.
    """
    shown = printable(name)
    if len(shown) <= LONGEST_NAME:
        return shown
    end = f"…{hashlib.sha256(shown.encode()).hexdigest()[:8]}"
    return shown[: LONGEST_NAME - len(end)] + end
