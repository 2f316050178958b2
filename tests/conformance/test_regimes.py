"""Every public trick in every regime: right (equal to a reference) or refused by name. There is no third state."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.settings import SETTINGS, Trick
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    assert_close,
    assert_equal,
    build,
    fit,
    loader,
    quiet,
    rank_loader,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.averages import NaiveEMA

tricks = pytest.mark.parametrize("trick", SETTINGS.values(), ids=SETTINGS.keys())


def run(trick: Trick, state: str = "on", base: type[Net] = NormNet, **settings: Any) -> dict[str, torch.Tensor]:
    """The end weights of a fit with the trick."""
    module = build(trick.module(base, state))
    fit(module, callbacks=trick.make_callbacks(state), **settings)
    return weights(module)


class Compiled(PlainNet):
    """The network runs compiled."""

    def setup(self, stage: str) -> None:
        self.run = torch.compile(self.layers, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}


@tricks
def test_the_trick_does_something_unless_it_is_to_be_neutral(trick: Trick) -> None:
    plain = build(NormNet)
    fit(plain)
    same = all(torch.equal(a, b) for a, b in zip(run(trick).values(), weights(plain).values(), strict=True))
    assert same == trick.neutral


regimes = pytest.mark.parametrize(
    "regime",
    [
        dict,
        lambda: {"precision": "bf16-mixed"},
        lambda: {"precision": "64-true"},
        fp16,
        lambda: {"accumulate_grad_batches": 4},
        lambda: {"gradient_clip_val": 0.1},
        lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        lambda: {"strategy": "single_bf16", "accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    ],
    ids=["fp32", "bf16-mixed", "fp64", "fp16", "accumulate", "clip-norm", "clip-value", "single_bf16"],
)


@regimes
def test_an_average_equals_a_naive_one(regime: Any) -> None:
    naive, module = NaiveEMA(0.9), build(NormNet)
    fit(module, callbacks=[lt.EMA(0.9, warmup=False), naive], **regime())
    naive.assert_equals(module.state_dict())


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}, {"max_steps": 5}],
    ids=str,
)
def test_a_preset_equals_strategy_and_precision_apart(settings: dict[str, Any]) -> None:
    together, apart = build(Compiled), build(Compiled)
    fit(together, strategy="single_bf16", **settings)
    fit(apart, precision="bf16-mixed", **settings)
    assert_equal(weights(together), weights(apart))


def preset_and_apart(settings: dict[str, Any]) -> None:
    ours = {"strategy": "ddp_bf16"}
    theirs = {"strategy": DDPStrategy(gradient_as_bucket_view=True), "precision": "bf16-mixed"}
    ended = []
    for strategy in (ours, theirs):
        module = build(Compiled)
        fit(module, train=rank_loader(), devices=2, use_distributed_sampler=False, **strategy, **settings)
        ended.append(weights(module))
    assert_equal(*ended)


def test_two_ranks_of_a_preset_equal_strategy_and_precision_apart() -> None:
    run_ranks(preset_and_apart, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})


@tricks
@regimes
def test_the_no_op_limit_is_bit_equal_to_a_run_without(trick: Trick, regime: Any) -> None:
    if trick.accumulates and "accumulate_grad_batches" in regime():
        with pytest.raises(MisconfigurationException, match="accumulate_grad_batches"):
            run(trick, "off", Net, **regime())
        return
    plain = build(Net)
    fit(plain, **regime())
    assert_equal(run(trick, "off", Net, **regime()), weights(plain))


def two_ranks(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    trick = SETTINGS[name]
    ended = run(trick, base=PlainNet, devices=2, train=rank_loader(), use_distributed_sampler=False, **settings)
    return {key: value.numpy() for key, value in ended.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_bf16"])
def test_two_ranks_agree_and_equal_one_process_on_their_batches(name: str, strategy: str) -> None:
    first, second = run_ranks(two_ranks, name, {"strategy": strategy})
    assert all((first[key] == second[key]).all() for key in first)
    settings = {"strategy": "single_bf16"} if strategy == "ddp_bf16" else {}
    apart = {"train": loader(48), "accumulate_grad_batches": 2}
    together = {"train": loader(48, batch_size=16)}
    alone = run(SETTINGS[name], base=PlainNet, **(together if SETTINGS[name].accumulates else apart), **settings)
    wide = SETTINGS[name].accumulates and strategy == "ddp_bf16"  # 16 bits round sums over other batches differently
    for key, value in alone.items():
        torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-3 if wide else 1e-5, rtol=1e-4)


# torch's compiler looks at it where a hook interrupts a network
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@tricks
def test_a_compiled_network_gives_the_same(trick: Trick) -> None:
    eager, compiled = run(trick, base=PlainNet), run(trick, base=Compiled)
    assert_close({name: compiled[name] for name in eager}, eager)


@tricks
def test_resume_is_bit_exact(trick: Trick, tmp_path: Any) -> None:
    whole = run(trick, max_epochs=4)

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    half = build(trick.module(NormNet, "on"))
    fit(half, callbacks=[*trick.make_callbacks("on"), Save()], max_epochs=4)
    assert_equal(run(trick, max_epochs=4, ckpt_path=tmp_path / "half.ckpt"), whole)


@tricks
def test_the_same_objects_serve_a_second_trainer_and_one_after_an_exception(trick: Trick) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("planned")

    fresh, callbacks = run(trick), trick.make_callbacks("on")
    with pytest.raises(RuntimeError, match="planned"):
        fit(build(trick.module(NormNet, "on")), callbacks=[*callbacks, Stop()])
    for _ in range(2):
        module = build(trick.module(NormNet, "on"))
        fit(module, callbacks=callbacks)
        assert_equal(weights(module), fresh)


class YamlSAMNet(lt.SAMMixin, NormNet):
    """Takes SAM's settings from a configuration file."""

    def __init__(self, sam: lt.SAM | None = None, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.sam = sam or lt.SAM()


@pytest.mark.parametrize("name", [name for name, trick in SETTINGS.items() if trick.yaml])
def test_a_configuration_file_gives_the_same(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = SETTINGS[name].yaml or {}
    settings = {**quiet, "max_epochs": 2, **yaml.get("trainer", {})}
    model = {"class_path": "tests.nets.NormNet", **yaml.get("model", {})}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": settings, "model": model, "seed_everything": 3}))
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(tmp_path / "config.yaml")])
    cli = LightningCLI(save_config_callback=None, run=False)
    pl.seed_everything(7, verbose=False)
    cli.trainer.fit(cli.model, loader(), loader(24))
    assert_equal(weights(cli.model), run(SETTINGS[name]))


