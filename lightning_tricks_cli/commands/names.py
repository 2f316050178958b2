"""The names that the command knows without importing torch, which takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def known_names() -> dict[str, Any]:
    """What ``.ci/names.py`` has written: presets, callbacks, arguments of the Trainer."""
    names: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("names.json").read_text())
    return names
