"""inspect_training and InspectTraining: the statistics of a plain loop, which changes nothing and leaves no hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightning_tricks as lt
from lightning_tricks.advisor.inspect_training import InspectTraining, TrainingInspection
from lightning_tricks.advisor.layer_statistics import LayerStatistics
from tests.nets import Net, PlainNet, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks

pytest.importorskip("matplotlib")


class Dying(Net):
    """A ReLU layer of which three quarters of the units never fire, by a functional ReLU."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2))
        with torch.no_grad():
            self.layers[2].bias[2:] = -100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[3](F.relu(self.layers[2](self.layers[:2](x))))


def by_hand(module: Any, steps: int, accumulate: int = 1) -> dict[str, tuple[float, float, float, float]]:
    """The statistics by a plain loop over SGD with momentum."""
    optimizer, batches = module.configure_optimizers(), list(loader(48))
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    seen: dict[str, list[Any]] = {name: [] for name in layers}
    outputs: dict[str, list[float]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _m, _i, y, n=name: outputs[n].append(float(y.detach().square().mean())))
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(accumulate):
            x, y = batches[(step * accumulate + number) % len(batches)]
            (F.cross_entropy(module(x), y) / accumulate).backward()
        before = {name: [p.detach().clone() for p in layer.parameters()] for name, layer in layers.items()}
        gradients = {name: [p.grad.clone() for p in layer.parameters()] for name, layer in layers.items()}
        optimizer.step()
        for name, layer in layers.items():
            flat = [torch.cat([each.flatten() for each in parts]) for parts in (gradients[name], before[name])]
            after = torch.cat([p.detach().flatten() for p in layer.parameters()])
            ratio = (after - flat[1]).norm() / max(after.norm(), flat[1].norm())
            seen[name].append((flat[0].norm(), ratio, (gradients[name][0] == 0).all(1)))
    found = {}
    for name, steps_of in seen.items():
        dead = torch.stack([zero for _, _, zero in steps_of]).all(0).float().mean()
        norms, ratios = (median(float(step[k]) for step in steps_of) for k in (0, 1))
        found[name] = norms, ratios, float(dead), (sum(outputs[name]) / len(outputs[name])) ** 0.5
    return found


def told(inspection: TrainingInspection) -> dict[str, Any]:
    return {each.name: (each.gradient, each.update, each.dead, each.activation) for each in inspection.layers}


def assert_statistics(inspection: TrainingInspection, expected: dict[str, Any], rel: float = 1e-4) -> None:
    found = told(inspection)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=rel), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_statistics_are_those_of_a_plain_loop(accumulate: int) -> None:
    run = trainer(accumulate_grad_batches=accumulate)
    inspection = lt.inspect_training(run, build(Dying), loader(48), steps=7)
    assert inspection.steps == 7
    assert_statistics(inspection, by_hand(build(Dying), 7, accumulate))
    assert inspection.layers[1].dead == 0.75
    assert "layers.2: 75% of its units are dead, none of 7 steps gave them a gradient." in str(inspection)


def test_a_training_that_was_inspected_goes_on_as_if_it_was_not() -> None:
    module, plain = build(Net), build(Net)
    run = trainer()
    before = weights(module)
    lt.inspect_training(run, module, loader(48), steps=20)
    assert_equal(weights(module), before)
    assert run.global_step == 0
    for each, its in ((module, run), (plain, trainer())):
        torch.manual_seed(1)
        its.fit(each, loader(48), loader(16))
    assert_equal(weights(module), weights(plain))


