"""The packages that the workflows of README and the pages install."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.workflows import workflow_installs
from tests.ecosystem.overlay import ROOT, Overlay, fetch

# The index of torch and PyPI are read.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OF_THE_READER = ("-r", "requirements.txt", "--find-links", "wheels")
"""Files of a project; the package itself comes from this checkout."""


def test_the_workflows_get_torch_for_the_cpu_alone(newest: Overlay, tmp_path: Path) -> None:
    """The one that they pin, and no package of CUDA: what all of them install, at once."""
    options, asked = set(), set()
    for words in workflow_installs():
        rest = [word for word in words[words.index("install") + 1 :] if word not in OF_THE_READER]
        first = rest.index("torch==2.13.0")
        options.add(tuple(rest[:first]))
        asked |= {f"{each} @ {ROOT.as_uri()}" if "edgeq" in each else each for each in rest[first:]}
    (indexes,) = options
    requirements = tmp_path / "requirements.in"
    requirements.write_text("\n".join(sorted(asked)), "utf-8")

    # pip takes the best version of all indexes, uv by default the first index that has any.
    told = fetch(
        *(str(newest.python), "-m", "uv", "pip", "compile", "--index-strategy=unsafe-best-match"),
        *("--python-version=3.12", "--python-platform=x86_64-manylinux_2_28"),
        *("--no-annotate", "--no-header", "--quiet", *indexes, str(requirements)),
    )

    found = dict(each.split("==") for each in told.split() if "==" in each)
    assert found["torch"] == "2.13.0+cpu"
    assert [name for name in found if name.startswith(("nvidia", "cuda", "triton"))] == []
    assert "ai-edge-litert" in found
