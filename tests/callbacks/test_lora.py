"""LoRA: adapters train and nothing else does, checkpoints hold them alone, and merged weights are the network."""

from __future__ import annotations

import copy
import os
import pickle
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessRaisedException
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.checkpoints.folders import lazy_weights
from lightning_tricks.core.adapters.inject import adapted_layers
from lightning_tricks.strategies.fsdp2.preset import FSDP2Preset
from lightning_tricks.strategies.zero.preset import ZeROPreset
from lightning_tricks_cli.main import main as command
from tests.conformance.runs import Steps
from tests.device.devices import CUDA, device
from tests.few import few
from tests.nets import (
    TWO,
    Net,
    NormNet,
    PlainNet,
    SaveAt,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    trained,
    trainer,
    weights,
)
from tests.ranks import run_cases, run_ranks
from tests.refusals import assert_refused


def lora(**settings: Any) -> lt.LoRA:
    return lt.LoRA("layers.0", **{"r": 2, "train": r"layers\.[23]", **settings})


def saved(module: Any, path: Path, **settings: Any) -> Any:
    """A checkpoint after a fit."""
    fit(module, callbacks=[lora()], **settings).save_checkpoint(path)
    return torch.load(path, weights_only=True)


def as_loader(batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)


# -- what trains ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_adapters_and_what_train_selects_move_and_the_base_does_not(variant: str) -> None:
    module, before = build(NormNet), weights(build(NormNet))
    fit(module, callbacks=[lora(variant=variant)])
    after = weights(module)
    assert torch.equal(after["layers.0.base_layer.weight"], before["layers.0.weight"])
    assert torch.equal(after["layers.0.base_layer.bias"], before["layers.0.bias"])
    assert torch.equal(after["layers.1.weight"], before["layers.1.weight"])  # BatchNorm, which train= does not select
    assert after["layers.0.lora_B.default.weight"].any()
    assert not torch.equal(after["layers.3.weight"], before["layers.3.weight"])
    assert ("layers.0.lora_magnitude_vector.default.weight" in after) == (variant == "dora")


