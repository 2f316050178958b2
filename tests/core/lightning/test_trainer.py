"""Facts about a Trainer, and one test for each private Lightning name that core/trainer.py stands on.

A test named ``test_lightning_...`` that fails says that Lightning has moved what its message names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from lightning_tricks.core.lightning.engine import UNSHARDED, require_engine
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    detects_anomaly,
    has_comm_state,
    has_static_graph,
    is_fitting,
    keep_user_samplers,
    later_extremes,
    launches_processes,
    log_every_n_steps,
    requested_precision,
    saves_folder,
    transfers_batch,
    validate_again,
    will_step,
)
from lightning_tricks.core.random_numbers import random_state
from tests.device.devices import CUDA, TRAINED_ON, device, require_devices
from tests.device.nccl import rank_device
from tests.nets import Net, PlainNet, build, fit, loader, trainer
from tests.ranks import run_ranks


class Heard(SingleDeviceStrategy):
    """A strategy that asks for the requested precision as it is set up."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []
        super().__init__()

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self.heard.append(requested_precision())
        self._precision_plugin = plugin


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, None),
        ({"precision": None}, None),
        ({"precision": 32}, "32-true"),
        ({"precision": "64-true"}, "64-true"),
        ({"precision": "16-mixed"}, "16-mixed"),
        ({"plugins": [MixedPrecision("bf16-mixed", "cpu")]}, "bf16-mixed"),
    ],
)
# Lightning says that fp16 on CPU becomes bf16; what was asked for is fp16
@pytest.mark.filterwarnings("ignore:You passed `Trainer")
def test_lightning_has_the_requested_precision_on_the_stack(settings: dict[str, Any], asked: str | None) -> None:
    strategy = Heard()
    trainer(strategy=strategy, **settings)
    assert strategy.heard == [None, asked], (
        "a Trainer no longer sets its strategy's precision_plugin inside _AcceleratorConnector.__init__ with the local"
        " `precision`: requested_precision() must find the argument elsewhere"
    )


def test_lightning_reads_the_precision_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_PRECISION", "64-true")
    strategy = Heard()
    trainer(strategy=strategy)
    assert strategy.heard[-1] == "64-true"


def test_lightning_names_the_connectors_arguments_as_ever() -> None:
    parameters = inspect.signature(accelerator_connector._AcceleratorConnector.__init__).parameters
    assert "precision" in parameters, "_AcceleratorConnector has no argument `precision` any more"
    assert parameters["precision"].default is None, "_AcceleratorConnector(precision=) has another default than None"
    connector = trainer()._accelerator_connector
    assert connector._precision_plugin_flag is None, "_precision_plugin_flag is not None without plugins="


@pytest.mark.parametrize(("given", "spelled"), [(None, None), (32, "32-true"), ("64", "64-true"), ("16-mixed",) * 2])
def test_lightning_spells_precisions_out(given: Any, spelled: str | None) -> None:
    assert _convert_precision_to_unified_args(given) == spelled, "_convert_precision_to_unified_args has changed"


def test_outside_of_a_trainers_construction_no_precision_is_requested() -> None:
    assert requested_precision() is None


# -- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "static"),
    [("auto", False), ("ddp", False), (DDPStrategy(static_graph=True), True), (DDPStrategy(static_graph=False), False)],
)
def test_lightning_keeps_ddps_arguments(strategy: Any, static: bool) -> None:
    assert has_static_graph(trainer(strategy=strategy)) is static, "DDPStrategy._ddp_kwargs is not torch's arguments"


@pytest.mark.parametrize("on", [False, True])
def test_lightning_keeps_whether_anomalies_are_detected(on: bool) -> None:
    assert detects_anomaly(trainer(detect_anomaly=on)) is on, "Trainer._detect_anomaly is not Trainer(detect_anomaly=)"


def test_lightning_reads_whether_to_replace_samplers_off_its_connector() -> None:
    run = trainer(strategy="ddp")
    assert run._accelerator_connector.use_distributed_sampler is True
    keep_user_samplers(run)
    assert not run._data_connector._requires_distributed_sampler(loader())


