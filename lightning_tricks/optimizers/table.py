"""The optimizers that ``optimizer()`` makes: where each comes from, and what it was tested with."""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from torch.torch_version import TorchVersion

from lightning_tricks.core.install import pip_install

__all__ = ["optimizers"]

_CLOSURE = "its step needs a closure that runs forward and backward passes again"
_GRAPH = "it needs second derivatives, for which Lightning keeps no graph"
_PAST = "it changes weights in the backward pass, past Lightning's clipping, accumulation and scaling"
_RANDOM = "it draws random numbers of its own, by which the ranks of DDP diverge"
_UNDERFLOW = "in its format the small values of the second moments become zero, and single weights blow up"
_ANY = "lightning_tricks.SAMMixin or SAMCallback, with any optimizer of the table"
_8BIT = "'adamw8bit', which keeps as many bytes in a finer format"

# What people ask for and what does not train right under Lightning: the reason, and what to take in its place.
LEFT_OUT = {
    "adahessian": (_GRAPH, "'adamw'"),
    "adalomo": (_PAST, "'adafactor'"),
    "adamuon": ("it is Muon with second moments of the orthogonalized steps", "'muon' with algo='adamuon'"),
    "adamw8bit_torchao": (_UNDERFLOW, _8BIT),
    "adamwfp8": (_UNDERFLOW, _8BIT),
    "asam": (_CLOSURE, _ANY),
    "gsam": (_CLOSURE, _ANY),
    "kron": (_RANDOM, "'soap'"),
    "lbfgs": (_CLOSURE, "'adamw', or return torch.optim.LBFGS itself, on one device in full precision"),
    "lomo": (_PAST, "'adafactor'"),
    "lookahead": ("it goes around another optimizer", "'lookahead_adamw', or 'lookahead_' before another name"),
    "offload_adamw": (
        "torchao's CPUOffloadOptimizer has no state that Lightning could move, and shows it other weights to clip",
        "'adamw' with strategy='zero2_offload_bf16' or 'fsdp2_offload_bf16'",
    ),
    "psgd": (_RANDOM, "'soap'"),
    "ranger": ("it is RAdam with Lookahead and centred gradients", "'lookahead_radam'"),
    "sam": (_CLOSURE, _ANY),
    "shampoo": ("its successor is SOAP, Adam in Shampoo's basis", "'soap'"),
    "sophia": (_GRAPH, "'lion'"),
    "wsam": (_CLOSURE, _ANY),
}
_SETTINGS = ("self", "params", "lr", "weight_decay", "args", "kwargs")
_EXTRAS = {"torch": "", "bitsandbytes": "8bit", "torchao": "8bit"}  # others are in "optimizers"
_LOOKAHEAD = "lookahead_"


@dataclass(frozen=True)
class Row:
    """An optimizer, its source, and what tests have shown of it.

    Args:
        name: The name that ``optimizer()`` takes.
        path: The module and the class.
        bytes: Bytes of state for an fp32 weight; where they depend on shapes, those of a ViT-small of two blocks,
            as ``python benchmarks/run.py optimizers`` measured them.
        use: When to take it.
        by_shape: Whether the bytes depend on the weights' shapes.
        zero: Whether two ranks under DeepSpeed ZeRO equal one process, which cuts weights anywhere.
        fsdp2: Whether two ranks under FSDP2 equal one process.
        fsdp2_since: The first version of the library in which they do, where it is not the oldest that is supported.
        tensor_parallel: Whether two ranks equal one process where they also split layers.
        lookahead: Whether slow weights may be put around it.
        instead: What to take where it is refused.
    """

    name: str
    path: str
    bytes: float
    use: str
    by_shape: bool = False
    zero: bool = True
    fsdp2: bool = True
    fsdp2_since: str = ""
    tensor_parallel: bool = True
    lookahead: bool = True
    instead: str = "adamw"

    @property
    def library(self) -> str:
        """The package that holds the arithmetic."""
        return self.path.partition(".")[0]

    @property
    def extra(self) -> str:
        """The extra of this package to install; "" for torch."""
        return _EXTRAS.get(self.library, "optimizers") or ("optimizers" if self.is_lookahead else "")

    @property
    def is_lookahead(self) -> bool:
        """Whether timm's Lookahead is around the optimizer."""
        return self.name.startswith(_LOOKAHEAD)

    @property
    def base(self) -> str:
        """The name of the optimizer that Lookahead is around, or its own."""
        return self.name.removeprefix(_LOOKAHEAD)

    @property
    def is_quantized(self) -> bool:
        """Whether its states have 4 or 8 bits, whatever the weights have."""
        return _EXTRAS.get(self.library) == "8bit"

    @property
    def averages(self) -> bool:
        """Whether the mean of the ranks' states is a state, as local SGD needs it."""
        return not self.is_quantized and self.base not in ("galore", "soap", "prodigy")

    @property
    def trains_shards(self) -> bool:
        """Whether the installed library trains the shards of FSDP2 as it trains whole weights."""
        return self.fsdp2 and (not self.fsdp2_since or TorchVersion(version(self.library)) >= self.fsdp2_since)

    def load(self, path: str = "") -> Any:
        """The class of the optimizer, or another one that it needs.

        Raises:
            ModuleNotFoundError: If its package is missing, with the extra to install.
        """
        module, _, kind = (path or self.path).rpartition(".")
        package = module.partition(".")[0]
        try:
            return getattr(importlib.import_module(module), kind)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            extra = _EXTRAS.get(package, "optimizers")
            raise ModuleNotFoundError(f"optimizer({self.name!r}) needs {package}: {pip_install(extra)}.") from error