class Hooks(Callback):
    """The number of hooks in each step, while its forward pass could call them."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        layers = [*pl_module.modules()]
        hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers]
        (optimizer,) = trainer.optimizers
        self.counts.append(sum(hooks) + len(optimizer._optimizer_step_post_hooks))


@pytest.mark.slow
def test_pictures_are_drawn_when_due_and_there_is_no_hook_otherwise(tmp_path: Path) -> None:
    module, plain, hooks, none = build(Net), build(Net), Hooks(), Hooks()
    callback = InspectTraining(tmp_path / "new", every_n_steps=5, steps=2)
    for each, callbacks in ((module, [callback, hooks]), (plain, [none])):
        torch.manual_seed(1)
        fit(each, train=loader(48), callbacks=callbacks, max_epochs=2)  # 12 steps
    assert_equal(weights(module), weights(plain))
    assert set(none.counts) == {0}
    assert [count > 0 for count in hooks.counts] == [step % 5 < 2 for step in range(12)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["step=0.png", "step=10.png", "step=5.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "new").iterdir())
    assert sum(len(layer._forward_hooks) for layer in module.modules()) == 0


@pytest.mark.slow
def test_a_picture_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "step=0.png").write_text("of the user")
    (tmp_path / "step=5.png").symlink_to("none")
    for version in ("-v1", "-v2"):
        fit(build(Net), train=loader(48), callbacks=[InspectTraining(tmp_path, every_n_steps=5, steps=2)], max_epochs=1)
        assert (tmp_path / f"step=0{version}.png").exists()
    assert (tmp_path / "step=0.png").read_text() == "of the user"
    assert (tmp_path / "step=5.png").is_symlink()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="folder must be a folder, got"):
        InspectTraining(tmp_path / "file")


class Told(Callback):
    """What InspectTraining reports, in place of pictures of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inspections: list[TrainingInspection] = []
        monkeypatch.setattr(InspectTraining, "_report", lambda _, run, inspection: self.inspections.append(inspection))


def test_a_resume_draws_at_the_same_steps_and_a_short_rest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Told(monkeypatch)
    run = fit(build(PlainNet), train=loader(48), callbacks=[InspectTraining(tmp_path, every_n_steps=10, steps=4)])
    assert [(each.first, each.steps) for each in seen.inspections] == [(0, 4), (10, 2)]
    run.save_checkpoint(tmp_path / "12.ckpt")
    again = InspectTraining(tmp_path, every_n_steps=10, steps=4)
    fit(build(PlainNet), train=loader(48), callbacks=[again], max_epochs=4, ckpt_path=tmp_path / "12.ckpt")
    assert [(each.first, each.steps) for each in seen.inspections[2:]] == [(20, 4)]


def test_gradients_are_unscaled_and_steps_that_a_scaler_leaves_out_do_not_count() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # the first steps overflow
    run = trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    inspection = lt.inspect_training(run, build(PlainNet), loader(48), steps=40)
    plain = lt.inspect_training(trainer(), build(PlainNet), loader(48), steps=15)
    for name, values in told(inspection).items():
        assert values[0] == pytest.approx(told(plain)[name][0], rel=0.5)
        assert values[2] == 0
    assert not inspection.findings


def test_validation_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Told(monkeypatch)
    for settings in ({"val_check_interval": 2}, {"limit_val_batches": 0}):
        callback = InspectTraining(tmp_path, every_n_steps=20, steps=5)
        fit(build(PlainNet), train=loader(48), callbacks=[callback], **settings)
    first, second = map(told, seen.inspections)
    assert first == second


class TwoOptimizers(PlainNet):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[n].parameters(), lr=lr) for n, lr in ((0, 0.1), (2, 0.0))]


def test_manual_optimization_with_two_optimizers() -> None:
    inspection = lt.inspect_training(trainer(), build(TwoOptimizers), loader(48), steps=8)
    first, second = inspection.layers
    assert first.update is not None
    assert first.update > 1e-3
    assert second.update == 0
    assert second.gradient is not None
    assert second.gradient > 0
    assert any("layers.2: an update is 0.0e+00 of the weights" in text for text in inspection.findings)


# -- two processes -----------------------------------------------------------------------------------------------------


class Sharded(Dying):
    def configure_model(self) -> None:
        for number in (0, 2, 3):
            fully_shard(self.layers[number], mesh=self.device_mesh["data_parallel"])


TWO: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}


def on_two_ranks() -> dict[str, Any]:
    return told(lt.inspect_training(trainer(strategy="ddp", **TWO), build(Dying), rank_loader(), steps=7))


def sharded(folder: Path) -> dict[str, Any]:
    drawn: list[TrainingInspection] = []
    report = InspectTraining._report
    InspectTraining._report = lambda *args: (drawn.append(args[2]), report(*args))  # type: ignore
    callback = InspectTraining(folder, every_n_steps=4, steps=4)
    fit(build(Sharded), strategy=ModelParallelStrategy(2, 1), train=rank_loader(), callbacks=[callback], **TWO)
    assert [(each.first, each.steps) for each in drawn] == [(0, 4), (4, 2)]  # the latter ends behind a validation
    assert all(layer.gradient is not None for each in drawn for layer in each.layers)
    run = trainer(strategy=ModelParallelStrategy(2, 1), **TWO)
    return told(lt.inspect_training(run, build(Sharded), rank_loader(), steps=7))


