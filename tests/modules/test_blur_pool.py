"""add_blur_pool: a network blurs before it strides, keeps its names, and is never changed too late."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.modules.blur_pool import blur_pool
from tests.nets import assert_equal, fit, weights


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, (2, 1), 1), nn.ReLU()),
        *(nn.Conv2d(16, 4, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def images(count: int = 4, height: int = 33, width: int = 38) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def blurred_by_hand(x: Tensor) -> Tensor:
    """Each pixel by the formula, in a plain loop over the nine places."""
    height, width = x.shape[-2:]

    def at(place: int, side: int) -> int:
        return 0 if side == 1 else abs(place) if place < side else 2 * side - 2 - place

    rows = [[at(i + k, height) for i in range(height)] for k in (-1, 0, 1)]
    columns = [[at(i + k, width) for i in range(width)] for k in (-1, 0, 1)]
    taps = (0.25, 0.5, 0.25)
    places = [(a * b, r, c) for a, r in zip(taps, rows, strict=True) for b, c in zip(taps, columns, strict=True)]
    return torch.stack([weight * x[..., r, :][..., c] for weight, r, c in places]).sum(0)


@pytest.mark.parametrize("stride", [1, 2, (2, 1), 3])
def test_the_blur_is_the_formula_and_timms(stride: Any) -> None:
    x = images()
    step = stride if isinstance(stride, tuple) else (stride, stride)
    expected = blurred_by_hand(x)[..., :: step[0], :: step[1]]
    torch.testing.assert_close(blur_pool(x, stride), expected, rtol=1e-5, atol=1e-6)
    if stride in (1, 2):
        timm = pytest.importorskip("timm")
        assert torch.equal(blur_pool(x, stride), timm.layers.BlurPool2d(3, stride=stride)(x))


@pytest.mark.parametrize("stride", [1, 2, (2, 1), 3])
@pytest.mark.parametrize("sides", [(1, 1), (1, 5), (4, 1), (2, 2)])
def test_one_pixel_on_a_side_is_its_own_neighbour(sides: tuple[int, int], stride: Any) -> None:
    x, step = images(4, *sides), stride if isinstance(stride, tuple) else (stride, stride)
    expected = blurred_by_hand(x)[..., :: step[0], :: step[1]]
    torch.testing.assert_close(blur_pool(x, stride), expected)
    torch.testing.assert_close(blur_pool(x[0], stride), expected[0])  # an image without a batch


@pytest.mark.parametrize("sides", [(1, 1), (2, 2), (1, 9), (3, 2)])
def test_small_maps_have_the_shapes_of_the_plain_layers(sides: tuple[int, int]) -> None:
    layers = [nn.MaxPool2d(2, 2, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 1, (2, 1))]
    if min(sides) > 1:
        layers.append(nn.MaxPool2d(2, 2))
    for layer in layers:
        for x in (images(4, *sides), images(4, *sides)[0]):
            plain = layer(x).shape
            lt.add_blur_pool(blurring := nn.Sequential(copy.deepcopy(layer)), modules="0")
            assert blurring(x).shape == plain
            assert blurring(x).isfinite().all()


def test_every_strided_layer_but_the_first_blurs() -> None:
    model, plain, x = net(), net(), images()
    shapes = [plain[:n](x).shape for n in range(len(plain) + 1)]
    assert lt.add_blur_pool(model) == ["2", "3", "5"]
    assert [model[:n](x).shape for n in range(len(model) + 1)] == shapes
    hidden = F.max_pool2d(plain[:2](x), 3, 1, 1)
    hidden = plain[3](blurred_by_hand(blurred_by_hand(hidden)[..., ::2, ::2]))
    expected = plain[6:](plain[5](blurred_by_hand(plain[4](hidden))))
    torch.testing.assert_close(model(x), expected)
    assert not torch.equal(model(x), plain(x))


def test_named_layers_blur_whatever_they_see() -> None:
    model = net()
    assert lt.add_blur_pool(model, modules=["^0$", "MaxPool2d"]) == ["0", "2"]
    assert torch.allclose(model[0](images()), net()[0](blurred_by_hand(images())), atol=1e-6)


@torch.no_grad()
def test_outputs_change_less_when_an_image_shifts() -> None:
    """What the trick is for: the mean change of the features by a shift of one pixel."""
    changes = []
    for blurs in (False, True):
        model = net()[:5]
        if blurs:
            lt.add_blur_pool(model, modules=["Conv2d", "MaxPool2d"])
        x = images(16, 64, 64)
        y, shifted = model(x), model(x.roll(1, -1))
        changes.append(float((y - shifted)[..., 2:-2, 2:-2].norm() / y[..., 2:-2, 2:-2].norm()))
    assert changes[1] < 0.75 * changes[0]


def test_checkpoints_load_in_both_directions_and_copies_keep_the_blur() -> None:
    model, plain, x = net(), net(), images()
    lt.add_blur_pool(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        model[3].weight.mul_(2)
    plain.load_state_dict(model.state_dict())
    fresh = net()
    lt.add_blur_pool(fresh)
    fresh.load_state_dict(plain.state_dict())
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


@pytest.mark.slow
def test_compiled_and_exported_networks_blur() -> None:
    model, x = net(), images()
    lt.add_blur_pool(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


class Images(L.LightningModule):
    """Blurs by its constructor, or in the hook named."""

    def __init__(self, when: str = "__init__", whole: bool = False, change: str = "blur") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.other = net(), nn.Linear(2, 2)
        self.given: list[Any] = []
        self._now("__init__")

    def _now(self, when: str) -> None:
        if when == self.hparams.when:
            model = self if self.hparams.whole else self.net
            if self.hparams.change == "blur":
                lt.add_blur_pool(model)
            elif self.hparams.change == "excite":
                lt.add_squeeze_excite(model, modules="Conv2d")
            else:
                lt.init_weights(model, "kaiming")
            self.hparams.when = "done"

    def setup(self, stage: str) -> None:
        self._now("setup")

    def configure_model(self) -> None:
        self._now("configure_model")

    def on_fit_start(self) -> None:
        self._now("on_fit_start")

    def on_train_start(self) -> None:
        self._now("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._now("training_step")
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        self._now("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> Any:
    return DataLoader(TensorDataset(images(8), torch.arange(8) % 2), batch_size=4)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("change", ["blur", "excite", "init"])
@pytest.mark.parametrize("when", ["on_fit_start", "on_train_start", "training_step"])
def test_a_change_behind_the_optimizer_is_refused_also_of_a_bare_network(when: str, change: str, whole: bool) -> None:
    if change == "excite":
        pytest.importorskip("timm")
    module = Images(when, whole, change)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=f"before its optimizer is made.*got one in training .{when}"):
        fit(module, train=batches(), max_epochs=1)
    assert_equal(weights(module), before)


@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["__init__", "setup", "configure_model", "configure_optimizers"])
def test_a_change_before_the_optimizer_trains_the_same_whenever_it_comes(when: str, tmp_path: Path) -> None:
    module, reference = Images(when), Images()
    trainer = fit(module, train=batches(), max_epochs=1)
    fit(reference, train=batches(), max_epochs=1)
    assert_equal(weights(module), weights(reference))
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    loaded = Images.load_from_checkpoint(tmp_path / "net.ckpt", when="__init__")
    assert torch.equal(loaded.net(images()), module.net(images()))


def test_a_change_between_two_fits_is_right_and_so_is_one_of_a_network_that_nobody_trains() -> None:
    module = Images("never")
    trainer = fit(module, train=batches(), max_epochs=1)
    module.hparams.when = "setup"  # the Trainer still has the optimizer of the first fit
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(), batches())
    assert module.hparams.when == "done"

    class Teacher(Images):
        def on_fit_start(self) -> None:
            self.given.append(net())  # not a submodule
            assert lt.add_blur_pool(self.given[0])

    fit(Teacher("never"), train=batches(), max_epochs=1)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Linear(2, 2), {}, "needs an nn.Conv2d or nn.MaxPool2d with a stride above 1, found none in Linear"),
        (net(), {"modules": "ReLU"}, "found none in Sequential with modules='ReLU'"),
        (net(), {"modules": "head"}, "'head' is neither"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), {}, "without ceil_mode and return_indices, got 0: MaxPool2d"),
    ],
)
def test_mistakes_raise(model: nn.Module, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lt.add_blur_pool(model, **arguments)


def test_a_second_call_is_refused_and_changes_nothing() -> None:
    model = net()
    lt.add_blur_pool(model, modules="^5$")
    before = model(images())
    for modules in (None, "^5$"):
        with pytest.raises(ValueError, match="must be called once, 5 blurs already"):
            lt.add_blur_pool(model, modules=modules)
    assert torch.equal(model(images()), before)
