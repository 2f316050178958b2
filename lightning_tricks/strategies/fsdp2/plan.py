"""Tensor parallelism: the layers that a plan splits among the processes of a group, and how."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_tricks.core.adapters.inject import adapted_layers, inside_attention
from lightning_tricks.core.checks import check_choice, check_type, compile_pattern, some
from lightning_tricks.core.selection import outermost, select_modules

Plan = Mapping[str, str | ParallelStyle]

_WHOLE, _SEQUENCE = Replicate(), Shard(1)
STYLES: Mapping[str, Callable[..., ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=_WHOLE),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=_WHOLE),
    "sequence_parallel": partial(SequenceParallel, use_local_output=True),
    "sequence_colwise": partial(ColwiseParallel, input_layouts=_SEQUENCE),
    "sequence_colwise_gather_output": partial(ColwiseParallel, input_layouts=_SEQUENCE, output_layouts=_WHOLE),
    "rowwise_sequence": partial(RowwiseParallel, output_layouts=_SEQUENCE),
    # A norm of single heads treats the heads of another process as it does other samples.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=0, use_local_output=True),
}
_TRANSFORMERS = {  # Other names in plans of transformers; of "replicate" nothing is split.
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_colwise": "colwise_gather_output",
    "embedding_rowwise": "rowwise",
}
_HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "n_kv_heads")


def check_plan(plan: Plan) -> None:
    """Raise unless a plan maps regular expressions or class names to styles.

    Raises:
        TypeError: If something has the wrong type.
        ValueError: If the plan is empty, a pattern is no regular expression, or there is no such style.
    """
    check_type("plan", plan, Mapping)
    if not plan:
        raise ValueError("plan must name layers, got {}: leave it out for the plan of a transformers model.")
    for pattern, style in plan.items():
        check_type("a pattern in plan", pattern, str)
        compile_pattern("plan", pattern)
        check_type(f"plan[{pattern!r}]", style, str, ParallelStyle)
        if isinstance(style, str):
            check_choice(f"plan[{pattern!r}]", style, STYLES)


def planned_layers(module: nn.Module, plan: Plan | None, size: int) -> dict[nn.Module, ParallelStyle]:
    """The submodules that a plan splits, with their styles.

    Args:
        module: The model, which is not split yet.
        plan: Styles by patterns (see ``core.selection``); None for the plans of the transformers models in the module.
        size: The number of processes to split the layers among.

    Raises:
        MisconfigurationException: If a layer cannot be split so, or there is no plan.
        ValueError: If a pattern selects nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> plan = planned_layers(model, {"0": "colwise", "2": "rowwise"}, size=2)
        >>> [type(style).__name__ for style in plan.values()]
        ['ColwiseParallel', 'RowwiseParallel']
    """
    named: dict[str, str | ParallelStyle] = {}
    for name, style in _of_transformers(module) if plan is None else _of_patterns(module, plan):
        if name in named:
            raise MisconfigurationException(f"plan: two patterns select {name!r}. Make one of them narrower.")
        named[name] = style
    layers: dict[nn.Module, ParallelStyle] = {}
    adapted, inside = adapted_layers(module), inside_attention(module)
    for name, given in named.items():
        layer = module.get_submodule(name)
        if any(f"{name}.".startswith(f"{other}.") for other in adapted):
            raise _cannot(name, "has an adapter of LoRA, whose weights would not be split with it")
        if name in inside:
            raise _cannot(name, "is a part of nn.MultiheadAttention, whose forward pass does not call its layers")
        style = layers[layer] = _style(layer, given)
        _check_layer(name, layer, style, size)
        if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
            _check_heads(name, module.get_submodule(name.rpartition(".")[0]), layer, size)
    _check_tied(module, layers)
    return layers


def split(layers: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Split layers, whose weights are equal on all processes, along a mesh of one dimension."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # Tied weights stay tied.
    for layer, style in layers.items():
        unsplit = dict(layer.named_parameters(recurse=False))
        if isinstance(style, RowwiseParallel) and isinstance(output := style.output_layouts[0], Shard):
            layer.register_forward_hook(partial(_require_even, output.dim, mesh.size()))
        parallelize_module(layer, mesh, style, src_data_rank=None)
        for name, parameter in unsplit.items():
            part = made.setdefault(parameter, layer.get_parameter(name))
            part.requires_grad_(parameter.requires_grad)  # Which SequenceParallel forgets.
            layer.register_parameter(name, part)


def require_split_among(size: int, module: nn.Module) -> None:
    """Raise if the module was split in an earlier run, among another number of processes.

    Raises:
        MisconfigurationException: If the module was split among another number of processes.
    """
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    sizes = [mesh["tensor_parallel"].size() for mesh in meshes if "tensor_parallel" in (mesh.mesh_dim_names or ())]
    before = max(sizes, default=1)
    if before != size:
        raise MisconfigurationException(
            f"{type(module).__name__} is still split among {before} processes from an earlier run, got"
            f" tensor_parallel={size}. Create a new module and load its weights from a checkpoint."
        )


def _require_even(dim: int, size: int, layer: nn.Module, arguments: Any, output: Tensor) -> None:
    """Raise unless a sequence can be split evenly: torch takes a part for the same fraction on every process."""
    if output.shape[dim] % size:
        raise MisconfigurationException(
            f"plan splits sequences among tensor_parallel={size} processes, got {output.shape[dim]} tokens in dimension"
            f" {dim} of the output of {type(layer).__name__}: pad sequences to a multiple of {size}."
        )


# -- from patterns to layers ------------------------------------------------------------------------------------------


def _of_patterns(module: nn.Module, plan: Plan) -> Iterator[tuple[str, str | ParallelStyle]]:
    adapted = adapted_layers(module)
    for pattern, style in plan.items():
        selected = select_modules(module, pattern, "plan")
        splits = style in STYLES or isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel)
        layers = [name for name, child in selected.items() if name in adapted or [*child.parameters(recurse=False)]]
        if splits and not layers:
            raise ValueError(
                f"plan: {pattern!r} selects no layer with weights of its own, but {some(map(repr, selected))}."
            )
        yield from ((name, style) for name in (layers if splits else selected))


def _of_transformers(module: nn.Module) -> Iterator[tuple[str, str | ParallelStyle]]:
    kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    names: dict[nn.Module, str] = {child: name for name, child in module.named_modules()}
    found = False
    for model in outermost(child for child in names if isinstance(child, kind)):
        prefix = names[model] and f"{names[model]}."
        for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
            regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            selected = [name for name, _ in model.named_modules() if regex.fullmatch(name)]
            parameters = [name for name, _ in model.named_parameters() if regex.fullmatch(name)]
            style = _TRANSFORMERS.get(style, style)
            if style != "replicate" and (parameters or (selected and style not in STYLES)):
                raise MisconfigurationException(
                    f"{type(model).__name__}'s own plan splits {pattern!r} as {style!r}, which is none of"
                    f" {', '.join(STYLES)}: pass a plan= of these, which leaves such layers out."
                )
            found = found or bool(selected)
            yield from ((prefix + name, style) for name in selected if style != "replicate")
    if not found:
        raise MisconfigurationException(
            "tensor_parallel splits the layers of a plan, and there is neither plan= nor a transformers model with a"
            ' plan of its own: pass plan={"q_proj|k_proj|v_proj": "colwise", "o_proj": "rowwise", ...}.'
        )


def _style(layer: nn.Module, given: str | ParallelStyle) -> ParallelStyle:
    if isinstance(given, str):
        # torch's own default would split the numbers of the tokens.
        tokens = {"input_layouts": Replicate()} if isinstance(layer, nn.Embedding) and "rowwise" in given else {}
        return STYLES[given](**tokens)
    return given


# -- layers that cannot be split --------------------------------------------------------------------------------------


def _check_layer(name: str, layer: nn.Module, style: ParallelStyle, size: int) -> None:
    dim = split_dimension(layer, style)
    saved_buffers = layer.state_dict().keys() - dict(layer.named_parameters()).keys()
    if saved_buffers and (dim is not None or isinstance(style, SequenceParallel)):
        raise _cannot(name, "has buffers that are saved")
    if dim is None:
        return
    if not isinstance(layer, nn.Linear | nn.Embedding) or "forward" in vars(layer):
        raise _cannot(name, f"is no nn.Linear or nn.Embedding with its own forward pass, but {type(layer).__name__}")
    if isinstance(layer.weight, DTensor):
        raise _cannot(name, "is split or sharded already")
    if getattr(layer, "max_norm", None) is not None:
        raise _cannot(name, "is an nn.Embedding(max_norm=...)")
    if layer.weight.shape[dim] % size:
        width = ("outputs", "inputs") if isinstance(layer, nn.Linear) else ("tokens", "entries of a vector")
        raise _cannot(name, f"has {layer.weight.shape[dim]} {width[dim]}, which {size} does not divide")


def _check_heads(name: str, owner: nn.Module, layer: Any, size: int) -> None:
    """Raise if a layer's outputs are heads, of which not every process can have the same number."""
    width = getattr(owner, "head_dim", None)
    counts = {key: getattr(owner, key, None) for key in _HEADS}
    if isinstance(layer, nn.Linear) and isinstance(width, int) and width and layer.out_features % width == 0:
        counts["head_dim"] = layer.out_features // width
    for key, count in counts.items():
        if isinstance(count, int) and count % size:
            owned = f"{type(owner).__name__}.{key}"
            raise _cannot(name, f"computes {count} heads (by {owned}), which {size} does not divide")


