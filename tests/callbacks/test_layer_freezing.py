"""LayerFreezing equals a loop in which layers stop by hand: alone, in two processes, on shards and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.callbacks.layer_freezing import freezing_order, frozen_layers
from tests.callbacks.test_gradual_unfreeze import TWELVE, Deep, DeepNorm, Manual, ShardedDeep, Spikes, resumed_on_ranks
from tests.nets import Net, SaveAt, assert_close, assert_equal, build, data, fit, loader, trained, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

NUMBERS = r"^layers\.(\d+)"
SETTINGS: dict[str, Any] = {"start": 2, "stop": 10, "parameters": NUMBERS}
AT = (6, 10)  # of 12 steps: the first of two layers stops half-way


def frozen_by_hand(module: Deep, batches: Any, at: tuple[int, ...] = AT) -> None:
    """A loop over AdamW in which a layer is taken out of the optimizer when it stops."""
    layers = [module.layers[0], module.layers[2], module.layers[4]]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=1.0, weight_decay=0.1) for layer in layers]
    schedule = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=module.lr)
    curve = lt.cosine(schedule, total_steps=12, warmup=2)["lr_scheduler"]["scheduler"].curve
    for step in range(12):
        x, y = batches[step % len(batches)]
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for number, optimizer in enumerate(optimizers):
            if number == 2 or step < at[number]:
                optimizer.param_groups[0]["lr"] = module.lr * curve(step)
                optimizer.step()


class Watch(Callback):
    """What has gradients, optimizer states and a graph in each step, and the weights after it."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[bool, bool]]] = []
        self.graph: list[bool] = []
        self.first: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = [pl_module.layers[n].weight for n in (0, 2, 4)]
        state = trainer.optimizers[0].state
        self.seen.append([(weight.grad is not None, weight in state) for weight in found])
        self.graph.append(pl_module.layers[0](batch[0]).requires_grad)
        self.first.append(found[0].detach().clone())


def test_training_equals_layers_that_stop_by_hand_and_nothing_of_them_is_left() -> None:
    reference, module, watch = build(Deep), build(Deep), Watch()
    frozen_by_hand(reference, list(loader(24)))
    fit(module, callbacks=[lt.LayerFreezing(**SETTINGS), watch], **TWELVE)
    assert_equal(weights(module), weights(reference))
    assert watch.seen == [[(step < 6,) * 2, (step < 10,) * 2, (True,) * 2] for step in range(12)]
    assert watch.graph == [step < 6 for step in range(12)]  # the backward pass ends above a layer that has stopped
    assert all(parameter.requires_grad for parameter in module.parameters())  # again


@pytest.mark.parametrize("off", [{"fraction": 0.0}, {"start": 1.0}, {"start": 12}])
def test_where_no_layer_stops_nothing_changes(off: dict[str, Any]) -> None:
    frozen = trained(DeepNorm, lt.LayerFreezing(parameters=NUMBERS, **off), **TWELVE)
    assert_equal(frozen, trained(DeepNorm, **TWELVE))


def test_the_schedule_is_that_of_composer() -> None:
    for layers in (1, 3, 10, 100):
        for step in range(0, 40):
            expected = int(layers * 0.5 * min(max((step - 8) / (24 - 8), 0), 1))
            assert frozen_layers(step, layers, fraction=0.5, start=8, stop=24) == expected
    assert frozen_layers(7, 100, fraction=0.29, start=7, stop=7) == 29
    assert frozen_layers(6, 100, fraction=0.29, start=7, stop=7) == 0


def test_layers_by_pattern_stop_in_the_order_given() -> None:
    watch, patterns = Watch(), [r"^layers\.[02]\.weight", r"^layers\.0", r"^layers\.2"]
    trained(Deep, lt.LayerFreezing(0.4, start=3, parameters=patterns), watch, train=loader(24))
    assert freezing_order(build(Deep), patterns)[1] == ["layers.0.bias"]
    trained(Deep, lt.LayerFreezing(0.4, start=1, stop=1, parameters=patterns), watch, train=loader(24))
    assert [has for has, _ in watch.seen[-1]] == [False, False, True]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_layer_stops_between_accumulation_windows(accumulate: int) -> None:
    watch = Watch()
    callback = lt.LayerFreezing(0.5, start=2, stop=2, parameters=NUMBERS)
    fit(build(Deep), train=loader(48), callbacks=[callback, watch], accumulate_grad_batches=accumulate, max_epochs=2)
    assert [seen[0][0] for seen in watch.seen] == [batch < 2 * accumulate for batch in range(12)]


