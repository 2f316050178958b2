"""The table of strategy presets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_tricks.core.checks import check_choice
from lightning_tricks.strategies.ddp import DDPBF16
from lightning_tricks.strategies.precision import FixedPrecision
from lightning_tricks.strategies.single import SingleBF16


@dataclass(frozen=True)
class _Row:
    strategy: type[FixedPrecision]
    when: str
    arguments: dict[str, Any] = field(default_factory=dict)


_TABLE = {
    row.strategy.strategy_name: row
    for row in (
        _Row(SingleBF16, "one device; the matrix products in bf16, weights and optimizer in fp32"),
        _Row(
            DDPBF16,
            "the model and its optimizer fit on each device; as many devices and nodes as there are",
            {"gradient_as_bucket_view": True},
        ),
    )
}


def preset(name: str, **overrides: Any) -> dict[str, Any]:
    """Trainer arguments of a preset: ``Trainer(**preset(name))`` is ``Trainer(strategy=name)``.

    Args:
        name: One of ``presets()``.
        **overrides: Arguments of the strategy in the place of the preset's, for example
            ``find_unused_parameters=True``.

    Returns:
        ``{"strategy": ...}`` with a new strategy object, which brings the precision.

    Raises:
        ValueError: If there is no such preset; names the nearest one.
        TypeError: If an override is no argument of the strategy.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(**preset("single_bf16"), accelerator="cpu", logger=False).precision
        'bf16-mixed'
    """
    check_choice("preset", name, _TABLE)
    row = _TABLE[name]
    allowed = _arguments(row.strategy)
    if unknown := sorted(overrides.keys() - allowed):
        raise TypeError(f"preset {name!r} has no argument {', '.join(unknown)}; it takes {', '.join(sorted(allowed))}.")
    return {"strategy": row.strategy(**{**row.arguments, **overrides})}


def presets() -> list[dict[str, str]]:
    """The presets, one row each: name, strategy, precision and when to use it.

    Returns:
        Rows with the keys ``name``, ``strategy``, ``precision``, ``when``.

    Example:
        >>> [row["name"] for row in presets()]
        ['single_bf16', 'ddp_bf16']
    """
    return [
        {"name": name, "strategy": row.strategy.__name__, "precision": row.strategy.precision, "when": row.when}
        for name, row in _TABLE.items()
    ]


def register() -> None:
    """Make each name a ``Trainer(strategy=...)`` string; a name that is somebody else's is an error."""
    for name, row in _TABLE.items():
        taken = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else row.strategy
        if getattr(taken, "__module__", "") != row.strategy.__module__:
            raise RuntimeError(f"The strategy name {name!r} is registered already, by {taken!r}.")
        StrategyRegistry.register(name, row.strategy, description=row.when, override=True, **row.arguments)


def _arguments(strategy: type[FixedPrecision]) -> set[str]:
    """The names that the strategy's constructor understands; DDP hands what it does not know on to torch's."""
    owners: list[Any] = [c for c in strategy.__mro__ if "__init__" in vars(c) and c is not object]
    if issubclass(strategy, DDPStrategy):
        owners.append(DistributedDataParallel)
    names = {name for owner in owners for name in inspect.signature(owner.__init__).parameters}
    return names - {"self", "args", "kwargs", "precision_plugin", "module", "device", "device_ids", "output_device"}