def _check_tied(module: nn.Module, layers: Mapping[nn.Module, ParallelStyle]) -> None:
    planned = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    split_by: dict[nn.Parameter, dict[str, int | None]] = {}
    for name, owner in module.named_modules():
        for parameter in planned.intersection(owner.parameters(recurse=False)):
            style = layers.get(owner)
            split_by.setdefault(parameter, {})[name] = None if style is None else split_dimension(owner, style)
    for dims in split_by.values():
        if len({*dims.values()}) > 1:
            ways = ", ".join(f"{name!r} {_WAYS[dim]}" for name, dim in dims.items())
            raise MisconfigurationException(
                f"plan splits a weight that layers share in different ways ({ways}): give both the same part, such as"
                ' an embedding "rowwise" and its head "colwise_gather_output".'
            )


_WAYS = {0: "in its rows", 1: "in its columns", None: "not at all"}


def split_dimension(layer: nn.Module, style: ParallelStyle) -> int | None:
    """The dimension of the layer's weight that a style splits; None for a style that splits no weight."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    return int(isinstance(style, ColwiseParallel) == isinstance(layer, nn.Embedding))


def _cannot(name: str, why: str) -> MisconfigurationException:
    return MisconfigurationException(f"plan cannot split {name!r}, which {why}. Change the plan, or the layer.")
