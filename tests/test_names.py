"""Names that no terminal, no XML and no line of a log could hold are escaped and cut."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import net
from fixtures.tflite import make
from fixtures.tflite.writer import FileWriter
from pytest_edgeq import Edgeq
from pytest_edgeq.compare.reference import module_tree
from pytest_edgeq.names import LONGEST_NAME, readable
from pytest_edgeq.quantize.arguments import _check_names
from pytest_edgeq.tflite.modules import ModuleNode
from tests.projects import Project

TITLE = "a\x1b]0;title\x07b"
NAMES = [TITLE, "two\nlines", "n" * 5000, "\x00", "\u202eright to left", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_text_can_hold(name: str) -> None:
    """It becomes one that every text can, and stays that."""
    shown = readable(name)
    assert shown.isprintable()
    assert 0 < len(shown) <= LONGEST_NAME
    assert readable(shown) == shown


@pytest.mark.parametrize("name", ["", "Net", "layer1.0.conv", "größe", "模型", "n" * LONGEST_NAME])
def test_a_name_that_a_text_can_hold_is_kept(name: str) -> None:
    """In any language."""
    assert readable(name) == name


def test_names_that_are_cut_stay_different() -> None:
    """Whatever of them is cut off."""
    assert len({readable("n" * count) for count in range(LONGEST_NAME - 5, 300)}) == 105


def _two_signatures(second: str) -> bytes:
    """Write a file that negates by one signature, and by the second one takes the square."""
    file = FileWriter()
    for op, key in (("NEG", "first"), ("SQUARE", second)):
        file.graph().fill((op, "x", "y"), inputs="x", outputs="y", key=key)
    return file.content()


@pytest.mark.parametrize("key", ["second", TITLE, "two\nlines", "n" * 5000])
def test_a_signature_of_such_a_name_is_run(key: str) -> None:
    """By its own name, and by the one that is shown."""
    model = Edgeq(cache_dir=None).load(
        _two_signatures(key), reference={"first": np.negative, key: np.square}, name=TITLE
    )
    assert model.name == readable(TITLE)
    assert model.signatures == ("first", readable(key))
    sample = np.full((1, 4), 3, np.float32)
    for name in (key, readable(key)):
        second = model.signature(name)
        assert (second.run(sample)["y"] == 9).all()
        assert second.name == f"{readable(TITLE)}[{readable(key)}]"
        assert Edgeq().compare(second, [sample]).total.max_abs_error == 0


def _keyed(key: str) -> nn.Module:
    """A layer of a name, on the sum of the inputs."""
    forward = lambda self, **inputs: next(iter(self.layers.values()))(sum(inputs.values()))  # noqa: E731
    return net(forward, "_Keyed", layers=nn.ModuleDict({key: nn.Linear(4, 4)})).eval()


@pytest.mark.parametrize("key", NAMES)
def test_a_module_of_such_a_name(key: str) -> None:
    """Its path is shown; its attribute is as the file's own names are read."""

    def paths(node: ModuleNode) -> list[str]:
        return [node.path, *(path for child in node.children for path in paths(child))]

    found = paths(module_tree(_keyed(key)).root)
    assert found == ["", "layers", readable(f"layers.{key}")]


@pytest.mark.parametrize("key", ["two\nlines", 'a"b', "\0", "class"])
def test_a_name_that_torch_writes_into_code_is_refused(key: str) -> None:
    """In place of a SyntaxError of torch.fx, which tells nothing of the model."""
    x = torch.zeros(1, 4)
    for quantizer in ("pt2e_static_int8", None):
        with pytest.raises(ValueError, match=r"^_Keyed: layers\..*rename this attribute or key"):
            Edgeq().quantize(_keyed(key), (x,), calibration=[x], quantizer=quantizer)
        with pytest.raises(ValueError, match=r"^_Keyed: the keyword input .*: expected the name"):
            Edgeq().quantize(_keyed("a"), (), sample_kwargs={key: x}, quantizer=quantizer)


@pytest.mark.parametrize("key", ["a", "a b", "a-b", "1", "größe", "a\\b", TITLE, "n" * 5000])
def test_a_name_that_torch_can_write_is_not_refused(key: str) -> None:
    """Nor is the name of a module without tensors, of which no graph tells."""
    _check_names(_keyed(key), ["x", "größe"], "Net")
    _check_names(nn.ModuleDict({"two\nlines": nn.ReLU()}), [], "Net")


def test_a_run_with_such_names_is_told_in_whole_files(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal, JUnit's XML, and what is written for a pull request."""
    suite = f"""
        import pytest

        @pytest.mark.parametrize("name", {[*NAMES[:4], "sound"]!r}, ids=range(5))
        def test_it(edgeq, name):
            model = edgeq.load({str(make.CONVERTED / "equal_weights.int8.tflite")!r}, name=name)
            edgeq.compare(model, [])
        """
    options = "--junitxml=junit.xml", "--edgeq-json=run.json"
    Project(pytester, monkeypatch).run(*options, files=suite, failed=5, hides="*\x1b]0*")
    tests = ElementTree.parse(pytester.path / "junit.xml").findall(".//testcase/failure")
    messages = [each.get("message", "") for each in tests]
    for message, name in zip(messages, [*NAMES[:4], "sound"], strict=True):
        assert readable(name) in message, message
