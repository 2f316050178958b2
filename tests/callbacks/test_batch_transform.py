"""BatchTransform: the samples that a naive loop makes, targets that follow, and what is refused; CutOut and ColOut."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

import lightning_tricks as lt
from lightning_tricks.functional import colout, cutout
from tests.callbacks.test_mixup import feed
from tests.callbacks.test_sequence_length_warmup import Looks
from tests.nets import Resumable, SaveAt, assert_equal, build, fit, quiet, weights
from tests.ranks import run_ranks

B, H, W, SEED = 6, 16, 16, 7  # the seed of ``fit``
LABELS = torch.arange(B)


def images(seed: int = 0, *, channels: int = 3) -> Tensor:
    return torch.rand(B, channels, H, W, generator=torch.Generator().manual_seed(seed))


def seen(transform: Any, *batches: Any, **settings: Any) -> list[Any]:
    """The batches that the module gets."""
    module, given = Looks(), batches or ((images(), LABELS),)
    callback = lt.BatchTransform(transform, **settings)
    fit(module, train=feed(*given), val=feed(given[0]), callbacks=[callback], max_epochs=1)
    return module.batches


def numbers_of(batch: int) -> int:
    """The seed of a batch's transforms: the second number of the batch's own generator."""
    drawn = random.Random(hashlib.blake2b(f"{SEED} {batch}".encode(), digest_size=16).digest())
    drawn.random()  # for callbacks with a probability
    return drawn.getrandbits(32)


def naive(transform: Callable[[Tensor], Tensor], x: Tensor, batch: int) -> Tensor:
    torch.manual_seed(seed := numbers_of(batch))
    random.seed(seed)
    np.random.seed(seed)
    return torch.stack([transform(sample) for sample in x])


def by_python(sample: Tensor) -> Tensor:
    return sample + random.random()


def by_numpy(sample: Tensor) -> Tensor:
    return sample + np.random.rand()


TRANSFORMS = {
    "RandAugment": v2.RandAugment(),
    "TrivialAugmentWide": v2.TrivialAugmentWide(),
    "AugMix": v2.AugMix(),
    "Compose": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(8), v2.Normalize([0.5] * 3, [0.2] * 3)]),
    "CutOut": lt.CutOut(0.5),
    "ColOut": lt.ColOut(),
    "Dropout": nn.Dropout(0.5),
    "python": by_python,
    "numpy": by_numpy,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_samples_are_those_of_a_naive_loop_with_random_numbers_of_the_batch(name: str) -> None:
    given = [(images(seed), LABELS) for seed in range(3)]
    got = seen(TRANSFORMS[name], *given)
    for number, ((x, _), (new, y)) in enumerate(zip(given, got, strict=True)):
        assert type(new) is Tensor
        assert torch.equal(new, naive(TRANSFORMS[name], x, number))
        assert torch.equal(y, LABELS)
        assert not torch.equal(new, x)


@pytest.mark.parametrize("transform", [v2.RandAugment(), lt.CutOut(), by_numpy])
def test_equal_samples_get_random_numbers_of_their_own(transform: Any) -> None:
    same = images()[:1].expand(B, 3, H, W)
    ((new, _), (again, _)) = seen(transform, (same, LABELS), (same, LABELS))
    assert len({sample.numpy().tobytes() for sample in (*new, *again)}) > B


def test_images_in_integers_stay_such() -> None:
    x = (255 * images()).to(torch.uint8)
    ((new, _),) = seen(v2.RandAugment(), (x, LABELS))
    assert new.dtype == torch.uint8
    assert torch.equal(new, naive(v2.RandAugment(), x, 0))


def test_the_generators_of_the_user_are_left_alone() -> None:
    class Draws(Looks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.batches.append((torch.rand(()).item(), random.random(), np.random.rand()))
            return self.weight.sum()

    def drawn(*callbacks: Any) -> Any:
        module, given = Draws(), [(images(), LABELS)] * 3
        fit(module, train=feed(*given), val=feed(given[0]), callbacks=list(callbacks), max_epochs=1)
        return module.batches

    transforms = v2.RandomHorizontalFlip(), by_python, by_numpy
    assert drawn(*map(lt.BatchTransform, transforms)) == drawn()


def test_start_and_stop_and_never_the_validation() -> None:
    class Looking(Looks):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.equal(batch[0], images())

    module, given = Looking(), [(images(), LABELS)] * 6
    transform = lt.BatchTransform(lt.CutOut(0.5), start=2, stop=4)
    fit(module, train=feed(*given), val=feed(given[0]), callbacks=[transform], max_epochs=1)
    assert [not torch.equal(x, images()) for x, _ in module.batches] == [False, False, True, True, False, False]


class Learns(Looks):
    """Has weights that depend on what it sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        return (self.weight * batch[0]).square().mean()


