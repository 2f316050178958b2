"""An optimizer by its name, with the parameter groups that it needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.core.checks import check_bool, check_count, check_range, check_type
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.trainer import callbacks_of, trainer_of
from lightning_tricks.core.selection import Patterns, check_patterns, select_parameters
from lightning_tricks.core.weights.fsdp2 import is_split
from lightning_tricks.optimizers.adamw import adamw
from lightning_tricks.optimizers.plain_states import with_plain_states
from lightning_tricks.optimizers.table import Row, check_settings, row_of
from lightning_tricks.schedules.param_groups import Groups, layer_decay_groups, no_weight_decay_groups
from lightning_tricks.schedules.scheduler import prepare_hooks

__all__ = ["optimizer"]

_LEAST_EPS = 1e-6  # for states of 4 bits
_SCALE_OF_ADAMW = "match_rms_adamw"  # of Muon's steps: 0.2 in the root mean square, times the learning rate
_FLAGS = ("capturable", "differentiable", "fused")  # which torch refuses in the first step, by device and dtype


def optimizer(
    name: str,
    module: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    no_decay: bool = True,
    layer_decay: float | None = None,
    parameters: Patterns | None = None,
    **settings: Any,
) -> Optimizer:
    """Make an optimizer by its name, with the parameter groups that it needs.

    The arithmetic is that of torch, timm, pytorch_optimizer, schedulefree, bitsandbytes or torchao; ``optimizers()``
    lists the names. ``"galore"`` keeps the states of hidden weights in a low rank. ``"lookahead_"`` before a name lets
    slow weights follow every ``k`` = 6 steps by ``alpha`` = 0.5. A checkpoint of one optimizer is refused by another.

    ``"muon"`` orthogonalizes the hidden weights: matrices and convolutions, without embeddings, the output layer and
    filters of a single channel. Their steps, with Nesterov's momentum, are as large as AdamW's: 0.2 ``lr`` in the root
    mean square. All other weights are trained by AdamW, with timm's ``betas`` = (0.9, 0.95), at ``adamw_lr``: ``lr`` by
    default, but with another ``adjust_lr_fn`` than timm's own, steps have another size, and it must be given. Muon is
    for training from scratch: to fine-tune all weights of a network that AdamW has trained, take AdamW.

    Args:
        name: A name of ``optimizers()``.
        module: The network, or the LightningModule (``self`` in ``configure_optimizers``).
        lr: The learning rate, at least 0.
        weight_decay: The weight decay, at least 0; as the optimizer defines it, decoupled or not.
        no_decay: Whether biases, norms and embeddings have no weight decay.
        layer_decay: The factor of the learning rate from a layer to the one below, in [0, 1]; by default none.
        parameters: The weights to train, by patterns; all that require gradients by default.
        settings: Further arguments of the optimizer, such as ``betas=``.

    Returns:
        The optimizer, to be returned from ``configure_optimizers`` or passed to a schedule.

    Raises:
        ValueError: If the name is unknown, a number is out of range, the library refuses a setting, or torch a flag
            such as ``fused=True`` for the weights' device or dtype.
        TypeError: If the optimizer does not have one of the settings.
        ModuleNotFoundError: If the library is missing, with the extra to install.
        MisconfigurationException: If the strategy shards weights and the optimizer does not train right then.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> made = optimizer("nadam", network, 1e-3, weight_decay=0.05)
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in made.param_groups]
        [('decay', 2, 0.05), ('no_decay', 4, 0.0)]

    References:
        Liu et al., "Muon is Scalable for LLM Training", 2025, https://arxiv.org/abs/2502.16982 (the size of its steps);
        Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them", 2025, https://arxiv.org/abs/2509.02046;
        Qu et al., "Can Muon Fine-tune Adam-Pretrained Models?", ICML 2026, https://arxiv.org/abs/2605.10468
    """
    row = row_of(name)
    if settings.get("algo") == "adamuon":
        row = replace(row, fsdp2=False)  # torch cannot add to the norm of a sharded matrix in place, as timm does there
    check_type("module", module, nn.Module)
    check_range("lr", lr, 0.0)
    check_range("weight_decay", weight_decay, 0.0)
    check_bool("no_decay", no_decay)
    check_patterns("parameters", parameters, optional=True)
    require_same_lightning(module, "optimizer")
    kind = row.load()
    check_settings(row, kind, settings)
    _require_trains_right(row, module)
    if layer_decay is not None and row.base == "prodigy":
        raise ValueError(
            f"layer_decay={layer_decay} does nothing in optimizer('prodigy'), which takes one learning rate for all"
            " groups: leave it out, or take 'adamw'."
        )
    groups = _groups(module, lr, weight_decay, no_decay=no_decay, layer_decay=layer_decay, parameters=parameters)
    _check_values(row, kind, groups, settings)
    slow = {key: settings.pop(key) for key in ("alpha", "k") if row.is_lookahead and key in settings}
    made = _make(row, kind, module, [{**group, "optimizer": name} for group in groups], lr, settings)
    made.register_load_state_dict_pre_hook(partial(_require_same, name))
    if not isinstance(module, L.LightningModule):
        _require_whole_weights(row, made)
    if not row.tensor_parallel and any(is_split(weight) for group in made.param_groups for weight in group["params"]):
        raise _wrong_on_shards(row, "tensor parallelism")
    return lookahead(row.load("timm.optim.Lookahead"), made, **slow) if row.is_lookahead else made


def _groups(
    module: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    no_decay: bool,
    layer_decay: float | None,
    parameters: Patterns | None,
) -> Groups:
    chosen = dict(module.named_parameters()) if parameters is None else select_parameters(module, parameters)
    groups = [{"params": [weight for weight in chosen.values() if weight.requires_grad], "weight_decay": weight_decay}]
    if not groups[0]["params"]:
        raise ValueError(f"{type(module).__name__} has no trainable parameters to optimize: unfreeze some.")
    if layer_decay is not None:
        check_range("layer_decay", layer_decay, 0.0, 1.0)
        try:
            groups = layer_decay_groups(module, lr, layer_decay, groups=groups)
        except ValueError as error:
            raise ValueError(
                f"layer_decay={layer_decay} needs the layers of one timm or Hugging Face model, which"
                f" {type(module).__name__} does not hold: give layer_decay_groups(..., pattern=) to an optimizer."
            ) from error
    return no_weight_decay_groups(module, weight_decay, embeddings=True, groups=groups) if no_decay else groups


def _make(row: Row, kind: Any, module: nn.Module, groups: Groups, lr: float, settings: dict[str, Any]) -> Optimizer:
    if row.name == "adamw" and isinstance(module, L.LightningModule) and settings.keys() <= {"betas", "eps"}:
        return adamw(module, lr, params=groups, **settings)
    if row.base == "muon":
        groups = _muon_groups(row, module, groups, lr, settings)
    if row.base == "galore":
        low_rank: dict[str, Any] = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"}
        low_rank |= {key: settings.pop(key) for key in low_rank if key in settings}
        check_count("rank", low_rank["rank"])
        groups = _with_hidden(row, module, groups, is_hidden(module), low_rank, {})
    if row.base in ("galore", "adamw4bit"):
        kind = with_plain_states(kind)
    try:
        made: Optimizer = kind(groups, lr=lr, **settings)
    except Exception as error:  # whatever a library raises
        if not settings or isinstance(error, ImportError | torch.OutOfMemoryError):
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise ValueError(f"optimizer({row.name!r}) does not take {given}: {error}") from error
    if "adamw_lr" in made.defaults:
        made.register_step_pre_hook(_follow_schedule)
    return made


def _muon_groups(row: Row, module: nn.Module, groups: Groups, lr: float, settings: dict[str, Any]) -> Groups:
    """Groups that Muon orthogonalizes, and groups that it trains as AdamW would, with their learning rates."""
    scale = settings.get("adjust_lr_fn", _SCALE_OF_ADAMW)
    if scale != _SCALE_OF_ADAMW and "adamw_lr" not in settings:
        raise ValueError(
            f"optimizer({row.name!r}, adjust_lr_fn={scale!r}) needs adamw_lr=, the learning rate of embeddings, output"
            f" layer, norms and biases: lr={lr:g} is one for them only where adjust_lr_fn={_SCALE_OF_ADAMW!r}, the"
            " default, makes the steps of matrices as large as AdamW's."
        )
    check_range("adamw_lr", rate := settings.pop("adamw_lr", lr), 0.0)
    hidden = {"use_fallback": False, "use_muon": True, "nesterov": settings.pop("nesterov", True)}
    others = {"use_fallback": True, "nesterov": False}  # with nesterov, timm takes NAdamW in the place of AdamW
    matrices = {weight for weight in is_hidden(module) if is_matrix(weight)}
    groups = _with_hidden(row, module, groups, matrices, hidden, others)
    for group in groups:
        if group["use_fallback"]:
            group["lr"] = rate * group["lr"] / lr if "lr" in group and lr else rate  # as layer_decay has scaled it
    return groups


def _follow_schedule(made: Optimizer, args: Any, kwargs: Any) -> None:
    """Before timm 1.0.27 Muon trains as AdamW with a setting of its own, which no schedule changes."""
    for group in made.param_groups:
        group["adamw_lr"] = group["lr"]


def _check_values(row: Row, kind: Any, groups: Groups, settings: dict[str, Any]) -> None:
    """Raise for a setting that would raise in the first step, or blow weights up.

    Raises:
        ValueError: With the value and what to do.
    """
    if row.library == "torchao" and settings.setdefault("eps", _LEAST_EPS) < _LEAST_EPS:
        raise ValueError(
            f"eps must be at least {_LEAST_EPS} in optimizer({row.name!r}), whose states have few bits, got"
            f" {settings['eps']}: leave it out."
        )
    if not (flags := {name: settings[name] for name in _FLAGS if settings.get(name)}):
        return
    for device, dtype in {(weight.device, weight.dtype) for group in groups for weight in group["params"]}:
        trial = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        trial.grad = torch.zeros_like(trial)
        try:
            kind([trial], **flags).step()
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"optimizer({row.name!r}, {', '.join(f'{name}=True' for name in flags)}) cannot train {dtype} weights"
                f" on {device}: {error} Leave {' and '.join(flags)} out."
            ) from error


def _with_hidden(
    row: Row, module: nn.Module, groups: Groups, chosen: set[Tensor], hidden: dict[str, Any], others: dict[str, Any]
) -> Groups:
    """Split each group into the chosen hidden weights and others, with the settings of each."""
    split = []
    for group in groups:
        for wanted, own in ((True, hidden), (False, others)):
            if weights := [weight for weight in group["params"] if (weight in chosen) is wanted]:
                name = "_".join(filter(None, [group.get("name"), "hidden" if wanted else "other"]))
                split.append({**group, **own, "name": name, "params": weights})
    if not any(group["name"].endswith("hidden") for group in split):
        raise ValueError(
            f"optimizer({row.name!r}) is for hidden weights of two or more dimensions, and {type(module).__name__} has"
            " none to train: take adamw."
        )
    return split


def _require_trains_right(row: Row, module: nn.Module) -> None:
    """Raise if the Trainer's strategy shards weights in a way that changes what the optimizer does."""
    trainer = trainer_of(module) if isinstance(module, L.LightningModule) else None
    if trainer is None:
        return
    if row.library == "schedulefree" and not any(
        type(c).__name__ == "ScheduleFree" for c in callbacks_of(trainer, Callback)
    ):
        raise MisconfigurationException(
            f"optimizer({row.name!r}) needs the callback ScheduleFree(), which validates and saves the averaged weights"
            f" of {type(module).__name__}: add it to callbacks=."
        )
    engine, rule = engine_of(trainer), ""
    if getattr(trainer.strategy, "is_apart", False) and not row.averages:  # DDPPreset's
        raise MisconfigurationException(
            f"optimizer({row.name!r}) keeps states in few bits, or in numbers and bases of each rank's own, which"
            f" {type(trainer.strategy).__name__}(compression='local_sgd') cannot average. Take {row.instead!r}, or"
            " another compression."
        )
    if engine is Engine.FSDP2 and not row.trains_shards:
        rule = "does not train under FSDP2 as in one process"
        if row.fsdp2:
            rule += f" before {row.library} {row.fsdp2_since}"
    if engine.is_deepspeed and not row.zero:
        rule = "does not train on the pieces of flat weights that DeepSpeed ZeRO gives it"
        if row.library == "schedulefree":
            rule = "has states that ScheduleFree() cannot read where DeepSpeed ZeRO holds them"
        elif row.base == "muon":
            rule = (
                "orthogonalizes whole matrices, of which DeepSpeed ZeRO gives it flat pieces (DeepSpeed's own Muon"
                " takes steps of another size, and its gradients cannot be clipped)"
            )
    if rule:
        strategies = "a DDP strategy or 'fsdp2_bf16'" if row.trains_shards else "a DDP strategy"
        raise MisconfigurationException(
            f"optimizer({row.name!r}) {rule}, and {type(module).__name__} is trained by"
            f" {type(trainer.strategy).__name__}. Take {row.instead!r}, or {strategies}."
        )


