"""``ddp_compressed_bf16`` and its other compressions, in two real processes, beside naive references."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.strategies.ddp.compression import average, make_compressor
from lightning_tricks.strategies.ddp.preset import DDPPreset
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, weights
from tests.ranks import run_ranks

EPOCHS = 2


class WideNet(PlainNet):
    """Matrices worth compressing, and a layer that gets gradients of zeros."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
        self.idle = nn.Linear(64, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.idle(batch[0].new_ones(64)).sum()


class SGDNet(PlainNet):
    """Plain SGD: averaging weights and averaging gradients are the same."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class AdamNet(PlainNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def run(kind: type[PlainNet] = PlainNet, *, arguments: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A fit of this rank's half of the data in fp32; gives the Trainer and the module."""
    strategy = lt.preset("ddp_compressed_bf16", **{"precision": "32-true", **(arguments or {})})
    defaults = {"devices": 2, "use_distributed_sampler": False, "max_epochs": EPOCHS, "train": rank_loader()}
    module = build(kind)
    return fit(module, **{**defaults, **strategy, **settings}), module


def trained(*args: Any, **settings: Any) -> dict[str, Tensor]:
    return weights(run(*args, **settings)[1])


# -- 16 bits ----------------------------------------------------------------------------------------------------------


def sixteen_bits(folder: str) -> dict[str, Any]:
    """All fits with rounded gradients."""
    found = {}
    for name in ("none", "bf16", "fp16"):
        found[name] = trained(arguments={"compression": name})
        found[f"{name}_clipped"] = trained(
            arguments={"compression": name}, accumulate_grad_batches=2, gradient_clip_val=0.1
        )
    found["named"] = trained(arguments={})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for name in ("bf16", "fp16"):
        plugin = MixedPrecision("16-mixed", "cpu", scaler=copy.deepcopy(scaler))
        arguments = {"compression": name, "precision": "16-mixed"}
        settings = {"plugins": [plugin], "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
        found[f"{name}_scaled"] = trained(arguments=arguments, **settings)
        found[f"{name}_scale"] = plugin.scaler.get_scale()
    found["users"] = trained(arguments={"compression": "none", "ddp_comm_hook": halve})
    found["resumed"] = resumed(folder, PlainNet, arguments={})
    return found


def halve(_, bucket):  # torch compares annotations and does not read strings
    return dist.all_reduce(bucket.buffer().div_(4), async_op=True).get_future().then(lambda done: done.value()[0])


def resumed(folder: str, kind: type[PlainNet], **settings: Any) -> dict[str, Tensor]:
    path = f"{folder}/1.ckpt"
    run(kind, max_epochs=1, **settings)[0].save_checkpoint(path)
    return trained(kind, ckpt_path=path, **settings)


def naive(kind: type[PlainNet], travel: Callable[[Tensor], Tensor], factor: float = 1.0) -> dict[str, Tensor]:
    """Two ranks in one process: the gradients of both, rounded, averaged in what they travel in."""
    module = build(kind)
    optimizer = module.configure_optimizers()
    batches = list(loader(48))
    for step in range(3 * EPOCHS):
        gradients = []
        for x, y in batches[2 * (step % 3) : 2 * (step % 3) + 2]:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            gradients.append([travel(parameter.grad) for parameter in module.parameters()])
        for parameter, first, second in zip(module.parameters(), *gradients, strict=True):
            parameter.grad = (first / 2 + second / 2).float() * factor
        optimizer.step()
    return weights(module)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(sixteen_bits, str(tmp_path_factory.mktemp("bits")))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_are_rounded_and_averaged_in_16_bits(
    sixteen: list[dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    assert_close(sixteen[0][name], naive(PlainNet, lambda gradient: gradient.to(dtype)), 1e-6)
    assert_close(sixteen[0]["none"], naive(PlainNet, lambda gradient: gradient), 1e-6)
    assert not torch.equal(sixteen[0][name]["layers.0.weight"], sixteen[0]["none"]["layers.0.weight"])
    assert_close(sixteen[0][name], sixteen[0]["none"], 5e-3)


def test_the_name_says_bf16(sixteen: list[dict[str, Any]]) -> None:
    assert_equal(sixteen[0]["named"], sixteen[0]["bf16"])


def test_ranks_end_equal(sixteen: list[dict[str, Any]]) -> None:
    for name in sixteen[0]:
        if not name.endswith("_scale"):
            assert_equal(sixteen[0][name], sixteen[1][name])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_with_accumulation_clipping_and_scaled_losses(sixteen: list[dict[str, Any]], name: str) -> None:
    assert_close(sixteen[0][f"{name}_clipped"], sixteen[0]["none_clipped"], 5e-3)
    assert_close(sixteen[0][f"{name}_scaled"], sixteen[0]["none"], 0.5)  # fewer steps than without accumulation
    assert sixteen[0][f"{name}_scale"] >= 1.0
    assert all(value.isfinite().all() for value in sixteen[0][f"{name}_scaled"].values())


def test_a_hook_of_the_users_runs_off_cuda_too(sixteen: list[dict[str, Any]]) -> None:
    assert_close(sixteen[0]["users"], naive(PlainNet, lambda gradient: gradient, factor=0.5), 1e-6)


def test_a_resumed_fit_is_exact(sixteen: list[dict[str, Any]]) -> None:
    assert_equal(sixteen[0]["resumed"], sixteen[0]["bf16"])


def written() -> int:
    """Bytes that this process has written, to gloo's sockets too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


class Written(Callback):
    """Bytes written between the first step and the last."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (4, 6):
            self.bytes = written() - getattr(self, "bytes", 0)


def bytes_a_step(names: list[str]) -> dict[str, float]:
    found = {}
    for name in names:
        arguments = {
            "compression": name,
            **({"powersgd_rank": 1, "compression_start": 2} if name == "powersgd" else {}),
        }
        callback = Written()
        run(WideNet, arguments=arguments, callbacks=[callback])
        found[name] = callback.bytes / 2
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="bytes written are read from Linux's /proc")
def test_bytes_on_the_wire_are_halved() -> None:
    whole = 4 * sum(parameter.numel() for parameter in WideNet().parameters())
    for found in run_ranks(bytes_a_step, ["none", "bf16", "fp16", "powersgd"]):
        assert found["none"] == pytest.approx(whole, rel=0.1)
        assert found["bf16"] == pytest.approx(whole / 2, rel=0.1)
        assert found["fp16"] == pytest.approx(whole / 2, rel=0.1)
        assert found["powersgd"] < whole / 4


# -- PowerSGD ---------------------------------------------------------------------------------------------------------


class OverflowNet(WideNet):
    """One loss that is not finite, on one rank, after compression has begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        overflows = self.trainer.global_step == 5 and self.trainer.global_rank == 0
        return loss * float("inf") if overflows else loss


class LateNet(WideNet):
    """A layer whose gradients are zeros at first, after compression has begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        late = self.idle(batch[0].repeat(1, 8)).pow(2).mean()
        return super().training_step(batch, batch_idx) + float(self.trainer.global_step >= 4) * late


def power_sgd(folder: str) -> dict[str, Any]:
    """All fits with thin matrices. Of two ranks' batches of 8 samples a gradient has at most rank 16."""
    found = {"plain": trained(WideNet, arguments={"compression": "none"})}
    for rank in (1, 16):
        arguments = {"compression": "powersgd", "powersgd_rank": rank, "compression_start": 2}
        found[f"rank_{rank}"] = trained(WideNet, arguments=arguments)
    found["late"] = trained(WideNet, arguments={"compression": "powersgd"})
    one = {"compression": "powersgd", "powersgd_rank": 1, "compression_start": 0}
    found["clipped"] = trained(WideNet, arguments=one, accumulate_grad_batches=2, gradient_clip_val=1.0, max_epochs=4)
    found["resumed"] = resumed(folder, WideNet, arguments=one)
    for rank in (1, 2, 4):
        found[f"late_{rank}"] = trained(LateNet, arguments={**one, "powersgd_rank": rank}, max_epochs=4)
    found["late_none"] = trained(LateNet, arguments={"compression": "none"}, max_epochs=4)
    for rank in (1, 4):  # which torch makes orthogonal in two ways
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        arguments = {**one, "powersgd_rank": rank, "precision": "16-mixed"}
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        found[f"overflow_{rank}"] = trained(OverflowNet, arguments=arguments, plugins=[plugin], max_epochs=4)
        found[f"scale_{rank}"] = scaler.get_scale()
    for interval in (2, 1000):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=interval)
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)], "max_epochs": 4}
        found[f"interval_{interval}"] = trained(WideNet, arguments={**one, "precision": "16-mixed"}, **settings)
    return found


