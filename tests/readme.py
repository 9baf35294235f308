"""Print README's commands for a fresh machine, which the pipeline runs before anything is there."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.docs.blocks import commands

    sys.stdout.write("".join(f"{command}\n" for command in commands()))
