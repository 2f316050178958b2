"""Ctrl-C and errors in every hook, with all tricks at work: everything is undone, and can be used again exactly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_tricks.callbacks.step_in_backward import _MODULE_HOOKS as REFUSED_HOOKS
from tests.faults.everything import TRAININGS, fresh, make, outcome, run
from tests.faults.runs import Resumable, differences
from tests.nets import assert_equal

STEP = 9  # of the checkpoint, in the middle of the second epoch
NOT_CALLED = {  # in a fit of this training
    *(f"{hook}{part}" for hook in ("on_test", "on_predict") for part in
      ("_start", "_end", "_epoch_start", "_epoch_end", "_batch_start", "_batch_end")),
    *("on_exception", "on_sanity_check_start", "on_sanity_check_end", "on_load_checkpoint", "on_save_checkpoint"),
}  # fmt: skip
CALLBACK_HOOKS = sorted({name for name in dir(Callback) if name.startswith("on_")} - NOT_CALLED | {"setup", "teardown"})
MODULE_HOOKS = (
    *("configure_model", "configure_optimizers", "training_step", "validation_step", "forward", "backward"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_start"),
    *("on_train_batch_end", "on_train_epoch_end", "on_validation_model_eval", "on_validation_model_train"),
    *("on_fit_end", "teardown", "setup"),
)
LOADER_HOOKS = ("iter", "next", "set_epoch")
PLACES = [
    *(("first callback", hook) for hook in CALLBACK_HOOKS),
    *(("last callback", hook) for hook in CALLBACK_HOOKS),
    *(("module", hook) for hook in MODULE_HOOKS),
    *(("loader", hook) for hook in LOADER_HOOKS),
]
ENDED = [("last callback", "on_fit_end"), ("module", "on_fit_end"), *((each[0], "teardown") for each in PLACES)]
# The averages and LoRA wrap these for good, so that what is saved after a fit holds what it held in the fit.
STAY = {"Trainer.save_checkpoint", "fit_loop.on_load_checkpoint", "strategy.lightning_module_state_dict"}
OF_TRAININGS = [
    (training, where, hook)
    for training, (where, hook) in product(TRAININGS, PLACES)
    if training != "in backward" or hook not in REFUSED_HOOKS
]
QUICK = [
    *(("everything", "last callback", hook) for hook in ("on_before_backward", "on_train_end")),
    *(("everything", "module", hook) for hook in ("forward", "optimizer_step")),
    *(("everything", "first callback", "on_validation_start"), ("everything", "loader", "next")),
    *(("adapters", "module", "optimizer_step"), ("experts", "last callback", "on_before_backward")),
    ("chunks", "module", "backward"),
]


class Bomb:
    """Raises at the n-th call of what it is laid to; never for n = 0."""

    def __init__(self, error: type[BaseException], at: int = 0) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error("on purpose")
        return original(*args, **kwargs)


class Loader(Resumable):
    """Bombs can be laid to its iteration, too."""

    bombs: dict[str, Bomb]

    def __init__(self) -> None:
        super().__init__()
        self.bombs = {}

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if bomb := self.bombs.get("iter"):
            bomb(lambda: None)
        for batch in super().__iter__():
            if bomb := self.bombs.get("next"):
                bomb(lambda: None)
            yield batch


class Watch(Callback):
    """The raw weights after each optimizer step, by parameter: LoRA renames those that it freezes."""

    def __init__(self) -> None:
        self.raw: dict[nn.Parameter, Tensor] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.take(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self.take(pl_module))

    def take(self, module: L.LightningModule) -> None:
        self.raw = {each: each.detach().clone() for each in module.parameters()}

    def check(self, module: L.LightningModule) -> None:
        """The module holds the raw weights."""
        named = {each: name for name, each in module.named_parameters()}
        assert self.raw.keys() <= named.keys()
        assert_equal({named[each]: each.detach() for each in self.raw}, {named[k]: raw for k, raw in self.raw.items()})


class Once(Callback):
    """Saves in the middle of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            trainer.save_checkpoint(self.path)


