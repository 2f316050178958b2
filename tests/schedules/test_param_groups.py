"""The groups partition what trains, each trains at its own learning rate, and timm's groups are the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_tricks.schedules import cosine, curves
from lightning_tricks.schedules.param_groups import (
    discriminative_groups,
    layer_decay_groups,
    no_weight_decay_groups,
    numbered_layers,
)
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, trained, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
TOKENS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def learning_rates(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate of each parameter, which a real optimizer accepts, each once."""
    optimizer = torch.optim.SGD(groups)
    assert all(group["params"] for group in groups)
    assert len({group["name"] for group in optimizer.param_groups}) == len(groups)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert set(rates) == {parameter for parameter in model.parameters() if parameter.requires_grad}
    return {name: rates[parameter] for name, parameter in model.named_parameters() if parameter.requires_grad}


def depths(model: nn.Module, **settings: Any) -> dict[str, int]:
    rates = learning_rates(model, layer_decay_groups(model, 1.0, 0.5, **settings))
    return {name: -int(torch.tensor(rate).log2()) for name, rate in rates.items()}


def blocks(count: int = 3) -> nn.Module:
    """A stem, a parameter of its own, blocks, a norm, a head."""
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])})
    model.update({"norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 4)))
    return model


# -- timm -------------------------------------------------------------------------------------------------------------

TIMM = ["vit_tiny_patch16_224", "resnet18", "convnext_atto", "swin_tiny_patch4_window7_224", "efficientnet_b0"]
TIMM += ["cait_xxs24_224", "mobilenetv3_small_050"]


def of_timm(name: str, **settings: Any) -> Any:
    import timm

    with torch.device("meta"):
        return timm.create_model(name, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TIMM)
def test_as_timm_groups(name):
    from timm.optim import param_groups_layer_decay

    for classes in (7, 0):
        model = of_timm(name, num_classes=classes)
        exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        theirs = param_groups_layer_decay(model, 0.05, no_weight_decay_list=exempt, layer_decay=0.7)
        expected = {p: (group["lr_scale"] * 0.3, group["weight_decay"]) for group in theirs for p in group["params"]}
        mine = layer_decay_groups(model, 0.3, 0.7, weight_decay=0.05)
        assert not any("lr_scale" in group for group in mine)
        found = {p: (group["lr"], group["weight_decay"]) for group in mine for p in group["params"]}
        assert found.keys() == expected.keys()
        assert all(found[p] == pytest.approx(expected[p]) for p in found)
        assert len(mine) == len(theirs)


def test_frozen_layers_keep_their_depth():
    model = of_timm("vit_tiny_patch16_224")
    before = depths(model)
    model.blocks.requires_grad_(False)
    model.blocks[11].requires_grad_(True)
    kept = {name: depth for name, depth in before.items() if not re.match(r"blocks\.\d\.|.*\.10\.", name)}
    assert depths(model) == kept


class Holds(L.LightningModule):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, module in held.items():
            setattr(self, name, module)


@pytest.mark.few(2)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model), nn.Sequential])
def test_a_module_that_holds_a_model_has_its_layers(wrap):
    inner = of_timm("resnet18")
    outer = Holds(net=wrap(inner))
    expected = {parameter: depths(inner)[name] for name, parameter in inner.named_parameters()}
    assert {p: depths(outer)[name] for name, p in outer.named_parameters()} == expected


def test_what_stands_beside_a_held_model_is_its_head():
    for classes, shift in [(5, 0), (0, 1)]:
        inner = of_timm("resnet18", num_classes=classes)
        outer = Holds(net=inner, own=nn.Linear(4, 2), before=nn.Linear(2, 2))
        expected = {f"net.{name}": depth + shift for name, depth in depths(inner).items()}
        own = dict.fromkeys(["own.weight", "own.bias", "before.weight", "before.bias"], 0)
        assert depths(outer) == {**expected, **own}


