"""Plans of tensor parallelism: the layers that they name, and those that cannot be split."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

import lightning_tricks as lt
from lightning_tricks.strategies.fsdp2.plan import STYLES, planned_layers
from tests.strategies.fsdp2.split_nets import HAND, SEQUENCE, Block, Pretrained, Qwen, Tied, Words


class Heads(nn.Module):
    def __init__(self, heads: int, keys: int, **names: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 4 * heads), nn.Linear(24, 4 * keys)
        for name, number in names.items():
            setattr(self, name, number)


class Scaled(nn.Embedding):
    """An embedding with a buffer that is saved, unlike Gemma's."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("factor", torch.ones(()))


def named(module: nn.Module, plan: Any, size: int = 2) -> dict[str, Any]:
    names = {child: name for name, child in module.named_modules()}
    return {names[layer]: style for layer, style in planned_layers(module, plan, size).items()}


def test_patterns_name_layers_with_weights() -> None:
    found = named(Block(16), {"attention.[qkv]$": "colwise", "o$|down": "rowwise", "^norm": "sequence_parallel"})
    kinds = {name: type(style).__name__.removesuffix("Parallel") for name, style in found.items()}
    assert kinds == {
        **dict.fromkeys(["attention.q", "attention.v", "attention.k"], "Colwise"),
        **dict.fromkeys(["attention.o", "down"], "Rowwise"),
        "norm": "Sequence",
    }
    prepare = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    own = {"Attention": prepare, "up": ColwiseParallel(output_layouts=Replicate())}
    assert named(Block(16), own) == {"attention": prepare, "up": own["up"]}


def test_numbers_of_tokens_are_not_split() -> None:
    style = named(Words(), {"embedding": "rowwise"})["embedding"]
    assert style.input_layouts == (Replicate(),)
    assert named(Words(), {"head": "rowwise"})["head"].input_layouts == (Shard(-1),)


@pytest.mark.parametrize("kind", [Pretrained, Qwen])
def test_the_plan_of_transformers(kind: type[Pretrained]) -> None:
    model = kind()
    found = named(model, None)
    for name, style in found.items():
        last = name.rpartition(".")[2]
        if last in ("o_proj", "down_proj", "embed_tokens"):
            assert isinstance(style, RowwiseParallel)
        elif last in ("q_norm", "k_norm"):
            assert style.sequence_sharding == (Shard(0),)
        else:
            assert isinstance(style, ColwiseParallel)
            assert style.output_layouts == ((Replicate() if last == "lm_head" else Shard(-1)),)
    linear = {name for name, child in model.named_modules() if isinstance(child, nn.Linear)}
    # Neither head nor norms of heads are in the plans of transformers 5.0.
    assert linear - {"model.lm_head"} <= found.keys()
    assert ("model.lm_head" in found) == ("lm_head" in model.model.tp_plan)
    assert sum(name.endswith("q_norm") for name in found) == 2 * any("q_norm" in name for name in model.model.tp_plan)


def mixtral() -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return nn.Sequential(transformers.MixtralForCausalLM(config))


def adapted() -> nn.Module:
    import peft

    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q"]), Block(16))


def hooked() -> nn.Module:
    block = Block(16)
    block.up.forward = lambda x: x
    return block


REFUSED: dict[str, tuple[Any, Any, str]] = {  # module, plan, message
    "outputs": (lambda: nn.Sequential(nn.Linear(3, 4)), {"0": "colwise"}, "'0', which has 4 outputs, which 3 does not"),
    "inputs": (lambda: nn.Sequential(nn.Linear(4, 3)), {"0": "rowwise"}, "'0', which has 4 inputs, which 3 does not"),
    "tokens": (lambda: nn.Sequential(nn.Embedding(4, 6)), {"0": "rowwise"}, "has 4 tokens, which 3"),
    "vectors": (lambda: nn.Sequential(nn.Embedding(6, 4)), {"0": "colwise"}, "has 4 entries of a vector, which 3"),
    "heads": (lambda: Heads(6, 3, n_heads=4), {"q": "colwise"}, re.escape("4 heads (by Heads.n_heads), which 3")),
    "keys": (lambda: Heads(6, 3, head_dim=6), {"k": "colwise"}, re.escape("2 heads (by Heads.head_dim), which 3")),
    "twice": (lambda: Block(18), {"up": "colwise", "Linear": "rowwise"}, "two patterns select 'up'"),
    "attention": (lambda: nn.Sequential(nn.MultiheadAttention(6, 3)), {"out_proj": "rowwise"}, "MultiheadAttention"),
    "tied": (lambda: Tied(), {"head": "colwise"}, "'embedding' not at all, 'head' in its rows"),
    "tied otherwise": (lambda: Tied(), {"head": "rowwise", "embedding": "rowwise"}, "'head' in its columns"),
    "conv": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1)), {"0": "colwise"}, "no nn.Linear or nn.Embedding"),
    "another forward": (hooked, {"up": "colwise"}, "with its own forward pass, but Linear"),
    "buffers": (lambda: nn.Sequential(Scaled()), {"0": "rowwise"}, "has buffers that are saved"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=1.0)), {"0": "rowwise"}, "max_norm"),
    "adapter": (adapted, {"q": "colwise"}, "'attention.q', which has an adapter of LoRA"),
    "no plan": (lambda: Block(16), None, "neither plan= nor a transformers model"),
    "experts": (
        mixtral, None, "MixtralForCausalLM's own plan splits '.*(experts|gate).*' as '(packed_colwise|ep_router)'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_cannot_be_split_is_named(case: str) -> None:
    make, plan, message = REFUSED[case]
    with pytest.raises(MisconfigurationException, match=message):
        planned_layers(make(), plan, 2 if case in ("tied", "tied otherwise", "experts") else 3)


def test_a_pattern_that_selects_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan: .*'qproj' is neither"):
        planned_layers(Block(16), {"qproj": "colwise"}, 2)
    with pytest.raises(ValueError, match="'attention' selects no layer with weights"):
        planned_layers(nn.ModuleDict({"attention": nn.ReLU()}), {"attention": "colwise"}, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel"),
        ({"tensor_parallel": "nodes"}, TypeError, "tensor_parallel"),
        ({"tensor_parallel": 2, "replicas": 2}, ValueError, "tensor_parallel=2 and replicas=2"),
        ({"plan": HAND}, ValueError, "got tensor_parallel=1"),
        ({"tensor_parallel": 2, "plan": {}}, ValueError, "must name layers"),
        ({"tensor_parallel": 2, "plan": {"(": "colwise"}}, ValueError, "not a regular expression"),
        ({"tensor_parallel": 2, "plan": {"q": "columns"}}, ValueError, "one of 'colwise'"),
        ({"tensor_parallel": 2, "plan": {"q": 1}}, TypeError, "must be str or ParallelStyle"),
        ({"tensor_parallel": 2, "plan": ["q"]}, TypeError, "plan must be Mapping"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.FSDP2Preset(**arguments)


def test_every_style_makes_an_object_of_its_own() -> None:
    assert all(make() is not make() for make in STYLES.values())
    assert {*HAND.values(), *SEQUENCE.values()} <= STYLES.keys()
    assert lt.preset("tp_bf16")["strategy"].tensor_parallel == "node"
