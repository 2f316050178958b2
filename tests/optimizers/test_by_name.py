"""Optimizers by name: each against its library's own in a plain loop, its groups, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.optim import Muon
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import lightning_tricks as lt
from lightning_tricks.callbacks.rewind_on_spike import Snapshot
from lightning_tricks.optimizers.by_name import is_hidden, is_matrix
from lightning_tricks.optimizers.table import LEFT_OUT, ROWS, Row, row_of
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases
from tests.reference.muon import NaiveMuon
from tests.refusals import assert_refused

NEEDED = {"ranger21": {"num_iterations": 100}, "galore": {"rank": 2}}  # settings without a default that fits
LR = {"prodigy": 1.0}
MATRICES = ("muon", "galore")  # which take hidden weights apart from the others


# The arithmetic of each kind: elementwise, by matrices, with slow weights, averaged, in few bits; the others are slow.
KINDS = ("adamw", "muon", "lookahead_radam", "adafactor", "adamw8bit", "galore")
SPLIT = [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
OTHER_LOOKAHEADS = [
    pytest.param(f"lookahead_{name}", marks=() if name in ("lion", "adamw4bit") else pytest.mark.slow)
    for name, row in ROWS.items()
    if row.lookahead and not row.is_lookahead and f"lookahead_{name}" not in ROWS
]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """torchao compiles its step, which takes half a minute; a slow test does."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Three(PlainNet):
    """With a hidden layer, of 4,096 weights if that is what the optimizer keeps in few bits."""

    def __init__(
        self, name: str = "sgd", weight_decay: float = 0.0, width: int = 0, bare: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        size = width or (64 if row_of(name).is_quantized else 16)
        self.layers = nn.Sequential(nn.Linear(8, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 2))
        self.name, self.weight_decay, self.settings = name, weight_decay, settings
        self.bare = bare  # whether the optimizer is made for the network, which knows no Trainer

    def configure_optimizers(self) -> Any:
        settings = {**NEEDED.get(row_of(self.name).base, {}), **self.settings}
        module = self.layers if self.bare else self
        return lt.optimizer(self.name, module, LR.get(self.name, 0.01), weight_decay=self.weight_decay, **settings)


def needed_by(name: str) -> list[Any]:
    return [lt.ScheduleFree()] if name.startswith("schedulefree") else []


def ended(name: str, *callbacks: Any, weight_decay: float = 0.0, **settings: Any) -> dict[str, Tensor]:
    """The weights after two epochs."""
    module = build(Three, name=name, weight_decay=weight_decay)
    fit(module, callbacks=[*needed_by(name), *callbacks], **settings)
    return weights(module)


def own(name: str, groups: Any, fused: bool = True) -> Any:
    """The library's optimizer, made as its documentation says."""
    row = row_of(name)
    module, _, kind = row.path.rpartition(".")
    settings = {"adamw4bit": {"eps": 1e-6}, "galore": {}}.get(row.base, NEEDED.get(row.base, {}))
    settings |= {"fused": fused} if name == "adamw" else {}
    made = getattr(importlib.import_module(module), kind)(groups, lr=LR.get(name, 0.01), weight_decay=0.0, **settings)
    return importlib.import_module("timm.optim").Lookahead(made) if row.is_lookahead else made


def groups_of(name: str, module: Three) -> Any:
    hidden = [module.layers[0].weight, module.layers[2].weight]
    others = [weight for weight in module.parameters() if all(weight is not each for each in hidden)]
    if name.endswith("muon"):
        return [{"params": hidden, "nesterov": True}, {"params": others, "use_fallback": True}]
    if name.endswith("galore"):
        low_rank = {"rank": 2, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"}
        return [{"params": hidden, **low_rank}, {"params": others}]
    weights, biases = ([each for n, each in module.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    return [{"params": weights}, {"params": biases}]


def plain_loop(name: str, scaler: torch.amp.GradScaler, window: int = 1) -> dict[str, Tensor]:
    """The weights after two epochs; fp16 if the scaler is enabled, with the gradients of ``window`` batches a step."""
    module, scaled = build(Three, name=name), scaler.is_enabled()
    optimizer = own(name, groups_of(name, module), fused=not scaled)
    if name.startswith("schedulefree"):
        optimizer.train()
    for _ in range(2):
        for number, (x, y) in enumerate(loader()):
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = F.cross_entropy(module(x), y)
            scaler.scale(loss / window).backward()
            if (number + 1) % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    if name.startswith("schedulefree"):
        optimizer.eval()
    return weights(module)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", [*ROWS, *OTHER_LOOKAHEADS])
def test_it_equals_the_librarys_own_in_a_plain_loop(name: str) -> None:
    assert_equal(ended(name), plain_loop(name, torch.amp.GradScaler("cpu", enabled=False)))


@pytest.mark.parametrize("name", SPLIT)
def test_accumulated_gradients_are_those_of_a_plain_loop(name: str) -> None:
    expected = plain_loop(name, torch.amp.GradScaler("cpu", enabled=False), window=2)
    assert_equal(ended(name, accumulate_grad_batches=2), expected)


@pytest.mark.parametrize("name", SPLIT)
def test_a_scaler_skips_the_steps_that_a_plain_loop_skips(name: str) -> None:
    scaler, other = (torch.amp.GradScaler("cpu", 2.0**18) for _ in range(2))
    found = ended(name, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert_equal(found, plain_loop(name, other))
    assert 1 < scaler.get_scale() == other.get_scale() < 2.0**18, "some were skipped, and some were not"


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*SPLIT, *OTHER_LOOKAHEADS])
def test_a_resumed_fit_is_exact_and_another_optimizer_is_refused(name: str, tmp_path: Path) -> None:
    whole = ended(name, SaveAt(path := tmp_path / "half.ckpt", epoch=0), weight_decay=0.1)
    resumed = build(Three, name=name, weight_decay=0.1)
    trainer(callbacks=needed_by(name)).fit(resumed, loader(), loader(24), ckpt_path=path, weights_only=True)
    assert_equal(weights(resumed), whole)
    other = "adagrad" if name != "adagrad" else "lion"
    module = build(Three, name=other, width=resumed.layers[2].out_features)
    with pytest.raises(MisconfigurationException, match=rf"optimizer\('{name}'\).*optimizer\('{other}'\)"):
        trainer().fit(module, loader(), loader(24), ckpt_path=path, weights_only=True)


# -- ranks ------------------------------------------------------------------------------------------------------------


@contextmanager
def orthogonalized_in_fp32() -> Iterator[None]:
    """Muon does it in bf16, where a sum in another order, as that of shards, changes a step by up to a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        exact = partial(timm.optim.muon.zeropower_via_newtonschulz, dtype=torch.float32)
        patch.setattr("timm.optim.muon.zeropower_via_newtonschulz", exact)
        yield


STRATEGIES = {"ddp": "ddp", "fsdp2": "fsdp2_bf16", "zero": "zero1_bf16"}


@orthogonalized_in_fp32()
def on_ranks(case: tuple[str, str], folder: Path) -> Any:
    name, engine = case
    engine, _, how = engine.partition("_")
    torch.compiler.set_stance("force_eager")

    def run(**more: Any) -> tuple[Three, L.Trainer]:
        settings = {"strategy": "ddp"} if engine == "ddp" else lt.preset(STRATEGIES[engine], precision="32-true")
        again = trainer(devices=2, callbacks=needed_by(name), use_distributed_sampler=False, **settings, **more)
        return build(Three, name=name, bare=how == "bare"), again

    path = None
    if how == "resumed":
        module, half = run(max_epochs=1)
        half.fit(module, rank_loader())
        half.save_checkpoint(path := folder / f"{name}_{engine}.ckpt")
    module, whole = run()
    try:
        whole.fit(module, rank_loader(), loader(8), ckpt_path=path, weights_only=True)
    except MisconfigurationException as error:
        assert whole.global_step == 0, "refused before the first step"
        return str(error)
    return weights(module)


# States that are objects, or of few bits, and those that a folder of shards holds.
RESUMED = [("adamw8bit", "ddp"), ("galore", "ddp"), ("lookahead_radam", "fsdp2")]
OTHERS_RESUMED = [("adamw4bit", "ddp")]
OTHERS_RESUMED += [(name, "fsdp2") for name, row in ROWS.items() if row.fsdp2 and (name, "fsdp2") not in RESUMED]
# An optimizer for a network that is not the LightningModule: a GAN's generator, for instance.
BARE = [("adafactor", "fsdp2_bare"), ("lamb", "zero_bare"), ("lookahead_radam", "zero_bare"), ("lion", "zero_bare")]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    cases = [(name, engine) for engine in STRATEGIES for name in KINDS]
    again = [(name, f"{engine}_resumed") for name, engine in RESUMED]
    return run_cases(on_ranks, cases + again + BARE, tmp_path_factory.mktemp("resumed"))


@pytest.fixture(scope="module")
def other_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    cases = [(name, engine) for engine in STRATEGIES for name in ROWS if name not in KINDS]
    again = [(name, f"{engine}_resumed") for name, engine in OTHERS_RESUMED]
    return run_cases(on_ranks, cases + again, tmp_path_factory.mktemp("resumed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [*RESUMED[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in [*RESUMED[1:], *OTHERS_RESUMED])],
)
def test_a_fit_resumed_on_two_ranks_is_exact(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("two_ranks" if (name, engine) in RESUMED else "other_two_ranks")
    whole = request.getfixturevalue("two_ranks" if name in KINDS else "other_two_ranks")
    for resumed, expected in zip(found[name, f"{engine}_resumed"], whole[name, engine], strict=True):
        assert_equal(resumed, expected)


def test_an_optimizer_for_a_part_of_the_module_is_refused_as_well(two_ranks: Cases) -> None:
    for name, engine in BARE:
        for found in two_ranks[name, engine]:
            if name == "lion":
                assert_close(found, one_process(name), 1e-5)
            else:
                assert f"optimizer({name!r}) does not train right on the shards of weights" in found


@orthogonalized_in_fp32()
def one_process(name: str) -> dict[str, Tensor]:
    """The weights of a process that gets the batches of both ranks."""
    return ended(name, train=loader(48, 16), val=loader(8))


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_equal_one_process_or_are_refused_as_the_table_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    found_by_case = request.getfixturevalue("two_ranks" if name in KINDS else "other_two_ranks")
    expected, row = one_process(name), next(row for row in lt.optimizers() if row["name"] == name)
    for engine in STRATEGIES:
        first, second = found_by_case[name, engine]
        for found in (first, second):
            if engine == "ddp" or (row_of(name).trains_shards if engine == "fsdp2" else row[engine]):
                assert not isinstance(found, str), f"{engine}: {found}"
                assert_equal(first, second)
                assert_close(found, expected, 1e-5 if name != "soap" else 0.1)  # its bases turn with rounding errors
            else:
                assert f"optimizer({name!r})" in found
                assert "Take 'adamw'" in found


def matrices() -> nn.Module:
    """Convolutions and layers whose rows are not as many on each rank, and none on some."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 10, 3), nn.Flatten(), nn.Linear(40, 3), nn.Linear(3, 2)
    )


@orthogonalized_in_fp32()
def steps_of_muon(case: tuple[str, tuple[int, ...]]) -> list[Tensor]:
    """The weights after four steps, sharded over a mesh of this shape, if any."""
    algo, shape = case
    net, x = matrices(), torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
        for layer in [layer for layer in net if [*layer.parameters()]]:
            fully_shard(layer, mesh=mesh)
    made = lt.optimizer("muon", net, 0.01, weight_decay=0.1, algo=algo)
    for _ in range(4):
        net(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        made.step()
        made.zero_grad()
    return [weight.full_tensor() if shape else weight.detach() for weight in net.parameters()]


@pytest.mark.slow
@pytest.mark.skipif(not row_of("muon").trains_shards, reason="this timm's Muon knows no shards")
def test_muon_trains_shards_of_four_ranks_as_whole_weights() -> None:
    cases: list[tuple[str, tuple[int, ...]]] = [("muon", (4,)), ("muon", (2, 2))]
    found = run_cases(steps_of_muon, [*cases, ("adamuon", (4,))], nprocs=4)
    for case in cases:
        for rank in found[case]:
            for weight, expected in zip(rank, steps_of_muon(("muon", ())), strict=True):
                torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)
    with pytest.raises(AssertionError, match=r"optimizer\('muon'\) does not train right on the shards of weights"):
        found["adamuon", (4,)]


def test_local_sgd_is_refused_where_states_have_no_mean() -> None:
    for name in ("adamw8bit", "lookahead_adamw4bit", "galore", "soap", "prodigy", "lion"):
        module = build(Three, name=name)
        module.trainer = trainer(strategy=lt.DDPPreset(compression="local_sgd"), devices=2)
        if name == "lion":
            assert module.configure_optimizers()
            continue
        with pytest.raises(MisconfigurationException, match=rf"'{name}'.* cannot average\. Take 'adamw'"):
            module.configure_optimizers()
        module.trainer = trainer(strategy=lt.DDPPreset(compression="local_sgd"), devices=1)
        assert module.configure_optimizers()  # one process averages nothing


# -- groups -----------------------------------------------------------------------------------------------------------


def named(made: torch.optim.Optimizer, module: nn.Module) -> dict[str, dict[str, Any]]:
    """The group of every parameter by name; each must be in exactly one."""
    names = {weight: name for name, weight in module.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in made.param_groups:
        for weight in group["params"]:
            assert names[weight] not in found, "in two groups"
            found[names[weight]] = group
    return found


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, **settings))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=32, **small))