def test_what_a_held_timm_model_exempts_is_exempt():
    outer = Holds(net=of_timm("vit_tiny_patch16_224", num_classes=0), own=nn.Linear(4, 2))
    names = {parameter: name for name, parameter in outer.named_parameters()}
    decay = {group["name"]: [names[p] for p in group["params"]] for group in no_weight_decay_groups(outer, 0.1)}
    assert {"net.pos_embed", "net.cls_token", "own.bias"} <= set(decay["no_decay"])
    assert set(decay["decay"]) == {name for p, name in names.items() if p.ndim > 1} - {"net.pos_embed", "net.cls_token"}


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def of_transformers(name: str, **settings: Any) -> Any:
    """A tiny one with random weights; three layers unless the settings give its shape."""
    import transformers

    kind = getattr(transformers, name)
    shape = {} if {"d_model", "depths"} & settings.keys() else SMALL
    return kind(kind.config_class(**{**TOKENS, **shape, **settings}))


HUGGING_FACE: list[tuple[str, dict[str, Any], str, dict[str, int]]] = [
    ("BertForSequenceClassification", {}, "bert.encoder.layer", {"bert.pooler": 0, "classifier": 0}),
    ("BertForMaskedLM", {}, "bert.encoder.layer", {"cls.predictions.transform": 0}),
    ("BertModel", {}, "encoder.layer", {"pooler": 0, "embeddings": 4}),
    ("RobertaForSequenceClassification", {}, "roberta.encoder.layer", {"classifier": 0, "roberta.embeddings": 4}),
    (
        "DistilBertForSequenceClassification",
        {"dim": 8, "n_layers": 3, "n_heads": 2, "hidden_dim": 8},
        "distilbert.transformer.layer",
        {"pre_classifier": 0, "distilbert.embeddings": 4},
    ),
    (
        "DebertaV2ForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["p2c"], "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
        "deberta.encoder.layer",
        {"deberta.encoder.rel_embeddings": 4, "deberta.encoder.LayerNorm": 4, "deberta.encoder.conv": 4, "pooler": 0},
    ),
    (
        "GPT2LMHeadModel",  # its head is its embeddings: the layers come first
        {"n_embd": 8, "n_layer": 3, "n_head": 2},
        "transformer.h",
        {"transformer.ln_f": 0, "transformer.wte": 3, "transformer.wpe": 3},
    ),
    ("LlamaForCausalLM", {}, "model.layers", {"model.norm": 1, "lm_head": 0, "model.embed_tokens": 4}),
    (
        "OPTForCausalLM",
        {"word_embed_proj_dim": 8, "ffn_dim": 8, "tie_word_embeddings": False},
        "model.decoder.layers",
        {"model.decoder.final_layer_norm": 1, "lm_head": 0, "model.decoder.embed_tokens": 4},
    ),
    (
        "ViTForImageClassification",
        {"image_size": 8, "patch_size": 4},
        "vit.layers",
        {"vit.embeddings": 4, "vit.layernorm": 1, "classifier": 0},
    ),
    (
        "ModernBertForSequenceClassification",
        {"cls_token_id": 0, "sep_token_id": 0},
        "model.layers",
        {"model.final_norm": 1, "head.dense": 0, "head.norm": 0, "classifier": 0, "model.embeddings": 4},
    ),
]


def assert_layers(found: dict[str, int], stacks: list[str], count: int, others: dict[str, int], head: int) -> None:
    for place, stack in enumerate(stacks):
        for layer in range(count):
            of_layer = {d for name, d in found.items() if f"{name}.".startswith(f"{stack}.{layer}.")}
            assert of_layer == {head + (len(stacks) - place) * count - layer - 1}, f"{stack}.{layer}"
    for prefix, depth in others.items():
        assert {d for name, d in found.items() if name.startswith(f"{prefix}.")} == {depth}, prefix


@pytest.mark.parametrize(("name", "settings", "stack", "others"), HUGGING_FACE, ids=[row[0] for row in HUGGING_FACE])
def test_the_layers_of_a_hugging_face_model(name, settings, stack, others):
    model = of_transformers(name, **settings)
    if name.startswith("ViT") and hasattr(model.vit, "encoder"):  # in transformers 5.0
        stack = "vit.encoder.layer"
    head = int(name != "GPT2LMHeadModel")
    assert_layers(depths(model), [stack], 3, others, head)
    held = {f"net.{prefix}": depth + (not head) for prefix, depth in others.items()}
    outer = Holds(net=model, own=nn.Linear(2, 2))
    assert_layers(depths(outer), [f"net.{stack}"], 3, {**held, "own": 0}, 1)


