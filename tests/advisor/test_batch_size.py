"""The largest batch that fits: found, agreed upon by all ranks, and nothing left behind."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.advisor.batch_size import accumulation_for, find_batch_size, search_sizes
from tests.device.devices import device
from tests.nets import Net, PlainNet, SteppedByHand, Stream, assert_equal, build, data, loader, trainer, weights
from tests.ranks import run_ranks

# -- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("available", [1, 2, 13, 64, 1000])
def test_the_search_finds_the_largest(start: int, available: int) -> None:
    for limit in range(70):
        for most in (1, 5, 64, 1000):
            asked: list[int] = []

            def fits(size: int, limit: int = limit, asked: list[int] = asked) -> tuple[bool, int]:
                asked.append(min(size, available))
                return min(size, available) <= limit, available

            tried = search_sizes(fits, start, most)
            largest = min(limit, available, most)
            assert max((size for size, fit in tried.items() if fit), default=0) == largest
            assert list(tried) == asked, "no size twice"
            assert all(fit == (size <= limit) for size, fit in tried.items())
            assert len(tried) < 2 * 10


def test_accumulation_is_exact_if_it_can_be() -> None:
    for effective in range(1, 130):
        for devices in (1, 2, 3):
            for largest in (1, 5, 16, 100):
                if effective < devices:
                    continue
                batch, accumulation = accumulation_for(effective, devices, largest)
                assert 1 <= batch <= largest
                fewest = -(-effective // (devices * largest))
                assert fewest <= accumulation <= 2 * fewest
                exact = [a for a in range(fewest, 2 * fewest + 1) if effective % (devices * a) == 0]
                if exact:
                    assert (batch * devices * accumulation, accumulation) == (effective, exact[0])
                else:
                    missed = abs(effective - batch * devices * accumulation)
                    assert missed == min(abs(effective - b * devices * accumulation) for b in range(1, largest + 1))


# -- a fit that runs out of memory ------------------------------------------------------------------------------------


class Limited(Net):
    """Runs out of the memory of a device above a batch size; keeps what it was given."""

    limit = 11

    @property
    def seen(self) -> Seen:
        return SEEN.setdefault(self, Seen())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.sizes.append(len(batch[0]))
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


class Seen:
    """What a module has seen."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.accumulated: list[bool] = []
        self.last = -1


SEEN: WeakKeyDictionary[nn.Module, Seen] = WeakKeyDictionary()  # not in the modules, whose attributes are put back


def find(module: Any, train: Any = None, run: L.Trainer | None = None, **arguments: Any) -> Any:
    train = loader(44) if train is None else train
    return find_batch_size(run or trainer(), module, train, **{"max_size": 40, "margin": 0.0, **arguments})


def test_it_finds_the_largest_in_real_steps() -> None:
    module = build(Limited)
    result = find(module)
    assert (result.batch_size, result.accumulate_grad_batches, result.effective) == (11, 1, 11)
    assert result.tried == {2: True, 4: True, 8: True, 16: False, 12: False, 10: True, 11: True}
    assert module.seen.sizes == [*(size for size in (2, 4, 8) for _ in range(3)), 16, 12, *[10] * 3, *[11] * 3]


@pytest.mark.parametrize(("margin", "size"), [(0.1, 9), (0.5, 5), (0.99, 1)])
def test_a_margin_is_left_where_memory_was_the_limit(margin: float, size: int) -> None:
    assert find(build(Limited), margin=margin, initial=10, max_size=12).batch_size == size
    assert find(build(Limited), margin=margin, max_size=8).batch_size == 8


@pytest.mark.parametrize("start", [5, 33, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 11, 12))])
def test_any_start_leads_there(start: int) -> None:
    assert find(build(Limited), initial=start).batch_size == 11


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("train", "size"),
    [
        (loader(7), 7),
        (loader(7, shuffle=True), 7),
        (DataLoader(data(10), batch_size=4, drop_last=True), 10),
        (DataLoader(data(6), batch_size=2, num_workers=2), 6),
        (DataLoader(data(6), batch_size=2, num_workers=1, persistent_workers=True), 6),
    ],
)
def test_the_data_are_a_limit(train: Any, size: int) -> None:
    result = find(build(Limited), train)
    assert result.batch_size == max(result.tried) == size
    assert all(result.tried.values())


