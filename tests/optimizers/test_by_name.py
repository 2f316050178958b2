"""Optimizers by name: each against its library's own in a plain loop, its groups, and what is refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.optimizers.hidden import is_hidden
from lightning_tricks.optimizers.table import ROWS, Row
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases

NEEDED = {"ranger21": {"num_iterations": 100}, "galore": {"rank": 2}}  # settings without a default that fits
LR = {"prodigy": 1.0}
MATRICES = ("muon", "galore")  # which take hidden weights apart from the others


class Three(PlainNet):
    """With a hidden layer."""

    def __init__(self, name: str = "sgd", weight_decay: float = 0.0, **settings: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        self.name, self.weight_decay, self.settings = name, weight_decay, settings

    def configure_optimizers(self) -> Any:
        settings = {**NEEDED.get(self.name, {}), **self.settings}
        return lt.optimizer(self.name, self, LR.get(self.name, 0.01), weight_decay=self.weight_decay, **settings)


def callbacks(name: str) -> list[Any]:
    return [lt.ScheduleFree()] if name.startswith("schedulefree") else []


def own(name: str, groups: Any) -> Any:
    """The library's optimizer, made as its documentation says."""
    module, _, kind = ROWS[name].path.rpartition(".")
    settings = {"adamw": {"fused": True}, "galore": {}}.get(name, NEEDED.get(name, {}))
    made = getattr(importlib.import_module(module), kind)(groups, lr=LR.get(name, 0.01), weight_decay=0.0, **settings)
    return importlib.import_module("timm.optim").Lookahead(made) if name.startswith("lookahead") else made