MODELS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4),
    "resnet": lambda: timm.create_model("resnet10t", num_classes=4),
    "convnext": lambda: timm.create_model("convnext_atto", num_classes=4, depths=(1, 1, 1, 1)),
    "gpt2": gpt2,
    "bert": bert,
}


@pytest.mark.parametrize("model", MODELS)
def test_every_trainable_parameter_is_in_one_group(model: str) -> None:
    module = MODELS[model]()
    first = next(iter(dict(module.named_parameters())))
    module.get_parameter(first).requires_grad_(False)
    for name, settings in (
        *(("adamw", {}), ("muon", {}), ("galore", {}), ("lookahead_muon", {}), ("adamw8bit", {})),
        *(("lion", {"layer_decay": 0.8}), ("adamw", {"no_decay": False})),
    ):
        made = lt.optimizer(name, module, 1e-3, weight_decay=0.1, **settings)
        assert named(made, module).keys() == {n for n, weight in module.named_parameters() if weight.requires_grad}
        assert all("weight_decay" in group for group in made.param_groups)


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    module = gpt2()
    groups = named(lt.optimizer("adamw", module, 1e-3, weight_decay=0.1), module)
    assert {name for name, group in groups.items() if group["weight_decay"]} == {
        f"transformer.h.{n}.{layer}.weight"
        for n in range(2)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    every = named(lt.optimizer("adamw", module, 1e-3, weight_decay=0.1, no_decay=False), module)
    assert {group["weight_decay"] for group in every.values()} == {0.1}


HIDDEN = {
    "vit": ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "patch_embed.proj.weight"),
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    "convnext": ("stem.0.weight", "downsample.1.weight", "mlp.fc1.weight", "mlp.fc2.weight"),  # without conv_dw
}