def test_an_encoder_lies_below_its_decoder():
    each = {"layers": 2, "ffn_dim": 8, "attention_heads": 2}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in each.items()}
    model = of_transformers("BartForSequenceClassification", d_model=8, **sizes)
    others = {"model.shared": 5, "model.encoder.embed_positions": 5, "classification_head": 0}
    assert_layers(depths(model), ["model.encoder.layers", "model.decoder.layers"], 2, others, 1)


def test_what_lies_between_an_encoder_and_a_decoder_belongs_to_the_encoder():
    model = of_transformers("T5ForConditionalGeneration", d_model=8, d_ff=8, num_layers=2, d_kv=4)
    others = {"encoder.final_layer_norm": 2, "decoder.final_layer_norm": 0, "shared": 4}
    assert_layers(depths(model), ["encoder.block", "decoder.block"], 2, others, 0)


def test_unknown_layers_are_refused_with_the_remedy():
    for model in (
        blocks(),
        Holds(a=of_timm("resnet18"), b=of_timm("vit_tiny_patch16_224")),
        of_timm("poolformer_s12"),  # has no group_matcher
        of_transformers("SwinForImageClassification", image_size=16, embed_dim=4, depths=[1], num_heads=[1]),
    ):
        name = next(name for name, _ in model.named_parameters())
        message = r"must be or hold one timm or Hugging Face model .*else pass pattern, a regex .*as r'\^blocks.*are '"
        with pytest.raises(ValueError, match=message + re.escape(name)):
            layer_decay_groups(model, 0.1, 0.5)


# -- a pattern --------------------------------------------------------------------------------------------------------


def test_a_pattern_numbers_the_layers():
    found = depths(blocks(), pattern=r"^blocks\.(\d+)")
    assert found["token"] == found["stem.weight"] == found["stem.bias"] == 4
    assert [found[f"blocks.{layer}.weight"] for layer in range(3)] == [3, 2, 1]
    assert found["norm.weight"] == found["head.bias"] == 0


def test_layers_sort_as_numbers_not_as_words():
    found = depths(blocks(12), pattern=r"blocks\.(\d+)")
    assert [found[f"blocks.{layer}.bias"] for layer in range(12)] == [*range(12, 0, -1)]


def test_further_groups_number_the_layers_within():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)])
    assert [*depths(model, pattern=r"^(\d+)\.(\d+)").values()][::2] == [3, 2, 1, 0]
    assert [*depths(model, pattern=r"^(\d+)").values()][::2] == [1, 1, 0, 0]


def test_what_stands_between_two_layers_belongs_to_the_lower_one():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("conv1", "norm_a", "conv2", "head")})
    assert [*depths(model, pattern=r"^conv(\d)").values()][::2] == [2, 2, 1, 0]


def test_a_pattern_goes_before_what_the_model_says():
    found = depths(of_timm("resnet18"), pattern=r"^layer(\d)")
    assert found["layer4.1.conv1.weight"] == found["layer4.0.conv1.weight"] == 1


def test_a_pattern_without_numbers_is_refused():
    message = r"pattern must be found in parameters' names with the layer's number .*got .*Parameters are 'token'"
    for pattern in (r"^block\.(\d+)", r"^blocks\.\d+", r"^(blocks)", r"(\w+)\.\d"):
        with pytest.raises(ValueError, match=message):
            layer_decay_groups(blocks(), 0.1, 0.5, pattern=pattern)


def test_what_has_no_number_belongs_to_its_neighbours_or_to_the_head():
    model = nn.ModuleDict({"stem": nn.Linear(1, 1), "blocks": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])})
    model["head"] = nn.Linear(1, 1)
    layers = numbered_layers(model, r"^blocks\.(\d+)")
    order = [layers[f"{name}.weight"] for name in ("stem", "blocks.0", "blocks.1", "head")]
    assert order == sorted(set(order))
    assert all(layers[name.replace("weight", "bias")] == key for name, key in layers.items())


# -- every group of every function ------------------------------------------------------------------------------------


def random_model(generator: random.Random) -> nn.Module:
    """Blocks, some of them frozen, with a shared weight; something always trains."""
    model = blocks(generator.randint(1, 5))
    layers: Any = model["blocks"]
    layers[-1].weight = generator.choice([layers[0], layers[-1], model["stem"]]).weight
    for parameter in model.parameters():
        parameter.requires_grad_(generator.random() < 0.7)
    model["head"].weight.requires_grad_(True)
    return model


