"""CutMix pixel by pixel: the box, its exact share, and which label a target shows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks import CutMix
from lightning_tricks.functional import cutmix
from tests.batches import fed, refused, stepping
from tests.callbacks.test_mixup import feed, run
from tests.core.batches.test_mixing import (
    DEVICES,
    ImageNet,
    Steps,
    Watch,
    images,
    naive_loss,
    naive_mixup,
    train_by_hand,
)
from tests.device.devices import device
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, quiet, weights
from tests.refusals import assert_refused


def marked(batch: int, *shape: int) -> Tensor:
    """Images of which every pixel tells its image."""
    return torch.arange(float(batch)).view(-1, *[1] * len(shape)).expand(batch, *shape).contiguous()


def naive_box(height: int, width: int, lam: float, seed: int) -> list[range]:
    """Rows and columns of a box of ``sqrt(1 - lam)`` of each side around a drawn centre; all of it if lam is 0."""
    centre = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
    sides = []
    for share, size in zip(centre, (height, width), strict=True):
        length = round(size * math.sqrt(1 - lam))
        box = {int(share * size) - length // 2 + step for step in range(length)} & set(range(size))
        sides.append(range(min(box), max(box) + 1) if box else range(0))
    return sides


def test_images_of_a_learnt_augmentation_are_cut_the_same_and_have_a_gradient() -> None:
    x, index = torch.randn(4, 3, 6, 5), torch.tensor([1, 1, 3, 0])
    learnt = x.clone().requires_grad_()
    mixed, _ = cutmix(learnt, 0.5, index, torch.Generator().manual_seed(0))
    assert torch.equal(mixed, cutmix(x, 0.5, index, torch.Generator().manual_seed(0))[0])
    mixed.sum().backward()
    assert learnt.grad is not None
    assert learnt.grad.sum() == x.numel()


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 5), (9, 4), (2, 3, 6, 10), (3, 1, 1), (3, 1, 16)], ids=str)
@pytest.mark.parametrize("lam", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_every_pixel_is_that_of_the_paper_and_the_share_is_exact(shape: tuple[int, ...], lam: float) -> None:
    height, width = shape[-2:]
    clipped = 0
    for seed in range(25):
        x, index = marked(4, *shape), torch.tensor([2, 0, 1, 3])
        before = x.clone()
        mixed, share = cutmix(x, lam, index, torch.Generator().manual_seed(seed))
        rows, columns = naive_box(height, width, lam, seed)
        for i, j in enumerate(index.tolist()):
            expected = torch.full(shape, float(i))
            for row in rows:
                for column in columns:
                    expected[..., row, column] = j
            assert torch.equal(mixed[i], expected)
        assert share == 1 - len(rows) * len(columns) / (height * width)
        assert share == pytest.approx((mixed[0] == 0).float().mean().item())
        assert torch.equal(x, before)
        clipped += len(rows) < round(height * math.sqrt(1 - lam)) or len(columns) < round(width * math.sqrt(1 - lam))
    assert clipped or lam > 0.5 or height * width == 1


def test_an_index_of_another_length_is_torchs_business() -> None:
    x = torch.randn(4, 3, 6, 5)
    with pytest.raises(RuntimeError):
        cutmix(x, 0.5, torch.tensor([1, 2, 3, 0, 1]))
    mixed, _ = cutmix(x, 0.5, torch.tensor([1]), torch.Generator().manual_seed(0))
    assert ((mixed == x) | (mixed == x[1])).all()


def test_without_a_generator_torchs_own_is_used_and_with_one_it_is_not() -> None:
    x, index = marked(2, 3, 8, 8), torch.tensor([1, 0])
    state = torch.get_rng_state()
    cutmix(x, 0.5, index, torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)
    cutmix(x, 0.5, index)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cutmix needs images \(B, ..., H, W\), got"):
        cutmix(torch.zeros(shape), 0.5, torch.arange(4))
    message = r"CutMix needs images \(B, ..., H, W\) of one size. The batch has 0: float32"
    with pytest.raises(MisconfigurationException, match=message):
        run(build(ImageNet), CutMix(), feed((torch.zeros(shape), torch.zeros(4).long())))


class Wide(ImageNet):
    """Sees images of (1, 8, 8), and notes the labels as the step sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mean((1, 2)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.labels.append(torch.tensor(batch[1].tolist()))
        return super().training_step(batch, batch_idx)


def big_images(batches: int, size: int = 6) -> list[Any]:
    numbers = torch.Generator().manual_seed(1)
    samples = lambda: torch.randn(size, 1, 8, 8, generator=numbers)  # noqa: E731
    return [(samples(), torch.randint(2, (size,), generator=numbers)) for _ in range(batches)]


def test_training_is_that_of_a_naive_loop_and_the_target_shows_the_greater_part() -> None:
    batches, module = big_images(30), build(Wide)
    watch = run(module, CutMix(), feed(*batches))
    lams = [lam for lam, _ in watch.drawn]
    assert min(lams) < 0.5 < max(lams)
    mixed = iter([x for x, _ in watch.batches])
    hand = train_by_hand(build(Wide), watch.drawn, batches, lambda x, lam, index: next(mixed))
    assert_close(weights(module), hand)
    steps = zip(batches, watch.batches, module.labels, watch.drawn, strict=True)
    for (x, y), (cut, shown), seen, (lam, index) in steps:
        other = cut != x
        assert torch.equal(cut[other], x[index][other])
        rows, columns = other.any(0)[0].any(1).sum().item(), other.any(0)[0].any(0).sum().item()
        assert lam == 1 - rows * columns / 64 or index.tolist() == sorted(index.tolist())  # each with itself
        assert torch.equal(shown, y if lam >= 0.5 else y[index])
        assert torch.equal(seen, shown)


def test_soft_targets_and_several_inputs_get_the_same_box() -> None:
    class Two(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.binary_cross_entropy_with_logits(self(batch["a"]) + 0 * self(batch["b"]), batch["labels"])

    plain = [(x, F.one_hot(y, 2).float()) for x, y in big_images(8)]
    module, cut = build(Two), []
    module.register_forward_pre_hook(lambda _, args: cut.append(args[0]))
    watch = run(module, CutMix(inputs=["a", "b"]), feed(*({"a": x, "b": 2 * x, "labels": y} for x, y in plain)))
    assert all(torch.equal(2 * a, b) for a, b in zip(cut[::2], cut[1::2], strict=True))
    mixed, bce = iter(cut[::2]), F.binary_cross_entropy_with_logits
    hand = train_by_hand(build(Wide), watch.drawn, plain, lambda x, lam, index: next(mixed), loss=bce)
    assert_close(weights(module), hand)


def test_images_of_two_sizes_are_refused() -> None:
    batch = {"a": torch.zeros(4, 3, 8, 8), "b": torch.zeros(4, 3, 4, 4), "y": torch.zeros(4).long()}
    with pytest.raises(MisconfigurationException, match=r"of one size.*a: float32 .*b: float32"):
        run(build(ImageNet), CutMix(inputs=["a", "b"]), feed(batch))


def test_it_works_with_sam_accumulation_and_bf16() -> None:
    seen: list[Any] = []  # not the module's: that forgets the second run

    class Sharp(lt.SAMMixin, Wide):
        sam = lt.SAM(rho=0.05)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((batch[0].clone(), torch.tensor(batch[1].tolist())))
            return super().training_step(batch, batch_idx)

    watch = Watch(callback := CutMix())
    settings = {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "limit_val_batches": 0}
    fit(build(Sharp), train=feed(*big_images(7)), callbacks=[callback, watch], **settings)
    assert len(seen) == 2 * len(watch.batches) == 28
    for first, second, noted in zip(seen[::2], seen[1::2], watch.batches, strict=True):
        assert all(map(torch.equal, first, second))
        assert all(map(torch.equal, first, noted))


@pytest.mark.few(2)
@pytest.mark.parametrize(("on", "precision"), DEVICES)
@pytest.mark.parametrize(
    "callback", [lt.Mixup(1.0), lt.Mixup(1.0, per_sample=True), lt.CutMix()], ids=lambda c: c.state_key
)
def test_a_step_on_a_device_has_the_gradient_of_a_naive_loop(callback: Any, on: str, precision: str) -> None:
    module, watch, steps, plain = build(ImageNet), Watch(callback), Steps(), list(images(48))
    with device(on) as there:
        settings = {"accelerator": there.name, "precision": precision, "callbacks": [callback, watch, steps]}
        fit(module, train=images(48), val=images(48), **settings)
        drawn = zip(watch.batches, watch.drawn, strict=True)
        assert {x.device.type for (mixed, _), (_, index) in drawn for x in (mixed, index)} == {there.name}
    hand, losses = build(ImageNet), []
    for (x, y), (mixed, _), (lam, index) in zip(2 * plain, watch.batches, watch.drawn, strict=True):
        mixed, lam, index = mixed.cpu(), torch.as_tensor(lam).cpu(), index.cpu()
        if isinstance(callback, lt.Mixup):
            torch.testing.assert_close(mixed, naive_mixup(x, lam, index))
        losses.append(lambda mixed=mixed, y=y, lam=lam, index=index: naive_loss(hand(mixed), y, lam, index))
    steps.compare(hand, losses)


# ---- mistakes, with Mixup too

MANY = torch.zeros(4, 3, 8, 8)


@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix])
def test_a_wrong_argument_is_refused_at_once(kind: Any) -> None:
    cases = [
        (ValueError, {"alpha": -0.1}, r"alpha must be in \[0.0, 1000000.0\], got -0.1"),
        (ValueError, {"start": 0.5, "stop": 0.4}, "start must not be after stop, got start=0.5 and stop=0.4"),
        (ValueError, {"start": 5, "stop": 4}, "start must not be after stop, got start=5 and stop=4"),
        (ValueError, {"alpha": float("nan")}, "alpha must be .*, got nan"),
        (ValueError, {"alpha": float("inf")}, "alpha must be .*, got inf"),
        (TypeError, {"alpha": "0.2"}, "alpha must be a number .*, got '0.2'"),
        (ValueError, {"prob": 1.5}, r"prob must be in \[0.0, 1.0\], got 1.5"),
        (TypeError, {"prob": True}, "prob must be a number .*, got True"),
        (ValueError, {"start": -1}, "start must be .*, got -1"),
        (ValueError, {"stop": 1.5}, "stop must be .*, got 1.5"),
        (TypeError, {"stop": False}, "stop must be .*, got False"),
        (TypeError, {"inputs": 1.0}, "inputs must be a key, .*, got 1.0"),
        (TypeError, {"target": [None]}, r"target must be a key, .*, got \[None\]"),
    ]
    assert_refused(kind, cases)