@pytest.mark.parametrize("model", HIDDEN)
def test_muon_orthogonalizes_the_hidden_weights_alone(model: str) -> None:
    module = MODELS[model]()
    groups = named(lt.optimizer("muon", module, 0.02, weight_decay=0.1), module)
    hidden = {name for name, group in groups.items() if not group["use_fallback"]}
    assert hidden == {name for name in groups if name.endswith(HIDDEN[model])}
    assert {groups[name]["lr"] for name in groups.keys() - hidden} == {0.02}
    apart = named(lt.optimizer("muon", module, 0.02, adamw_lr=0.002), module)
    assert {name for name, group in apart.items() if group.get("lr", 0.02) == 0.002} == groups.keys() - hidden


class Kinds(nn.Module):
    """A weight of every kind: embedding, norm, matrices, a thin one, convolution, depthwise filters, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
        self.wide, self.tall, self.thin = nn.Linear(48, 16), nn.Linear(16, 48), nn.Linear(48, 3)
        self.mixing, self.depthwise = nn.Conv1d(16, 8, 3), nn.Conv1d(8, 8, 3, groups=8)
        self.head = nn.Linear(16, 5)


MATRICES_OF_KINDS = {"wide.weight", "tall.weight", "mixing.weight"}


def with_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Its weights before a step, for which it gets gradients."""
    for weight in module.parameters():
        weight.grad = torch.randn(weight.shape)
    return weights(module)