def items() -> Resumable:
    return Resumable([(images(seed), LABELS) for seed in range(6)])


def fitted(*callbacks: Any, **settings: Any) -> Any:
    module = build(Learns)
    settings = {"train": items(), "val": feed((images(), LABELS)), "limit_val_batches": 0, "max_epochs": 1, **settings}
    fit(module, callbacks=list(callbacks), **settings)
    return module


def test_doing_nothing_is_bit_equal_to_no_callback() -> None:
    for callback in (lt.BatchTransform(nn.Identity()), lt.BatchTransform(lt.CutOut(0)), lt.BatchTransform(abs, stop=0)):
        assert_equal(weights(fitted(callback)), weights(fitted()))


ADJUSTS = partial(v2.functional.adjust_hue, hue_factor=0.1)


@pytest.mark.parametrize("make", [v2.RandAugment, lambda: ADJUSTS, lambda: lambda x: x + torch.rand(())])
def test_a_resumed_fit_goes_on_exactly(make: Any, tmp_path: Any) -> None:
    def callback() -> Any:
        return lt.BatchTransform(make())

    straight = fitted(callback(), SaveAt(tmp_path / "half.ckpt", step=3))
    torch.manual_seed(99)
    resumed = fitted(callback(), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(resumed), weights(straight))
    assert torch.equal(resumed.batches[0][0], straight.batches[3][0])


def test_the_name_in_checkpoints_has_no_address() -> None:
    keys = {lt.BatchTransform(transform).state_key for transform in (lambda x: x, lambda x: x)}
    assert len(keys) == 1
    assert "0x" not in keys.pop()


def of_a_rank() -> list[Tensor]:
    given = [(images(), LABELS)] * 3
    module = Looks()
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "max_epochs": 1}
    fit(module, train=feed(*given), val=feed(given[0]), callbacks=[lt.BatchTransform(lt.CutOut(0.5))], **settings)
    return [x for x, _ in module.batches]


@pytest.mark.slow  # as of all that changes batches, see tests/core/batches/test_pipeline.py
def test_ranks_draw_numbers_of_their_own() -> None:
    one, two = run_ranks(of_a_rank)
    found = [*one, *two]
    assert len({x.numpy().tobytes() for x in found}) == 6
    assert torch.equal(one[0], naive(lt.CutOut(0.5), images(), 0))
    assert torch.equal(two[0], naive(lt.CutOut(0.5), images(), 1))


def test_it_comes_before_the_filter_and_the_mixing_and_behind_smaller_images() -> None:
    shapes: list[tuple[int, ...]] = []

    def noted(sample: Tensor) -> Tensor:
        shapes.append(tuple(sample.shape))
        return sample

    callbacks = [lt.Mixup(), lt.BatchTransform(noted), lt.ProgressiveResizing(0.5, stop=1, multiple_of=8)]

    class Classifies(Looks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.weight * batch[0].flatten(1)[:, :B], batch[1])

    fit(Classifies(), train=feed((images(), LABELS)), callbacks=callbacks, max_epochs=1, limit_val_batches=0)
    assert shapes == [(3, 8, 8)] * B
    assert lt.BatchTransform.order < lt.HardExampleFilter().order


# ---- targets that follow


def test_masks_follow_the_images() -> None:
    x = images(channels=1)
    for mask in ((x[:, 0] * 1000).long(), x * 1000, (x[:, 0, :, :, None] * 1000).expand(B, H, W, 2)):
        transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomCrop(8)])
        ((new, followed),) = seen(transform, (x, mask))
        assert torch.equal(new, naive(transform, x, 0))
        assert followed.dtype == mask.dtype
        expected = (new[:, 0] * 1000).to(mask.dtype)
        assert all(torch.equal(part.reshape(B, 8, 8), expected) for part in followed.reshape(B, 8, 8, -1).unbind(-1))


def test_masks_that_follow_can_be_flattened_by_view() -> None:
    for shape in ((B, H, W), (B, 2, H, W), (B, H, W, 2)):
        ((_, mask),) = seen(v2.RandomHorizontalFlip(), (images(), torch.rand(shape)))
        assert torch.equal(mask.view(-1), mask.flatten())