_UNSHARDED: dict[str, Any] = {"zero": False, "fsdp2": False}
_ALONE: dict[str, Any] = {"zero": False, "lookahead": False}  # slow weights would take it off its own way
_SCHEDULE_FREE = "no schedule: with the callback ScheduleFree()"

_ROWS = (
    Row("sgd", "torch.optim.SGD", 0, "convolutional networks, with momentum=0.9 (4 bytes) and nesterov=True"),
    Row("adam", "torch.optim.Adam", 8, "Adam with coupled weight decay"),
    Row("adamw", "torch.optim.AdamW", 8, "the default of most recipes; DeepSpeed's own by adamw()"),
    Row("nadam", "torch.optim.NAdam", 8, "Adam with Nesterov momentum"),
    Row("radam", "torch.optim.RAdam", 8, "Adam without a warm-up"),
    Row("adamax", "torch.optim.Adamax", 8, "Adam with the largest gradient in place of the mean square"),
    Row(
        "asgd",
        "torch.optim.ASGD",
        4,
        "SGD whose average stays in its states; for averaged weights, sgd with EMA() or SWA()",
    ),
    Row("rmsprop", "torch.optim.RMSprop", 4, "recurrent networks and reinforcement learning"),
    Row("adagrad", "torch.optim.Adagrad", 4, "sparse features", zero=False),
    Row("adadelta", "torch.optim.Adadelta", 8, "without a learning rate to choose: lr=1.0"),
    Row("adafactor", "torch.optim.Adafactor", 0.059, "a large model in little memory", by_shape=True, **_UNSHARDED),
    Row("lion", "timm.optim.Lion", 4, "half the state of AdamW; a third to a tenth of its lr"),
    Row("madgrad", "timm.optim.MADGRAD", 12, "convolutional networks and MRI reconstruction"),
    Row("adan", "timm.optim.Adan", 16, "vision transformers from scratch"),
    Row("laprop", "timm.optim.LaProp", 8, "Adam with momentum after the normalization"),
    Row("adopt", "timm.optim.Adopt", 8, "Adam that converges for every beta2"),
    Row("lamb", "timm.optim.Lamb", 8, "very large batches", zero=False, tensor_parallel=False),
    Row("mars", "timm.optim.Mars", 12, "language models; variance-reduced gradients", **_UNSHARDED),
    Row(
        "muon",
        "timm.optim.Muon",
        4.4,
        "training from scratch at AdamW's lr: hidden weights, orthogonalized; AdamW (8 bytes) for the rest",
        by_shape=True,
        zero=False,
        fsdp2_since="1.0.26",
        tensor_parallel=False,
    ),
    Row("ademamix", "pytorch_optimizer.AdEMAMix", 12, "long trainings of language models"),
    Row("galore", "pytorch_optimizer.GaLore", 4, "states in a low rank: rank=128", by_shape=True, **_UNSHARDED),
    Row("prodigy", "pytorch_optimizer.Prodigy", 16, "finds the step size by itself: lr=1.0", **_ALONE, fsdp2=False),
    Row(
        "ranger21",
        "pytorch_optimizer.Ranger21",
        20,
        "its own warm-up and -down over num_iterations= steps",
        **_ALONE,
        fsdp2=False,
    ),
    Row("soap", "pytorch_optimizer.SOAP", 36, "Shampoo's basis for Adam", by_shape=True, **_UNSHARDED),
    Row("stableadamw", "pytorch_optimizer.StableAdamW", 8, "AdamW without spikes", **_UNSHARDED),
    Row("schedulefree_adamw", "schedulefree.AdamWScheduleFree", 8, _SCHEDULE_FREE, **_ALONE),
    Row("schedulefree_sgd", "schedulefree.SGDScheduleFree", 4, _SCHEDULE_FREE, **_ALONE),
    Row("adam8bit", "bitsandbytes.optim.Adam8bit", 2.03, "a quarter of Adam's state", **_UNSHARDED),
    Row("adamw8bit", "bitsandbytes.optim.AdamW8bit", 2.03, "a quarter of AdamW's state", **_UNSHARDED),
    Row("lion8bit", "bitsandbytes.optim.Lion8bit", 1.02, "an eighth of AdamW's state", **_UNSHARDED),
    Row("adamw4bit", "torchao.optim.AdamW4bit", 1.06, "an eighth of AdamW's state", **_UNSHARDED),
)


