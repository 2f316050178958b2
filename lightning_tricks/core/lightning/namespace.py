"""``lightning.pytorch`` and ``pytorch_lightning`` are copies of each other, whose classes are not each other's.

In ``pytorch_lightning_tricks``, which loads this file again, both names are exchanged, and those of this package, too.
"""

from __future__ import annotations

import sys

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

OTHER = "pytorch_lightning"


def require_same_lightning(thing: object, what: str) -> None:
    """Raise if a Trainer or a module is of the other Lightning.

    Args:
        thing: The object.
        what: The function or class that was called, for the error message.

    Raises:
        MisconfigurationException: With the class that was met, and what to import.
    """
    if isinstance(thing, L.Trainer | L.LightningModule):
        return
    for kind in type(thing).__mro__:
        if kind.__module__.startswith(f"{OTHER}.") and kind.__name__ in ("Trainer", "LightningModule"):
            base = f"{OTHER}.{kind.__name__}"
            raise wrong_lightning(what, base if type(thing) is kind else f"{type(thing).__name__}, a {base}")


def wrong_lightning(what: str, found: str) -> MisconfigurationException:
    """An error that ``except MisconfigurationException`` of either Lightning catches."""
    others = sys.modules[f"{OTHER}.utilities.exceptions"].MisconfigurationException
    kind = type("MisconfigurationException", (MisconfigurationException, others), {})
    return kind(
        f"{what} of lightning_tricks works with lightning.pytorch, got {found}. For pytorch_lightning, `import"
        " pytorch_lightning_tricks as lt` in place of lightning_tricks."
    )
