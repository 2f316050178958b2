"""Write lightning_tricks_cli/names.json, the names that the command knows without importing torch: `make exports`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import callbacks

import lightning_tricks as lt

FILE = Path(__file__).parents[1] / "lightning_tricks_cli" / "names.json"


def names() -> dict[str, Any]:
    """The presets and optimizers, the callbacks of this package and of Lightning, and the arguments of a Trainer."""
    ours, theirs = (
        [
            name
            for name in package.__all__
            if inspect.isclass(thing := getattr(package, name)) and issubclass(thing, L.Callback)
        ]
        for package in (lt, callbacks)
    )
    arguments = [name for name in inspect.signature(L.Trainer).parameters if name != "self"]
    return {
        "presets": lt.presets(),
        "optimizers": lt.optimizers(),
        "callbacks": sorted(ours),
        "lightning_callbacks": sorted(set(theirs) - {"Callback", "LambdaCallback"}),
        "trainer": arguments,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(names(), indent=1) + "\n")