class Adaptive(Limited):
    """Runs out of memory only once there are optimizer states; how many batches are accumulated is seen too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).limit = 6 if self.optimizers().state else 40
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.accumulated.append(any(weight.grad is not None for weight in self.parameters()))

    def configure_optimizers(self) -> Any:
        self.seen.accumulated.clear()
        return torch.optim.AdamW(self.parameters())


def test_optimizer_states_count() -> None:
    assert find(build(Adaptive)).batch_size == 6


def test_the_second_pass_of_sam_counts() -> None:
    class Sharp(lt.SAMMixin, Net):
        sam = lt.SAM(rho=0.05)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            again = self.trainer.global_step == seen.last
            seen.last = self.trainer.global_step
            if again and len(batch[0]) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    module, seen = build(Sharp), Seen()
    assert find(module, max_size=8).batch_size == 5


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("settings", "arguments", "accumulates"),
    [
        ({}, {}, False),
        ({"accumulate_grad_batches": 3}, {}, True),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, {}, True),
        ({}, {"effective": 24}, True),
    ],
)
def test_gradients_that_wait_while_others_are_accumulated_count(
    settings: dict[str, Any], arguments: dict[str, Any], accumulates: bool
) -> None:
    module = build(Adaptive)
    result = find(module, run=trainer(**settings), **arguments)
    assert any(module.seen.accumulated) == accumulates
    assert result.batch_size == 6


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("effective", "batch", "accumulation"), [(8, 8, 1), (11, 11, 1), (22, 11, 2), (48, 8, 6), (13, 6, 2)]
)
def test_accumulation_makes_the_batch_that_is_wanted(effective: int, batch: int, accumulation: int) -> None:
    run = trainer()
    result = find(build(Limited), run=run, effective=effective)
    assert (result.batch_size, result.accumulate_grad_batches) == (batch, accumulation)
    assert run.accumulate_grad_batches == accumulation
    assert result.effective == (12 if effective == 13 else effective)
    assert max(result.tried) <= max(effective, 16)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception) -> None:
    class Raises(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 3:
                raise error
            return super().training_step(batch, batch_idx)

    assert find(build(Raises), max_size=4).batch_size == 3


def test_fp16_takes_its_first_step() -> None:
    class Scaled(Adaptive):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 1e3  # overflows at a scale of 65536

    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    run = trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert find(build(Scaled), run=run).batch_size == 6
    assert scaler.get_scale() == 65536.0


LIMITED_PROCESS = """
import resource, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_tricks.advisor import find_batch_size

class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 65536), nn.Tanh(), nn.Linear(65536, 1))
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

torch.set_num_threads(1)
settings = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, max_steps=3)
dataset = TensorDataset(torch.randn(4096, 1))
torch.manual_seed(0)
module = Wide()
L.Trainer(**settings).fit(Wide(), DataLoader(dataset, batch_size=1))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 150 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = [p.clone() for p in module.parameters()]
loader = DataLoader(dataset, batch_size=1)
result = find_batch_size(L.Trainer(**settings), module, loader, max_size=4096, margin=0.3)  # addresses are scattered
assert all(map(torch.equal, before, module.parameters()))
L.Trainer(**settings).fit(module, DataLoader(dataset, batch_size=result.batch_size))
try:
    L.Trainer(**settings).fit(module, DataLoader(dataset, batch_size=2 * result.batch_size))
except (RuntimeError, MemoryError):
    print(result.batch_size, sorted(result.tried))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address spaces are limited on Linux")
def test_a_real_limit_of_memory() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED_PROCESS],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    size = int(run.stdout.split()[0])
    # A sample takes 65536 floats in each of Linear, Tanh and their gradients: 0.5 to 1 MiB of the 150, of which threads
    # and libraries take a part that depends on the machine.
    assert 32 <= size <= 400


# -- nothing is left behind -------------------------------------------------------------------------------------------


