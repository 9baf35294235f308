"""`edgeq init`: the test that it writes passes and fails on a defect; factories that are none."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_edgeq import Budget
from pytest_edgeq.cli.factory import Factory
from pytest_edgeq.cli.first_measurement import Measured, WeightedOps
from pytest_edgeq.cli.first_test import render
from pytest_edgeq.cli.placeholders import Placeholder, Placeholders, parse_shape
from pytest_edgeq.plugin.options import CI_VARIABLES
from tests.cli.conftest import Check, Run, module, without_torch
from tests.shared_cache import shared_cache

ROOT = Path(__file__).parents[2]
FACTORIES = """
import torch
from torch import nn
from fixtures.models import EmbeddingMean, KeywordInputs, ResidualNet, seeded

LEARNING_RATE = 0.1


def residual():
    return seeded(ResidualNet), ResidualNet.sample_inputs()


def words():
    return seeded(EmbeddingMean), EmbeddingMean.sample_inputs()


def sized(width):
    return nn.Linear(width, 2)


def path():
    return "model.pt"


def odd():
    return seeded(ResidualNet), "cat.jpg"


def broken():
    raise KeyError("weights")


class Twice(nn.Module):
    def forward(self, x, y):
        return torch.relu(x + y)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a module of factories, and forget the module afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    (tmp_path / "fails.py").write_text("import no_such_package")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("my_factories", "fails"):
            del sys.modules[name]


def run_pytest(*arguments: str) -> str:
    """Run pytest in a process of its own, and return the last line that it prints."""
    # Other people's plugins make it slow.
    options = ["-p", "pytest_edgeq.plugin", "-p", "no:unraisableexception", *arguments]
    # It finds the conversion that `init` has made.
    if (cache := shared_cache()) is not None:
        options.append(f"--edgeq-cache-dir={cache}")
    # It must be able to write baselines.
    variables = {name: each for name, each in os.environ.items() if name not in CI_VARIABLES}
    paths = [str(ROOT), variables.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        capture_output=True,
        text=True,
        check=False,
        env=variables
        | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        timeout=100,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_test_passes_and_fails_on_a_defect(here: Path, run: Run) -> None:
    """The first run stores the baselines; weights that are quantized per tensor are found."""
    done = run("init", "my_factories:residual")

    assert done.exit_code == 0, done.stderr
    assert done.stdout == (
        "test_model_quant.py: written\n"
        "next: replace the random data in it, then: pytest test_model_quant.py --edgeq-update\n"
    )
    assert run_pytest("--edgeq-update").startswith("4 passed in")
    assert run_pytest().startswith("4 passed in")
    test = here / "test_model_quant.py"
    sound = test.read_text()
    other = '        quantizer="pt2e_static_int8_per_tensor",\n'
    spoiled = sound.replace("        calibration", f"{other}        calibration")
    assert spoiled != sound
    test.write_text(spoiled)
    assert run_pytest("-k", "dtypes or accepted").startswith("2 failed, 2 deselected in")


def test_an_existing_file_is_kept(here: Path, run: Run) -> None:
    """Nothing is imported or measured first; `--force` replaces it."""
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
    assert "torch.randint(0, 45, (1, 7), generator=generator)" in text
    assert 'quantizer="recipe_dynamic_wi8_afp32",' in text
    ast.parse(text)


FAILURES = {
    "my_factories": "expected package.module:factory, such as my_model:Classifier, got",
    "my_factorys:residual": "there is no module 'my_factorys' (did you mean my_factories?)",
    "fixtures.modles:X": "there is no module 'fixtures.modles' (did you mean models?)",
    "fails:model": "fails cannot be imported: No module named 'no_such_package'",
    "my_factories:residul": "my_factories has no 'residul' (did you mean residual",
    "my_factories:LEARNING_RATE": "LEARNING_RATE of my_factories is float: expected a function",
    "my_factories:sized": "sized of my_factories needs the arguments width",
    "my_factories:path": "path of my_factories gives str: expected a torch nn.Module, or a pair",
    "my_factories:odd": "sample inputs: expected a tensor, a tuple of tensors, or a dict",
    "my_factories:broken": "broken of my_factories fails: KeyError: 'weights'",
    "my_factories:Twice": "name the shape of each by --shape, in the order of Twice.forward(x, y)",
}


@pytest.mark.parametrize("target", FAILURES)
def test_what_cannot_be_a_factory(target: str, here: Path, run: Run) -> None:
    """A sentence and exit code 2, and nothing is written."""
    done = run("init", target)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert FAILURES[target] in done.stderr
    assert not (here / "test_model_quant.py").exists()


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (["1,4"], "Twice.forward(x, y) fails on inputs of float32 [1, 4]: TypeError: "),
        (["1,4", "1,3"], "fails on inputs of float32 [1, 4], float32 [1, 3]: RuntimeError: "),
        (["1,x", "1,4"], "expected numbers such as 1,3,224,224 or 1,16:int64, got '1,x'"),
        (["1,4:in64", "1,4"], "unknown dtype 'in64' (did you mean int64"),
        (["0,4"], "expected lengths of 1 or more, got '0,4'"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list[str], sentence: str, here: Path, run: Run) -> None:
    """They are tried on the model before it is quantized."""
    options = [word for shape in shapes for word in ("--shape", shape)]

    done = run("init", "my_factories:Twice", *options)

    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_folder_that_is_missing(here: Path, run: Run) -> None:
    """Before anything is measured."""
    done = run("init", "my_factories:residual", "--output", here / "tests" / "test_it.py")

    assert done.exit_code == 2
    assert f"there is no folder {here / 'tests'}" in done.stderr


def test_the_text_with_all_that_can_be_told(golden: Check) -> None:
    """Several inputs and outputs, an unhealthy model that the gate refuses, no budget."""
    samples = Placeholders(
        by_name={"image": Placeholder((1, 3, 8, 8)), "ids": Placeholder((1, 4), "int32", 50)}
    )
    measured = Measured(
        inputs=("int8", "int32"),
        outputs=("int8", "int8"),
        weighted=(WeightedOps("CONV_2D", "int8", "int8", "per_channel", 3),),
        float_ops=("MEAN", "SOFTMAX"),
        all_float=False,
        budget=None,
        figures={"quantization": 31.25, "lowering": 60.5, "total": 31.2},
        health=("clipped_output: output 'output_0': expected the reference within its codes",),
        refused="SOFTMAX #9: expected codes within 1 of torch's, got 12 off (1 finding)",
    )
    factory = Factory("pkg.mod", "models.small", None)

    text = render(factory, samples, measured, quantizer="recipe_static_wi8_ai8", gives_inputs=True)

    ast.parse(text)
    golden("init", text)


def test_the_least_text() -> None:
    """One input, a budget, and nothing in float; it compiles, and imports what it uses."""
    measured = Measured(
        inputs=("int8",),
        outputs=("int8",),
        weighted=(),
        float_ops=(),
        all_float=False,
        budget=Budget(sqnr_db=30.5, cosine_similarity=0.999),
        figures={"total": 40.0},
        health=(),
        refused="",
    )
    factory = Factory("my_model", "Classifier", None)
    samples = Placeholders((Placeholder((1, 4)),))

    text = render(factory, samples, measured, quantizer="pt2e_static_int8", gives_inputs=False)

    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    [imported] = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "pytest_edgeq"
    ]
    assert {alias.name for alias in imported.names} <= used
    assert "    model = Classifier().eval()  # load its weights here\n" in text
    assert "            sqnr_db=30.5,\n            cosine_similarity=0.999,\n" in text
    assert "quantizer=" not in text


