"""A signal to any process: all of them save at the same step, end, and go on exactly from what they have saved."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.callbacks.preemption import _requeue
from tests.faults import everything
from tests.faults.runs import Resumable, differences
from tests.few import few
from tests.nets import NormNet, PlainNet, Stream, assert_equal, build, data, loader, trainer, weights
from tests.ranks import run_cases, run_ranks

STATUS = 128 + signal.SIGTERM
NEWEST: Any = "newest"


class Signals(Callback):
    """Sends this process a signal in a hook, once the step is reached, ``times`` times."""

    def __init__(self, hook: str, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times
        setattr(self, hook, self.send)

    def send(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step and self.times:
            self.times -= 1
            os.kill(os.getpid(), self.number)


class Validated(Callback):
    """The steps at which a validation ended, with the loss that it found."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def ended(run: Callable[[], Any]) -> Any:
    """The exit status of a fit that a signal ends."""
    with pytest.raises(SIGTERMException) as raised:
        run()
    return raised.value.code


# ---- one process

PLACES = [  # hook, step from which on it sends, step of the checkpoint
    ("setup", 0, 1),
    ("on_train_start", 0, 1),
    ("on_before_backward", 8, 9),
    ("on_train_batch_end", 9, 9),
    ("on_validation_start", 6, 6),
    ("on_validation_batch_start", 6, 6),
    ("on_validation_batch_end", 6, 6),
    ("on_validation_end", 6, 7),
    ("on_train_epoch_end", 6, 7),
]


def interrupted(folder: Path, hook: str, step: int, **settings: Any) -> tuple[list[Any], list[Any], list[str]]:
    """Outcomes of a training, and of one that is ended in a hook and goes on, with their validations."""
    outcomes, validations = [], []
    path = folder / "run"
    for signals in ([], [Signals(hook, step, times=2)]):
        watch, module = Validated(), everything.fresh()
        made = everything.make(folder, lt.Preemption(path), watch, *signals, **settings)
        if signals:
            assert ended(partial(everything.run, made, module)) == STATUS
            module = everything.fresh()
            made = everything.make(folder, lt.Preemption(path), watch, **settings)
            everything.run(made, module, ckpt_path=NEWEST)
        else:
            everything.run(made, module, ckpt_path=NEWEST)  # there is none
        outcomes.append(everything.outcome(made, module))
        validations.append(watch.found)
    return outcomes, validations, sorted(os.listdir(path))


@pytest.mark.parametrize(("hook", "step", "saved"), few(PLACES, 2))
@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}], ids=str)
def test_a_training_that_is_ended_goes_on_exactly(
    hook: str, step: int, saved: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    (whole, resumed), (all_validations, both_validations), names = interrupted(tmp_path, hook, step, **settings)
    assert not differences(resumed, whole)
    assert both_validations == all_validations  # none is left out, done twice or cut short
    if not settings:
        assert names == [f"preempted-step={saved}.ckpt"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("hook", "saved"), [("on_before_backward", 5), ("on_train_batch_end", 4)])
def test_accumulated_gradients_are_used_before_the_end(hook: str, saved: int, tmp_path: Path) -> None:
    (whole, resumed), _, names = interrupted(tmp_path, hook, 4, accumulate_grad_batches=2)
    assert not differences(resumed, whole)
    assert names == [f"preempted-step={saved}.ckpt"]


def test_a_signal_in_the_last_step_lets_training_end(tmp_path: Path) -> None:
    module = build(NormNet)
    made = trainer(max_steps=3, callbacks=[lt.Preemption(tmp_path), Signals("on_train_batch_end", 3)])
    made.fit(module, loader(), loader(24))
    assert made.global_step == 3
    assert not any(tmp_path.iterdir())


def preempted_at(folder: Path, step: int, ckpt_path: str | None = None) -> None:
    made = trainer(callbacks=[lt.Preemption(folder), Signals("on_before_backward", step - 1)])
    with pytest.warns(UserWarning, match="is left out") if ckpt_path == "newest" else nullcontext():
        assert ended(lambda: made.fit(build(NormNet), Resumable(), loader(24), ckpt_path=ckpt_path)) == STATUS


def test_those_of_this_run_are_removed_and_none_is_written_over(tmp_path: Path) -> None:
    others = ["last.ckpt", "preempted-step=2.ckpt", "preempted-step=3-v1.ckpt", "preempted-step=9.ckpt"]
    for name in others:
        (tmp_path / name).write_text("no checkpoint")
    (tmp_path / "preempted-step=3.ckpt").mkdir()
    others.append("preempted-step=3.ckpt")
    preempted_at(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "preempted-step=3-v2.ckpt"])
    preempted_at(tmp_path, 5, "newest")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "preempted-step=5.ckpt"])
    shutil.copy(tmp_path / "preempted-step=5.ckpt", tmp_path / "preempted-step=4.ckpt")  # a copy that the user has made
    preempted_at(tmp_path, 7, str(tmp_path / "preempted-step=5.ckpt"))
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "preempted-step=4.ckpt", "preempted-step=7.ckpt"])


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(NotADirectoryError, match=r"folder must be a folder, got .*runs/a.*, and .*runs is none"):
        lt.Preemption(tmp_path / "runs" / "a")