@pytest.fixture(scope="module")
def power(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(power_sgd, str(tmp_path_factory.mktemp("power")))


@pytest.mark.slow
def test_at_full_rank_powersgd_is_plain_ddp(power: list[dict[str, Any]]) -> None:
    assert_close(power[0]["rank_16"], power[0]["plain"], 1e-5)


def test_before_its_start_powersgd_is_plain_ddp(power: list[dict[str, Any]]) -> None:
    assert_close(power[0]["late"], power[0]["plain"], 1e-6)


def test_at_rank_1_powersgd_is_near_plain_ddp(power: list[dict[str, Any]]) -> None:
    assert not torch.equal(power[0]["rank_1"]["layers.2.weight"], power[0]["plain"]["layers.2.weight"])
    assert_close(power[0]["rank_1"], power[0]["plain"], 0.05)


@pytest.mark.parametrize("name", ["rank_1", "rank_16", "clipped", "resumed", "overflow_1", "overflow_4"])
def test_powersgds_ranks_end_equal_and_finite(power: list[dict[str, Any]], name: str) -> None:
    assert_equal(power[0][name], power[1][name])
    assert all(value.isfinite().all() for value in power[0][name].values())


@pytest.mark.parametrize("rank", [1, 4])
def test_an_overflow_is_not_fed_back(power: list[dict[str, Any]], rank: int) -> None:
    start = weights(build(OverflowNet))
    assert not torch.equal(power[0][f"overflow_{rank}"]["layers.2.weight"], start["layers.2.weight"])
    assert power[0][f"scale_{rank}"] == 2.0**10 * 2**4  # twice doubled, halved, thrice doubled in 12 steps


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_after_gradients_of_zeros_others_get_through(power: list[dict[str, Any]], rank: int) -> None:
    start = weights(build(LateNet))["idle.weight"]
    whole, thin = (power[0][name]["idle.weight"] - start for name in ("late_none", f"late_{rank}"))
    assert F.cosine_similarity(whole.flatten(), thin.flatten(), dim=0) > 0.5
    assert thin.norm() > 0.5 * whole.norm()
    assert_equal(power[0][f"late_{rank}"], power[1][f"late_{rank}"])


def test_what_was_lost_is_scaled_as_the_losses_are(power: list[dict[str, Any]]) -> None:
    assert_close(power[0]["interval_2"], power[0]["interval_1000"], 1e-3)


# -- local SGD --------------------------------------------------------------------------------------------------------


class Watching(Callback):
    """A weight of this rank after each step, and as its validation sees it."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append(next(pl_module.parameters()).detach().clone())

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.validated.append(next(pl_module.parameters()).detach().clone())


class Halt(Callback):
    """Ends training in the middle of a period and an epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 1


class FewBits(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("adamw4bit", self.layers, 0.01)  # which knows no Trainer


def local_sgd(folder: str) -> dict[str, Any]:
    found = {}
    every = {name: {"compression": "local_sgd", "local_sgd_period": period} for name, period in (("1", 1), ("2", 2))}
    for name, kind in (("1", SGDNet), ("2", PlainNet), ("adam", AdamNet)):
        watching = Watching()
        settings = {"callbacks": [watching], "val_check_interval": 1 if name == "adam" else 1.0}
        found[name] = trained(kind, arguments=every.get(name, {"compression": "local_sgd"}), **settings)
        found[f"{name}_steps"], found[f"{name}_validated"] = watching.steps, watching.validated
    found["plain"] = trained(SGDNet, arguments={"compression": "none"})
    found["start"] = trained(PlainNet, arguments={"compression": "local_sgd", "compression_start": 99})
    found["plain_start"] = trained(PlainNet, arguments={"compression": "none"})
    found["odd_end"] = trained(PlainNet, arguments={"compression": "local_sgd"}, max_steps=4, max_epochs=-1)
    found["stopped"] = trained(
        PlainNet, arguments={"compression": "local_sgd"}, callbacks=[EarlyStopping("val_loss", stopping_threshold=9.0)]
    )
    found["halted"] = trained(arguments=every["2"], callbacks=[Halt()], limit_val_batches=0)
    whole = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    checkpoints = {"callbacks": [whole], "enable_checkpointing": True}
    found["saved"] = trained(AdamNet, arguments=every["2"], **checkpoints)
    found["resumed"] = trained(AdamNet, arguments=every["2"], **checkpoints, ckpt_path=f"{folder}/epoch=0.ckpt")
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    scaled = {"compression": "local_sgd", "precision": "16-mixed"}
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    found["scaled"] = trained(arguments=scaled, plugins=[plugin], **settings)
    with pytest.raises(
        MisconfigurationException, match=r"'ddp_compressed_bf16' and WeightAveraging.*: with compression='local_sgd'"
    ):
        run(arguments=every["2"], callbacks=[WeightAveraging()])
    with pytest.raises(
        MisconfigurationException, match=r"compression='local_sgd' .* and AdamW4bit keeps states in few"
    ):
        trained(FewBits, arguments=every["2"])
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(local_sgd, str(tmp_path_factory.mktemp("local")))


def naive_local_sgd() -> dict[str, Tensor]:
    """Two modules that take steps of their own and are averaged after every second and the last of an epoch."""
    modules = [build(PlainNet) for _ in range(2)]
    optimizers = [module.configure_optimizers() for module in modules]
    batches = list(loader(48))
    for step in range(3 * EPOCHS):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            x, y = batches[2 * (step % 3) + rank]
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        if step % 2 == 1 or step % 3 == 2:
            for first, second in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
                mean = (first.data / 2) + (second.data / 2)
                first.data.copy_(mean)
                second.data.copy_(mean)
    return weights(modules[0])


@pytest.mark.slow
def test_local_sgd_with_period_1_is_plain_ddp(local: list[dict[str, Any]]) -> None:
    assert_close(local[0]["1"], local[0]["plain"], 1e-6)
    assert_close(local[0]["start"], local[0]["plain_start"], 1e-6)


def test_local_sgd_averages_weights_every_second_step(local: list[dict[str, Any]]) -> None:
    assert_close(local[0]["2"], naive_local_sgd(), 1e-6)
    agreed = [
        torch.equal(first, second) for first, second in zip(local[0]["2_steps"], local[1]["2_steps"], strict=True)
    ]
    assert agreed == [False, True, True, True, False, True]  # the third is the last of its epoch


def test_local_sgds_ranks_end_equal(local: list[dict[str, Any]]) -> None:
    for name in ("1", "2", "adam", "odd_end", "stopped", "halted", "start", "scaled", "resumed"):
        assert_equal(local[0][name], local[1][name])


def test_validation_sees_the_same_weights_on_all_ranks(local: list[dict[str, Any]]) -> None:
    assert len(local[0]["adam_validated"]) > 6
    for name in ("2_validated", "adam_validated"):
        assert all(map(torch.equal, local[0][name], local[1][name]))


def test_local_sgd_resumes_exactly(local: list[dict[str, Any]]) -> None:
    for rank in local:
        assert_equal(rank["resumed"], rank["saved"])


# -- on CUDA ----------------------------------------------------------------------------------------------------------


def on_cuda() -> dict[str, Any]:
    return {
        name: trained(arguments={"compression": name, **more}, accelerator="cuda")
        for name, more in (
            ("none", {}),
            ("bf16", {}),
            ("fp16", {}),
            ("powersgd", {"compression_start": 2}),
            ("local_sgd", {"local_sgd_period": 2}),
        )
    }


@pytest.mark.gpu
def test_each_compression_runs_on_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    first, second = run_ranks(on_cuda)
    for name in first:
        assert_equal(first[name], second[name])
        assert_close(first[name], first["none"], 0.05)


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "bf61"}, "compression must be one of .*, got 'bf61'. Did you mean 'bf16'"),
        (
            {"compression": "bf16", "powersgd_rank": 1},
            r"powersgd_rank has no effect with compression='bf16', got 1.*'powersgd'",
        ),
        ({"compression": "none", "compression_start": 1}, "compression_start .*='powersgd' or 'local_sgd'"),
        ({"compression": "powersgd", "local_sgd_period": 2}, "local_sgd_period has no effect .*'powersgd', got 2"),
        ({"compression": "powersgd", "powersgd_rank": 0}, "powersgd_rank must be at least 1, got 0"),
        ({"compression": "local_sgd", "local_sgd_period": 0}, "local_sgd_period must be at least 1, got 0"),
        ({"compression": "local_sgd", "compression_start": -1}, "compression_start must be at least 0, got -1"),
        ({"ddp_comm_hook": halve}, "compression='bf16' brings its own communication hook, got ddp_comm_hook"),
        ({"model_averaging_period": 2}, "compression='bf16' brings its own .*, got model_averaging_period"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lt.preset("ddp_compressed_bf16", **arguments)


def test_what_is_no_number_of_steps_and_what_nothing_takes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"compression_start must be an integer, got 0\.5"):
        lt.preset("ddp_compressed_bf16", compression="powersgd", compression_start=0.5)
    with pytest.raises(TypeError, match=r"DDPPreset has no argument bucket; DDPStrategy has .* bucket_cap_mb, .*"):
        DDPPreset(bucket=25)
    for name in ("kwargs", "module"):
        with pytest.raises(TypeError, match=f"DDPPreset has no argument {name}"):
            DDPPreset(**{name: 3})


def test_an_unknown_compression_is_refused_beneath_the_preset() -> None:
    assert make_compressor("none") is None
    with pytest.raises(ValueError, match="compression must be one of"):
        make_compressor("zip")  # type: ignore[arg-type]


def averaged() -> list[Tensor]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    tensors = [
        torch.full((2, 2), float(rank)),
        torch.full((3,), 2.0 * rank, dtype=torch.bfloat16),
        torch.ones(1) * rank,
    ]
    views = [tensor.view(-1) for tensor in tensors]
    average(tensors)
    assert all(torch.equal(view, tensor.view(-1)) for view, tensor in zip(views, tensors, strict=True))  # in place
    return tensors


def test_tensors_are_averaged_in_place_and_in_their_dtypes() -> None:
    for tensors in run_ranks(averaged):
        assert [tensor.unique().tolist() for tensor in tensors] == [[0.5], [1.0], [0.5]]
        assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bfloat16, torch.float32]