@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix])
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (MANY.byte(), torch.zeros(4), "uint8 for '0'.* convert it in the data set or, on the device, in on_after_bat"),
        (MANY.long(), torch.zeros(4), "int64 for '0'.*HiddenMixup for token ids"),
        (MANY, torch.zeros(2), r"got inputs \(4, 3, 8, 8\) and 2 targets\. The batch has 0: float32 \(4, 3"),
        (MANY, torch.tensor(1.0), r"needs targets with one entry for each of the samples, .*, 1: float32 \(\)"),
        (torch.tensor(1.0), torch.zeros(4), r"needs an input and a target for each sample, got inputs \(\) and 4"),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused_with_what_they_have(kind: Any, x: Any, y: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} .*{message}"):
        run(build(ImageNet), kind(), feed((x, y)))


def test_images_in_integers_may_be_converted_where_the_refusal_says() -> None:
    class Converts(ImageNet):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0].float() / 255, batch[1]

    given = [((255 * x.sigmoid()).to(torch.uint8), y) for x, y in images()]
    watch = run(build(Converts), CutMix(), feed(*given))
    assert all(watch.drawn)


# ---- YAML, with Mixup too


class CLINet(ImageNet):
    def train_dataloader(self) -> Any:
        return images()

    val_dataloader = train_dataloader