def test_boxes_follow_in_lists() -> None:
    def target(number: int) -> dict[str, Any]:
        box = BoundingBoxes(torch.tensor([[1, 2, 3 + number, 5]]), format="XYXY", canvas_size=(H, W))  # type: ignore[call-overload]
        return {"boxes": box, "labels": torch.tensor([number]), "mask": Mask(torch.full((1, H, W), number))}

    batch = (images(), [target(number) for number in range(B)])
    ((new, targets),) = seen(v2.RandomHorizontalFlip(), batch)
    flipped = [torch.equal(sample, before.flip(-1)) for sample, before in zip(new, images(), strict=True)]
    assert 0 < sum(flipped) < B
    for number, (found, was) in enumerate(zip(targets, flipped, strict=True)):
        assert type(found["boxes"]) is BoundingBoxes
        assert found["boxes"].tolist() == ([[13 - number, 2, 15, 5]] if was else [[1, 2, 3 + number, 5]])
        assert found["labels"].tolist() == [number]
    assert batch[1][0]["boxes"].tolist() == [[1, 2, 3, 5]], "the data set's own stay as they are"


def test_several_inputs_of_a_sample_get_the_same_numbers() -> None:
    for transform in (v2.RandomCrop(8), lt.CutOut(0.5)):
        ((a, b, _),) = seen(transform, (images(), 2 * images(), LABELS), inputs=[0, 1], target=2)
        assert torch.equal(b, 2 * a)
        assert not torch.equal(a, images()[..., : a.shape[-2], : a.shape[-1]])


def test_inputs_may_be_of_any_kind_for_a_callable() -> None:
    ((x, _),) = seen(nn.Dropout(0.5), (torch.ones(B, 8), LABELS))
    assert {0.0, 2.0} == set(x.flatten().tolist())
    (x,) = seen(by_python, torch.ones(B, 8))
    assert len(set(x.flatten().tolist())) == B


# ---- what is refused


def boxes() -> Any:
    return BoundingBoxes(torch.ones(3, 4), format="XYXY", canvas_size=(H, W))  # type: ignore[call-overload]


FLIP = v2.RandomHorizontalFlip()


IMAGES = images()
CASES: list[tuple[Any, Any, str]] = [
    (lt.CutOut(), (IMAGES, IMAGES[:, 0]), r"whether batch\[1\], a mask, must follow CutOut\(length=0.5\): use a tr"),
    (lt.ColOut(), {"x": IMAGES, "depth": IMAGES[:, 0]}, r"does not change batch\['depth'\].*name it in target="),
    (by_python, (IMAGES, [boxes()] * B), r"cannot change batch\[1\]\[0\], .*: use a transform of torchvision"),
    (
        FLIP,
        {"x": IMAGES, "boxes": torch.ones(B, 3, 4)},
        r"cannot change batch\['boxes'\], .*: put tv_tensors in a list",
    ),
    (FLIP, {"x": IMAGES, "depth": IMAGES[:, 0]}, r"does not change batch\['depth'\]"),
    (FLIP, (torch.ones(B, H, W), LABELS), r"torchvision's transforms take images \(B, C, H, W\), got 0: float32"),
    (FLIP, {"pictures": IMAGES}, "BatchTransform.*finds no such tensor"),
    (
        lt.CutOut(),
        torch.ones(B, 8),
        r"BatchTransform\(transform=CutOut\(.*: cutout needs .*\(8,\)\. The batch is a tensor: float32 \(6, 8\)",
    ),
    (v2.Normalize([0.0] * 3, [1.0] * 3), (images(channels=1).byte(), LABELS), "BatchTransform.*float tensor"),
    (v2.RandAugment(), (IMAGES * 2 - 1, LABELS), r"RandAugment takes images with values in \[0, 1\].* from -1 to 1: n"),
    (v2.Compose([FLIP, v2.AugMix()]), (IMAGES * 2, LABELS), r"AugMix takes images .* from .* to 2: normalize after it"),
    *(
        (jittered, (IMAGES * 2, LABELS), "ColorJitter takes images with values in")
        for jittered in (
            v2.RandomApply([v2.ColorJitter()]),
            v1.Compose([v1.ColorJitter()]),
            nn.Sequential(v2.ColorJitter()),
        )
    ),
    (v2.ToPILImage(), (IMAGES, LABELS), r"needs a tensor of each sample of batch\[0\], got a Image: end ToPILImage"),
    (lambda sample: sample.tolist(), (IMAGES, LABELS), "needs a tensor of each sample .* got a list"),
    (v2.Lambda(lambda x: x[:, random.randrange(4) :]), (IMAGES, LABELS), "samples of several shapes .* resize to one"),
]