@pytest.mark.parametrize("error", [None, RuntimeError, SIGTERMException])
def test_handlers_are_put_back(error: type[BaseException] | None, tmp_path: Path) -> None:
    def mine(*_: Any) -> None: ...

    class Raises(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if error is not None:
                raise error

    before = signal.signal(signal.SIGTERM, mine)
    try:
        made = trainer(callbacks=[lt.Preemption(tmp_path), Raises()])
        with pytest.raises(error) if error else nullcontext():
            made.fit(build(NormNet), loader(), loader(24))
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_is_left_alone(tmp_path: Path) -> None:
    made = trainer(callbacks=[lt.Preemption(tmp_path), Signals("on_before_backward", 2, signal.SIGINT)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(SystemExit) as raised:
            made.fit(build(NormNet), loader(), loader(24))
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from now on
    assert raised.value.code == 1
    assert not any(tmp_path.iterdir())


def test_another_thread_and_a_second_one_are_refused(tmp_path: Path) -> None:
    errors: list[str] = []

    def run() -> None:
        try:
            trainer(callbacks=[lt.Preemption(tmp_path)]).fit(build(NormNet), loader(), loader(24))
        except MisconfigurationException as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "needs a fit in the main thread" in errors[0]
    with pytest.raises(MisconfigurationException, match="both would answer the same signal"):
        trainer(callbacks=[lt.Preemption(tmp_path), lt.Preemption("b")]).fit(build(NormNet), loader(), loader(24))
    with pytest.raises(TypeError, match="folder must be str or PathLike, got None"):
        lt.Preemption(None)  # type: ignore[arg-type]


# ---- workers of data loaders


class Drawn(Dataset[Any]):
    """Samples with a random number of the worker, which takes its time."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return data()[index % 44][0], random.random()


class Draws(NormNet):
    drawn: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(batch[1])
        return self(batch[0]).square().mean()


def to_everyone(folder: str) -> list[Any]:
    """Fits with workers, without and with the callback; then one in which all processes get the signals."""
    os.setsid()
    drawn = []
    for callbacks in ([], [lt.Preemption(folder)], [lt.Preemption(folder), Everyone()]):
        module = build(Draws)
        module.drawn = []
        L.seed_everything(3, workers=True, verbose=False)
        made = trainer(callbacks=callbacks)
        fit = partial(made.fit, module, DataLoader(Drawn(), 8, num_workers=2))
        assert (ended(fit) if len(callbacks) == 2 else fit()) in (STATUS, None)
        drawn.append(torch.cat(module.drawn))
        assert not multiprocessing.active_children()
    return [*drawn, made.global_step]


class Everyone(Callback):
    """Sends signals to all processes of a session, as SLURM and systemd do."""

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.killpg(0, signal.SIGUSR1)
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.2)


@pytest.mark.slow
def test_workers_outlive_the_signals_and_draw_the_same_numbers(tmp_path: Path) -> None:
    ((without, beside, signalled, step),) = run_ranks(to_everyone, str(tmp_path), nprocs=1)
    assert torch.equal(without, beside)
    assert torch.equal(without[: len(signalled)], signalled)
    assert step == 3
    assert os.listdir(tmp_path) == ["preempted-step=3.ckpt"]


# ---- two processes: everything, on the ranks' own batches

CASES = [  # preset, hook, step, the ranks that get a signal
    (engine, hook, step, ranks)
    for engine in ("ddp_bf16", "fsdp2_bf16", "zero1_bf16")
    for hook, step in (("on_before_backward", 8), ("on_validation_batch_end", 6), ("on_save_checkpoint", 8))
    for ranks in ((0,), (1,), (0, 1))
]
QUICK = [CASES[4], CASES[10]]


def strategy(engine: str) -> dict[str, Any]:
    backend = {} if engine.startswith("zero") else {"process_group_backend": "gloo"}
    return lt.preset(engine, precision="32-true", **backend)


def fit(folder: Path, engine: str, *callbacks: Callback, ckpt_path: str | None = None) -> tuple[Any, int]:
    """The weights at the end, and the step."""
    zero = engine.startswith("zero")  # which not all tricks support, and which saves the buffers of one rank only
    module, tricks = build(PlainNet if zero else everything.Everything), everything.tricks() if not zero else [lt.EMA()]
    saves = ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=4, save_top_k=-1)
    made = trainer(
        **{"max_epochs": 3, "devices": 2, "enable_checkpointing": True, **strategy(engine)},
        callbacks=[lt.Preemption(folder), *callbacks, *tricks, saves],
    )
    L.seed_everything(7, verbose=False)
    made.fit(module, Resumable(seed=5 + made.global_rank), loader(24), ckpt_path=ckpt_path)
    return weights(module), made.global_step


def preempted(case: tuple[str, str, int, tuple[int, ...]], folder: str) -> dict[str, Any]:
    engine, hook, step, ranks = case
    run = Path(folder, "-".join(map(str, case)))
    whole = fit(run / "whole", engine)
    mine = [Signals(hook, step)] if int(os.environ["RANK"]) in ranks else []
    status = ended(lambda: fit(run / "ended", engine, *mine))
    (path,) = (run / "ended").glob("*.ckpt")
    resumed = fit(run / "ended", engine, ckpt_path="newest")
    return {"status": status, "path": path.name, "whole": whole, "resumed": resumed}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_cases(preempted, QUICK, str(tmp_path_factory.mktemp("quick")))


def check_case(case: tuple[str, str, int, tuple[int, ...]], ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["status"] == STATUS
        finished = case[2] + (case[1] == "on_before_backward")  # of whose step the hook is a part
        assert found["path"] == f"preempted-step={finished}.ckpt"
        assert_equal(found["resumed"][0], found["whole"][0])
        assert found["resumed"][1] == found["whole"][1] == 18


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_all_ranks_end_at_one_step_and_go_on_exactly(case: Any, quick: Any) -> None:
    check_case(case, quick[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_so_they_do_with_every_engine_wherever_the_signal_comes(case: Any, tmp_path: Path) -> None:
    check_case(case, run_ranks(preempted, case, str(tmp_path)))


def uneven(folder: str) -> tuple[int, int]:
    """A validation with other numbers of batches on each rank, in which a signal comes."""
    rank = int(os.environ["RANK"])
    signals = [Signals("on_validation_batch_end", 6)] if rank else []
    made = trainer(callbacks=[lt.Preemption(folder), *signals], devices=2, **strategy("ddp_bf16"))
    batches = list(loader(24))[: 1 + 2 * rank]
    status = ended(lambda: made.fit(build(PlainNet), Resumable(), Stream(batches)))
    return status, made.global_step


def apart(folder: str) -> str:
    """A relative path, in another working directory on each rank."""
    home = Path(folder, os.environ["RANK"])
    home.mkdir()
    os.chdir(home)
    if os.environ["RANK"] == "0":
        trainer_ = trainer(max_steps=1)
        trainer_.fit(build(PlainNet), loader())
        trainer_.save_checkpoint("run/a.ckpt")
    made = trainer(callbacks=[lt.Preemption("run")], devices=2, **strategy("ddp_bf16"))
    with pytest.raises(MisconfigurationException) as raised:
        made.fit(build(PlainNet), loader(), ckpt_path="newest")
    return str(raised.value)


def test_a_validation_of_other_lengths_on_each_rank_is_finished_first(tmp_path: Path) -> None:
    assert run_ranks(uneven, str(tmp_path)) == [(STATUS, 7)] * 2


def test_a_checkpoint_that_not_all_ranks_see_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(apart, str(tmp_path)):
        assert "found run/a.ckpt, which another one does not see" in said


# ---- SLURM

SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS"
exit $STATUS
"""


def job(folder: str, number: int, auto_requeue: bool) -> tuple[int, list[str]]:
    """A task of a job of two, both of which get a signal, in different steps; with what they saved."""
    rank = os.environ["RANK"]
    os.environ.pop("TORCHELASTIC_RUN_ID")
    tasks = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NODEID": "0", "NODELIST": "localhost", "JOB_NAME": "train"}
    for name, value in {**tasks, "JOB_ID": "77", "PROCID": rank, "LOCALID": rank}.items():
        os.environ[f"SLURM_{name}"] = value
    scontrol(Path(folder), os.environ)
    mine = Signals("on_before_backward", 3, number) if rank == "0" else Signals("on_train_batch_start", 5, number)
    environment = SLURMEnvironment(auto_requeue=auto_requeue)
    made = trainer(callbacks=[lt.Preemption(f"{folder}/run"), mine], devices=2, plugins=[environment], strategy="ddp")
    return ended(lambda: made.fit(build(PlainNet), loader(192), ckpt_path="newest")), os.listdir(f"{folder}/run")


def scontrol(folder: Path, environment: Any) -> None:
    """A command that notes what it was asked, in the place of SLURM's."""
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    environment.update(PATH=f"{folder}:{os.environ['PATH']}", CALLS=str(folder / "calls"), STATUS="0")


@pytest.mark.parametrize(
    ("number", "auto_requeue", "calls"),
    [(signal.SIGUSR1, True, "requeue 77\n"), (signal.SIGTERM, True, ""), (signal.SIGUSR1, False, "")],
)
def test_a_slurm_job_is_queued_again_once(number: int, auto_requeue: bool, calls: str, tmp_path: Path) -> None:
    (tmp_path / "calls").touch()
    found = run_ranks(job, str(tmp_path), number, auto_requeue)
    assert found == [(STATUS, ["preempted-step=4.ckpt"])] * 2
    assert (tmp_path / "calls").read_text() == calls


def test_a_task_of_an_array_is_named_and_a_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    scontrol(tmp_path, variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _requeue()
    assert (tmp_path / "calls").read_text() == "requeue 7_3\n"
    monkeypatch.setenv("STATUS", "1")
    with pytest.warns(UserWarning, match=r"not queued again, and must be started by hand: .*status 1"):
        _requeue()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.warns(UserWarning, match=r"not queued again, .*No such file"):
        _requeue()