@pytest.mark.parametrize("adamw_lr", [None, 0.004])
@pytest.mark.parametrize("nesterov", [None, False])
def test_muon_steps_as_far_as_adamw_and_trains_the_others_as_adamw_does(
    nesterov: bool | None, adamw_lr: float | None
) -> None:
    """Beside a naive loop that gets the same gradients, with a learning rate that falls."""
    torch.manual_seed(0)
    module, lr, settings = Kinds(), 0.02, {"adamw_lr": adamw_lr, "nesterov": nesterov}
    settings = {name: value for name, value in settings.items() if value is not None}
    made = lt.optimizer("muon", module, lr, weight_decay=0.1, no_decay=False, **settings)
    falling = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    twin = dict(copy.deepcopy(module).named_parameters())
    naive = {name: NaiveMuon(twin[name], 0.1, nesterov is None) for name in MATRICES_OF_KINDS}
    others = [weight for name, weight in twin.items() if name not in naive]
    adamw = torch.optim.AdamW(others, adamw_lr or lr, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    slower = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
    for step in range(4):
        before, rate = with_gradients(module), lr / (1 + step)
        for name, weight in module.named_parameters():
            twin[name].grad = weight.grad.clone()
            if name in naive:
                naive[name].step(weight.grad, rate)
        for each in (adamw, slower, made, falling):
            each.step()
        for name, weight in weights(module).items():
            if name in naive:
                moved = weight - (1 - 0.1 * rate) * before[name]
                assert moved.square().mean().sqrt() == pytest.approx(0.2 * rate, rel=0.05)
                assert (weight - twin[name]).norm() < 0.05 * moved.norm()  # Newton-Schulz has 16 bits
                twin[name].data.copy_(weight)
            else:
                torch.testing.assert_close(weight, twin[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif("algo" not in inspect.signature(Muon).parameters, reason="timm 1.0.21 has no AdaMuon")
def test_adamuon_steps_as_far_as_adamw_too() -> None:
    module = Kinds()
    made = lt.optimizer("muon", module, 0.02, algo="adamuon")
    for _ in range(3):
        before = with_gradients(module)
        made.step()
        for name in MATRICES_OF_KINDS:
            moved = weights(module)[name] - before[name]
            assert moved.square().mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.01)


def test_cautious_updates_leave_out_what_goes_against_the_gradient() -> None:
    module = Kinds()
    made = lt.optimizer("lion", module, 0.01, caution=True)
    momentum: dict[str, Tensor] = {}
    for _ in range(3):
        before = with_gradients(module)
        made.step()
        for name, weight in module.named_parameters():
            assert weight.grad is not None
            mean = momentum.get(name, torch.zeros_like(weight))
            update = (0.9 * mean + 0.1 * weight.grad).sign()
            agrees = (update * weight.grad > 0).to(update)
            expected = before[name] - 0.01 * update * agrees / agrees.mean().clamp(min=1e-3)
            torch.testing.assert_close(weight.detach(), expected)
            momentum[name] = 0.99 * mean + 0.01 * weight.grad
    with pytest.raises(TypeError, match=r"optimizer\('muon'\) has no setting 'caution'; it has .*algo"):
        lt.optimizer("muon", module, 0.01, caution=True)


@pytest.mark.parametrize("scale", ["original", "rms_to_rms", None])
def test_muon_on_another_scale_needs_the_rate_of_the_others(scale: str | None) -> None:
    with pytest.raises(ValueError, match=rf"adjust_lr_fn={scale!r}\) needs adamw_lr=, the learning rate of embeddings"):
        lt.optimizer("muon", Kinds(), 0.02, adjust_lr_fn=scale)
    made = lt.optimizer("muon", Kinds(), 0.02, adjust_lr_fn=scale, adamw_lr=0.003)
    assert {(group["use_fallback"], group.get("lr")) for group in made.param_groups} == {(False, 0.02), (True, 0.003)}
    with pytest.raises(ValueError, match=r"'adamuon' is not one of .*Take 'muon' with algo='adamuon'"):
        lt.optimizer("adamuon", Kinds(), 0.02)


@pytest.mark.parametrize(
    "shape",
    [(8,), (8, 8), (8, 1, 3), (1, 8, 3), (3, 64), (64, 3), (4, 512), (4, 516), (512, 2, 3), (8, 2, 2), (8, 3, 1, 1)],
)
def test_what_is_a_matrix_is_what_timm_orthogonalizes_by_itself(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    made = Muon([weight])
    made.step()
    assert is_matrix(weight) is made.state[weight]["use_muon"]


def test_the_weights_of_attention_are_hidden_and_those_of_a_tied_head_are_not() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Embedding(8, 4), nn.MultiheadAttention(4, 2)
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.out = nn.Linear(4, 8, bias=False)
            self.out.weight = self.embed.weight

    module = Tied()
    assert is_hidden(module) == {module.attention.in_proj_weight, module.attention.out_proj.weight}


def test_layer_decay_scales_the_rates_of_hidden_and_of_other_weights_alike() -> None:
    module = MODELS["vit"]()
    plain = named(lt.optimizer("muon", module, 0.02), module)
    scaled = named(lt.optimizer("muon", module, 0.02, layer_decay=0.5), module)
    shares = {name: scaled[name]["lr"] / plain[name].get("lr", 0.02) for name in scaled}
    assert shares["head.weight"] == 1
    assert shares["blocks.1.attn.qkv.weight"] == pytest.approx(shares["blocks.1.norm1.bias"])
    assert shares["blocks.0.attn.qkv.weight"] == pytest.approx(shares["blocks.1.attn.qkv.weight"] / 2)


def test_adamw_has_the_settings_of_torch_too() -> None:
    assert lt.optimizer("adamw", build(Three), 0.1, amsgrad=True).defaults["amsgrad"]
    assert lt.optimizer("adamw", build(Three), 0.1, betas=(0.8, 0.9)).defaults["fused"]


def test_parameters_select_what_trains() -> None:
    module = gpt2()
    groups = named(lt.optimizer("lion", module, 1e-3, parameters=["ln_f", "mlp"]), module)
    assert groups.keys() == {name for name, _ in module.named_parameters() if "ln_f" in name or "mlp" in name}


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(Three)

    def make(name: Any, module: nn.Module = module, lr: float = 0.1, **settings: Any) -> None:
        lt.optimizer(name, module, lr, **settings)

    decay, wrong = {"name": "prodigy", "module": MODELS["vit"](), "layer_decay": 0.5}, {"betas": (2, 0.9)}
    cases = [
        (ValueError, {"name": "adamww"}, "got 'adamww': did you mean 'adamw'"),
        (TypeError, {"name": "lion", "beta": 0.9}, "has no setting 'beta'; it has betas"),
        (TypeError, {"name": "ranger21"}, r"\('ranger21'\) needs the setting 'num_iterations'"),
        (ValueError, decay, r"layer_decay=0.5 does nothing in optimizer\('prodigy'\)"),
        (TypeError, {"name": torch.optim.SGD}, "name must be a string"),
        (ValueError, {"name": "sgd", "lr": -1}, "lr"),
        (ValueError, {"name": "galore", "rank": 0}, "rank must be at least 1, got 0"),
        (ValueError, {"name": "lion", **wrong}, r"optimizer\('lion'\) does not take betas=\(2, 0.9\): Invalid beta"),
        (ValueError, {"name": "sgd", "momentum": "x"}, r"optimizer\('sgd'\) does not take momentum='x': "),
        (ValueError, {"name": "muon", "adamw_lr": -1.0}, "adamw_lr must be"),
        (ValueError, {"name": "muon", "module": nn.Linear(4, 2)}, "hidden weights"),
        (ValueError, {"name": "sgd", "module": nn.Linear(4, 2).requires_grad_(False)}, "no trainable parameters"),
    ]
    assert_refused(make, cases)
    monkeypatch.setitem(ROWS, "elsewhere", Row("elsewhere", "not_there.optim.Elsewhere", 4, ""))
    with pytest.raises(ModuleNotFoundError, match=r"needs not_there: pip install 'lightning-tricks\[optimizers\]"):
        lt.optimizer("elsewhere", module, 0.1)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'"), torch.OutOfMemoryError("full")])
def test_what_no_setting_is_to_blame_for_is_raised_as_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch.optim.NAdam, "add_param_group", fail)
    with pytest.raises(type(error), match=str(error)):
        lt.optimizer("nadam", build(Three), 0.1, eps=1e-6)


@pytest.mark.parametrize("name", [*LEFT_OUT, "KRON", "lookahead_kron"])
def test_what_is_left_out_is_named_with_what_to_take(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not one of lightning_tricks.optimizers\(\): .*\. Take ") as caught:
        lt.optimizer(name, build(Three), 0.1)
    quoted = str(caught.value).rpartition("Take ")[2].partition("'")[2].partition("'")[0]
    assert not quoted or row_of(quoted)


@pytest.mark.filterwarnings("ignore:It is highly recommended")  # of Kron, to install a package
def test_what_is_left_out_is_left_out_for_a_reason() -> None:
    from timm.optim.kron import Kron
    from torchao.optim import CPUOffloadOptimizer

    found = []
    for seed in (1, 2):
        weight, gradient = nn.Parameter(torch.ones(8, 8)), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        made = Kron([weight], lr=0.1)
        torch.manual_seed(seed)  # the ranks of DDP differ by it
        for _ in range(4):
            weight.grad = gradient.clone()
            made.step()
        found.append(weight)
    assert not torch.equal(*found)
    assert not hasattr(object.__new__(CPUOffloadOptimizer), "state")  # which Lightning moves when a fit begins


def test_lookahead_is_refused_around_what_averages_itself() -> None:
    averaging = ("schedulefree_adamw", "ranger21", "prodigy")
    cases = [
        *((ValueError, {"name": name}, f"'lookahead_{name}': '{name}' measures or averages") for name in averaging),
        (ValueError, {"name": "lookahead_sgd"}, "got 'lookahead_lookahead_sgd': did you mean 'lookahead_"),
        (ValueError, {"name": "lionn"}, "got 'lookahead_lionn': did you mean 'lookahead_lion'"),
        (TypeError, {"name": "lion", "gamma": 1}, r"has no setting 'gamma'; it has .*alpha, k"),
    ]
    assert_refused(lambda name, **given: lt.optimizer(f"lookahead_{name}", build(Three), 0.1, **given), cases)


@pytest.mark.parametrize("flag", ["capturable", "differentiable", "fused"])
def test_flags_that_torch_refuses_later_are_refused_at_once(flag: str) -> None:
    module = nn.Linear(4, 2, dtype=torch.complex64) if flag == "fused" else nn.Linear(4, 2)
    with pytest.raises(ValueError, match=rf"'adamw', {flag}=True\) cannot train .* on cpu: .* Leave {flag} out"):
        lt.optimizer("adamw", module, 0.1, **{flag: True})
    assert lt.optimizer("adam", nn.Linear(4, 2), 0.1, fused=True).defaults["fused"]


# -- few bits ---------------------------------------------------------------------------------------------------------


def _largest_weight(made: torch.optim.Optimizer) -> float:
    """After 100 steps with gradients that differ by eight orders of magnitude, and of which most are zero."""
    (weight,), numbers = made.param_groups[0]["params"], torch.Generator().manual_seed(0)
    scale = 10 ** (-8 * torch.rand(weight.shape, generator=numbers))
    for _ in range(100):
        gradient = scale * torch.randn(weight.shape, generator=numbers)
        weight.grad = gradient * (torch.rand(weight.shape, generator=numbers) < 0.3)
        made.step()
    return float(weight.detach().abs().max())


def test_few_bits_do_not_blow_single_weights_up_where_those_that_are_left_out_do() -> None:
    from torchao.optim import AdamW8bit, AdamWFp8

    def zeros() -> nn.Module:
        module = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(module.weight)
        return module

    expected = _largest_weight(lt.optimizer("adamw", zeros(), 1e-3))
    for name in ("adamw8bit", "adamw4bit"):
        assert _largest_weight(lt.optimizer(name, zeros(), 1e-3)) < expected, name
    for kind in (AdamW8bit, AdamWFp8):
        assert _largest_weight(kind(zeros().parameters(), lr=1e-3, eps=1e-6)) > 100 * expected


def test_an_eps_that_few_bits_cannot_hold_is_refused() -> None:
    assert lt.optimizer("adamw4bit", build(Three), 0.1).defaults["eps"] == 1e-6
    for name in ("adamw4bit", "lookahead_adamw4bit"):
        with pytest.raises(ValueError, match=r"eps must be at least 1e-06 .* got 1e-08"):
            lt.optimizer(name, build(Three), 0.1, eps=1e-8)


class Scheduled(Three):
    """With a schedule, which writes into a learning rate that is a tensor."""

    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        return lt.flat_cos(super().configure_optimizers(), self, warmup=2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates += [float(group["lr"]) for group in self.trainer.optimizers[0].param_groups]


def test_a_schedule_sets_the_rate_of_few_bits() -> None:
    plain, few = (build(Scheduled, name=name) for name in ("adamw", "adamw4bit"))
    for module in (plain, few):
        fit(module)
    assert len(set(plain.rates)) > 3
    assert few.rates == pytest.approx(plain.rates)


@pytest.mark.parametrize("name", ["galore", "adamw4bit"])
def test_states_of_the_library_load_too(name: str) -> None:
    def step(made: Any, module: nn.Module) -> dict[str, Tensor]:
        for weight in module.parameters():
            weight.grad = torch.full_like(weight, 0.1).cumsum(0)
        for _ in range(3):
            made.step()
        return weights(module)

    first, other = (build(Three, name=name) for _ in range(2))
    library = own(name, groups_of(name, other))
    assert_equal(step(made := first.configure_optimizers(), first), step(library, other))
    states = [copy.deepcopy(made.state_dict())]
    if name == "adamw4bit":  # whose groups are as many
        states.append(library.state_dict())
    found = []
    for state in states:
        module = build(Three, name=name)
        module.load_state_dict(weights(first))
        again = module.configure_optimizers()
        again.load_state_dict(state)
        found.append(step(again, module))
    expected = step(made, first)
    for each in found:
        assert_equal(each, expected)


def test_states_of_the_library_are_the_named_optimizers_from_then_on() -> None:
    module = build(Three, name="lion")
    made, library = module.configure_optimizers(), own("lion", groups_of("lion", module))
    made.load_state_dict(library.state_dict())
    made.load_state_dict(made.state_dict())
    with pytest.raises(MisconfigurationException, match=r"states of optimizer\('lion'\)"):
        lt.optimizer("adamw", module, 0.1).load_state_dict(made.state_dict())


class Restores(L.Callback):
    """Takes a snapshot, goes on for three steps, restores it."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        (made,), step = trainer.optimizers, trainer.global_step
        if step == 7:
            self.snapshot, self.before = Snapshot(trainer, module), copy.deepcopy(made.state_dict())
        if step == 10:
            changed = copy.deepcopy(made.state_dict())
            self.snapshot.restore(trainer, module)
            self.found = (self.before, changed, made.state_dict())
            trainer.should_stop = True


@pytest.mark.parametrize("name", ["lookahead_adamw", "galore", "adamw4bit", "adamw8bit"])
def test_a_snapshot_of_a_fit_has_the_states(name: str) -> None:
    fit(build(Three, name=name), callbacks=[restores := Restores()])
    before, changed, restored = (
        [leaf for leaf in tree_leaves(state["state"]) if isinstance(leaf, Tensor)] for state in restores.found
    )
    assert any(not torch.equal(one, other) for one, other in zip(before, changed, strict=True))
    for one, other in zip(before, restored, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own parts
def test_compiled_steps_resume_exactly_too(tmp_path: Path) -> None:
    with torch.compiler.set_stance("default"):
        test_a_resumed_fit_is_exact_and_another_optimizer_is_refused("adamw4bit", tmp_path)


def test_torch_calls_the_hooks_of_lookahead_from_the_first_step_on() -> None:
    module, seen = build(Three), []
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    made = lt.optimizer("lookahead_sgd", module, 0.1)
    assert all(weight.grad is not None for weight in module.parameters())
    made.register_step_pre_hook(lambda *_: seen.append("before"))
    made.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        made.step()
    assert seen == ["before", "after"] * 2


# -- beside averages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_an_average_follows_the_weights_that_lookahead_has_pulled_back(window: int) -> None:
    module, naive = (build(Three, name="lookahead_sgd") for _ in range(2))
    ema = lt.EMA(decay=0.9, warmup=False)
    fit(module, callbacks=[ema], accumulate_grad_batches=window, max_epochs=4)
    optimizer, average = own("lookahead_sgd", groups_of("lookahead_sgd", naive)), weights(naive)
    for _ in range(4):
        for number, (x, y) in enumerate(loader()):
            (F.cross_entropy(naive(x), y) / window).backward()
            if (number + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
                average = {name: average[name].lerp(weight, 1 - 0.9) for name, weight in weights(naive).items()}
    assert optimizer.param_groups[0]["lookahead_step"] > 6
    assert_equal(weights(module), average)


def test_the_page_says_of_every_name_why_fsdp2_refuses_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    section = page.partition("## What FSDP2 refuses, and why\n")[2].partition("\n## ")[0]
    told = [name for line in section.splitlines() for name in re.findall("`(.+?)`", line.partition(" | ")[0])]
    assert sorted(told) == sorted(row["name"] for row in lt.optimizers() if not row["fsdp2"])


def test_the_table_has_what_people_ask_for() -> None:
    names = {row["name"] for row in lt.optimizers()}
    assert len(names) > 20
    assert {"sgd", "adamw", "lion", "adafactor", "muon", "galore", "soap", "prodigy", "adamw8bit"} <= names


@pytest.mark.few(15)
@pytest.mark.filterwarnings("ignore")  # of libraries, about single settings
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.by_shape])
def test_bytes_of_state_are_those_of_the_table(name: str) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    made = lt.optimizer(name, module, 0.01, **NEEDED.get(name, {}))
    if name.startswith("schedulefree"):
        made.train()  # type: ignore[attr-defined]
    for _ in range(6):  # after which Lookahead has its slow weights
        module(torch.ones(2, 256)).sum().backward()
        made.step()
    inner = getattr(made, "_base_optimizer", made)
    state = inner.state_dict()["state"]  # in which tensors of few bits are dictionaries
    held = sum(tensor.nbytes for tensor in tree_leaves(state) if isinstance(tensor, Tensor))
    per_weight = held / sum(weight.numel() for weight in module.parameters())
    assert per_weight == pytest.approx(ROWS[name].bytes, rel=0.05)
