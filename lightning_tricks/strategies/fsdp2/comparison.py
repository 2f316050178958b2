"""Modules with split layers beside unsplit ones; apart from the preset, since it looks at the first step only."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.linalg import vector_norm

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.rerun import Start, undone
from lightning_tricks.core.selection import is_called
from lightning_tricks.core.weights.tensors import full_tensor, hidden_from_autograd

TOLERANCE = 2e-3  # Relative, in fp32; TensorFloat32 rounds by less.
Places = list[tuple[nn.Module, str]]  # Modules, and the names of their split layers.


def compare_at_first(module: nn.Module, layers: Mapping[nn.Module, ParallelStyle], device: torch.device) -> None:
    """Let the modules around split layers compare themselves with unsplit layers, once, in their first forward pass.

    A module that counts heads, or cuts one layer's outputs into queries, keys and values, would compute something else
    with a part of the outputs, and nobody would notice. Left out are modules of transformers, whose code is written for
    parts; the LightningModule itself, whose own layers ``StepComparison`` compares; modules with sharded blocks inside,
    which would be gathered; and layers whose inputs or outputs are parts of the tokens.

    Args:
        module: The sharded module.
        layers: The layers that are split, with their styles.
        device: The device that the module is on.
    """
    for name, (owner, places) in _owners(module, layers).items():
        _Comparison(name, places, device).start(owner)


class _Comparison:
    """A hook after the first forward pass of a module, and a warning if its layers run outside of it."""

    def __init__(self, name: str, places: Places, device: torch.device) -> None:
        self._name, self._places, self._device = name, places, device
        self._inside = False

    def start(self, owner: nn.Module) -> None:
        layers = [parent.get_submodule(key) for parent, key in self._places]
        self._handles = [
            owner.register_forward_pre_hook(self._enter),
            *(layer.register_forward_pre_hook(self._ask) for layer in layers),
            # In front of the hook of FSDP2, which shards the weights again.
            owner.register_forward_hook(self, with_kwargs=True, prepend=True),
        ]

    @torch.compiler.disable
    def _enter(self, owner: nn.Module, args: Any) -> None:
        self._inside = True

    @torch.compiler.disable
    def _ask(self, layer: nn.Module, args: Any) -> None:
        if not self._inside:
            self._remove()
            rank_zero_warn(
                f"plan splits layers of {self._name!r}, which run outside of its forward pass: whether they compute the"
                " same with parts is not compared. Call the module itself, or look whether the loss of the first step"
                " is that of strategy='fsdp2_bf16'."
            )

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable
    def __call__(self, owner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._remove()
        parts: list[Tensor] = []
        apply_to_collection((args, kwargs), DTensor, parts.append)
        if not parts:
            with torch.autocast(self._device.type, enabled=False):
                _require_same(self._name, owner, self._places, args, kwargs, self._device)


class StepComparison:
    """Runs the first training step once more, with unsplit layers, and compares what layers with whole outputs give.

    It is for what no module's forward pass can show: layers that are the LightningModule's own, and tokens that are
    split from one module to the next. Weights are gathered layer by layer. Nothing is logged, and nothing is left of
    either run in module and random numbers.

    Args:
        module: The sharded module.
        layers: The layers that are split, with their styles.
        device: The device that the module is on.
    """

    def __init__(
        self, module: L.LightningModule, layers: Mapping[nn.Module, ParallelStyle], device: torch.device
    ) -> None:
        self._module, self._device = module, device
        names = {layer: name for name, layer in module.named_modules()}
        self._layers = {names[layer]: layer for layer in layers if [*layer.parameters(recurse=False)]}
        self._whole = {name for name, layer in self._layers.items() if _gives_whole(layers[layer])}

    @staticmethod
    def is_due(module: L.LightningModule, layers: Mapping[nn.Module, ParallelStyle]) -> bool:
        """Whether the LightningModule sees parts of features, or tokens are split."""
        own = [layers[layer] for path, layer in module.named_modules() if layer in layers and not _owner(module, path)]
        parts = any(_shards(style, "input_layouts") or _shards(style, "output_layouts") for style in own)
        return module.automatic_optimization and (parts or any(map(_splits_tokens, layers.values())))

    @torch.no_grad()
    def run(self, *arguments: Any) -> None:
        """Compare the outputs of a step.

        Args:
            arguments: Those of ``training_step``.

        Raises:
            MisconfigurationException: If a layer gives something else on any process.
        """
        error: Exception | None = None
        self._outputs(arguments)  # in which modules compare themselves, and run their layers more often
        ours = self._outputs(arguments)
        try:
            with ExitStack() as undo:
                for layer in self._layers.values():
                    undo.callback(wrap_method(layer, "forward", partial(_forward_whole, layer)))
                    undo.enter_context(_without_hooks(layer))
                theirs = self._outputs(arguments)
            wrong = next((n for (n, a), (_, b) in zip(ours, theirs, strict=True) if _differ(a, b, TOLERANCE)), "")
        except Exception as raised:  # It only runs with parts.
            wrong, error = "training_step", raised
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, wrong)
        if any(found):
            kind = type(self._module).__name__.removeprefix("FSDP")
            raise MisconfigurationException(
                f"plan splits layers of {kind}, whose training step computes something else with parts of them (first"
                f" seen in {next(filter(None, found))!r}): it counts heads, features or tokens, of"
                " which a process has only some, or cuts one layer's outputs into several. Leave the number of heads"
                " open, as in q.unflatten(-1, (-1, head_dim)), give queries, keys and values a layer each, add"
                " positions before tokens are split, or leave these layers out of the plan."
            ) from error

    def _outputs(self, arguments: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """What layers with whole outputs give, in the order of their calls."""
        outputs: list[tuple[str, Any]] = []
        with ExitStack() as undo:
            undo.enter_context(torch.autocast(self._device.type, enabled=False))
            undo.enter_context(undone(Start.here(self._module, self._device, deep=True)))
            undo.callback(wrap_method(self._module, "log", lambda original, *_, **__: None))
            for name in self._whole:
                note = partial(_note_output, outputs, name)
                undo.callback(self._layers[name].register_forward_hook(note).remove)
            self._module.eval()
            self._module.training_step(*arguments)
        return outputs


def _note_output(outputs: list[tuple[str, Any]], name: str, layer: nn.Module, args: Any, output: Any) -> None:
    outputs.append((name, output))


def _forward_whole(layer: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
    return _unsplit(layer)(*args, **kwargs)


@contextmanager
def _without_hooks(layer: nn.Module) -> Iterator[None]:
    """Leave the hooks out that a layer has now."""
    kept = layer._forward_pre_hooks, layer._forward_hooks
    layer._forward_pre_hooks, layer._forward_hooks = type(kept[0])(), type(kept[1])()
    try:
        yield
    finally:
        layer._forward_pre_hooks, layer._forward_hooks = kept


@torch.no_grad()
def _require_same(name: str, owner: nn.Module, places: Places, args: Any, kwargs: Any, device: torch.device) -> None:
    start, forward = Start.here(owner, device, deep=True), type(owner).forward
    unsplit = [(parent, key, _unsplit(parent.get_submodule(key))) for parent, key in places]
    dtype = next(unsplit[0][2].parameters()).dtype
    args, kwargs = apply_to_collection((args, kwargs), Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x)
    error: Exception | None = None
    # The graph of the forward pass that has ended keeps buffers of BatchNorm, which end as they are.
    with hidden_from_autograd([*owner.buffers()]), undone(start):
        owner.eval()
        ours = forward(owner, *args, **kwargs)
        for parent, key, layer in unsplit:
            setattr(parent, key, layer)
        try:
            differs = _differ(ours, forward(owner, *args, **kwargs), max(TOLERANCE, 8 * torch.finfo(dtype).eps))
        except Exception as raised:  # It only runs with parts.
            differs, error = True, raised
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, differs)
    if any(found):
        raise MisconfigurationException(
            f"plan splits layers of {name!r} ({type(owner).__name__}), whose forward pass computes something else with"
            " parts of them: it counts heads or features, of which a process has only some, or cuts one layer's outputs"
            " into several. Leave the number of heads open, as in q.unflatten(-1, (-1, head_dim)), give queries, keys"
            " and values a layer each, or leave these layers out of the plan."
        ) from error


def _owners(module: nn.Module, layers: Mapping[nn.Module, ParallelStyle]) -> dict[str, tuple[nn.Module, Places]]:
    """The modules that call split layers, by name, with the places of these layers."""
    found: dict[str, tuple[nn.Module, Places]] = {}
    kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    left_out = {inner for outer in module.modules() if isinstance(outer, kind) for inner in outer.modules()}
    for path, layer in module.named_modules():
        if layer not in layers or layer in left_out or not any(True for _ in layer.parameters(recurse=False)):
            continue
        parent, _, key = path.rpartition(".")
        name = _owner(module, path)
        owner = module.get_submodule(name)
        if (
            name
            and owner not in layers
            and not any(isinstance(inner, FSDPModule) for inner in owner.modules() if inner is not owner)
        ):
            found.setdefault(name, (owner, []))[1].append((module.get_submodule(parent), key))
    return {
        name: (owner, places)
        for name, (owner, places) in found.items()
        if not any(_splits_tokens(layers[parent.get_submodule(key)]) for parent, key in places)
    }


def _owner(module: nn.Module, path: str) -> str:
    """The name of the module that calls a layer; empty for the LightningModule."""
    *parents, _ = path.split(".")
    # A ModuleList has layers and is never called: the module that calls them is further up.
    while parents and not is_called(module.get_submodule(".".join(parents))):
        parents.pop()
    return ".".join(parents)


def _shards(style: ParallelStyle, layouts: str) -> bool:
    return any(isinstance(layout, Shard) for layout in getattr(style, layouts, None) or ())


def _gives_whole(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel | RowwiseParallel) and not _shards(style, "output_layouts")


def _splits_tokens(style: ParallelStyle) -> bool:
    layouts = (getattr(style, name, None) or () for name in ("input_layouts", "output_layouts", "sequence_sharding"))
    return any(isinstance(layout, Shard) and layout.dim > 0 for several in layouts for layout in several)


def _unsplit(layer: nn.Module) -> nn.Module:
    """A copy of a layer with all of its weights, and without the hooks that split its inputs and outputs."""
    whole = copy.copy(layer)
    whole._forward_hooks, whole._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
    own = layer.named_parameters(recurse=False)
    full = {name: nn.Parameter(full_tensor(weight), requires_grad=False) for name, weight in own}
    whole._parameters = {**layer._parameters, **full}
    vars(whole).pop("forward", None)  # of a trick such as Float8, bound to the layer with parts
    return whole


def _differ(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Whether the tensors of two outputs are of other shapes, or further apart than rounding takes them."""
    both: tuple[list[Tensor], list[Tensor]] = [], []
    for output, tensors in zip((ours, theirs), both, strict=True):
        apply_to_collection(output, Tensor, tensors.append)
    pairs = list(zip(*both, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return True
    far = (vector_norm((one - other).float()) > tolerance * vector_norm(other.float()) for one, other in pairs)
    return any(bool(each) for each in far)
