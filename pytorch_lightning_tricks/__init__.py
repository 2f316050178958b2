"""The names of ``lightning_tricks`` for a ``pytorch_lightning.Trainer``, from the same source files."""

import sys
from typing import TYPE_CHECKING

from pytorch_lightning_tricks.loader import load

if TYPE_CHECKING:
    from lightning_tricks import *  # noqa: F403
    from lightning_tricks import __all__ as __all__

load(sys.modules[__name__])