def test_batchnorm_of_what_has_stopped_is_in_eval_mode() -> None:
    class Modes(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append((pl_module.layers[1].training, pl_module.layers[1].running_mean.clone()))

    seen: list[tuple[bool, Tensor]] = []
    module, patterns = build(DeepNorm), [r"^layers\.[01]\.", r"^layers\.2\."]
    for epochs in (2, 4):
        freezing = lt.LayerFreezing(0.5, start=4, stop=4, parameters=patterns)
        fit(module, train=loader(24), callbacks=[freezing, Modes()], max_epochs=epochs)
    modes = [mode for mode, _ in seen[-12:]]
    assert modes == [step < 4 for step in range(12)]
    assert torch.equal(seen[-1][1], seen[-8][1])
    assert not torch.equal(seen[-12][1], seen[-9][1])
    assert all(each.training for each in module.modules())


def test_an_average_approaches_the_last_weights_and_sam_does_not_move_them() -> None:
    class Sharp(lt.SAMMixin, Deep):  # type: ignore[misc]
        sam = lt.SAM(rho=0.1)

    ema, watch, module = lt.EMA(0.5, at_end="raw"), Watch(), build(Sharp)
    fit(module, callbacks=[lt.LayerFreezing(**SETTINGS), ema, watch], **TWELVE)
    assert all(torch.equal(each, watch.first[5]) for each in watch.first[5:])
    assert not torch.equal(watch.first[4], watch.first[5])
    name, raw = "layers.0.weight", watch.first[-1]
    gaps = [torch.dist(a, raw) for a in (ema.averaged_state_dict()[name], watch.first[0])]
    assert 0 < gaps[0] < 2**-5 * gaps[1]  # six updates by a half since the weights stopped


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [Deep, DeepNorm])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_resume_is_exact_whatever_has_stopped(kind: type[Deep], epoch: int, tmp_path: Path) -> None:
    settings = {"start": 2, "stop": 6, "parameters": NUMBERS}  # the first layer stops at step 4, the second at 6
    path, watch = tmp_path / "a.ckpt", Watch()
    both = lambda: [lt.LayerFreezing(**settings), lt.EMA(0.5, at_end="averaged")]  # noqa: E731
    whole = trained(kind, *both(), SaveAt(path, epoch=epoch), **TWELVE)
    assert_equal(trained(kind, *both(), watch, **TWELVE, ckpt_path=path), whole)
    assert [seen[0] for seen in watch.seen] == [(step < 4,) * 2 for step in range(3 * epoch + 3, 12)]