def test_lightning_keeps_the_state_of_ddps_communication_hook() -> None:
    assert has_comm_state(trainer(strategy=DDPStrategy(ddp_comm_state=object()))), "DDPStrategy._ddp_comm_state moved"
    assert has_comm_state(trainer(strategy=lt.DDPPreset(compression="powersgd")))
    assert not has_comm_state(trainer(strategy=lt.DDPPreset(compression="bf16")))
    assert not has_comm_state(trainer(strategy="ddp"))
    assert not has_comm_state(trainer())


@pytest.mark.parametrize(
    ("strategy", "copies"), [("ddp_spawn", True), ("ddp_fork", True), ("ddp", False), ("auto", False)]
)
def test_lightning_starts_copies_by_one_launcher(strategy: str, copies: bool) -> None:
    run = trainer(strategy=strategy, devices=1 if strategy == "auto" else 2)
    assert launches_processes(run) is copies, "the launcher of ddp_spawn is no _MultiProcessingLauncher any more"


@pytest.mark.parametrize("strategy", ["auto", "ddp", "single_bf16", "ddp_bf16"])
def test_whole_weights_are_fine_with(strategy: str) -> None:
    require_engine(trainer(strategy=strategy), "EMA", *UNSHARDED)


def test_sharded_weights_are_refused_with_the_trick_and_the_strategy() -> None:
    with pytest.raises(MisconfigurationException, match=r"EMA works .*, got ModelParallelStrategy\..*remove EMA"):
        require_engine(trainer(strategy=ModelParallelStrategy()), "EMA", *UNSHARDED)


# -- states, callbacks, methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_fitting_includes_its_validation_and_nothing_else(run: str) -> None:
    def noting(hook: str) -> Callable[..., None]:
        return lambda trainer, *_, **__: seen.append((hook, is_fitting(trainer)))

    seen, module, hooks = [], build(), ("setup", "on_validation_start", "teardown")
    stage = LambdaCallback(**{hook: noting(hook) for hook in hooks})
    if run == "fit":
        fit(module, max_epochs=1, num_sanity_val_steps=1, callbacks=[stage])
    else:
        trainer(callbacks=[stage]).validate(module, loader(), verbose=False)
    assert set(seen) == {(hook, run == "fit") for hook in hooks}


def test_callbacks_are_found_by_kind_in_their_order() -> None:
    first, second, timer = EarlyStopping("a"), EarlyStopping("b"), Timer(duration=None)
    run = trainer(callbacks=[first, timer, second])
    assert callbacks_of(run, EarlyStopping) == [first, second]
    assert callbacks_of(run, Timer) == [timer]
    assert callbacks_of(run, ModelCheckpoint) == []