@pytest.mark.parametrize(("transform", "batch", "message"), CASES, ids=[case[-1][:40] for case in CASES])
def test_what_cannot_be_transformed_is_refused(transform: Any, batch: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        seen(transform, batch)


def test_a_later_start_is_checked_at_the_first_batch() -> None:
    with pytest.raises(MisconfigurationException, match="a mask, must follow"):
        seen(lt.CutOut(), (images(), images()[:, 0]), start=5)


def test_normalized_images_are_right_where_colours_do_not_matter_or_behind() -> None:
    x = images() * 2 - 1
    assert torch.equal(seen(FLIP, (x, LABELS))[0][0], naive(FLIP, x, 0))
    behind = v2.Compose([v2.Normalize([-1.0] * 3, [2.0] * 3), v2.RandAugment()])
    assert torch.equal(seen(behind, (x, LABELS))[0][0], naive(behind, x, 0))


@pytest.mark.parametrize("transform", [None, "RandAugment", v2.RandAugment, lt.CutOut])
def test_a_transform_is_a_callable_and_no_class(transform: Any) -> None:
    with pytest.raises(TypeError, match="transform must be a callable that takes a sample, got"):
        lt.BatchTransform(transform)


# ---- YAML


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        ({"class_path": "torchvision.transforms.v2.RandAugment", "init_args": {"magnitude": 5}}, v2.RandAugment),
        ({"class_path": "lightning_tricks.CutOut", "init_args": {"length": 0.25}}, lt.CutOut),
        ("tests.callbacks.test_batch_transform.by_python", None),
    ],
)
def test_it_is_built_from_yaml(transform: Any, expected: Any, tmp_path: Any, monkeypatch: Any) -> None:
    callback = {"class_path": "lightning_tricks.BatchTransform", "init_args": {"transform": transform, "stop": 0.5}}
    config = {"trainer": {**quiet, "callbacks": [callback]}, "model": {"class_path": f"{__name__}.Looks"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(tmp_path / "config.yaml")])
    run = LightningCLI(save_config_callback=None, run=False).trainer
    (made,) = [each for each in run.callbacks if isinstance(each, lt.BatchTransform)]
    assert made.transform is by_python if expected is None else isinstance(made.transform, expected)
    assert getattr(made.transform, "magnitude", 5) == 5
    assert getattr(made.transform, "length", 0.25) == 0.25
    assert made.stop == 0.5