def _require_whole_weights(row: Row, made: Optimizer) -> None:
    """Raise for shards that the optimizer does not train right, where no Trainer tells the strategy.

    FSDP2 has sharded the weights by now. DeepSpeed puts others in their place before the first step.
    """
    weights = {weight for group in made.param_groups for weight in group["params"]}
    if not row.trains_shards and any(isinstance(weight, DTensor) for weight in weights):
        raise _wrong_on_shards(row, "FSDP2")

    def require_own(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if weights.isdisjoint(weight for group in optimizer.param_groups for weight in group["params"]):
            raise _wrong_on_shards(row, "DeepSpeed ZeRO")

    if not row.zero:
        made.register_step_pre_hook(require_own)


def _wrong_on_shards(row: Row, engine: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"optimizer({row.name!r}) does not train right on the shards of weights that {engine} gives it. Take"
        f" {row.instead!r}, or a DDP strategy."
    )


def _require_same(name: str, made: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved = next((group.get("optimizer") for group in state["param_groups"]), None)
    if saved is not None and saved != name:
        raise MisconfigurationException(
            f"the checkpoint has the states of optimizer({saved!r}), which are not those of optimizer({name!r}): resume"
            " with the same name, or load the weights alone."
        )
    return {**state, "param_groups": [{**group, "optimizer": name} for group in state["param_groups"]]}


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase)
_HEADS = ("head", "lm_head", "classifier", "fc_out", "score", "embed_out", "decoder_out")


def is_hidden(module: nn.Module) -> set[Tensor]:
    """The weights of layers with two or more dimensions, without embeddings, weights tied to them and output layers.

    The output layer is the one that is called ``head``, ``lm_head``, ``classifier`` or the like, or else the last.
    Parameters that are no layer's weight (class tokens, position embeddings) are not hidden either.

    Example:
        >>> network = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
        >>> is_hidden(network) == {network[1].weight}
        True
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _LAYERS) or type(layer).__name__ == "Conv1D"  # that of transformers, as in GPT-2
    }
    heads = [layer for name, layer in layers.items() if any(part in _HEADS for part in name.split("."))]
    outputs = heads or list(layers.values())[-1:]
    left = {weight for layer in outputs for weight in layer.parameters(recurse=False)}
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            left.add(layer.weight)
    return {
        weight
        for layer in layers.values()
        for name, weight in layer.named_parameters(recurse=False)
        if "weight" in name and weight.ndim >= 2 and weight not in left
    }


def is_matrix(weight: Tensor) -> bool:
    """Whether a hidden weight is a matrix that can be orthogonalized, by the rule of timm's Muon.

    The filters of a convolution are the rows. A vector, a filter of a single channel, and what has fewer than 4 rows or
    columns or is more than 128 times as long as wide, are not.

    Example:
        >>> is_matrix(nn.Conv2d(8, 8, 3).weight), is_matrix(nn.Conv2d(8, 8, 3, groups=8).weight)
        (True, False)
    """
    if weight.ndim < 2 or 1 in weight.shape[:2]:
        return False
    sides = sorted((weight.shape[0], weight.shape[1:].numel()))
    return sides[0] >= 4 and sides[1] <= 128 * sides[0]


def lookahead(kind: Any, inside: Optimizer, **settings: Any) -> Optimizer:
    """Put Lookahead around an optimizer.

    timm's own has an empty ``state``, so that whoever reads it (snapshots, FSDP2's checkpoints, local SGD) would miss
    the slow weights and all else, and its first step calls no hooks.

    Args:
        kind: ``timm.optim.Lookahead``.
        inside: The optimizer to put it around.
        settings: ``alpha``, the way of the slow weights to the fast ones, and ``k``, the steps between.
    """
    state = property(lambda self: self._base_optimizer.state, lambda self, _: None)
    made: Optimizer = type(kind.__name__, (kind,), {"__module__": kind.__module__, "state": state})(inside, **settings)
    prepare_hooks(made)
    return made