class Moves(PlainNet):
    """Moves a batch of its own to the device in each step, as a callback may do in its hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.trainer.strategy.batch_to_device(batch), batch_idx)


def test_lightning_names_what_it_does_as_a_loop_moves_its_batch() -> None:
    module, seen, told = build(Moves), [], []
    assert hasattr(module, "_current_fx_name"), "a LightningModule has no `_current_fx_name` any more"

    def moves(run: Any, *_: Any) -> None:
        _call_strategy_hook(run, "batch_to_device", torch.zeros(1))  # as a loop does
        run.strategy.batch_to_device(torch.zeros(1))

    move = LambdaCallback(on_train_batch_end=moves)
    run = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, callbacks=[move])

    def note(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(module._current_fx_name)
        told.append(transfers_batch(run))
        return original(*args, **kwargs)

    undo = wrap_method(run.strategy, "batch_to_device", note)
    run.fit(module, loader(), loader())
    undo()
    names = [*["batch_to_device", "training_step", "batch_to_device", "on_train_batch_end"] * 2, "batch_to_device"]
    assert seen == names, "_current_fx_name is not the name of the strategy's method or of the hook that is called"
    assert told == [name == "batch_to_device" for name in names]


# -- validation and logging -------------------------------------------------------------------------------------------


def test_lightning_tells_whether_a_checkpoint_is_a_folder() -> None:
    for folder in (False, True):
        strategy = ModelParallelStrategy(save_distributed_checkpoint=folder)
        assert strategy._save_distributed_checkpoint is folder, "_save_distributed_checkpoint is not the argument"
        assert saves_folder(trainer(strategy=strategy)) is folder
    assert not saves_folder(trainer())


def test_lightning_has_a_validation_loop_that_can_be_run_once_more() -> None:
    loop = trainer().fit_loop.epoch_loop.val_loop
    assert callable(loop.run), "the fit's validation loop is not fit_loop.epoch_loop.val_loop any more"
    assert {"total", "current"} <= loop.batch_progress.state_dict().keys()


def test_lightning_says_when_to_log_and_at_which_step(tmp_path: Any) -> None:
    def log(trainer: Any, *_: Any) -> None:
        log_every_n_steps(trainer, lambda: {"tricks/step": float(trainer.global_step)})

    logs = LambdaCallback(on_train_batch_end=log)
    run = fit(build(PlainNet), callbacks=[logs], logger=CSVLogger(tmp_path), log_every_n_steps=4)
    assert run.callback_metrics["tricks/step"] == 12
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    logged = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    found = [(int(row["step"]), float(row["tricks/step"])) for row in logged if row["tricks/step"]]
    assert found == [(3, 4.0), (7, 8.0), (11, 12.0)], "_batches_that_stepped has moved"


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [True] * 5), (2, [False, True, False, True, True])])
def test_lightning_knows_in_a_batch_whether_the_optimizer_steps_after_it(accumulate: int, steps: list[bool]) -> None:
    class Ask(PlainNet):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            asked.append(will_step(self.trainer))

    asked: list[bool] = []
    fit(build(Ask), train=loader(40), max_epochs=2, accumulate_grad_batches=accumulate)
    assert asked == steps * 2, "fit_loop._should_accumulate no longer tells which batches are followed by a step"


# -- several ranks, and devices ---------------------------------------------------------------------------------------


def asked_and_answered(on: str) -> list[Any]:
    """The extremes of the ranks' numbers in each step, which are read behind the step's own work."""
    found = []

    class Ask(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            number = 5 + trainer.global_rank * (1 - 2 * trainer.global_step)
            with there.waits(at_most=0):
                self.answer = later_extremes(trainer, number)

        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            with there.waits(at_most=0):
                found.append(self.answer())

    with rank_device(on) as there:
        settings = {"accelerator": there.name, "strategy": "ddp", "devices": 2, "max_steps": 3}
        fit(build(PlainNet), callbacks=[Ask()], **settings)
    return found


@pytest.mark.parametrize("on", ["host cpu", *CUDA])
def test_numbers_of_other_ranks_come_later_and_nobody_waits(on: str) -> None:
    if on == "real cuda":
        require_devices(2)
    assert run_ranks(asked_and_answered, on) == [[(5, 6), (4, 5), (2, 5)]] * 2


@pytest.mark.parametrize("on", ["host cpu", *TRAINED_ON])
def test_logged_tensors_come_from_the_device_together(on: str) -> None:
    class Many(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            values = {"a": torch.full((), 2.5, device=there.name), "b": 3, "c": torch.ones((), device=there.name)}
            with there.waits(at_most=1):
                log_every_n_steps(trainer, lambda: values)

    with device(on) as there:
        run = fit(build(PlainNet), callbacks=[Many()], accelerator=there.name, max_steps=2, log_every_n_steps=1)
        logged = {name: value.item() for name, value in run.callback_metrics.items()}
    assert (logged["a"], logged["b"], logged["c"]) == (2.5, 3.0, 1.0)


@pytest.mark.parametrize("on", ["host cpu", *TRAINED_ON])
def test_a_validation_that_runs_again_leaves_random_numbers_alone(on: str) -> None:
    class Draws(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            torch.rand(3, device=self.device)

    class Again(Callback):
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            states.append(random_state(trainer.strategy.root_device)[there.name if there.name != "cpu" else "torch"])
            validate_again(trainer, trainer.fit_loop.epoch_loop.val_loop.run, "_again")
            states.append(random_state(trainer.strategy.root_device)[there.name if there.name != "cpu" else "torch"])

    states: list[torch.Tensor] = []
    with device(on) as there:
        fit(build(Draws), callbacks=[Again()], accelerator=there.name, max_epochs=1)
    assert torch.equal(*states)