@pytest.mark.few(1)
@pytest.mark.parametrize("prefix", ["", "lightning_tricks."])
def test_it_is_built_from_yaml_and_trains(prefix: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["cli"])
    callbacks = [
        {"class_path": f"{prefix}Mixup", "init_args": {"alpha": 1, "stop": 0.5, "inputs": 0, "target": "1"}},
        {"class_path": f"{prefix}CutMix", "init_args": {"start": 3, "inputs": ["0"], "target": [1], "prob": 0.5}},
    ]
    settings = {"seed_everything": 7, "trainer": {**quiet, "max_epochs": 1, "callbacks": callbacks}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    tool = LightningCLI(CLINet, args=["fit", f"--config={tmp_path / 'config.yaml'}"], save_config_callback=None)
    mixup, cutmix = (each for each in tool.trainer.callbacks if isinstance(each, lt.Mixup | lt.CutMix))
    assert (mixup.alpha, mixup.stop, mixup.inputs, mixup.target) == (1, 0.5, 0, "1")
    assert (cutmix.start, cutmix.inputs, cutmix.target, cutmix.prob) == (3, ["0"], [1], 0.5)
    assert tool.trainer.global_step == 6


class Images(Dataset[Any]):
    """Images whose every pixel tells its class; the masks, and a label of the image."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        mask = torch.full((8, 8), index % 3)
        one_hot = F.one_hot(mask, 3).permute(2, 0, 1).float()
        masks = {"mask": mask, "one-hot": one_hot, "multi-channel": torch.cat([one_hot, one_hot]), "both": mask}
        masks["channels-last"] = one_hot.permute(1, 2, 0)
        image = 20 * one_hot - 10
        sample = {"image": image, "mask": masks[self.form]}
        return {**sample, "label": index % 3} if self.form == "both" else sample


class Pixels(L.LightningModule):
    """A perfect labeller of pixels: its loss is 0 on every image that is what its mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, mask = self.scale * batch["image"], batch["mask"]
        if mask.ndim == 4:
            mask = mask.permute(0, 3, 1, 2) if mask.shape[1:3] == (8, 8) else mask
            logits = logits.repeat(1, mask.shape[1] // 3, 1, 1)
            loss = F.binary_cross_entropy_with_logits(logits, mask)
        else:
            loss = F.cross_entropy(logits, mask)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to validate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("form", ["mask", "one-hot", "channels-last", "multi-channel"])
def test_cutmix_pastes_spatial_targets(form: str) -> None:
    module, cut = build(Pixels), lt.CutMix(target="mask")
    fit(module, train=DataLoader(Images(form), 8), callbacks=[cut], limit_val_batches=0)
    assert cut.drawn is not None
    assert 0 < cut.drawn.lam < 1
    assert max(module.losses) < 1e-3


def test_cutmix_mixes_labels_beside_masks_by_area() -> None:
    found: list[Tensor] = []

    class Labels(Pixels):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            means = self.scale * batch["image"].mean((2, 3))
            label = F.cross_entropy(means, batch["label"])
            # the share of each class in the pasted mask is its weight in the loss
            shares = F.one_hot(torch.as_tensor(batch["mask"]), 3).flatten(1, 2).float().mean(1)
            found.append(torch.stack([label.detach().as_subclass(Tensor), F.cross_entropy(means, shares).detach()]))
            return loss + label

    cut, module = lt.CutMix(target=["mask", "label"]), build(Labels)
    fit(module, train=DataLoader(Images("both"), 8), callbacks=[cut], limit_val_batches=0)
    assert max(module.losses) < 1e-3
    for mixed, expected in found:
        torch.testing.assert_close(mixed, expected)


def with_part(**extra: Any) -> DataLoader[Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        parts = {name: make(len(x)) for name, make in extra.items()}
        return {"image": x[:, :, None].expand(-1, -1, 8).clone(), "label": y, **parts}

    return DataLoader(loader().dataset, 8, collate_fn=collate)


class Detector(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"].mean(-1)), batch["label"])


@pytest.mark.parametrize(
    ("part", "target", "message"),
    [
        (lambda n: torch.zeros(n, 3, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 3, 4\)"),
        (lambda n: torch.zeros(n, 3, 4), None, r"batch\['boxes'\]"),
        (lambda n: torch.zeros(n, 8, 8, dtype=torch.long), None, r"batch\['boxes'\].*name it in target="),
        (lambda n: torch.zeros(n, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 4\)"),
        (lambda n: torch.zeros(n, 4, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 4, 4\)"),
    ],
    ids=["boxes as target", "boxes beside", "a mask that is not named", "a box a sample", "heat maps of another size"],
)
def test_cutmix_refuses_geometry_that_it_cannot_paste(part: Any, target: Any, message: str) -> None:
    module = build(Detector)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, train=with_part(boxes=part), limit_val_batches=0, callbacks=[lt.CutMix(target=target)])
    assert_equal(weights(module), before)


def pictures(image: tuple[int, ...], mask: tuple[int, ...] | None = None) -> DataLoader[Any]:
    return fed(lambda x, y, ids: {"image": torch.rand(8, *image), "y": y if mask is None else torch.rand(8, *mask)})


def flat(module: Any, batch: Any) -> Tensor:
    x = batch["image"].flatten(1)[:, :8]
    return module(x).mean() * 0 + F.mse_loss(module(x).mean(1), torch.rand(8)) + batch["y"].float().mean()


@pytest.mark.parametrize("image", [(16, 16, 3), (16, 12, 1), (9, 16, 12, 4)])
def test_cutmix_refuses_channels_behind_the_image(image: tuple[int, ...]) -> None:
    refused(stepping(flat), r"CutMix .*batch\['image'\].*movedim\(-1, 1\)", [lt.CutMix()], train=pictures(image))


@pytest.mark.parametrize("image", [(3, 16, 3), (3, 16, 16), (64, 4, 4), (64, 1, 1), (13, 16, 16), (1, 16, 16, 4)])
def test_cutmix_takes_channels_before_the_image(image: tuple[int, ...]) -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch["image"].flatten(1).mean(1, keepdim=True).expand(-1, 8)), batch["y"])

    fit(build(stepping(step)), train=pictures(image), callbacks=[lt.CutMix()], limit_val_batches=0, max_epochs=1)


@pytest.mark.parametrize("image", [(3, 8, 8), (8, 8, 8)])
def test_cutmix_refuses_a_mask_with_as_many_classes_as_rows_and_columns(image: tuple[int, ...]) -> None:
    said = r"which dimensions are height and width in batch\['y'\].*mask of labels without channels.*\(B, 1, D, H, W\)"
    refused(stepping(flat), said, [lt.CutMix()], train=pictures(image, (8, 8, 8)))


@pytest.mark.parametrize("trick", [lambda: lt.CutMix(), lambda: lt.ProgressiveResizing(0.5, stop=9, multiple_of=2)])
@pytest.mark.parametrize("mask", [(8, 8, 8), (1, 8, 8, 8), (2, 8, 8, 8)])
def test_the_mask_of_a_cubic_volume_follows_it(mask: tuple[int, ...], trick: Callable[[], Any]) -> None:
    """Every pixel of the mask tells the volume that it came from."""

    def step(module: Any, batch: Any) -> Tensor:
        volume, mask = batch["image"], batch["y"]
        assert volume.shape[-3:] == mask.shape[-3:]
        assert torch.equal((mask if mask.ndim == 5 else mask[:, None]).mean(1), volume.mean(1))
        found.append(mask.unique().numel())
        return module(volume.mean((1, 2, 3))[:, :1].expand(-1, 8)).sum()

    found: list[int] = []
    pixels = torch.arange(8.0).view(-1, 1, 1, 1, 1)
    batch = {"image": pixels.expand(8, 2, 8, 8, 8).clone(), "y": pixels.view(-1, *[1] * len(mask)).expand(8, *mask)}
    train = DataLoader([batch], batch_size=None, collate_fn=lambda each: each)  # type: ignore[arg-type]
    fit(build(stepping(step)), train=train, callbacks=[trick()], limit_val_batches=0, max_epochs=1)
    assert found == [8]
