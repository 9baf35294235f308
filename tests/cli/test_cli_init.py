"""`edgeq init`: the test that it writes passes and fails on a defect; factories that are none."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Refused, Run, module, without_torch
from tests.projects import Project
from tests.shared_cache import shared_cache

FACTORIES = """
import torch
from torch import nn
from fixtures.models import EmbeddingMean, ResidualNet, seeded

def residual():
    return seeded(ResidualNet), ResidualNet.sample_inputs()


def words():
    return seeded(EmbeddingMean), EmbeddingMean.sample_inputs()


def named():
    return Masked(), {"x": torch.zeros(1, 4), "mask": torch.zeros(1, 4).bool()}


def sized(width):
    return nn.Linear(width, 2)


def path():
    return "model.pt"


def odd():
    return seeded(ResidualNet), "cat.jpg"


def coarse():
    return nn.Linear(4, 2).bfloat16(), torch.zeros(1, 4, dtype=torch.bfloat16)


class Masked(nn.Module):
    def forward(self, x, mask):
        return torch.relu(x) * mask


class Twice(nn.Module):
    def forward(self, x, y):
        return torch.relu(x + y)


model = Twice()
"""


@pytest.fixture
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a module of factories, and forget the module afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pytester.makepyfile(my_factories=FACTORIES, fails="import no_such_package")
    yield pytester.path
    for name in set(sys.modules) - before:
        if name in ("my_factories", "fails"):
            del sys.modules[name]


@pytest.mark.slow
def test_the_test_passes_and_fails_on_a_defect(
    here: Path, run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, warm: str
) -> None:
    """The first run stores the baselines; weights that are quantized per tensor are found."""
    done = run("init", "my_factories:residual")

    assert done.exit_code == 0, done.stderr
    assert done.stdout == (
        "test_model_quant.py: written\n"
        "next: replace the random data in it, then: pytest test_model_quant.py --edgeq-update\n"
    )
    cache = shared_cache()  # which has the conversion that `init` has made
    options = [] if cache is None else [f"--edgeq-cache-dir={cache}"]
    project = Project(pytester, monkeypatch, *options)
    project.run("--edgeq-update", process=warm, passed=3)
    project.run(process=warm, passed=3)
    test = here / "test_model_quant.py"
    sound = test.read_text()
    spoiled = sound.replace('"pt2e_static_int8"', '"pt2e_static_int8_per_tensor"')
    assert spoiled != sound
    test.write_text(spoiled)
    project.run("-k", "accepted", process=warm, failed=1, deselected=2)


def test_an_existing_file_is_kept(here: Path, run: Run) -> None:
    """Nothing is imported first; `--force` replaces it."""
    path = here / "test_model_quant.py"
    path.write_text("mine")

    done = run("init", "my_factories:words")
    forced = run("init", "my_factories:words", "--force", "--quantizer", "recipe_dynamic_wi8_afp32")

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: test_model_quant.py exists; --force replaces it, --output names another file\n"
    )
    assert forced.exit_code == 0, forced.stderr
    text = path.read_text()
    assert "torch.randint(0, 45, (1, 7), generator=generator, dtype=torch.int64)," in text
    assert 'quantizer="recipe_dynamic_wi8_afp32",' in text
    ast.parse(text)


NUMBERS = "expected numbers such as 1,3,224,224 or 1,16:int64, got "
FAILURES = {
    "my_factories": "expected package.module:factory, such as my_model:Classifier, got",
    "my_factorys:residual": "there is no module 'my_factorys' (did you mean my_factories?)",
    "fails:model": "fails cannot be imported: there is no module 'no_such_package' in",
    "my_factories:residul": "my_factories has no 'residul' (did you mean residual",
    "my_factories:sized": "sized() fails: TypeError: sized() missing 1 required",
    "my_factories:path": "my_factories:path returns str: expected a torch nn.Module, or a pair",
    "my_factories:odd": "sample inputs: expected a tensor, a tuple of tensors, or a dict",
    "my_factories:coarse": "sample inputs: expected float16, float32, float64, uint8, int8, int16",
    "my_factories:Twice": "name the shape of each by --shape, in the order of Twice.forward(x, y)",
    "my_factories:Twice --shape 1,x": f"{NUMBERS}'1,x'",
    "my_factories:Twice --shape 0,4": f"{NUMBERS}'0,4'",
    "my_factories:Twice --shape 1,4:in64": "unknown dtype 'in64' (did you mean int64",
    "my_factories:residual --output tests/test_it.py": "there is no folder tests",
}


@pytest.mark.parametrize("arguments", FAILURES)
def test_what_cannot_be_written(arguments: str, here: Path, refused: Refused) -> None:
    """A sentence and exit code 2, and nothing is written."""
    refused("init", *arguments.split(), says=FAILURES[arguments])

    assert not (here / "test_model_quant.py").exists()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["my_factories:Twice", "--shape", "1,3", "--shape", "3:uint8"],
            [
                "from my_factories import Twice",
                "            torch.randn((1, 3), generator=generator),",
                "            torch.randint(0, 2, (3,), generator=generator, dtype=torch.uint8),",
                "    model = Twice()",
                "        sample_inputs=samples(1, seed=0)[0],",
                '        quantizer="pt2e_static_int8",',
            ],
        ),
        (
            ["my_factories:model", "--shape", "1,3", "--shape", "1,3"],
            ["from my_factories import model as my_model", "    model = my_model"],
        ),
        (
            ["my_factories:named"],
            [
                '            "x": torch.randn((1, 4), generator=generator),',
                '            "mask": torch.randint(0, 2, (1, 4), generator=generator, '
                "dtype=torch.bool),",
                "    model, _ = named()",
                "        sample_kwargs=samples(1, seed=0)[0],",
            ],
        ),
    ],
)
def test_the_text(arguments: list[str], lines: list[str], here: Path, run: Run) -> None:
    """Samples of the shapes, by position or by name; they can be made, and differ by seed."""
    done = run("init", *arguments, "--output", "test_it.py")

    assert done.exit_code == 0, done.stderr
    text = (here / "test_it.py").read_text()
    assert set(lines) <= set(text.splitlines())
    names: dict[str, Any] = {}
    exec(compile(text, "test_it.py", "exec"), names)
    (one, two), [other] = names["samples"](2, 0), names["samples"](1, 1)
    first = next(iter(one.values() if isinstance(one, dict) else one))
    for each in (two, other):
        assert not first.equal(next(iter(each.values() if isinstance(each, dict) else each)))


@pytest.mark.slow
def test_in_processes_of_their_own(here: Path) -> None:
    """A factory that cannot be imported; and without torch the command that installs it."""
    (here / "plain.py").write_text("def model(): pass\n")

    done, bare = module("init", "nowhere:model"), without_torch("init", "plain:model")

    assert (done.returncode, bare.returncode) == (2, 2)
    assert done.stderr.startswith("Error: nowhere cannot be imported: ")
    assert bare.stderr.startswith("Error: pytest-edgeq needs torch, and the package torch cannot")