class Training:
    """A Trainer, its callbacks, a module and a loader, in which a bomb explodes."""

    def __init__(self, folder: Path, training: str) -> None:
        self.first, self.last, self.watch = Callback(), Callback(), Watch()
        self.trainer = make(folder, self.watch, self.first, training=training)
        self.trainer.callbacks.append(self.last)  # type: ignore[attr-defined]
        self.module, self.loader = fresh(TRAININGS[training][0]), Loader()
        self.before = facts(self.trainer, self.module)

    def fit(self, where: str, hook: str, bomb: Bomb) -> None:
        owner: Any = {"first callback": self.first, "last callback": self.last}.get(where) or getattr(self, where)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "signal", lambda *_: None)  # Lightning does not give SIGINT back
            if hook in ("iter", "next"):
                patch.setitem(self.loader.bombs, hook, bomb)
            else:
                original = getattr(owner, hook)
                patch.setitem(vars(owner), hook, lambda *args, **kwargs: bomb(original, *args, **kwargs))
            run(self.trainer, self.module, self.loader)


def facts(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """What tricks might leave behind in what is the user's."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    wrapped = {
        "Trainer": trainer,
        "strategy": trainer.strategy,
        "fit_loop": trainer.fit_loop,
        "epoch_loop": trainer.fit_loop.epoch_loop,
        "val_loop": trainer.fit_loop.epoch_loop.val_loop,
        **{f"module.{name}": each for name, each in module.named_modules()},
    }
    return {
        "wrappers": [f"{name}.{key}" for name, each in wrapped.items() for key, v in vars(each).items() if is_ours(v)],
        "hooks": {name: [len(getattr(each, hook)) for hook in hooks] for name, each in module.named_modules()},
        "requires_grad": {name: each.requires_grad for name, each in module.named_parameters()},
    }


def is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("lightning_tricks.core.lightning.patching")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What comes of a training that nothing disturbs, and a checkpoint of it."""

    @cache
    def of(training: str) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("marked_busy")
        made, module = make(folder, training=training), fresh(TRAININGS[training][0])
        made.callbacks.append(Once(folder / "middle.ckpt"))  # type: ignore[attr-defined]
        run(made, module)
        return deepcopy(outcome(made, module)), folder / "middle.ckpt"

    return of


def check(folder: Path, name: str, where: str, hook: str, error: type[BaseException], at: int, expected: Any) -> None:
    whole, checkpoint = expected(name)
    training = Training(folder, name)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):  # as Lightning ends
        training.fit(where, hook, Bomb(error, at))
    left = facts(training.trainer, training.module)
    assert {*left.pop("wrappers")} <= STAY
    if name != "adapters":  # which stay in the module, beside frozen weights
        assert left == {name: value for name, value in training.before.items() if name != "wrappers"}
    if training.watch.raw and (where, hook) not in ENDED:  # then the averages are there to stay (at_end)
        training.watch.check(training.module)
    training.module.train()  # Lightning leaves it in the mode of validation
    run(training.trainer, training.module, training.loader, ckpt_path=checkpoint)
    assert not differences(outcome(training.trainer, training.module), whole), "the same Trainer does not resume"
    again = make(folder, training=name)
    again.callbacks[:] = training.trainer.callbacks  # type: ignore[attr-defined]
    module = fresh(TRAININGS[name][0])
    if name != "adapters":  # a module that has them has other names
        training.module.load_state_dict(module.state_dict())
        module = training.module
    training.loader.load_state_dict({"epoch": 0, "batches": 0})
    run(again, module, training.loader)
    assert not differences(outcome(again, module), whole), "another Trainer does not train as a first one"


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("training", "where", "hook"), QUICK, ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_training_interrupted_in_its_middle_can_be_used_again(
    training: str, where: str, hook: str, error: type[BaseException], tmp_path: Path, expected: Any
) -> None:
    check(tmp_path, training, where, hook, error, 1, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("training", "where", "hook"), OF_TRAININGS, ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_training_interrupted_anywhere_can_be_used_again(
    training: str, where: str, hook: str, error: type[BaseException], tmp_path: Path, expected: Any
) -> None:
    count = Bomb(error)
    Training(tmp_path / "counted", training).fit(where, hook, count)
    assert count.calls, "this hook is not called"
    for at in sorted({1, (count.calls + 1) // 2, count.calls}):
        check(tmp_path / str(at), training, where, hook, error, at, expected)