Make = Callable[..., list[dict[str, Any]]]
MAKES: dict[str, Make] = {
    "layer": lambda model, **more: layer_decay_groups(model, 0.1, 0.5, pattern=r"blocks\.(\d+)", **more),
    "named": lambda model, **more: discriminative_groups(model, {"^head": 0.3, "stem|blocks": 0.1, "": 0.2}, **more),
    "decay": lambda model, **more: no_weight_decay_groups(model, 0.01, **more),
}


def test_groups_partition_what_trains_in_any_order_of_the_functions():
    generator = random.Random(0)
    for _ in range(30):
        model = random_model(generator)
        groups, before = None, [*model.parameters()]
        for name in generator.sample(sorted(MAKES), generator.randint(1, 3)):
            groups = MAKES[name](model, groups=groups)
            learning_rates(model, [{"lr": 1.0, **group} for group in groups])
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_shared_parameter_counts_once_by_its_first_name():
    layers = nn.Sequential(nn.Linear(4, 4))
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": layers, "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    assert depths(model, pattern=r"layers\.(\d)")["embed.weight"] == 2
    rates = learning_rates(model, discriminative_groups(model, {"^head": 0.3, "": 0.1}))
    assert rates == {"embed.weight": 0.1, "layers.0.weight": 0.1, "layers.0.bias": 0.1, "head.bias": 0.3}


def test_groups_may_be_a_tuple():
    model = blocks()
    given = discriminative_groups(model, {"": 0.1})
    assert no_weight_decay_groups(model, 0.1, groups=tuple(given)) == no_weight_decay_groups(model, 0.1, groups=given)


def test_what_cannot_be_grouped_is_refused():
    no_groups: Any = ([], (), 0, [{"lr": 0.1}], ["params"])
    frozen, lazy = blocks().requires_grad_(False), nn.Sequential(nn.LazyLinear(2))
    others = no_weight_decay_groups(blocks(), 0.1)
    message = "groups must be a list of parameter groups, dictionaries with 'params', got"
    cases = [
        (ValueError, {"model": frozen}, "ModuleDict has no trainable parameters to group: unfreeze some"),
        (ValueError, {"model": lazy}, r"weight decay goes by shapes, and 0\.weight has none yet"),
        (ValueError, {"groups": others}, "groups hold a parameter that ModuleDict lacks: pass their model"),
        *((TypeError, {"groups": each}, message) for each in no_groups),
    ]
    assert_refused(lambda **given: no_weight_decay_groups(**{"model": blocks(), "weight_decay": 0.1, **given}), cases)


def test_splitting_keeps_the_settings_and_leaves_the_given_groups_alone():
    model = blocks()
    given = [{"params": [*model.parameters()], "lr": 0.2, "momentum": 0.5, "name": "all"}]
    made = layer_decay_groups(model, 7.0, 0.5, pattern=r"blocks\.(\d)", groups=given)
    assert [(g["name"], g["lr"]) for g in made[:2]] == [("all_depth_4", 0.2 * 0.5**4), ("all_depth_3", 0.2 * 0.5**3)]
    assert {g["momentum"] for g in made} == {0.5}
    assert given == [{"params": [*model.parameters()], "lr": 0.2, "momentum": 0.5, "name": "all"}]