def assert_as_one_process(ranks: list[dict[str, Any]]) -> None:
    alone = told(lt.inspect_training(trainer(), build(Dying), loader(48, batch_size=16), steps=7))
    for found in ranks:
        for name, values in found.items():
            assert values[:3] == pytest.approx(alone[name][:3], rel=1e-3), name
            assert values[3] == pytest.approx(alone[name][3], rel=0.5)  # of this rank's half


def test_two_ranks_find_what_one_process_does() -> None:
    assert_as_one_process(run_ranks(on_two_ranks))


@pytest.mark.slow
def test_shards_are_gathered_and_one_rank_draws(tmp_path: Path) -> None:
    assert_as_one_process(run_ranks(sharded, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=0.png", "step=4.png"]


# -- findings and mistakes ---------------------------------------------------------------------------------------------


def test_what_stands_out() -> None:
    usual = [LayerStatistics(f"layers.{n}", 1.0, 1e-3, 0.0, 1.0) for n in range(3)]
    assert not TrainingInspection(0, 20, tuple(usual)).findings
    odd: dict[str, Callable[[], LayerStatistics]] = {
        "a: no gradient has come in 20 steps": lambda: LayerStatistics("a", None, None, None, 1.0),
        "a: its gradient is not finite": lambda: LayerStatistics("a", float("nan"), 1e-3, 0.0, 1.0),
        "a: its gradient (1.0e-06) vanishes": lambda: LayerStatistics("a", 1e-6, 1e-3, 0.0, 1.0),
        "a: 50% of its units are dead": lambda: LayerStatistics("a", 1.0, 1e-3, 0.5, 1.0),
        "a: an update is 30% of the weights": lambda: LayerStatistics("a", 1.0, 0.3, 0.0, 1.0),
        "a: an update is 1.0e-09 of the weights": lambda: LayerStatistics("a", 1.0, 1e-9, 0.0, 1.0),
    }
    for text, make in odd.items():
        (finding,) = TrainingInspection(0, 20, (*usual, make())).findings
        assert finding.startswith(text)


def test_the_picture_has_a_panel_for_each_statistic() -> None:
    import matplotlib.pyplot as plt

    layers = (LayerStatistics("a", 1.0, 1e-3, None, None), LayerStatistics("b", None, None, 0.5, 2.0))
    figure, axes = TrainingInspection(3, 20, layers).plot()
    assert [ax.get_ylabel() for ax in axes] == ["gradient norm", "update / weight", "dead units", "activation (rms)"]
    assert axes[2].lines[0].get_ydata()[1] == 0.5
    assert [label.get_text() for label in axes[-1].get_xticklabels()] == ["a", "b"]
    plt.close(figure)


class Unused(PlainNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.unused = nn.Linear(2, 2)


def test_a_layer_without_gradients_is_told() -> None:
    inspection = lt.inspect_training(trainer(), build(Unused), loader(48), steps=3)
    assert [text for text in inspection.findings if text.startswith("unused: no gradient has come in 3 steps")]


def test_a_layer_that_stops_in_the_first_of_these_steps_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Told(monkeypatch)
    stops = lt.LayerFreezing(start=2, stop=2, parameters=["layers.0"])
    fit(build(PlainNet), train=loader(48), callbacks=[InspectTraining(tmp_path, every_n_steps=2, steps=2), stops])
    assert [list(told(each)) for each in seen.inspections] == [["layers.0", "layers.2"], *[["layers.2"]] * 5]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"folder": 3}, TypeError, "folder must be str or PathLike, got 3"),
        ({"folder": "x", "every_n_steps": 0}, ValueError, "every_n_steps must be at least 1"),
        ({"folder": "x", "steps": 0}, ValueError, "steps must be at least 1"),
        ({"folder": "x", "every_n_steps": 5}, ValueError, "steps must be at most every_n_steps=5, got 10"),
    ],
)
def test_mistakes_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InspectTraining(**arguments)


def test_inside_of_a_fit_it_is_refused() -> None:
    class Inside(PlainNet):
        def on_train_start(self) -> None:
            lt.inspect_training(self.trainer, self, loader(16), steps=1)

    with pytest.raises(MisconfigurationException, match="inspect_training runs a fit of its own"):
        fit(build(Inside))