def test_layers_that_setup_and_configure_model_make_get_adapters() -> None:
    class Later(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.layers = self.layers, None

        def setup(self, stage: str) -> None:
            self.layers = self.layers or self.made

    class Last(Later):
        def setup(self, stage: str) -> None:
            pass

        def configure_model(self) -> None:
            Later.setup(self, "fit")

    expected = trained(PlainNet, lora())
    for kind in (Later, Last):
        found = trained(kind, lora())
        assert_equal({name: found[name] for name in expected}, expected)


def test_a_second_fit_goes_on_and_needs_the_same_settings() -> None:
    module = build(NormNet)
    fit(module, callbacks=[lora()])
    before = weights(module)
    fit(module, callbacks=[lora()], max_epochs=1)
    assert weights(module).keys() == before.keys()
    assert not torch.equal(*(w["layers.0.lora_B.default.weight"] for w in (before, weights(module))))
    changed: list[dict[str, Any]] = [{"r": 4}, {"dropout": 0.1}, {"train": ()}]
    for settings in changed:
        with pytest.raises(MisconfigurationException, match="from an earlier LoRA"):
            fit(module, callbacks=[lora(**settings)])


# -- LoRA+ and the names of peft --------------------------------------------------------------------------------------


class Scheduled(PlainNet):
    """Has a schedule whose groups are made before the adapters' are split."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def rates(run: Any) -> dict[str, float]:
    """The learning rates of the last step, by parameter."""
    names = {id(parameter): name for name, parameter in run.lightning_module.named_parameters()}
    return {names[id(p)]: group["lr"] for group in run.optimizers[0].param_groups for p in group["params"]}


@pytest.mark.parametrize("kind", [PlainNet, Scheduled])
def test_b_has_a_multiple_of_the_learning_rate_of_a(kind: Any) -> None:
    alone, ratio = (rates(fit(build(kind), callbacks=[lora(lr_ratio=ratio)])) for ratio in (1.0, 16.0))
    assert alone.keys() == ratio.keys()
    for name, rate in ratio.items():
        assert rate == pytest.approx(alone[name] * (16 if "lora_B" in name else 1)), name
    assert any("lora_B" in name for name in ratio)


def test_the_weights_are_those_of_pefts_own_optimizer() -> None:
    import peft
    from peft.optimizers import create_loraplus_optimizer

    class WithPeft(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = peft.get_peft_model(self.layers, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"]))

        def configure_optimizers(self) -> Any:
            return create_loraplus_optimizer(self.layers, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=8.0)

    theirs, mine = build(WithPeft), build(PlainNet)
    mine.configure_optimizers = lambda: torch.optim.SGD(mine.parameters(), lr=0.1)
    fit(mine, callbacks=[lt.LoRA("layers.0", r=2, lr_ratio=8.0)], max_steps=0)  # makes adapters
    before = mine.layers[0].state_dict()
    theirs.layers.base_model.model[0].load_state_dict(before)
    fit(theirs)
    fit(mine, callbacks=[lt.LoRA("layers.0", r=2, lr_ratio=8.0)])
    found, expected = mine.layers[0].state_dict(), theirs.layers.base_model.model[0].state_dict()
    assert found["lora_B.default.weight"].any()
    assert_equal(found, expected)


def test_a_ratio_resumes_exactly_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = trained(Scheduled, lora(lr_ratio=4.0), SaveAt(path, epoch=0))
    assert_equal(trained(Scheduled, lora(lr_ratio=4.0), ckpt_path=path), whole)
    with pytest.raises(MisconfigurationException, match=r"saved with lr_ratio=4\.0, .* got lr_ratio=1\.0"):
        fit(build(Scheduled), callbacks=[lora()], max_epochs=2, ckpt_path=path)
    trainer(callbacks=[lora()]).validate(build(Scheduled), loader(), ckpt_path=path, verbose=False)


class OwnSchedule(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

        class Own(torch.optim.lr_scheduler.LRScheduler):
            def get_lr(self) -> list[float]:
                return [0.01 for _ in self.optimizer.param_groups]

        return [optimizer], [Own(optimizer)]


class Hidden(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer


def test_groups_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"LoRA\(lr_ratio=2.0\): .*need a scheduler of .*, got Own"):
        fit(build(OwnSchedule), callbacks=[lora(lr_ratio=2.0)])
    with pytest.raises(MisconfigurationException, match="has made a schedule that it does not return"):
        fit(build(Hidden), callbacks=[lora(lr_ratio=2.0)])


def test_arguments_of_peft_are_answered_with_ours() -> None:
    with pytest.raises(TypeError, match=r"target_modules= of peft is modules=, .*; lora_alpha= of peft is alpha=\."):
        lt.LoRA(target_modules=["q_proj"], lora_alpha=16)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match='use_dora= of peft is variant="dora"'):
        lt.LoRA("q_proj", use_dora=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        lt.LoRA("q_proj", rank=3)  # type: ignore[call-arg]
    assert lora(lr_ratio=2.0)._arguments()["lr_ratio"] == copy.deepcopy(lora(lr_ratio=2.0)).lr_ratio == 2.0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by transformers, in peft
def test_all_linear_layers_are_those_that_peft_takes() -> None:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}

    class Speaks(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers = None
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))

    module = Speaks()
    fit_start(module, lt.LoRA("all-linear"))
    theirs = peft.get_peft_model(
        LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)), peft.LoraConfig(target_modules="all-linear")
    )
    found = {name.removeprefix("model.") for name in adapted_layers(module)}
    assert found == {name.removeprefix("base_model.model.") for name in adapted_layers(theirs)}
    assert len(found) == 14


def fit_start(module: Any, callback: lt.LoRA) -> None:
    """Give a module its adapters, without a step."""
    callback._injected(trainer(callbacks=[callback]), module)


def test_all_linear_layers_are_without_what_trains_and_what_cannot_be_adapted() -> None:
    module = build(NormNet)
    fit_start(module, lt.LoRA(["all-linear"], train=r"layers\.3"))
    linear = [name for name, layer in build(NormNet).named_modules() if type(layer) is nn.Linear]
    assert [*adapted_layers(module)] == [name for name in linear if name != "layers.3"]
    assert "layers.3" in linear
    with pytest.raises(MisconfigurationException, match=r"modules='all-linear' selects linear layers .* has none but"):
        fit_start(build(NormNet), lt.LoRA("all-linear", train="layers"))


# -- combinations -----------------------------------------------------------------------------------------------------


def ended(*callbacks: Callback, base: Any = NormNet, **settings: Any) -> dict[str, Tensor]:
    return trained(base, lora(), *callbacks, **settings)


@pytest.mark.slow
def test_a_trick_at_its_limit_changes_nothing() -> None:
    alone = ended()
    assert_equal(ended(lt.EMA(0)), alone)
    assert_equal(ended(lt.SAMCallback(0.0)), alone)
    assert_equal(ended(lt.SWA(start=1.0, recalibrate_batchnorm=False)), alone)
    assert_equal(ended(lt.LRSchedule("cosine", floor=1.0)), alone)
    assert_equal(ended(lt.ActivationCheckpointing("^layers$")), alone)
    assert_close(ended(lt.Compile("layers", backend="aot_eager")), alone)


def test_layer_decay_finds_the_layers_of_adapters() -> None:
    class Transformer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            import timm

            self.net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=48, num_classes=2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return lt.optimizer("adamw", self, 0.1, layer_decay=0.5)

    batches = as_loader([(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))])
    module = build(Transformer)
    run = fit(module, train=batches, limit_val_batches=0, callbacks=[lt.LoRA("attn.qkv", r=2, train="head")])
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = run.optimizers[0].param_groups
    rates = {names[id(parameter)]: group["lr"] for group in groups for parameter in group["params"]}
    assert rates["net.head.weight"] == 0.1
    for block, rate in (2, 0.05), (1, 0.025), (0, 0.0125):
        for part in "AB":
            assert rates[f"net.blocks.{block}.attn.qkv.lora_{part}.default.weight"] == pytest.approx(rate)


@pytest.mark.slow
def test_an_adapter_checkpoint_of_a_llama_is_small_and_its_fsdp2_run_equal(tmp_path: Path) -> None:
    sizes, found = {}, {}
    for name, callbacks in {"whole": [], "adapter": [lt.LoRA("q_proj|v_proj", r=4)]}.items():
        module = build(Llama)
        run = fit(module, train=rank_tokens(whole=True), limit_val_batches=0, callbacks=callbacks, max_epochs=1)
        run.save_checkpoint(tmp_path / name)
        sizes[name], found[name] = (tmp_path / name).stat().st_size, module
    assert sizes["adapter"] <= 0.03 * sizes["whole"]
    first, second = run_ranks(llama_on_ranks)
    assert_equal(second, first)
    expected = trainable(found["adapter"])
    torch.testing.assert_close(first, {name: expected[name] for name in first}, atol=1e-4, rtol=1e-4)


class Llama(L.LightningModule):
    """With three layers and tied embeddings, as a user wraps one."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, tie_word_embeddings=True, **sizes))

    def setup(self, stage: str) -> None:
        torch.manual_seed(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rank_tokens(whole: bool = False) -> DataLoader[Any]:
    tokens = torch.randint(0, 1000, (3, 4, 16), generator=torch.Generator().manual_seed(0))
    return as_loader(list(tokens if whole else tokens[:, int(os.environ["RANK"]) :: 2]))


def llama_on_ranks() -> dict[str, Tensor]:
    callbacks: list[Any] = [lt.LoRA("q_proj|v_proj", r=4), whole := Whole()]
    settings = {"train": rank_tokens(), "limit_val_batches": 0, "max_epochs": 1, **TWO}
    fit(build(Llama), strategy=STRATEGIES["fsdp2"](), callbacks=callbacks, **settings)
    return {name: value for name, value in whole.weights.items() if ".lora_" in name}


@pytest.mark.parametrize("average", [lt.EMA(0.9), lt.SWA(start=3)], ids=["EMA", "SWA"])
def test_averages_are_those_of_what_trains(average: Any, tmp_path: Path) -> None:
    module = build(NormNet)
    base = weights(module)["layers.0.weight"]
    run = fit(module, callbacks=[lora(), average])
    run.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]
    (kept,) = (one["raw"] for key, one in state.items() if key.startswith(type(average).__name__))
    assert "layers.0.lora_A.default.weight" in kept
    assert not any("base_layer" in name for name in kept)
    assert torch.equal(weights(module)["layers.0.base_layer.weight"], base)
    assert not torch.equal(weights(module)["layers.0.lora_B.default.weight"], ended()["layers.0.lora_B.default.weight"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters_move_in_16_bits_and_the_base_does_not(precision: Any) -> None:
    module, before = build(NormNet), weights(build(NormNet))
    fit(module, callbacks=[lora()], precision=precision)
    base = module.layers[0].base_layer.weight
    assert torch.equal(base, before["layers.0.weight"].to(base.dtype))
    assert module.layers[0].lora_B["default"].weight.any()


def test_a_base_in_16_bits_has_adapters_in_32() -> None:
    module = build(NormNet).bfloat16()
    fit(module, callbacks=[lora()], train=as_loader([(x.bfloat16(), y) for x, y in loader()]), limit_val_batches=0)
    assert module.layers[0].base_layer.weight.dtype == torch.bfloat16
    assert module.layers[0].lora_B["default"].weight.dtype == torch.float32
    assert module.layers[0].lora_B["default"].weight.any()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_what_training_changes_and_no_more(tmp_path: Path) -> None:
    checkpoint = saved(build(NormNet), tmp_path / "a.ckpt")
    tensors = {name for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    adapters = {f"layers.0.lora_{part}.default.weight" for part in "AB"}
    buffers = {"layers.1.running_mean", "layers.1.running_var", "layers.1.num_batches_tracked"}
    assert tensors == {*adapters, *buffers, "layers.3.weight", "layers.3.bias"}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_fresh_module_loads_it(weights_only: bool, tmp_path: Path) -> None:
    module, best = build(NormNet), ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only)
    run = fit(module, callbacks=[lora(), best], enable_checkpointing=True)
    expected = run.test(module, loader(24), ckpt_path="best", verbose=False)
    scored = float(best.best_model_score)
    fresh, other = build(NormNet), trainer(callbacks=[lora()])
    assert other.test(fresh, loader(24), ckpt_path=best.best_model_path, verbose=False) == expected
    assert_equal(weights(fresh), weights(module))
    (validated,) = other.validate(build(NormNet), loader(24), ckpt_path=best.best_model_path, verbose=False)
    assert validated["val_loss"] == pytest.approx(scored)
    predicted = other.predict(build(NormNet), loader(24), ckpt_path=best.best_model_path)
    with torch.no_grad():  # batch by batch, since the rounding of a product depends on the number of rows
        assert torch.equal(torch.cat(predicted), torch.cat([module.eval()(x) for x, _ in loader(24)]))


def test_a_checkpoint_without_the_frozen_weights_that_it_needs_is_not_saved(tmp_path: Path) -> None:
    class Moves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.layers[0].base_layer.weight.data += 1.0

    run = fit(build(NormNet), callbacks=[lora(), Moves()])
    with pytest.raises(MisconfigurationException, match="frozen weights have changed since"):
        run.save_checkpoint(tmp_path / "a.ckpt")
    fit(build(NormNet), callbacks=[lora(save="all"), Moves()]).save_checkpoint(tmp_path / "b.ckpt")


class Draws(NormNet):
    """Draws its weights in a hook of its own, which runs after those of callbacks."""

    def draw(self) -> None:
        for weight in self.parameters():
            weight.data.normal_()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_base_that_is_drawn_anew_is_refused_before_the_first_step(hook: str, precision: Any) -> None:
    kind, steps = type("Draws", (Draws,), {hook: Draws.draw}), Steps()
    with pytest.raises(MisconfigurationException, match="frozen weights have changed since the adapters were made"):
        fit(build(kind), callbacks=[lora(), steps], precision=precision)
    assert steps.made == 0


def test_a_base_that_the_checkpoint_has_may_be_drawn_anew(tmp_path: Path) -> None:
    kind = type("Draws", (Draws,), {"on_train_start": lambda module: module.global_step or Draws.draw(module)})
    whole = trained(kind, lora(save="all"), SaveAt(tmp_path / "a.ckpt", epoch=0))
    assert_equal(trained(kind, lora(save="all"), ckpt_path=tmp_path / "a.ckpt"), whole)


def test_layers_that_are_parametrized_in_the_fit_are_saved_as_others(tmp_path: Path) -> None:
    class Renames(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                for number in (1, 3):  # one that is frozen, and one that trains
                    parametrize.register_parametrization(module.layers[number], "weight", nn.Identity())

    run = fit(build(NormNet), callbacks=[lora(), Renames()], max_epochs=2)
    run.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert "layers.3.parametrizations.weight.original" in state
    assert "layers.1.parametrizations.weight.original" not in state


@pytest.mark.parametrize("save", ["adapter", "all"])
def test_nothing_else_loads_it(save: Any, tmp_path: Path) -> None:
    fit(build(NormNet), callbacks=[lora(save=save)]).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=r"callbacks=\[LoRA\(...\)\]"):
        NormNet.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=r'named "layers.0.weight", expected torch.Tensor'):
        NormNet.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    with pytest.raises(RuntimeError, match="expected torch"):
        build(NormNet).load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"callbacks=\[LoRA"):
        trainer().test(build(NormNet), loader(24), ckpt_path=tmp_path / "a.ckpt")


def test_all_saves_the_base_too(tmp_path: Path) -> None:
    module = build(NormNet)
    fit(module, callbacks=[lora(save="all")]).save_checkpoint(tmp_path / "a.ckpt")
    other = NormNet()  # with another base
    trainer(callbacks=[lora(save="all")]).test(other, loader(24), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_equal(weights(other), weights(module))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(build(NormNet), tmp_path / "a.ckpt")
    fit(build(NormNet)).save_checkpoint(tmp_path / "plain.ckpt")
    del checkpoint["state_dict"]["layers.3.bias"]
    torch.save(checkpoint, tmp_path / "part.ckpt")
    other = NormNet()
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        (other, {}, "a.ckpt", "checksum="),
        (build(NormNet), {"r": 4}, "a.ckpt", "r=2 and 4"),
        (build(NormNet), {"variant": "dora"}, "a.ckpt", "variant='lora' and 'dora'"),
        (build(NormNet), {"alpha": 1.0}, "a.ckpt", "alpha=4 and 1.0"),
        (build(NormNet), {"train": "layers.3.weight"}, "a.ckpt", r"trained=\['layers.3.bias'\]"),
        (build(NormNet), {"save": "all"}, "a.ckpt", "save='adapter', got save='all'"),
        (build(NormNet), {}, "plain.ckpt", "was saved without LoRA"),
        (build(NormNet), {}, "part.ckpt", "differ in layers.3.bias"),
    ]
    for module, settings, name, message in cases:
        before = module.layers[3].weight.detach().clone()
        for stage in ("fit", "test"):
            with pytest.raises(MisconfigurationException, match=message):
                run = trainer(callbacks=[lora(**settings)], max_epochs=3)
                batches = (loader(), loader()) if stage == "fit" else (loader(),)
                getattr(run, stage)(module, *batches, ckpt_path=tmp_path / name)
        assert torch.equal(module.layers[3].weight, before)


# -- refusals ---------------------------------------------------------------------------------------------------------


class Shared(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 16)
        self.other.weight = self.layers[0].weight


class Twice(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.layers[0]


class TwoNames(PlainNet):
    """As the blocks of N-BEATS, of which one module has the same layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return self.first(hidden) + self.second(hidden).tanh()


class Attention(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.wide = nn.Conv1d(1, 1, 3, dilation=2)
        self.deep = nn.Conv1d(4, 4, 3, groups=2)
        self.ring = nn.Conv1d(4, 4, 3, padding_mode="circular")
        self.table = nn.Embedding(4, 4, max_norm=1.0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.lazy = nn.LazyLinear(4)


class Dropped(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        lt.add_stochastic_depth(self, 0.5, modules="layers.0")


class Meta(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers.to("meta")


class MadeEarly(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Unfreezes(PlainNet):
    def on_fit_start(self) -> None:
        self.requires_grad_(True)


REFUSED: list[tuple[Any, dict[str, Any], list[Callback], str]] = [
    (PlainNet, {"modules": "layer.0"}, [], "is neither. Names are 'layers.0'"),
    (PlainNet, {"train": "haed"}, [], "train: a pattern must be found"),
    (PlainNet, {"modules": "Tanh"}, [], "selects no layer that takes an adapter, but 'layers.1' of class Tanh"),
    (PlainNet, {"train": "layers.0"}, [], "train selects the weights of layers.0"),
    (Shared, {}, [], "used in more than one place"),
    (Twice, {}, [], "used in more than one place"),
    (TwoNames, {"modules": "first"}, [], "'first' .* used in more than one place"),
    (Attention, {"modules": "out_proj"}, [], "inside nn.MultiheadAttention"),
    *((Attention, {"modules": name}, [], f"{name}.*convolution") for name in ("wide", "deep", "ring")),
    (Attention, {"modules": "table"}, [], "max_norm"),
    (Attention, {"modules": "normed"}, [], "parametrization"),
    (Attention, {"modules": "lazy"}, [], "shape yet"),
    (Dropped, {}, [], "has forward hooks .* and the adapter runs past them"),
    (MadeEarly, {}, [], "configure_optimizers makes lack layers.0.lora_A"),
    (Unfreezes, {}, [], "requires_grad of layers.0.base_layer"),
    (PlainNet, {}, [lt.GradualUnfreeze([1], parameters=["layers.0"])], "unfreezes weights that the other keeps"),
    (PlainNet, {}, [BackboneFinetuning()], "unfreezes weights that the other keeps"),
]


@pytest.mark.parametrize(("kind", "settings", "callbacks", "message"), REFUSED, ids=[case[-1] for case in REFUSED])
def test_what_cannot_be_right_is_refused_before_a_step(
    kind: Any, settings: dict[str, Any], callbacks: list[Callback], message: str
) -> None:
    module, steps = build(kind), Steps()
    own = lt.LoRA(**{"modules": "layers.0", **settings})
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[own, *callbacks, steps])
    assert not steps.made


@pytest.mark.slow
def test_processes_whose_module_is_lost_are_refused() -> None:
    with pytest.raises(ProcessRaisedException, match="LoRA changes the module in the process that trains"):
        fit(build(PlainNet), callbacks=[lora()], strategy="ddp_spawn", devices=2)


def test_weights_without_values_are_refused() -> None:
    with pytest.raises(NotImplementedError) as caught:  # Lightning's, when it takes the module back to the CPU
        fit(build(Meta), callbacks=[lora()])
    assert "LoRA: Meta has weights on the meta device" in str(caught.value.__context__)


def test_arguments_are_checked() -> None:
    cases = [
        (ValueError, {"modules": ()}, "modules"),
        (ValueError, {"r": 0}, "r"),
        (ValueError, {"alpha": 0}, "alpha"),
        (ValueError, {"alpha": 10**400}, "alpha"),
        (TypeError, {"alpha": "2"}, "alpha"),
        (ValueError, {"dropout": 1.0}, "dropout"),
        (ValueError, {"variant": "qlora"}, "variant"),
        (ValueError, {"save": "none"}, "save"),
        (TypeError, {"train": 3}, "train"),
        (ValueError, {"lr_ratio": 0.5}, r"lr_ratio must be in \[1.0, "),
        (ValueError, {"base": "nf4", "save": "all"}, "save='all' needs base='keep'"),
    ]
    assert_refused(lambda **given: lt.LoRA(**{"modules": "x", **given}), cases)


def test_adapters_that_another_made_are_refused() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    module = build(PlainNet)
    inject_adapter_in_model(LoraConfig(target_modules=["0"]), module.layers)
    with pytest.raises(MisconfigurationException, match="has other adapters already, in layers"):
        fit(module, callbacks=[lora()])


MISSING = [("peft", {}, "lora"), ("bitsandbytes", {"base": "nf4"}, "8bit")]
MISSING += [("torchao.quantization", {"base": "int8"}, "8bit")]


@pytest.mark.parametrize(("library", "settings", "extra"), MISSING)
def test_a_missing_library_is_named_with_its_extra(library: str, settings: Any, extra: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {library.split('.')[0]}: .*lightning-tricks\[{extra}\]"):
        fit(build(PlainNet), callbacks=[lora(**settings)])


def test_a_sweep_trains_the_adapters_and_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module, before, run = build(NormNet), weights(build(NormNet)), trainer(callbacks=[lora(train=())], max_epochs=1)
    found = lt.find_lr(run, module, loader(), steps=20)
    assert_equal(weights(module), before)
    assert found.losses != lt.find_lr(trainer(), build(NormNet), loader(), steps=20).losses
    run.fit(module, loader(), loader(24))
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert "layers.0.base_layer.weight" not in torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]


def test_an_adapter_that_the_network_reads_past_is_told() -> None:
    class ReadsPast(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](torch.tanh(nn.functional.linear(x, self.layers[0].weight)))

    with pytest.warns(UserWarning, match=r"the adapters of layers.0 are as they were"):
        fit(build(ReadsPast), callbacks=[lora()])


# -- merging ----------------------------------------------------------------------------------------------------------


GENERATOR = torch.Generator().manual_seed(0)
TOKENS = [(torch.randint(0, 9, (8, 5), generator=GENERATOR), torch.arange(8) % 2) for _ in range(4)]


class Kinds(L.LightningModule):
    """A layer of each kind that takes an adapter."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed = nn.Embedding(9, 6, padding_idx=0)
        self.mix = Conv1D(6, 6)
        self.line = nn.Conv1d(6, 6, 3, stride=2, padding=1)
        self.plane = nn.Conv2d(6, 4, (3, 1), padding=(1, 0))
        self.space = nn.Conv3d(4, 4, 1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.line(self.mix(self.embed(tokens)).transpose(1, 2))
        x = self.space(self.plane(x[..., None])[..., None])[..., 0, 0]
        return self.head(self.norm(self.encoder(x.transpose(1, 2)).mean(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    validation_step = Net.validation_step
    predict_step = Net.predict_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Conditioned(PlainNet):
    """As the networks of scvi-tools, which append a covariate to the inputs of what is an nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(17, 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.cat([x, x[:, :1]], 1) if isinstance(layer, nn.Linear) else x)
        return x


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_adapted_layers_are_still_linear_for_a_network_that_asks(variant: Any) -> None:
    module, x = build(Conditioned), data(8).tensors[0]
    fit(module, callbacks=[lt.LoRA("Linear", r=2, variant=variant)])
    bare = build(Conditioned)
    before = bare(x)
    bare.load_state_dict(lt.merge_adapters(module))
    assert (module(x) - before).abs().max() > 0.01
    torch.testing.assert_close(bare(x), module(x), atol=1e-5, rtol=1e-5)
    module.trainer = None  # type: ignore[assignment]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied(x), module(x), rtol=0, atol=0)
        assert [type(layer) for layer in copied.modules()] == [type(layer) for layer in module.modules()]
    assert repr(module.layers[0]).startswith("lora.Linear(")


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_merged_weights_are_the_adapted_network(variant: Any) -> None:
    module = build(Kinds)
    kinds = ["embed", "mix", "line", "plane", "space", "linear1", "linear2", "head"]
    callback = lt.LoRA(kinds, r=2, alpha=3.0, variant=variant)
    run = fit(module, train=as_loader(TOKENS), limit_val_batches=0, callbacks=[callback], max_epochs=3)
    merged = lt.merge_adapters(module)
    bare = build(Kinds)
    before = bare.state_dict()
    assert list(merged) == list(before)
    assert sum(not torch.equal(merged[name], before[name]) for name in merged) == 8 + 3  # with the statistics
    bare.load_state_dict(merged)
    adapted = module.eval()(TOKENS[0][0])
    torch.testing.assert_close(bare.eval()(TOKENS[0][0]), adapted, atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # not on the fast path of nn.TransformerEncoderLayer, which passes the adapters by
        torch.testing.assert_close(module(TOKENS[0][0]), adapted)
    (predicted,) = run.predict(module, as_loader(TOKENS[:1]))
    torch.testing.assert_close(predicted, adapted)


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("save", ["adapter", "all"])
def test_exported_weights_are_the_merged_ones(save: Any, variant: Any, tmp_path: Path) -> None:
    module = build(NormNet)
    torch.save(module.state_dict(), tmp_path / "base.pt")
    callbacks = [lora(variant=variant, save=save), lt.EMA(0.9)]
    fit(module, callbacks=callbacks).save_checkpoint(tmp_path / "a.ckpt")
    base = {"base": tmp_path / "base.pt"} if save == "adapter" else {}
    lt.export_weights(tmp_path / "a.ckpt", tmp_path / "out.pt", merge=True, **base)
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_equal(exported, lt.merge_adapters(module))
    bare = NormNet()
    bare.load_state_dict(exported)
    x = data(24).tensors[0]
    torch.testing.assert_close(bare.eval()(x), module.eval()(x), atol=1e-5, rtol=1e-5)
    layers = ["--strip-prefix", "layers.", *(["--base", str(base["base"])] if base else [])]
    command(["export", str(tmp_path / "a.ckpt"), "-o", str(tmp_path / "l.safetensors"), "--merge", *layers])
    assert_equal(load_file(tmp_path / "l.safetensors"), bare.layers.state_dict())


def test_an_export_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    base = build(NormNet).state_dict()
    torch.save(base, tmp_path / "base.pt")
    torch.save({**base, "layers.0.weight": base["layers.0.weight"] + 1e-3}, tmp_path / "other.pt")
    torch.save({name.removeprefix("layers."): value for name, value in base.items()}, tmp_path / "inner.pt")
    saved(build(NormNet), tmp_path / "a.ckpt")
    fit(build(NormNet), callbacks=[lora(save="all")]).save_checkpoint(tmp_path / "all.ckpt")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("a.ckpt", {}, "need merge=True"),
        ("a.ckpt", {"merge": True}, "pass base="),
        ("a.ckpt", {"merge": True, "base": tmp_path / "other.pt"}, "not what the adapters .* were trained with"),
        ("a.ckpt", {"merge": True, "base": tmp_path / "inner.pt"}, "its names must be those of the LightningModule"),
        ("all.ckpt", {"merge": True, "base": tmp_path / "base.pt"}, "leave it out"),
        ("base.pt", {"merge": True}, "no adapters of LoRA to merge"),
    ]
    for name, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            lt.export_weights(tmp_path / name, tmp_path / "out.pt", **settings)
    assert not (tmp_path / "out.pt").exists()


class Stateless(Kinds):
    """Without statistics, which peft does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")  # peft's, about layers of two kinds
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_plain_peft_loads_the_exported_adapters(variant: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    module = build(Stateless)
    # Not linear1: plain peft evaluates nn.TransformerEncoderLayer on its fast path, past the adapters.
    callback = lt.LoRA(["embed", "mix", "line$", "plane"], r=2, variant=variant, train="head")
    run = fit(module, train=as_loader(TOKENS), limit_val_batches=0, callbacks=[callback])
    run.save_checkpoint(tmp_path / "a.ckpt")
    lt.export_adapters(tmp_path / "a.ckpt", tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(build(Stateless), tmp_path / "adapters")
    torch.testing.assert_close(loaded.eval()(TOKENS[0][0]), module.eval()(TOKENS[0][0]))

    plain = build(PlainNet)
    fit(plain, callbacks=[lora(variant=variant)]).save_checkpoint(tmp_path / "b.ckpt")
    command(["export", str(tmp_path / "b.ckpt"), "-o", str(tmp_path / "inner"), "--peft", "--strip-prefix", "layers."])
    inner, x = PeftModel.from_pretrained(build(PlainNet).layers, tmp_path / "inner"), data(24).tensors[0]
    torch.testing.assert_close(inner(x), plain(x))


def test_what_peft_cannot_save_is_refused(tmp_path: Path) -> None:
    fit(build(NormNet)).save_checkpoint(tmp_path / "plain.ckpt")
    saved(build(NormNet), tmp_path / "norm.ckpt")
    fit(build(PlainNet), callbacks=[lora()]).save_checkpoint(tmp_path / "a.ckpt")
    fit(build(PlainNet), callbacks=[lora(train=r"layers\.0\.bias")]).save_checkpoint(tmp_path / "bias.ckpt")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("plain.ckpt", {}, "has no adapters of LoRA"),
        ("norm.ckpt", {}, "no place for layers.1.running_mean"),
        ("a.ckpt", {"strip_prefix": "layers.0"}, "outside of 'layers.0.', layers.0"),
        ("bias.ckpt", {}, "'layers.0' has both trained parameters and adapters"),
    ]
    for name, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            lt.export_adapters(tmp_path / name, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    lt.export_adapters(tmp_path / "a.ckpt", tmp_path / "out")
    with pytest.raises(FileExistsError, match="force=True"):
        lt.export_adapters(tmp_path / "a.ckpt", tmp_path / "out")


def test_means_are_those_of_adapters_for_one_base(tmp_path: Path) -> None:
    module = build(NormNet)
    run = fit(module, callbacks=[lora()])
    run.save_checkpoint(tmp_path / "a.ckpt")
    first = module.layers[0].lora_B["default"].weight.detach().clone()
    fit(module, callbacks=[lora()], max_epochs=1).save_checkpoint(tmp_path / "b.ckpt")
    second = module.layers[0].lora_B["default"].weight.detach().clone()
    lt.average_checkpoints([tmp_path / "a.ckpt", tmp_path / "b.ckpt"], tmp_path / "mean.ckpt")
    fresh = build(NormNet)
    trainer(callbacks=[lora()]).test(fresh, loader(24), ckpt_path=tmp_path / "mean.ckpt", verbose=False)
    torch.testing.assert_close(fresh.layers[0].lora_B["default"].weight, (first + second) / 2)
    saved(NormNet(), tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match="for weights of checksum"):
        lt.average_checkpoints([tmp_path / "a.ckpt", tmp_path / "c.ckpt"], tmp_path / "out.ckpt")


# -- quantized bases --------------------------------------------------------------------------------------------------


class Deep(NormNet):
    """With a frozen layer that has no adapter."""

    def __init__(self) -> None:
        super().__init__()
        first, norm, act, head = NormNet().layers
        self.layers = nn.Sequential(
            first, norm, act, nn.Linear(16, 16), nn.TransformerEncoderLayer(16, 2, 8, 0.0), head
        )


def test_a_quantized_base_leaves_the_settings_of_the_compiler() -> None:
    from torch._inductor import config

    before = config.get_config_copy(), torch.get_float32_matmul_precision()
    fit(build(PlainNet), callbacks=[lora(base="int8")], max_epochs=1)
    assert (config.get_config_copy(), torch.get_float32_matmul_precision()) == before


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantized_base_trains_resumes_and_merges(base: Any, variant: Any, tmp_path: Path) -> None:
    def callback() -> lt.LoRA:
        return lora(train=r"layers\.5", base=base, variant=variant)

    module = build(Deep)
    torch.save(module.state_dict(), tmp_path / "base.pt")
    run = fit(module, callbacks=[callback(), lt.EMA(0.9)])
    packed = module.layers[0].base_layer.weight, module.layers[3].weight, module.layers[4].linear1.weight
    assert all(type(weight).__name__ in ("Params4bit", "Int8Tensor") for weight in packed)
    run.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    norm = {f"layers.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    tensors = {name for name, value in state.items() if isinstance(value, Tensor)}
    assert {name for name in tensors if ".lora_" not in name} == {*norm, "layers.5.weight", "layers.5.bias"}
    bare, x = build(Deep), data(24).tensors[0]
    bare.load_state_dict(lt.merge_adapters(module))
    with torch.no_grad():
        torch.testing.assert_close(bare.eval()(x), module.eval()(x), atol=1e-5, rtol=1e-5)
        before = build(Deep).eval()
        first = {name: weight for name, weight in build(Deep).state_dict().items() if "layers.0" in name}
        before.load_state_dict(bare.state_dict() | first)
        assert (before(x) - bare(x)).abs().max() > 1e-3
    lt.export_weights(tmp_path / "a.ckpt", tmp_path / "out.pt", merge=True, base=tmp_path / "base.pt")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(exported["layers.3.weight"], build(Deep).layers[3].weight)  # of before quantizing
    again, resumed = build(Deep), build(Deep)
    fit(again, callbacks=[callback(), SaveAt(tmp_path / "half.ckpt", epoch=0)])
    fit(resumed, callbacks=[callback()], ckpt_path=tmp_path / "half.ckpt")
    assert_equal(trainable(resumed), trainable(again))


@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("base", few(["nf4", "int8"], 1))
def test_a_quantized_base_trains_on_a_device_as_on_the_cpu(base: Any, on: str, tmp_path: Path) -> None:
    whole, there_too, resumed = build(Deep), build(Deep), build(Deep)
    fit(whole, callbacks=[lora(base=base)])
    with device(on) as there:
        settings = {"callbacks": [lora(base=base)], "accelerator": there.name}
        fit(build(Deep), **settings, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
        fit(there_too, **settings)
        fit(resumed, **settings, ckpt_path=tmp_path / "half.ckpt")
        ended, again = ({n: w.cpu() for n, w in trainable(each).items()} for each in (there_too, resumed))
    assert_close(ended, trainable(whole), 1e-6 if there.simulation else 1e-2)
    assert_close(again, ended, 0.0 if there.simulation else 1e-4)


class Speaks(Deep):
    """With a head that it names as models of transformers do."""

    def get_output_embeddings(self) -> nn.Module:
        return self.layers[3]


class Prescaled(PlainNet):
    """With a layer that has one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Linear(1, 4), nn.Flatten(), nn.Linear(32, 2))


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("kind", "selected", "kept", "packed"),
    [
        (Speaks, {"modules": "layers.0", "train": r"layers\.5"}, "layers.3.weight", "layers.4.linear1.weight"),
        (Prescaled, {"modules": r"layers\.3"}, "layers.1.weight", "layers.3.weight"),
    ],
)
def test_the_head_of_a_language_model_and_layers_with_one_input_are_not_quantized(
    kind: Any, selected: dict[str, Any], kept: str, packed: str, base: Any
) -> None:
    module, callback = build(kind), lt.LoRA(**selected, r=2, base=base)
    weight = module.get_parameter(kept).clone()
    estimate = lt.estimate_memory(module, precision="32-true", lora=callback)
    fit(module, callbacks=[callback])
    assert torch.equal(module.get_parameter(kept), weight)
    assert type(module.get_parameter(packed)).__name__ in ("Params4bit", "Int8Tensor")
    assert estimate.weights == sum(map(held, module.parameters()))


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def test_inputs_that_are_cast_to_packed_weights_are_refused() -> None:
    class Casts(PlainNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.to(self.layers[0].weight.dtype))

    with pytest.raises(MisconfigurationException, match=r"got an input of dtype torch\.uint8"):
        fit(build(Casts), callbacks=[lora(base="nf4")])
    fit(build(Casts), callbacks=[lora(base="int8")])


def test_a_base_with_nothing_to_quantize_is_refused() -> None:
    class Convolves(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 2))

    with pytest.raises(MisconfigurationException, match=r"base='nf4'\) quantizes frozen nn.Linear layers, .* has none"):
        fit(build(Convolves), callbacks=[lt.LoRA("Conv1d", train=r"layers\.3", base="nf4")])
    with pytest.raises(MisconfigurationException, match=r"base='int8'\) quantizes weights of 16 or 32 bits, got"):
        fit(build(PlainNet).double(), callbacks=[lora(base="int8")])


@pytest.mark.parametrize("pruned", ["layers.0.base_layer", "layers.0.lora_A.default"])
def test_weights_that_are_pruned_are_not_merged(pruned: str) -> None:
    fit(module := build(PlainNet), callbacks=[lora()], max_epochs=1)
    prune.l1_unstructured(module.get_submodule(pruned), "weight", amount=0.5)
    with pytest.raises(ValueError, match=r"layers\.0\.weight or its adapter is computed from others .*prune\.remove"):
        lt.merge_adapters(module)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("base", few(["keep", "nf4", "int8"], 1))
def test_the_memory_is_what_was_estimated(base: Any, variant: Any) -> None:
    module, callback = build(Deep), lora(train=r"layers\.5", base=base, variant=variant)
    before = weights(module)
    estimate = lt.estimate_memory(module, precision="32-true", lora=callback, batch=next(iter(loader())))
    assert_equal(weights(module), before)
    assert all(parameter.requires_grad for parameter in module.parameters())
    fit(module, callbacks=[callback])
    assert estimate.weights == sum(map(held, module.parameters()))
    assert estimate.gradients == 4 * sum(weight.numel() for weight in trainable(module).values())
    assert estimate.optimizer == 2 * estimate.gradients + 4 * len(trainable(module))  # with the steps
    assert estimate.activations > 0
    assert lt.estimate_memory(build(Deep).to("meta"), precision="32-true", lora=callback).weights == estimate.weights


def held(weight: Any) -> int:
    """The bytes of a weight with all that belongs to it."""
    if type(weight).__name__ == "Int8Tensor":
        return int(weight.qdata.nbytes + weight.scale.nbytes)
    if (packing := getattr(weight, "quant_state", None)) is None:
        return int(weight.nbytes)
    inner = packing.state2
    return int(weight.nbytes + sum(t.nbytes for t in (packing.absmax, packing.code, inner.absmax, inner.code)))


def test_a_suggestion_has_adapters_as_an_alternative() -> None:
    large = lt.Hardware(24e9, host_memory=512e9)
    *_, adapters = lt.suggest_strategy(7 * 10**9, hardware=large).alternatives
    text = "With LoRA(r=8, base='nf4') on all linear layers, single_bf16 takes 4.14 GB on each device: fits."
    assert str(adapters) == text
    with pytest.raises(ValueError, match="Nothing fits.*" + re.escape(text)):
        lt.suggest_strategy(7 * 10**9, hardware=lt.Hardware(24e9))
    with pytest.raises(ValueError, match="trains on a single device or under DDP"):
        lt.estimate_memory(10**9, strategy="fsdp2_bf16", lora=lora(base="nf4"))


# -- ranks ------------------------------------------------------------------------------------------------------------


class Seeded(PlainNet):
    """Its adapters begin with the same numbers in every process, and it trains by Adam."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ShardedByUser(Seeded):
    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "ddp, nf4": lambda: "ddp",
    "ddp, int8": lambda: "ddp",
    "fsdp2": lambda: FSDP2Preset(precision="32-true"),
    "fsdp2, EMA": lambda: FSDP2Preset(precision="32-true"),
    "fsdp2, dora": lambda: FSDP2Preset(precision="32-true"),
    "fsdp2 into a file": lambda: FSDP2Preset(precision="32-true", save_distributed_checkpoint=False),
    "fsdp2 in configure_model": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "zero1": lambda: ZeROPreset(stage=1, precision="32-true"),
    "zero2": lambda: ZeROPreset(stage=2, precision="32-true"),
    "zero3": lambda: ZeROPreset(stage=3, precision="32-true"),
    "zero3, EMA": lambda: ZeROPreset(stage=3, precision="32-true"),
}


class DrawsOnOne(Seeded):
    """Draws the rows of a frozen weight that one rank holds under sharding."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            for name, weight in self.named_parameters():
                if "base_layer" in name:
                    local = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)
                    local.data.normal_()


def drawn_on_one(name: str) -> tuple[str, int]:
    steps = Steps()
    with pytest.raises(MisconfigurationException) as caught:
        fit(build(DrawsOnOne), callbacks=[lora(), steps], strategy=STRATEGIES[name](), devices=2)
    return str(caught.value), steps.made


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_base_that_one_rank_draws_anew_is_refused_by_all(name: str) -> None:
    first, second = run_ranks(drawn_on_one, name)
    assert first == second
    assert "frozen weights have changed since the adapters were made" in first[0]
    assert first[1] == 0


class Whole(Callback):
    """The whole weights when training ends, before a strategy takes the module apart."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if any(hasattr(p, "ds_id") for p in pl_module.parameters()):
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(pl_module.parameters())):
                self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        else:
            self.weights = {name: w for name, w in weights(pl_module).items() if type(w) is Tensor}


def different_weights() -> str:
    torch.manual_seed(int(os.environ["RANK"]))
    with pytest.raises(MisconfigurationException) as caught:
        fit(PlainNet(), callbacks=[lora(base="nf4")], strategy="ddp", devices=2)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_must_have_equal_weights_before_quantizing() -> None:
    first, second = run_ranks(different_weights)
    assert first == second
    assert "the ranks have different weights before quantizing" in first


def callbacks_of(name: str) -> list[Callback]:
    base = next((base for base in ("nf4", "int8") if base in name), "keep")
    made = lora(variant="dora" if "dora" in name else "lora", base=base)
    return [made, lt.EMA(0.9)] if "EMA" in name else [made]


def on_ranks(name: str, folder: str) -> Any:
    """The weights of a whole run, and of one that went on from a checkpoint."""
    kind = ShardedByUser if "configure_model" in name else Seeded
    given: list[dict[str, Any]] = []
    if name == REFUSED_SHARDED:
        with pytest.raises(MisconfigurationException) as caught:
            fit(build(Seeded), callbacks=callbacks_of(name), strategy=STRATEGIES["fsdp2"](), devices=2)
        return str(caught.value)

    def run(epochs: int, path: str | None = None) -> L.Trainer:
        settings = {"train": rank_loader(), "val": loader(), "max_epochs": epochs, "ckpt_path": path, **TWO}
        callbacks: list[Any] = [*callbacks_of(name), whole := Whole()]
        made = fit(build(kind), strategy=STRATEGIES[name](), callbacks=callbacks, **settings)
        given.append(whole.weights)
        return made

    run(2)
    run(1).save_checkpoint(f"{folder}/{name}.ckpt")
    run(2, f"{folder}/{name}.ckpt")
    return given


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Any], Path]]:
    """What the ranks give in a case, and its checkpoint; all quick cases, or all slow ones, in the same processes."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = [*STRATEGIES, REFUSED_SHARDED]
    run = cache(lambda quick: run_cases(on_ranks, [n for n in cases if (n in QUICK) == quick], str(folder)))
    return lambda name: (run(name in QUICK)[name], folder / f"{name}.ckpt")


REFUSED_SHARDED = "fsdp2, nf4"
QUICK = ("ddp", "fsdp2", REFUSED_SHARDED)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one_process_and_resume_exactly(
    name: str, on_two_ranks: Callable[[str], tuple[list[Any], Path]]
) -> None:
    ((whole, _, resumed), (other, *_)), _ = on_two_ranks(name)
    alone = build(Seeded)
    fit(alone, train=loader(48), val=loader(), callbacks=callbacks_of(name), accumulate_grad_batches=2)
    expected = trainable(alone)
    torch.testing.assert_close({key: whole[key] for key in expected}, expected, atol=1e-5, rtol=1e-4)
    assert_equal(other, whole)
    assert_equal(resumed, whole)
    if "int8" not in name and "nf4" not in name:
        assert torch.equal(whole["layers.0.base_layer.weight"], weights(build(Seeded))["layers.0.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_two_ranks_is_small_and_merged(
    name: str, on_two_ranks: Callable[[str], tuple[list[Any], Path]], tmp_path: Path
) -> None:
    ((_, half, _), _), folder = on_two_ranks(name)
    module = build(Seeded)
    torch.save(module.state_dict(), tmp_path / "base.pt")
    if folder.is_dir():
        assert not any("base_layer" in name for name in lazy_weights(folder))
        with pytest.raises(ValueError, match="has adapters of LoRA: merge them"):
            lt.consolidate(folder, tmp_path / "out.pt")
    lt.export_weights(folder, tmp_path / "out.pt", merge=True, base=tmp_path / "base.pt")
    module.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    a, b = (half[f"layers.0.lora_{part}.default.weight"] for part in "AB")
    if "dora" not in name:
        torch.testing.assert_close(module.layers[0].weight, build(Seeded).layers[0].weight + 2 * b @ a)
    assert torch.equal(module.layers[2].weight, half["layers.2.weight"])


def test_a_quantized_base_is_refused_where_weights_are_sharded(
    on_two_ranks: Callable[[str], tuple[list[Any], Path]],
) -> None:
    (first, second), _ = on_two_ranks(REFUSED_SHARDED)
    assert first == second
    assert "LoRA(base='nf4') works under" in first
