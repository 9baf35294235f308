"""Binding samples to inputs: every shape a sample may have, and the words for those it may not."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pytest_edgeq.compare.samples import SampleSpec, read_samples

x, y, mask = torch.ones(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool)


class Image(torch.Tensor):
    """As MONAI's MetaTensor and fastai's TensorImage are."""


BOTH = SampleSpec.of_inputs((x, y), {"mask": mask}, ("x", "y", "mask"))
POSITIONAL = SampleSpec.of_inputs((x, y), {}, ("x", "y"))


@pytest.mark.parametrize(
    "sample", [((x, y), {"mask": mask}), [(x, y), {"mask": mask}], {"mask": mask, "y": y, "x": x}]
)
def test_a_sample_of_both_kinds(sample: Any) -> None:
    """A pair, or a dict with every name, in any order."""
    bound = BOTH.bind(sample, "sample 0")

    assert [t is e for t, e in zip(bound.tensors, (x, y, mask), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "sample", [(x, y), [x, y], {"x": x, "y": y}, ((x, y), {}), (x.as_subclass(Image), y)]
)
def test_a_positional_sample(sample: Any) -> None:
    """A tuple, a list (as data loaders give it), a dict by parameter name."""
    assert [t.tolist() for t in POSITIONAL.bind(sample, "sample 0").args] == [[[1] * 3], [[0] * 2]]


@pytest.mark.parametrize(
    ("spec", "sample", "error", "message"),
    [
        (BOTH, (x, y), ValueError, "expected ['mask'] by name, got nothing; give a pair"),
        (
            POSITIONAL,
            {"image": x, "y": y},
            ValueError,
            "expected 2 positional inputs, got 0; by name it expects ['x', 'y'], and got "
            "['image', 'y']",
        ),
        (BOTH, (x, y, mask), ValueError, "expected 2 positional inputs, got 3; the model also"),
        (
            BOTH,
            ((x, y), {"maks": mask}),
            ValueError,
            "expected ['mask'] by name, got ['maks'] (did you mean mask?)",
        ),
        (POSITIONAL, (x, y[0]), ValueError, "expected shape 1×2, got 2; the file is built for"),
        (POSITIONAL, (x.bool(), y), TypeError, "expected float32, got bool; integers in place"),
        (POSITIONAL, "xy", TypeError, "expected a tensor, a tuple of tensors or a dict of tensors"),
    ],
)
def test_a_sample_that_does_not_fit(
    spec: SampleSpec, sample: Any, error: type[Exception], message: str
) -> None:
    """Each text names the sample, what was expected, what came, and the way out."""
    with pytest.raises(error) as caught:
        spec.bind(sample, "sample 7")

    assert str(caught.value).startswith("sample 7")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "wanted", "message"),
    [
        ((1, 8, 8, 3), (1, 3, 8, 8), "; permute the sample: x.permute(0, 3, 1, 2), as its "),
        ((1, 40, 3), (1, 3, 40), "; permute the sample: x.permute(0, 2, 1), as its channels"),
        ((1, 3, 4, 8, 8), (1, 4, 8, 8, 3), "; permute the sample: x.permute(0, 2, 3, 4, 1), as "),
        ((1, 3, 9, 8), (1, 3, 8, 8), "expected shape 1×3×8×8, got 1×3×9×8"),
    ],
)
def test_channels_in_another_place(
    shape: tuple[int, ...], wanted: tuple[int, ...], message: str
) -> None:
    """The permute that fixes it is suggested where nothing else is wrong."""
    spec = SampleSpec.of_inputs([torch.zeros(wanted)], {}, ["x"])
    with pytest.raises(ValueError, match="expected shape") as caught:
        spec.bind(torch.zeros(shape), "sample 7")
    assert message in str(caught.value)
    assert ("permute" in message) == ("permute" in str(caught.value))


@pytest.mark.parametrize("thing", [x, x.numpy(), {"x": x}, "path", 3])
def test_what_is_no_iterable_of_samples(thing: Any) -> None:
    """One sample instead of a list of them would be iterated over its rows."""
    with pytest.raises(TypeError, match=r"calibration: expected an iterable of samples"):
        list(read_samples(thing, POSITIONAL, "calibration"))


@pytest.mark.parametrize("last", [IndexError, KeyError, None])
def test_a_dataset_is_read_up_to_its_length(last: type[Exception] | None) -> None:
    """A map-style dataset need not raise IndexError behind its last sample."""

    class Dataset:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if last is not None and index >= 3:
                raise last(index)
            assert index <= 3, "reading does not end"
            return x, y

    assert len(list(read_samples(cast("Any", Dataset()), POSITIONAL, "evaluation"))) == 3


def test_the_number_of_a_bad_sample_is_reported() -> None:
    """The third sample is number 2."""
    with pytest.raises(ValueError, match="evaluation sample 2, input 'args_1'"):
        list(read_samples([(x, y), (x, y), (x, x)], POSITIONAL, "evaluation"))
