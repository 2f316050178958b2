"""CutMix pixel by pixel: the box, its exact share, and which label a target shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks import CutMix, cutmix
from tests.callbacks.test_mixing import ImageNet, Watch, images, train_by_hand
from tests.callbacks.test_mixup import feed, run
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, weights


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
    return [
        (torch.randn(size, 1, 8, 8, generator=numbers), torch.randint(2, (size,), generator=numbers))
        for _ in range(batches)
    ]


def test_training_is_that_of_a_naive_loop_and_the_target_shows_the_greater_part() -> None:
    batches, module = big_images(30), build(Wide)
    watch = run(module, CutMix(), feed(*batches))
    lams = [lam for lam, _ in watch.drawn]
    assert min(lams) < 0.5 < max(lams)
    mixed = iter([x for x, _ in watch.batches])
    hand = train_by_hand(build(Wide), watch.drawn, batches, lambda x, lam, index: next(mixed))
    assert_close(weights(module), hand)
    for (x, y), (cut, shown), seen, (lam, index) in zip(
        batches, watch.batches, module.labels, watch.drawn, strict=True
    ):
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
    mixed = iter(cut[::2])
    hand = train_by_hand(
        build(Wide),
        watch.drawn,
        plain,
        lambda x, lam, index: next(mixed),
        loss=F.binary_cross_entropy_with_logits,
    )
    assert_close(weights(module), hand)


def test_images_of_two_sizes_are_refused() -> None:
    batch = {"a": torch.zeros(4, 3, 8, 8), "b": torch.zeros(4, 3, 4, 4), "y": torch.zeros(4).long()}
    with pytest.raises(MisconfigurationException, match=r"of one size.*a: float32 .*b: float32"):
        run(build(ImageNet), CutMix(inputs=["a", "b"]), feed(batch))


@pytest.mark.parametrize("settings", [{"alpha": 0}, {"prob": 0.0}, {"stop": 0}], ids=str)
def test_never_mixing_is_bit_equal_to_no_callback(settings: dict[str, Any]) -> None:
    with_it, without = build(ImageNet), build(ImageNet)
    fit(with_it, callbacks=[CutMix(**settings)], train=images(), val=images())
    fit(without, train=images(), val=images())
    assert_equal(weights(with_it), weights(without))


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


# ---- one of several


def shares(*callbacks: Any) -> list[float]:
    """The share of 600 batches that each of the callbacks mixed, and that none did."""
    watch, counts = Watch(*callbacks), [0] * (len(callbacks) + 1)

    class Count(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts[next((n for n, each in enumerate(callbacks) if each.drawn is not None), len(callbacks))] += 1

    settings = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [*callbacks, watch, Count()]}
    fit(build(ImageNet), train=images(1200, 2), **settings)
    return [count / 600 for count in counts]


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        ((0.3, 0.2), (0.3, 0.2, 0.5)),
        ((1.0, 1.0), (0.5, 0.5, 0.0)),
        ((1.0, 0.5), (2 / 3, 1 / 3, 0)),
        ((0, 1), (0, 1, 0)),
    ],
    ids=str,
)
def test_one_of_two_is_chosen_by_its_prob(probs: tuple[float, float], expected: tuple[float, ...]) -> None:
    found = shares(lt.Mixup(prob=probs[0]), lt.CutMix(prob=probs[1]))
    assert all(abs(a - b) < 0.06 for a, b in zip(found, expected, strict=True)), found
    assert [a == 0 for a in found] == [b == 0 for b in expected]


def test_three_alternatives_share_the_batches() -> None:
    found = shares(lt.CutMix(), lt.HiddenMixup("layers.2"), lt.Mixup())
    assert all(abs(share - 1 / 3) < 0.06 for share in found[:3])
    assert found[3] == 0


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="state_key leaves out prob, inputs, target and per_sample")
@pytest.mark.parametrize("settings", [{"inputs": 0, "target": 1}, {"prob": 0.5}, {"per_sample": True}], ids=str)
def test_two_of_a_kind_with_other_settings_are_alternatives_too(settings: dict[str, Any]) -> None:
    fit(build(PlainNet), callbacks=[lt.Mixup(), lt.Mixup(**settings)])