@pytest.mark.parametrize(
    ("text", "code", "dtype"),
    [
        ("1,3", "torch.randn((1, 3), generator=generator)", "float32"),
        ("4:float16", "torch.randn((4,), generator=generator, dtype=torch.float16)", "float16"),
        ("1,9:int64", "torch.randint(0, 2, (1, 9), generator=generator)", "int64"),
        ("2:uint8", "torch.randint(0, 2, (2,), generator=generator, dtype=torch.uint8)", "uint8"),
        ("2:bool", "torch.randint(0, 2, (2,), generator=generator).bool()", "bool"),
    ],
)
def test_the_code_makes_what_the_shape_says(text: str, code: str, dtype: str) -> None:
    """And other values for another seed."""
    placeholder = parse_shape(text)
    [[tensor]] = Placeholders((placeholder,)).samples(1, seed=0)

    assert placeholder.code == code
    assert (tuple(tensor.shape), str(tensor.dtype)) == (placeholder.shape, f"torch.{dtype}")


def test_in_processes_of_their_own(here: Path) -> None:
    """A factory that cannot be imported; and without torch the command that installs it."""
    (here / "plain.py").write_text("def model(): pass\n")

    done, bare = module("init", "nowhere:model"), without_torch("init", "plain:model")

    assert (done.returncode, bare.returncode) == (2, 2)
    assert done.stderr.startswith("Error: there is no module 'nowhere'")
    assert bare.stderr.startswith("Error: pytest-edgeq needs torch, and the package torch cannot")