def _with_lookahead(row: Row) -> Row:
    """The row of Lookahead around an optimizer."""
    use = f"{row.base} whose weights follow slow ones"
    return replace(row, name=_LOOKAHEAD + row.name, bytes=row.bytes + 4, use=use, zero=False)


ROWS = {row.name: row for row in _ROWS}
ROWS |= {row.name: row for row in (_with_lookahead(ROWS[base]) for base in ("sgd", "adamw", "radam"))}


def row_of(name: str) -> Row:
    """The row of a name; ``"lookahead_..."`` has one for every optimizer that slow weights may be put around.

    Raises:
        ValueError: For another name, with the reason and what to take, or with the nearest names.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}.")
    if name in ROWS:
        return ROWS[name]
    base = name.lower().removeprefix(_LOOKAHEAD)
    if base in LEFT_OUT:
        why, instead = LEFT_OUT[base]
        raise ValueError(f"{base!r} is not one of lightning_tricks.optimizers(): {why}. Take {instead}.")
    around = {row.name: row for row in _ROWS}
    if name == _LOOKAHEAD + base and base in around:
        if around[base].lookahead:
            return _with_lookahead(around[base])
        raise ValueError(
            f"{name!r}: {base!r} measures or averages its own way through the weights, from which slow weights would"
            f" take it off. Take {base!r} alone, or 'lookahead_adamw'."
        )
    known = [*ROWS, *(_LOOKAHEAD + base for base in around)]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(ROWS)}."
    raise ValueError(f"the name of an optimizer must be one of lightning_tricks.optimizers(), got {name!r}: {hint}")


def check_settings(row: Row, kind: Any, settings: dict[str, Any]) -> None:
    """Raise for settings that the optimizer does not have, and for those that it needs.

    Raises:
        TypeError: With the settings that it has, or needs.
    """
    parameters = inspect.signature(kind.__init__).parameters
    own = [name for name in parameters if name not in _SETTINGS]
    own += ["alpha", "k"] if row.is_lookahead else []
    own += ["rank", "update_proj_gap", "scale", "projection_type"] if row.base == "galore" else []
    if unknown := [name for name in settings if name not in own]:
        raise TypeError(f"optimizer({row.name!r}) has no setting {unknown[0]!r}; it has {', '.join(own)}.")
    for setting in own:
        if setting in parameters and parameters[setting].default is inspect.Parameter.empty and setting not in settings:
            raise TypeError(f"optimizer({row.name!r}) needs the setting {setting!r}, which has no default.")


def optimizers() -> list[dict[str, Any]]:
    """The optimizers that ``optimizer()`` knows by name, with what tests have shown of each.

    All resume exactly, and equal a plain loop with accumulated gradients, under fp16's scaler and under DDP.

    Returns:
        A row for each: its name, library and extra to install, bytes of state for an fp32 weight, whether they depend
        on the weights' shapes (then they are those of a ViT-small), whether two ranks equal one process under FSDP2
        and under ZeRO, and when to take it.

    Example:
        >>> [row["name"] for row in optimizers() if row["extra"] == ""][:4]
        ['sgd', 'adam', 'adamw', 'nadam']
    """
    return [
        {
            "name": row.name,
            "library": f"timm, {row.library}" if row.is_lookahead else row.library,
            "extra": row.extra,
            "bytes": row.bytes,
            "by_shape": row.by_shape,
            "fsdp2": row.fsdp2,
            "zero": row.zero,
            "use": row.use,
        }
        for row in ROWS.values()
    ]