def test_unnamed_groups_are_numbered_so_that_lightning_logs_each(tmp_path):
    class Unnamed(PlainNet):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [*layer.parameters()]} for layer in (self.layers[0], self.layers[2])]
            return torch.optim.SGD(no_weight_decay_groups(self, 0.1, groups=groups), lr=0.1)

    run = fit(build(Unnamed), callbacks=[LearningRateMonitor()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    names = [group["name"] for group in run.optimizers[0].param_groups]
    assert names == [f"group_{i}_{part}" for i in (0, 1) for part in ("decay", "no_decay")]


def test_the_order_of_functions_that_set_different_things_does_not_matter():
    model = blocks()
    settings: Any = {"pattern": r"blocks\.(\d)"}
    first = layer_decay_groups(model, 0.1, 0.5, **settings, groups=no_weight_decay_groups(model, 0.05))
    second = layer_decay_groups(model, 0.1, 0.5, **settings, weight_decay=0.05)
    tables = [{p: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]} for groups in (first, second)]
    assert tables[0] == tables[1]


def test_layer_decay_goes_on_top_of_discriminative_rates():
    model = blocks()
    groups = discriminative_groups(model, {"^head|^norm": 1.0, "": 0.1})
    rates = learning_rates(model, layer_decay_groups(model, 9.0, 0.5, pattern=r"blocks\.(\d)", groups=groups))
    assert (rates["head.bias"], rates["blocks.2.bias"], rates["token"]) == (1.0, 0.1 * 0.5, 0.1 * 0.5**4)


# -- discriminative ---------------------------------------------------------------------------------------------------


def test_the_first_pattern_wins():
    model = blocks()
    rates = learning_rates(model, discriminative_groups(model, {"bias": 0.5, r"blocks\.1": 0.25, "": 1.0}))
    assert (rates["blocks.1.bias"], rates["blocks.1.weight"], rates["blocks.0.weight"]) == (0.5, 0.25, 1.0)


def test_a_pattern_may_be_the_name_of_a_class():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    rates = learning_rates(model, discriminative_groups(model, {"LayerNorm": 0.1, "": 0.01}))
    assert rates == {name: 0.1 if name.startswith("1.") else 0.01 for name, _ in model.named_parameters()}


def test_what_matches_nothing_is_refused_with_examples():
    with pytest.raises(ValueError, match=r'7 match no pattern: add one .*or "" at the end .*are \'token\'.*blocks'):
        discriminative_groups(blocks(), {"head|stem": 0.1, "norm": 0.2})


def test_frozen_parameters_need_no_pattern_and_may_have_one():
    model = blocks()
    model["blocks"].requires_grad_(False)
    model.token.requires_grad_(False)
    groups = discriminative_groups(model, {"head": 0.1, "stem|norm": 0.2})
    assert groups[0]["name"] == "stem|norm"
    assert len(discriminative_groups(model, {"blocks": 0.3, "": 0.1})) == 1


def test_a_pattern_that_gives_no_learning_rate_is_refused():
    with pytest.raises(ValueError, match=r"lrs: a pattern must be found in a name, .*; 'heads' is neither"):
        discriminative_groups(blocks(), {"heads": 0.1, "": 0.2})
    useless = {"head": {"": 0.1, "head": 0.2}, "^stem": {"stem": 0.1, "^stem": 0.2, "": 1.0}}
    for pattern, lrs in useless.items():
        message = rf"{re.escape(repr(pattern))} gives none: .*general patterns last.*'token'"
        with pytest.raises(ValueError, match=message):
            discriminative_groups(blocks(), lrs)


# -- weight decay -----------------------------------------------------------------------------------------------------


def test_biases_and_norms_have_no_weight_decay():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    model = nn.ModuleDict({"conv": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2), "odd": Odd()})
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {group["name"]: {names[p] for p in group["params"]} for group in no_weight_decay_groups(model, 0.1)}
    decays = {"conv.weight", "odd.weight"}
    assert found == {"decay": decays, "no_decay": {*names.values()} - decays}


def test_a_weight_that_zero_3_has_taken_away_is_known_by_its_whole_shape():
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)  # as DeepSpeed leaves it
    found = {group["name"]: len(group["params"]) for group in no_weight_decay_groups(model, 0.1)}
    assert found == {"decay": 1, "no_decay": 1}


def grouped_under_fsdp1() -> str:
    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="use FSDP2") as refusal:
        no_weight_decay_groups(nn.Sequential(model), 0.1)
    return str(refusal.value)