# ---- CutOut and ColOut


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 6), (2, 3, 5, 9)])
@pytest.mark.parametrize("length", [0, 0.3, 0.5, 1.0])
def test_a_square_at_a_random_place_is_zero(shape: tuple[int, ...], length: float) -> None:
    side, places = round(length * min(shape[-2:])), set()
    for seed in range(20):
        x = torch.ones(shape)
        cut = cutout(x, length, torch.Generator().manual_seed(seed))
        down, across = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
        top, left = int(down * shape[-2]) - side // 2, int(across * shape[-1]) - side // 2
        for row in range(shape[-2]):
            for column in range(shape[-1]):
                inside = top <= row < top + side and left <= column < left + side
                assert (cut[..., row, column] == (0 if inside else 1)).all()
        assert (x == 1).all()
        places.add((top, left))
    assert len(places) > 5


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 6), (2, 3, 5, 9)])
def test_rows_and_columns_are_left_out_in_their_order(shape: tuple[int, ...]) -> None:
    x, found = torch.arange(float(torch.Size(shape).numel())).view(shape), set()
    for seed in range(20):
        new = colout(x, 0.3, 0.5, torch.Generator().manual_seed(seed))
        height, width = shape[-2] - int(0.3 * shape[-2]), shape[-1] - int(0.5 * shape[-1])
        assert new.shape == (*shape[:-2], height, width)
        first = new.reshape(-1, height, width)[0]
        rows, columns = (first[:, 0] // shape[-1]).long(), (first[0] % shape[-1]).long()
        assert torch.equal(new, x[..., rows[:, None], columns])
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert columns.tolist() == sorted(set(columns.tolist()))
        found.add((*rows.tolist(), *columns.tolist()))
    assert len(found) > 5
    assert torch.equal(colout(x, 0, 0), x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lt.CutOut(1.5), ValueError, r"length must be in \[0.0, 1.0\], got 1.5"),
        (lambda: lt.CutOut("half"), TypeError, "length must be a number"),
        (lambda: lt.ColOut(1.0), ValueError, r"rows must be in \[0.0, 1.0\), got 1.0"),
        (lambda: lt.ColOut(columns=-0.1), ValueError, r"columns must be in \[0.0, 1.0\), got -0.1"),
        (lambda: cutout(torch.ones(3)), ValueError, r"cutout needs an image \(..., H, W\), got \(3,\)"),
        (lambda: colout(torch.ones(3)), ValueError, r"colout needs an image \(..., H, W\), got \(3,\)"),
    ],
)
def test_wrong_arguments_of_both(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_sparse_inputs_are_refused_by_name() -> None:
    batch = {"x": torch.eye(4).to_sparse(), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(MisconfigurationException, match="BatchTransform needs dense inputs"):
        lt.BatchTransform(nn.Identity(), inputs="x")._found_parts(batch)


def test_both_go_into_a_data_set_and_a_compose() -> None:
    transform = v2.Compose([lt.CutOut(), lt.ColOut(0.5, 0.5), v2.ToDtype(torch.float64)])
    assert transform(Image(images()[0])).shape == (3, 8, 8)
    assert repr(lt.CutOut(0.25)) == "CutOut(length=0.25)"


# ---- pictures of PIL, and whole batches


MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F"]


def picture(mode: str) -> Any:
    """Of random pixels, 10 high and 14 wide."""
    rng = np.random.default_rng(0)
    rgb = PIL.Image.fromarray(rng.integers(1, 256, (10, 14, 3), dtype=np.uint8))
    if mode.startswith("I;"):
        return PIL.Image.fromarray(rng.integers(1, 60_000, (10, 14), dtype=np.uint16))
    return rgb.convert(mode)


def pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image).astype(np.float64)).reshape(image.height, image.width, -1).movedim(-1, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", [lt.CutOut(0.6), lt.ColOut(0.3, 0.4), lt.ColOut(0, 0), lt.CutOut(0)], ids=repr)
def test_a_picture_of_pil_becomes_what_its_tensor_would(transform: Any, mode: str) -> None:
    for seed in range(5):
        given = picture(mode)
        before = pixels(given)
        torch.manual_seed(seed)
        new = transform(given)
        torch.manual_seed(seed)
        assert torch.equal(pixels(new), transform(before))
        assert new.mode == mode
        assert new.getpalette() == given.getpalette()
        assert torch.equal(pixels(given), before), "the data set's own picture stays as it is"


def test_a_data_set_of_torchvision_takes_them_beside_its_own_transforms(tmp_path: Any) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        picture("RGB").save(tmp_path / str(number) / "picture.png")
    steps = [v2.RandomHorizontalFlip(), lt.CutOut(0.5), lt.ColOut(0.2, 0.2), v2.PILToTensor(), lt.CutOut(0.5)]
    for made in (v2.Compose(steps), v1.Compose(steps)):
        loader = DataLoader(ImageFolder(str(tmp_path), transform=made), batch_size=4, num_workers=0)
        ((x, y),) = list(loader)
        assert x.shape == (4, 3, 8, 12)
        assert y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("transform", [lt.CutOut(), lt.ColOut()], ids=repr)
@pytest.mark.parametrize("image", [np.zeros((4, 4)), "picture.png", None], ids=["array", "path", "None"])
def test_what_is_neither_a_tensor_nor_a_picture_is_refused_by_name(transform: Any, image: Any) -> None:
    name = f"{type(transform).__name__} takes a tensor .* or a PIL image, got {type(image).__name__}"
    with pytest.raises(TypeError, match=name):
        transform(image)


@pytest.mark.parametrize("shape", [(5, 8, 8), (5, 3, 8, 6), (1, 2, 3, 5, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize(
    "transform", [lt.CutOut(0.6), lt.CutOut(0), lt.CutOut(1.0), lt.ColOut(0.3, 0.4), lt.ColOut(0, 0)], ids=repr
)
def test_a_whole_batch_is_what_a_loop_over_its_images_makes(transform: Any, dtype: torch.dtype, shape: Any) -> None:
    x = (100 * torch.rand(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    before = x.clone()
    torch.manual_seed(3)
    expected = torch.stack([transform(image) for image in x])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(transform.of_batch(x), expected)
    assert torch.equal(torch.get_rng_state(), after), "the same random numbers"
    assert torch.equal(x, before)
