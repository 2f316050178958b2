"""Convolutions run in channels_last: close results, and weights, checkpoints and modules as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.callbacks.channels_last import to_channels_last
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.test_again import Stop
from tests.nets import Net, assert_close, build, fit, trained, trainer, weights
from tests.ranks import run_ranks

LAST = torch.channels_last


class Conv(Net):
    """Notes the formats of the images between its layers."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, stride=2)),
            *(nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)),
        )
        self.formats: list[tuple[str, bool]] = []
        for layer in self.layers[1:5]:
            layer.register_forward_hook(self.note)

    def note(self, layer: Any, inputs: Any, output: Tensor) -> None:
        tensors = (*inputs, output, *(weight for weight in layer.parameters() if weight.ndim == 4))
        both = [each.is_contiguous(memory_format=torch.channels_last) for each in tensors]
        self.formats.append((str(self.trainer.state.stage.value), all(both)))


def images(size: int = 24) -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=8)


def fitted(*callbacks: Callback, **settings: Any) -> Conv:
    module = build(Conv)
    fit(module, train=images(), val=images(), callbacks=list(callbacks), **settings)
    return module


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_a_fit_gives_close_weights_in_their_own_format(settings: dict[str, Any]) -> None:
    plain, module = fitted(**settings), fitted(lt.ChannelsLast(), **settings)
    assert not any(last for _, last in plain.formats)
    assert {stage for stage, _ in module.formats} == {"train", "validate"}
    assert all(last for _, last in module.formats)
    assert_close(weights(module), weights(plain), 1e-6 if not settings else 2e-2)
    assert all(weight.is_contiguous() for weight in module.state_dict().values())
    assert not any(layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_contiguous_and_resumes(weights_only: bool, tmp_path: Any) -> None:
    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert not pl_module.layers[0].weight.is_contiguous()
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt", weights_only)

    whole = fitted(lt.ChannelsLast(), Save())
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert all(each.is_contiguous() for each in state.values())
    if not weights_only:
        again = fitted(lt.ChannelsLast(), ckpt_path=tmp_path / "half.ckpt")
        assert_close(weights(again), weights(whole))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_alone_uses_it(stage: str) -> None:
    module, quiet = build(Conv), {} if stage == "predict" else {"verbose": False}
    found = getattr(trainer(callbacks=[lt.ChannelsLast()]), stage)(module, images(), **quiet)
    assert {last for _, last in module.formats} == {True}
    torch.testing.assert_close(found, getattr(trainer(), stage)(build(Conv), images(), **quiet))
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_an_exception_leaves_the_module_as_it_was() -> None:
    module = build(Conv)
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, train=images(), val=images(), callbacks=[lt.ChannelsLast(), Stop(1)])
    assert not any(layer._forward_pre_hooks for layer in module.modules())


def test_resnet_gives_the_same_and_its_images_stay_so() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model("resnet18", num_classes=5), torch.randn(4, 3, 64, 64)
    expected = model(x)
    last: list[bool] = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.ReLU):
            layer.register_forward_hook(lambda _, __, out: last.append(out.is_contiguous(memory_format=LAST)))
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(to_channels_last)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert all(last)


def test_a_compiled_network_gives_the_same() -> None:
    class Compiled(Conv):
        def setup(self, stage: str) -> None:
            self.run = torch.compile(self.layers, backend="aot_eager")

        def note(self, layer: Any, inputs: Any, output: Tensor) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    found, plain = trained(Compiled, lt.ChannelsLast(), train=images(), val=images()), weights(fitted())
    assert_close({name: found[name] for name in plain}, plain)  # without those of the compiled module


def two_ranks() -> dict[str, Any]:
    settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
    plain = fitted(strategy=DDPStrategy(gradient_as_bucket_view=True), **settings)
    module = fitted(lt.ChannelsLast(), strategy=DDPStrategy(gradient_as_bucket_view=True), **settings)
    assert all(last for _, last in module.formats)
    assert_close(weights(module), weights(plain))
    return weights(module)


def test_two_ranks_give_the_same() -> None:
    first, second = run_ranks(two_ranks)
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name)


def on_shards(engine: str) -> None:
    ended = []
    for callbacks in ([], [lt.ChannelsLast()]):
        module = build(Sharded)
        arguments = lt.preset("fsdp2_bf16") if engine == "FSDP2" else {"strategy": cpu_deepspeed(3)}
        arguments |= {"devices": 2, "use_distributed_sampler": False}
        fit(module, train=images(), val=images(), callbacks=callbacks, **arguments)
        ended.append(module)
    assert [{last for _, last in module.formats} for module in ended] == [{False}, {True}]
    torch.testing.assert_close(ended[1].losses, ended[0].losses, rtol=1e-2, atol=1e-2)


class Sharded(Conv):
    """Notes the formats of images, whatever the shards of weights are, and the losses."""

    losses: list[Tensor]

    def note(self, layer: Any, inputs: Any, output: Tensor) -> None:
        last = all(each.is_contiguous(memory_format=LAST) for each in (*inputs, output))
        self.formats.append((str(self.trainer.state.stage.value), last))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses = [*getattr(self, "losses", []), outputs["loss"].detach().clone()]


@pytest.mark.parametrize("engine", ["FSDP2", pytest.param("ZeRO-3", marks=pytest.mark.slow)])
def test_images_are_converted_where_weights_are_sharded(engine: str) -> None:
    run_ranks(on_shards, engine)


def test_it_works_beside_other_tricks() -> None:
    class Sharp(lt.SAMMixin, Conv):
        sam = lt.SAM(rho=0.05)

    ended = []
    for more in ([], [lt.ChannelsLast()]):
        module = build(Sharp)
        callbacks = [lt.EMA(0.9), lt.CutMix(), lt.HardExampleFilter(), lt.ActivationCheckpointing("layers"), *more]
        fit(module, train=images(), val=images(), callbacks=callbacks)
        ended.append(weights(module))
    assert_close(*ended, 1e-5)


def test_a_module_without_convolutions_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="Net has none"):
        fit(build(Net), callbacks=[lt.ChannelsLast()])
    with pytest.raises(MisconfigurationException, match="Net has none"):
        trainer(callbacks=[lt.ChannelsLast()]).validate(build(Net), images(), verbose=False)


def test_what_is_no_image_is_left_alone() -> None:
    x, y = torch.zeros(2, 3), "other"
    assert to_channels_last(nn.Identity(), (x, y)) == (x, y)
    image = torch.zeros(2, 3, 4, 4).contiguous(memory_format=LAST)
    assert to_channels_last(nn.Identity(), (image,))[0] is image
    assert F.conv2d(image, torch.zeros(1, 3, 1, 1)).shape == (2, 1, 4, 4)
