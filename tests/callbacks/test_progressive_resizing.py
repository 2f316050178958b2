"""ProgressiveResizing: pixels, masks that follow, what is refused. For sizes, see core/batches/test_growing.py."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchvision.transforms.v2 import functional as tv
from torchvision.tv_tensors import BoundingBoxes

import lightning_tricks as lt
from lightning_tricks.functional import resize_images
from tests.callbacks.test_mixup import feed
from tests.callbacks.test_sequence_length_warmup import Looks
from tests.nets import fit, trainer

B, H, W = 4, 16, 24
LABELS = torch.arange(B)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*(shape or (B, 3, H, W)), generator=torch.Generator().manual_seed(seed))


def first(batch: Any, **settings: Any) -> Any:
    """What the module gets of a batch at the first step."""
    module = Looks()
    growth = lt.ProgressiveResizing(**{"initial": 0.5, "stop": 2, "multiple_of": 4, **settings})
    fit(module, train=feed(batch, batch, batch), val=feed(batch), callbacks=[growth], max_epochs=1)
    assert str(module.batches[2]) == str(batch), "the full batch from stop on"
    return module.batches[0]


# ---- the function


@pytest.mark.parametrize("size", [(8, 12), (5, 24), (16, 7), (16, 24), (20, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_images_are_those_of_torchvision(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = images() if dtype.is_floating_point else (255 * images()).to(dtype)
    x = x.to(dtype)
    new = resize_images(x, size)
    assert new.dtype == dtype
    torch.testing.assert_close(
        new, tv.resize(x, list(size), antialias=True), atol=1 if dtype == torch.uint8 else 1e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = images().to(dtype)
    assert torch.equal(resize_images(x, (8, 12)), resize_images(x.float(), (8, 12)).to(dtype))


def test_any_dimensions_may_be_between() -> None:
    video = images(2, 5, 3, H, W)
    frames = torch.stack([resize_images(frame, (8, 12)) for frame in video.unbind(1)], 1)
    torch.testing.assert_close(resize_images(video, (8, 12)), frames)
    torch.testing.assert_close(resize_images(video[:, 0, 0], (8, 12)), frames[:, 0, 0])
    x = images().contiguous(memory_format=torch.channels_last)
    assert resize_images(x, (8, 12)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [(8, 12), (5, 24), (16, 7), (16, 24), (20, 30)])
def test_masks_have_the_pixel_under_the_new_one(size: tuple[int, int]) -> None:
    mask = torch.arange(2 * H * W).view(2, H, W)
    new = resize_images(mask, size, mode="nearest")
    for row in range(size[0]):
        for column in range(size[1]):
            old = math.floor((row + 0.5) * H / size[0]), math.floor((column + 0.5) * W / size[1])
            assert torch.equal(new[:, row, column], mask[:, old[0], old[1]])
    assert resize_images(mask > 7, size, mode="nearest").dtype == torch.bool


def test_what_has_no_sides_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resize_images needs images \(B, ..., H, W\), got \(4, 3\)"):
        resize_images(torch.zeros(4, 3), (2, 2))
    with pytest.raises(ValueError, match=r"mode must be one of 'bilinear', 'nearest', got 'bicubic'"):
        resize_images(torch.zeros(4, 3, 3), (2, 2), mode="bicubic")  # type: ignore[arg-type]


# ---- in a fit


MASKS = [torch.arange(H * W).view(H, W).expand(B, H, W), images(B, 2, H, W) > 0.5, images(B, H, W, 2, seed=1)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_follow_their_images(mask: Tensor) -> None:
    x, followed = first((images(), mask))
    torch.testing.assert_close(x, tv.resize(images(), [8, 12], antialias=True))
    rows, columns = torch.arange(1, H, 2)[:, None], torch.arange(1, W, 2)
    expected = mask[:, rows, columns] if mask.shape[1:3] == (H, W) else mask[..., rows, columns]
    assert torch.equal(followed, expected)
    assert followed.dtype == mask.dtype


def test_a_crop_is_the_same_window_of_images_and_masks() -> None:
    x = torch.arange(float(B * H * W)).view(B, 1, H, W)
    batch = {"a": x, "b": 2 * x, "mask": x[:, 0].long(), "y": LABELS}
    windows = set()
    for seed in range(8):
        module = Looks()
        growth = lt.ProgressiveResizing(
            0.5, stop=2, multiple_of=4, mode="crop", inputs=["a", "b"], target=["mask", "y"]
        )
        L.seed_everything(seed, verbose=False)
        trainer(max_epochs=1, callbacks=[growth], limit_val_batches=0).fit(module, feed(batch, batch), feed(batch))
        cut = module.batches[0]
        top, left = divmod(int(cut["a"][0, 0, 0, 0]), W)
        assert torch.equal(cut["a"], x[..., top : top + 8, left : left + 12])
        assert torch.equal(cut["b"], 2 * cut["a"])
        assert torch.equal(cut["mask"], cut["a"][:, 0].long())
        assert torch.equal(cut["y"], LABELS)
        windows.add((top, left))
    assert len({top - left for top, left in windows}) > 3


@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("shape", [(B, H, W), (B, 2, H, W), (B, H, W, 2)])
def test_what_was_contiguous_can_be_flattened_by_view(shape: tuple[int, ...], mode: str) -> None:
    x, mask = first((images(), images(*shape, seed=1)), mode=mode)
    assert x.view(-1).shape == (B * 3 * 8 * 12,)
    assert torch.equal(mask.view(-1), mask.flatten())
    last = images().contiguous(memory_format=torch.channels_last)
    assert first((last, LABELS), mode=mode)[0].is_contiguous(memory_format=torch.channels_last)


def test_other_parts_stay() -> None:
    batch = {"image": images(), "labels": LABELS, "soft": torch.rand(B, 10), "names": ["a"] * B, "scale": 2.0}
    small = first(batch)
    assert small["image"].shape == (B, 3, 8, 12)
    assert {name: str(part) for name, part in small.items() if name != "image"} == {
        name: str(part) for name, part in batch.items() if name != "image"
    }


@pytest.mark.parametrize("batch", [images(), (images(), LABELS), [images(), images(seed=1)]])
def test_targets_need_not_be_there(batch: Any) -> None:
    small = first(batch, inputs=[0, 1] if isinstance(batch, list) else None)
    parts = [small] if isinstance(small, Tensor) else [part for part in small if part.ndim > 1]
    assert {part.shape for part in parts} == {(B, 3, 8, 12)}


def boxes() -> Any:
    return BoundingBoxes(torch.ones(3, 4), format="XYXY", canvas_size=(H, W))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": images(), "boxes": torch.zeros(B, 3, 4)}, r"batch\['boxes'\], a tensor \(4, 3, 4\): leave it"),
        ({"x": images(), "objects": [boxes()] * B}, r"batch\['objects'\]\[0\], a tensor \(3, 4\): leave it"),
        ({"x": images(), "keypoints": [[1, 2]] * B}, r"cannot change batch\['keypoints'\]"),
        ({"x": images(), "depth": images(B, 1, H, W)}, r"does not change batch\['depth'\], .* the size of the images"),
        ({"x": images(), "y": torch.zeros(B, H // 4, W // 4)}, r"cannot change batch\['y'\], a tensor \(4, 4, 6\)"),
        ({"x": images(B, H, W, 3), "y": LABELS}, r"which looks like \(B, H, W, C\)"),
        ({"x": torch.zeros(B, 8), "y": LABELS}, r"needs images \(B, ..., H, W\) of one size"),
        ({"x": images(B, 3, 4, 4), "y": LABELS}, r"multiple_of=4\) needs images that are larger, got \(4, 4\)"),
        ({"picture": images(), "y": LABELS}, "finds no such tensor in the batch, which has picture: float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_what_cannot_follow_is_refused(batch: Any, message: str, mode: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"ProgressiveResizing.*{message}"):
        first(batch, mode=mode)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_images_of_several_sizes_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"ProgressiveResizing needs images .* of one size.*nested"):
        first((torch.nested.nested_tensor([*images()]), LABELS))


def test_the_mode_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of 'resize', 'crop', got 'crops'\. Did you mean 'crop'"):
        lt.ProgressiveResizing(mode="crops")  # type: ignore[arg-type]