@pytest.mark.parametrize("save", ["adapter", "all"])
def test_adapters_that_have_stopped_are_saved_and_resumed_as_others(save: Any, tmp_path: Path) -> None:
    def end(*others: Callback, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        adapters = lt.LoRA(r"layers\.[02]", r=2, train=r"layers\.4", save=save)
        freezing = lt.LayerFreezing(start=2, stop=6, parameters=NUMBERS)  # the first layer stops at step 4
        return trained(Deep, adapters, freezing, *others, **TWELVE, ckpt_path=ckpt_path)

    whole = end(SaveAt(tmp_path / "1.ckpt", epoch=1))
    assert_equal(end(ckpt_path=tmp_path / "1.ckpt"), whole)


def test_a_longer_resume_keeps_what_has_stopped_and_other_layers_are_refused(tmp_path: Path) -> None:
    settings, path, watch = {"start": 0, "stop": 0.5, "parameters": NUMBERS}, tmp_path / "1.ckpt", Watch()
    trained(Deep, lt.LayerFreezing(**settings), SaveAt(path, epoch=1), train=loader(24), max_epochs=3)
    longer = {**settings, "start": 0.9, "stop": 1.0}
    trained(Deep, lt.LayerFreezing(**longer), watch, **TWELVE, ckpt_path=path)
    assert all([has for has, _ in seen] == [False, False, True] for seen in watch.seen)
    with pytest.raises(MisconfigurationException, match="must resume with the groups of the checkpoint"):
        other = lt.LayerFreezing(parameters=[r"^layers\.0"])
        fit(build(Deep), callbacks=[other], max_epochs=4, ckpt_path=path)


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_stopped_since_a_snapshot_trains_again_when_training_goes_back(order: int) -> None:
    def run(at: int, train: Any, *callbacks: Any) -> Any:
        module = build(Spikes)
        module.at = at
        both = [lt.LayerFreezing(0.5, start=3, stop=3, parameters=NUMBERS), *callbacks]
        fit(module, train=train, callbacks=both[::order], max_epochs=1)
        return module

    everything = data(80)
    left_out = [sample for sample in range(80) if not 16 <= sample < 32]  # the batches from the snapshot on
    spoiled = run(3, DataLoader(everything, 8), lt.RewindOnSpike(every_n_steps=2))
    assert_equal(weights(spoiled), weights(run(-1, DataLoader(Subset(everything, left_out), 8))))


@pytest.mark.parametrize("order", [1, -1])
def test_a_step_back_to_where_a_layer_stopped_gives_it_no_state_again(order: int) -> None:
    module, watch, rewind = build(Spikes), Watch(), lt.RewindOnSpike(every_n_steps=3)
    module.at = 4
    callbacks = [lt.LayerFreezing(0.5, start=3, stop=3, parameters=NUMBERS), rewind][::order]
    fit(module, train=DataLoader(data(80), 8), callbacks=[*callbacks, watch], max_epochs=1)
    assert rewind.rewinds == 1
    assert [states[0][1] for states in watch.seen] == [step < 3 for step in range(10)]


class ManualZeros(Manual):
    """Keeps zeros as gradients, by which an optimizer would still decay weights."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def test_manual_optimization_stops_layers_as_well() -> None:
    module, watch = build(ManualZeros), Weights()
    fit(module, callbacks=[lt.LayerFreezing(start=3, stop=3, parameters=[r"^layers\.0\."]), watch])
    moves = [not torch.equal(before, after) for before, after in zip(watch.first, watch.first[1:], strict=False)]
    assert moves == [step < 2 for step in range(len(moves))]


class Weights(Callback):
    def __init__(self) -> None:
        self.first: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.first.append(pl_module.layers[0].weight.detach().clone())


# -- two processes -----------------------------------------------------------------------------------------------------


STRATEGIES: dict[str, tuple[type[Deep], Callable[[], Any]]] = {
    "ddp": (Deep, lambda: "ddp"),
    "static": (Deep, lambda: DDPStrategy(static_graph=True, gradient_as_bucket_view=True)),
    "fsdp2": (ShardedDeep, lambda: ModelParallelStrategy(2, 1)),
    "fsdp2 in a file": (ShardedDeep, lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
}


def on_two_ranks(folder: Path, names: list[str]) -> dict[str, Any]:
    freezing = partial(lt.LayerFreezing, start=2, stop=6, parameters=NUMBERS)  # stops layers at the steps 4 and 6
    return {name: resumed_on_ranks(freezing, *STRATEGIES[name], folder / name) for name in names}


@pytest.mark.parametrize(
    "names", [["ddp"], pytest.param(["static", "fsdp2", "fsdp2 in a file"], marks=pytest.mark.slow)], ids=str
)
def test_two_ranks_equal_one_process_and_each_other_without_unused_parameters(names: list[str], tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, tmp_path, names)
    freezing = lt.LayerFreezing(start=2, stop=6, parameters=NUMBERS)
    alone = trained(Deep, freezing, train=loader(48, batch_size=16), max_epochs=4)
    for name in names:
        assert_equal(first[name], second[name])
        assert_close(first[name], alone, 1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_mistakes_raise() -> None:
    cases = [
        (ValueError, {"fraction": 1.5}, r"fraction must be in \[0.0, 1.0\], got 1.5"),
        (ValueError, {"start": 1.5}, "start must be an int >= 0"),
        (ValueError, {"start": 0.5, "stop": 0.2}, "stop must not be before start, got start=0.5 and stop=0.2"),
        (ValueError, {"parameters": ["("]}, "parameters: '\\(' is not a regular expression"),
        (TypeError, {"parameters": 3}, "parameters must be a string"),
    ]
    assert_refused(lt.LayerFreezing, cases)


class Tied(Net):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
        self.layers[2].weight = self.layers[0].weight


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Deep, {"parameters": [r"^layers\.(\d+)"]}, "each pattern is one group, and .* Give this pattern alone"),
        (Deep, {}, "must be or hold one timm or Hugging Face model .*else pass parameters, a regex"),
        (Deep, {"parameters": [""]}, "needs parameters that train from the start to the end"),
        (Deep, {"parameters": NUMBERS, "start": 0.5, "stop": 2}, "got optimizer steps 6 and 2: give both in one unit"),
        (Tied, {"parameters": NUMBERS}, "layers.0.weight is layers.2.weight as well, which would stop with it"),
        (Manual, {"parameters": NUMBERS}, r"LayerFreezing\(start=0.5\) is a fraction of a training whose"),
    ],
)
def test_what_cannot_be_right_is_refused(kind: type[Any], arguments: dict[str, Any], message: str) -> None:
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[lt.LayerFreezing(**arguments)], **TWELVE)
    assert_equal(weights(module), before)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_the_layers_of_a_vision_transformer_stop_from_its_embedding_on() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=2)
    order = freezing_order(model, None)
    assert "patch_embed.proj.weight" in order[0]
    assert all(name.startswith("blocks.0.") for name in order[1])
    assert not any("head" in name for names in order for name in names)
