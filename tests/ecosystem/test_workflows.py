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

LINES = sorted({" ".join(words) for words in workflow_installs()})


@pytest.mark.parametrize("line", LINES)
def test_a_workflow_gets_torch_for_the_cpu_alone(
    newest: Overlay, tmp_path: Path, line: str
) -> None:
    """The one that it pins, and no package of CUDA."""
    _, _, rest = line.partition(" install ")
    words = [word for word in rest.split() if word not in OF_THE_READER]
    first = words.index("torch==2.13.0")
    options, packages = words[:first], words[first:]
    here = [f"{each} @ {ROOT.as_uri()}" if "edgeq" in each else each for each in packages]
    asked = tmp_path / "requirements.in"
    asked.write_text("\n".join(here), "utf-8")

    # pip takes the best version of all indexes, uv by default the first index that has any.
    told = fetch(
        *(str(newest.python), "-m", "uv", "pip", "compile", "--index-strategy=unsafe-best-match"),
        *("--python-version=3.12", "--python-platform=x86_64-manylinux_2_28"),
        *("--no-annotate", "--no-header", "--quiet", *options, str(asked)),
    )

    found = dict(each.split("==") for each in told.split() if "==" in each)
    assert found["torch"] == "2.13.0+cpu"
    assert [name for name in found if name.startswith(("nvidia", "cuda", "triton"))] == []
    assert "ai-edge-litert" in found