@pytest.mark.filterwarnings("ignore")
def test_flat_shards_are_refused():
    assert "FSDP1 hides" in run_ranks(grouped_under_fsdp1)[0]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_names_the_argument_the_value_and_what_is_allowed():
    layers = partial(layer_decay_groups, blocks(), 1, 0.5)
    decays = [(ValueError, {"weight_decay": -0.1}, r"weight_decay must be in \[0.0, inf\), got -0.1")]
    cases = [
        (ValueError, {"lr": -1}, r"lr must be in \[0.0, inf\), got -1"),
        (TypeError, {"lr": "1"}, r"lr must be a number .*got '1'"),
        (ValueError, {"decay": 1.5}, r"decay must be in \[0.0, 1.0\], got 1.5"),
    ]
    assert_refused(lambda lr=1, decay=0.5: layer_decay_groups(blocks(), lr, decay), cases)
    cases = [
        (ValueError, {"pattern": "("}, r"pattern: '\(' is not a regular expression: missing \)"),
        (TypeError, {"pattern": 3}, r"pattern must be str, got 3"),
    ]
    assert_refused(layers, cases)
    assert_refused(partial(layers, pattern=r"blocks\.(\d)"), decays)
    assert_refused(partial(no_weight_decay_groups, blocks()), decays)
    cases = [
        (ValueError, {"lrs": {"head": -1}}, r"lrs\['head'\] must be in \[0.0, inf\), got -1"),
        (ValueError, {"lrs": {"[": 1}}, r"lrs: '\[' is not a regular expression: unterminated"),
        (TypeError, {"lrs": {3: 1}}, "lrs must be str, got 3"),
        (TypeError, {"lrs": {}}, r"lrs must map patterns to learning rates, as .*got {}"),
        (TypeError, {"lrs": [0.1, 0.2]}, r"lrs must map patterns .*got \[0.1, 0.2\]"),
    ]
    assert_refused(partial(discriminative_groups, blocks()), cases)


# -- in a fit ---------------------------------------------------------------------------------------------------------


class Decayed(PlainNet):
    """Three layers at learning rates of their own under a cosine."""

    def configure_optimizers(self) -> Any:
        groups = layer_decay_groups(self, 0.2, 0.5, pattern=r"layers\.(\d+)", weight_decay=0.1)
        return cosine(torch.optim.SGD(groups, momentum=0.5), self, warmup=2)


def by_hand(module: PlainNet, steps: int) -> nn.Module:
    """SGD with momentum and a learning rate for each parameter, in a plain loop."""
    rates = {"layers.0": 0.1, "layers.2": 0.2}
    momenta = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    batches = [*loader(), *loader()]
    for step, (x, y) in enumerate(batches):
        factor = curves.cosine(step, total_steps=steps, warmup=2)
        loss = torch.nn.functional.cross_entropy(module(x), y)
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        for (name, p), gradient in zip(module.named_parameters(), gradients, strict=True):
            decay = 0.1 if name.endswith("weight") else 0.0
            momenta[name] = 0.5 * momenta[name] + gradient + decay * p.detach()
            p.data -= rates[name.rpartition(".")[0]] * factor * momenta[name]
    return module


def test_each_group_trains_at_its_own_rate_under_a_schedule():
    module = build(Decayed)
    run = fit(module)
    assert_close(weights(module), weights(by_hand(build(Decayed), run.global_step)), 1e-6)


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.rates: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})


def test_the_ratio_of_two_groups_is_the_decay_at_every_step():
    recorder = Recorder()
    fit(build(Decayed), callbacks=[recorder])
    assert len(recorder.rates) == 12
    for rates in recorder.rates:
        assert rates["depth_1_decay"] == rates["depth_1_no_decay"] == pytest.approx(0.5 * rates["depth_0_decay"])


def test_lightning_logs_each_group_by_its_name(tmp_path):
    monitor = LearningRateMonitor()
    fit(build(Decayed), callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert {f"lr-SGD/depth_{depth}_{part}" for depth in (0, 1) for part in ("decay", "no_decay")} == set(monitor.lrs)


def test_a_decay_of_1_is_one_learning_rate_for_all():
    class Plain(PlainNet):
        def configure_optimizers(self) -> Any:
            return cosine(torch.optim.SGD(self.parameters(), lr=0.2), self)

    class NoDecay(PlainNet):
        def configure_optimizers(self) -> Any:
            return cosine(torch.optim.SGD(layer_decay_groups(self, 0.2, 1.0, pattern=r"layers\.(\d+)")), self)

    assert_equal(trained(NoDecay), trained(Plain))


def test_an_optimizer_takes_resumes_and_steps_the_groups():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        model = blocks()
        settings: Any = {"pattern": r"blocks\.(\d)", "weight_decay": 0.01}
        optimizer, resumed = (kind(layer_decay_groups(model, 0.1, 0.5, **settings)) for _ in range(2))
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        resumed.load_state_dict(optimizer.state_dict())
        assert [group["name"] for group in resumed.param_groups] == [group["name"] for group in optimizer.param_groups]