class Scheduled(Limited):
    """With a schedule whose warm-up is longer than a trial, counters and generators of its own."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.steps, self.noise = 0, torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand((), generator=self.noise))

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 12
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=self.lr), self, warmup=10)


class Failing(Scheduled):
    """Fails with the second batch of eight samples, for no lack of memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) == 8 and batch_idx == 1:
            raise ValueError("planned")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_afterwards_is_as_if_there_had_been_none(fails: bool, tmp_path: Path) -> None:
    def fitted(search: bool) -> tuple[L.Trainer, Any, Any]:
        module = build(Scheduled)
        run = trainer(callbacks=[lt.EMA(decay=0.5), lt.Mixup()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
        L.seed_everything(5, verbose=False)
        train = DataLoader(data(44), 8, shuffle=True, generator=torch.Generator().manual_seed(2))
        if search:
            module.__class__ = Failing if fails else Scheduled
            before, attributes = weights(module), copy.deepcopy(run.callbacks)
            if fails:
                with pytest.raises(ValueError, match="planned"):
                    find(module, train, run=run)
            else:
                assert find(module, train, run=run).batch_size == 11
            module.__class__ = Scheduled
            assert_equal(weights(module), before)
            assert [type(each) for each in run.callbacks] == [type(each) for each in attributes]
            assert (run.global_step, run.current_epoch, run.accumulate_grad_batches) == (0, 0, 1)
            assert train.batch_size == 8
            assert type(train.batch_sampler).__name__ == "BatchSampler"
            assert not list(tmp_path.rglob("*.csv"))
            module.seen.sizes.clear()
        run.fit(module, train, loader(8))
        return run, module, (torch.rand(1), train.generator.get_state())

    (_, searched, after), (_, plain, expected) = fitted(True), fitted(False)
    assert_equal(weights(searched), weights(plain))
    assert torch.equal(after[0], expected[0])
    assert torch.equal(after[1], expected[1])
    assert searched.seen.sizes == plain.seen.sizes == [8, 8, 8, 8, 8, 4] * 2
    assert searched.steps == plain.steps == 12


def test_in_a_trainer_that_has_fitted() -> None:
    run, module = trainer(), build(Limited)
    run.fit(module, loader(), loader(8))
    before, steps = weights(module), run.global_step
    assert find(module, run=run).batch_size == 11
    assert_equal(weights(module), before)
    assert run.global_step == steps == 12


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "settings",
    [
        {"limit_train_batches": 2},
        {"limit_train_batches": 0.3},
        {"val_check_interval": 4},
        {"fast_dev_run": 2},
        {"reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": None, "max_steps": 1},
        {"overfit_batches": 1},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
        {"max_time": {"hours": 1}},
    ],
)
def test_settings_of_the_trainer_do_not_matter(settings: dict[str, Any]) -> None:
    class Loads(Limited):
        def train_dataloader(self) -> Any:
            return loader(44)

        def val_dataloader(self) -> Any:
            return loader(8)

    result = find_batch_size(trainer(**settings), build(Loads), initial=10, max_size=12, margin=0.0)
    assert result.tried == {10: True, 12: False, 11: True}


# -- where the size goes ----------------------------------------------------------------------------------------------


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(44, self.batch_size)


def test_the_data_modules_batch_size_is_set() -> None:
    digits, module = Digits(), build(Limited)
    module.batch_size = 3
    result = find_batch_size(trainer(), module, datamodule=digits, max_size=40)
    assert digits.batch_size == digits.hparams.batch_size == result.batch_size == 9
    assert module.batch_size == 3
    assert len(next(iter(digits.train_dataloader()))[0]) == 9


def test_the_modules_batch_size_is_set_if_it_loads_the_data() -> None:
    class Loads(Limited):
        batch_size = 5

        def train_dataloader(self) -> Any:
            return loader(44, self.batch_size)

    module = build(Loads)
    find_batch_size(trainer(), module, max_size=40)
    assert module.batch_size == 9
    find_batch_size(trainer(), module, loader(44), max_size=2)
    assert module.batch_size == 9, "of loaders that are passed, the module's size says nothing"


def test_manual_optimization() -> None:
    class Manual(SteppedByHand, Limited):
        """Steps by itself."""

    module = build(Manual)
    before = weights(module)
    assert find(module).batch_size == 11
    assert_equal(weights(module), before)
    with pytest.raises(MisconfigurationException, match=r"effective=4.*Manual\.automatic_optimization=False"):
        find(module, effective=4)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"margin": 1.0}, ValueError, "margin must be in"),
        ({"margin": "much"}, TypeError, "margin must be a number"),
        ({"initial": 0}, ValueError, "initial must be at least 1"),
        ({"steps": 1}, ValueError, "steps must be at least 2"),
        ({"max_size": 2.5}, TypeError, "max_size must be an integer"),
        ({"max_size": None}, ValueError, "max_size must be given on a CPU"),
        ({"effective": 0}, ValueError, "effective must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        find(build(Limited), **arguments)


class Endless(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize(
    ("train", "match"),
    [
        (DataLoader(Stream(data(8)), 4), "DataLoader of an IterableDataset"),
        (DataLoader(data(8), batch_sampler=[[0, 1], [2, 3]]), "DataLoader with list"),
        (DataLoader(data(8), batch_size=None), "DataLoader with no batch sampler"),
        (DataLoader(data(8), 4, sampler=Endless()), "got a sampler without a length"),
        ({"a": loader(8), "b": loader(8)}, "got 2 loaders"),
    ],
)
def test_loaders_whose_batches_cannot_be_sized_are_refused(train: Any, match: str) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        find(build(Limited), train)


def test_one_sample_that_does_not_fit() -> None:
    module = build(type("Full", (Limited,), {"limit": 0}))
    with pytest.raises(MisconfigurationException, match="one sample does not fit into the memory of cpu"):
        find(module, initial=4)


@pytest.mark.filterwarnings("ignore:Total length of")  # Lightning says it twice
def test_a_loader_without_samples_is_no_lack_of_memory() -> None:
    with pytest.raises(MisconfigurationException, match="needs samples to train on"):
        find_batch_size(trainer(), build(Net), loader(0), max_size=8)


@pytest.mark.parametrize(
    ("callback", "match"),
    [
        (lt.BatchSizeWarmup(final=4), "BatchSizeWarmup, which sets the batch size"),
        (GradientAccumulationScheduler({0: 2}), "effective=16.*GradientAccumulationScheduler"),
    ],
)
def test_callbacks_that_decide_on_the_same_are_refused(callback: Callback, match: str) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        find(build(Limited), run=trainer(callbacks=[callback]), effective=16)


# -- several ranks ----------------------------------------------------------------------------------------------------


class Synced(nn.SyncBatchNorm):
    """On CPU, where torch's own does not work."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0)
        torch.distributed.all_reduce(total, group=self.process_group)
        return x - total / len(x) / torch.distributed.get_world_size(self.process_group)


class Norms(Net):
    """With buffers, which DDP would broadcast; its limit depends on the rank."""

    where = "forward"
    limits = (11, 7)

    def full(self, size: int) -> None:
        if size > self.limits[int(os.environ["RANK"])]:
            raise torch.OutOfMemoryError(f"CUDA out of memory in {self.where}.")

    def on_fit_start(self) -> None:
        if self.where == "sync":  # not before, since DDP refuses it on CPU
            self.layers[1] = Synced(16)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.where == "transfer" and self.trainer.training:
            self.full(len(batch[0]))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.training or len(batch[0]) == 0:
            return super().training_step(batch, batch_idx)
        self.size = len(batch[0])
        if self.where in ("forward", "sync"):
            self.full(self.size)
        if self.where == "gather" and self.size > 2:
            self.all_gather(batch[0])
        if self.where == "error" and self.size > 2 and os.environ["RANK"] == "1":
            raise ValueError("planned")
        self.log("loss", torch.ones(()), sync_dist=True, on_step=True)
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_after_backward(self) -> None:
        if self.where == "backward":
            self.full(self.size)

    def configure_optimizers(self) -> Any:
        module = self

        class Adam(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                if module.where == "optimizer":
                    module.full(module.size)
                return loss

        return Adam(self.parameters(), lr=0.01)


def made(where: str) -> Any:
    module = build(Norms)
    module.where = where
    return module


def ddp(**settings: Any) -> L.Trainer:
    return trainer(strategy=DDPStrategy(), devices=2, max_epochs=1, **settings)


def on_two_ranks() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for where in ("forward", "transfer", "backward", "optimizer", "sync"):
        module, run = made(where), ddp()
        before = weights(module)
        result = find(module, loader(60), run=run, effective=42 if where == "forward" else None)
        assert_equal(weights(module), before)
        answers[where] = (result.batch_size, run.accumulate_grad_batches, result.effective, result.tried)
    module, run = made("forward"), ddp()
    find(module, loader(60), run=run)
    module.limits = (60, 60)
    run.fit(module, loader(60))
    plain = made("forward")
    plain.limits = (60, 60)
    ddp().fit(plain, loader(60))
    assert_equal(weights(module), weights(plain))
    kinds = (DDPStrategy(static_graph=True), DDPStrategy(find_unused_parameters=True), lt.DDPPreset(compression="bf16"))
    for strategy in kinds:
        run = trainer(strategy=strategy, devices=2)
        answers["kinds"] = [
            *answers.get("kinds", []),
            find(made("backward"), loader(60), run=run, initial=6, max_size=8).batch_size,
        ]
    for where in ("gather", "error"):
        try:
            find(made(where), loader(60), run=ddp())
        except Exception as error:
            answers[where] = f"{type(error).__name__}: {error}"
    answers["data"] = find(made("nowhere"), rank_data(), run=ddp(use_distributed_sampler=False)).batch_size
    for name, refused in {
        "fsdp": (PlainNet, {"strategy": ModelParallelStrategy(data_parallel_size=2)}),
        "manual": (type("Manual", (PlainNet,), {"automatic_optimization": False}), {"strategy": "ddp"}),
    }.items():
        try:
            find(build(refused[0]), run=trainer(devices=2, **refused[1]))
        except MisconfigurationException as error:
            answers[name] = str(error)
    return answers


def rank_data() -> Any:
    return loader((9, 5)[int(os.environ["RANK"])], 2)


@pytest.mark.slow
def test_two_ranks_agree_on_what_fits_on_both() -> None:
    first, second = run_ranks(on_two_ranks)
    for where in ("forward", "transfer", "backward", "optimizer", "sync"):
        assert first[where] == second[where]
        assert first[where][3] == {2: True, 4: True, 8: False, 6: True, 7: True}
    assert first["forward"][:3] == (7, 3, 42)
    assert first["transfer"][:3] == (7, 1, 14)
    assert first["kinds"] == second["kinds"] == [7, 7, 7]
    assert "all_gather in training_step" in first["gather"]
    assert "all_gather in training_step" in second["gather"]
    assert first["error"].startswith("RuntimeError: find_batch_size: another rank has failed")
    assert second["error"] == "ValueError: planned"
    assert first["data"] == second["data"] == 5
    assert "ModelParallelStrategy on 2 devices" in first["fsdp"]
    assert "Manual.automatic_optimization=False on 2 devices" in first["manual"]


# -- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_keeps_its_margin() -> None:
    class Wide(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 2**18), nn.Tanh(), nn.Linear(2**18, 2))

    module, total = build(Wide), torch.cuda.get_device_properties(0).total_memory
    before = weights(module)
    result = find_batch_size(trainer(accelerator="gpu"), module, loader(200_000), margin=0.4)
    assert_equal(weights(module), before)
    for size, fits in ((result.batch_size, True), (result.batch_size + 16, False)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer(accelerator="gpu", max_steps=3).fit(build(Wide), loader(200_000, size))
        assert (torch.cuda.max_memory_allocated() <= 0.6 * total) == fits


@pytest.mark.few(2)
@pytest.mark.parametrize(("margin", "size"), [(0.0, 20), (0.38, 12), (0.88, 2)])
def test_the_memory_of_a_device_decides(margin: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of which each sample takes a twentieth."""

    class Notes(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            samples.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    samples: list[int] = []
    with device("simulated cuda"):
        total = torch.cuda.get_device_properties(0).total_memory
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: samples.clear())
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: max(samples, default=0) * total // 20)
        result = find_batch_size(trainer(accelerator="cuda"), build(Notes), loader(200), margin=margin)
    assert result.batch_size == size
