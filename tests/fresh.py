"""What ``import lightning_tricks`` adds to a process that has ``lightning.pytorch``.

``tests.conftest`` imports it first, so every run of the tests tells it and no interpreter is started for it.
"""

from __future__ import annotations

import sys

PYTESTS = {name.split(".")[0] for name in sys.modules}  # loaded before Lightning

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

_strategies, _modules = set(StrategyRegistry), set(sys.modules)

import lightning_tricks  # noqa: E402, F401

STRATEGIES = set(StrategyRegistry) - _strategies
MODULES = {name.split(".")[0] for name in set(sys.modules) - _modules}