class ShardedNet(PlainNet):
    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Gather(Callback):
    """The whole weights at the end, in fp32, put together from their shards."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            pl_module.layers.reshard()  # validation leaves the root unsharded
            named = dict(pl_module.named_parameters())
            self.weights = {name: weight.full_tensor().detach() for name, weight in named.items()}
        else:
            from deepspeed.utils import safe_get_full_fp32_param

            named = dict(pl_module.named_parameters())
            self.weights = {name: safe_get_full_fp32_param(weight) for name, weight in named.items()}


def sharded(name: str, engine: str) -> dict[str, Any] | str:
    fsdp = engine == "FSDP2"
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if fsdp else cpu_deepspeed()
    trick, gather = SETTINGS[name], Gather()
    module = build(trick.module(ShardedNet if fsdp else PlainNet, "on"))
    callbacks = [*trick.make_callbacks("on"), gather]
    try:
        fit(
            module,
            train=rank_loader(),
            callbacks=callbacks,
            strategy=strategy,
            devices=2,
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:
        return str(error)
    return {name: weight.numpy() for name, weight in gather.weights.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("engine", ["FSDP2", "DeepSpeed"])
def test_sharded_weights_are_right_or_refused_by_name(name: str, engine: str) -> None:
    first, _ = run_ranks(sharded, name, engine)
    if engine in SETTINGS[name].refused:
        assert {"FSDP2": "ModelParallelStrategy", "DeepSpeed": "DeepSpeedStrategy"}[engine] in first
    else:
        apart = {"train": loader(48), "accumulate_grad_batches": 2}  # the batches of both ranks
        together = {"train": loader(48, batch_size=16)}
        alone = run(SETTINGS[name], base=PlainNet, **(apart if SETTINGS[name].by_batches else together))
        assert_close({key: torch.from_numpy(value) for key, value in first.items()}, alone, 1e-5)


def accumulating_across_epochs() -> str:
    module = build(SETTINGS["cosine"].module(PlainNet, "on"))
    with pytest.raises(lt.UnknownTotalSteps) as caught:
        fit(module, strategy=cpu_deepspeed(), devices=2, accumulate_grad_batches=2)
    return str(caught.value)


def test_accumulation_by_deepspeed_is_not_counted_but_refused() -> None:
    first, second = run_ranks(accumulating_across_epochs)
    assert first == second == "CPUDeepSpeedStrategy accumulates gradients across epochs; pass total_steps=..."
