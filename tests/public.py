"""Everything public, by name: what the packages of the kinds list, whether it is on the top level or not."""

from __future__ import annotations

import importlib

KINDS = (
    *("advisor", "callbacks", "checkpoints", "evaluation", "losses", "modules", "optimizers", "schedules"),
    "strategies",
)
PACKAGES = [importlib.import_module(f"lightning_tricks.{kind}") for kind in KINDS]
PUBLIC: dict[str, object] = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