def groups_of(name: str, module: Three) -> Any:
    hidden = [module.layers[0].weight, module.layers[2].weight]
    others = [weight for weight in module.parameters() if all(weight is not each for each in hidden)]
    if name == "muon":
        return [{"params": hidden}, {"params": others, "use_fallback": True, "lr": 0.001}]
    if name == "galore":
        low_rank = {"rank": 2, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"}
        return [{"params": hidden, **low_rank}, {"params": others}]
    weights, biases = ([each for n, each in module.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    return [{"params": weights}, {"params": biases}]


@pytest.mark.parametrize("name", ROWS)
def test_it_equals_the_librarys_own_in_a_plain_loop(name: str) -> None:
    naive = build(Three)
    optimizer = own(name, groups_of(name, naive))
    for switch in ("train",) if name.startswith("schedulefree") else ():
        getattr(optimizer, switch)()
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(naive(x), y).backward()
            optimizer.step()
    if name.startswith("schedulefree"):
        optimizer.eval()
    module = build(Three, name=name)
    fit(module, callbacks=callbacks(name))
    assert_equal(weights(module), weights(naive))


@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_fit_is_exact_and_another_optimizer_is_refused(name: str, tmp_path: Path) -> None:
    whole, resumed = build(Three, name=name, weight_decay=0.1), build(Three, name=name, weight_decay=0.1)
    fit(whole, callbacks=callbacks(name))
    run = fit(build(Three, name=name, weight_decay=0.1), callbacks=callbacks(name), max_epochs=1)
    run.save_checkpoint(path := tmp_path / "half.ckpt")
    trainer(callbacks=callbacks(name)).fit(resumed, loader(), loader(24), ckpt_path=path, weights_only=name != "galore")
    assert_equal(weights(resumed), weights(whole))
    other = "adagrad" if name != "adagrad" else "lion"
    with pytest.raises(MisconfigurationException, match=rf"optimizer\('{name}'\).*optimizer\('{other}'\)"):
        trainer().fit(build(Three, name=other), loader(), loader(24), ckpt_path=path, weights_only=name != "galore")


# -- ranks ------------------------------------------------------------------------------------------------------------

STRATEGIES = {"ddp": "ddp", "fsdp2": "fsdp2_bf16", "zero": "zero1_bf16"}


def on_ranks(case: tuple[str, str]) -> Any:
    name, engine = case
    settings = {"strategy": "ddp"} if engine == "ddp" else lt.preset(STRATEGIES[engine], precision="32-true")
    module = build(Three, name=name)
    run = trainer(devices=2, callbacks=callbacks(name), use_distributed_sampler=False, **settings)
    try:
        run.fit(module, rank_loader(), loader(8))
    except MisconfigurationException as error:
        assert run.global_step == 0, "refused before the first step"
        return str(error)
    return weights(module)


# One of each kind: elementwise, by matrices, with slow weights, averaged, refused; the others are slow.
KINDS = ("sgd", "adamw", "lion", "lamb", "muon", "lookahead_radam", "schedulefree_adamw", "adafactor", "adamw8bit")
SPLIT = [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]


@pytest.fixture(scope="module")
def two_ranks() -> Cases:
    return run_cases(on_ranks, [(name, engine) for engine in STRATEGIES for name in KINDS])


@pytest.fixture(scope="module")
def other_two_ranks() -> Cases:
    return run_cases(on_ranks, [(name, engine) for engine in STRATEGIES for name in ROWS if name not in KINDS])


def one_process(name: str) -> dict[str, Tensor]:
    """The weights of a process that gets the batches of both ranks."""
    module = build(Three, name=name)
    run = trainer(callbacks=callbacks(name))
    run.fit(module, loader(48, 16), loader(8))
    return weights(module)


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_equal_one_process_or_are_refused_as_the_table_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    found_by_case = request.getfixturevalue("two_ranks" if name in KINDS else "other_two_ranks")
    expected, row = one_process(name), next(row for row in lt.optimizers() if row["name"] == name)
    for engine in STRATEGIES:
        first, second = found_by_case[name, engine]
        for found in (first, second):
            if engine == "ddp" or row[engine]:
                assert not isinstance(found, str), f"{engine}: {found}"
                assert_equal(first, second)
                assert_close(found, expected, 1e-5 if name != "soap" else 0.1)  # its bases turn with rounding errors
            else:
                assert f"optimizer({name!r})" in found
                assert "Take 'adamw'" in found


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
    for name, settings in (("adamw", {}), ("muon", {}), ("lion", {"layer_decay": 0.8}), ("adamw", {"no_decay": False})):
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
}


@pytest.mark.parametrize("model", HIDDEN)
def test_muon_orthogonalizes_the_hidden_weights_alone(model: str) -> None:
    module = MODELS[model]()
    groups = named(lt.optimizer("muon", module, 0.02, weight_decay=0.1), module)
    hidden = {name for name, group in groups.items() if not group["use_fallback"]}
    assert hidden == {name for name in groups if name.endswith(HIDDEN[model])}
    assert {groups[name]["lr"] for name in groups.keys() - hidden} == {0.002}


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
    with pytest.raises(ValueError, match="got 'adamww': did you mean 'adamw'"):
        lt.optimizer("adamww", module, 0.1)
    with pytest.raises(TypeError, match="has no setting 'beta'; it has betas"):
        lt.optimizer("lion", module, 0.1, beta=0.9)
    with pytest.raises(TypeError, match="name must be a string"):
        lt.optimizer(torch.optim.SGD, module, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr"):
        lt.optimizer("sgd", module, -1)
    with pytest.raises(ValueError, match="hidden weights"):
        lt.optimizer("muon", nn.Linear(4, 2), 0.1)
    with pytest.raises(ValueError, match="no trainable parameters"):
        lt.optimizer("sgd", nn.Linear(4, 2).requires_grad_(False), 0.1)
    monkeypatch.setitem(ROWS, "elsewhere", Row("elsewhere", "not_there.optim.Elsewhere", 4, ""))
    with pytest.raises(ModuleNotFoundError, match=r"needs not_there: pip install 'lightning-tricks\[optimizers\]'"):
        lt.optimizer("elsewhere", module, 0.1)


def test_the_table_has_what_people_ask_for() -> None:
    names = {row["name"] for row in lt.optimizers()}
    assert len(names) > 20
    assert {"sgd", "adamw", "lion", "adafactor", "muon", "galore", "soap", "prodigy", "adamw8bit"} <= names


# Whose bytes depend on settings and shapes, or are kept in objects and lists.
OTHERWISE = {"adafactor", "galore", "muon", "soap"}


@pytest.mark.filterwarnings("ignore")  # of libraries, about single settings
@pytest.mark.parametrize("name", sorted(ROWS.keys() - OTHERWISE))
def test_bytes_of_state_are_those_of_the_table(name: str) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    momentum = {"momentum": 0.9} if name in ("sgd", "lookahead_sgd") else {}
    made = lt.optimizer(name, module, 0.01, **momentum, **NEEDED.get(name, {}))
    if name.startswith("schedulefree"):
        made.train()  # type: ignore[attr-defined]
    for _ in range(6):  # after which Lookahead has its slow weights
        module(torch.ones(2, 256)).sum().backward()
        made.step()
    inner = getattr(made, "_base_optimizer", made)
    held = sum(t.nbytes for state in inner.state.values() for t in state.values() if isinstance(t, Tensor))
    per_weight = held / sum(weight.numel() for weight in module.parameters())
    assert per_weight == pytest.approx(ROWS[name].bytes, rel=0.05)
