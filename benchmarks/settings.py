"""How long and how large a run is: full for the committed figures, reduced to look, tiny for tests."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

Value = TypeVar("Value")
Effort = Literal["full", "reduced", "tiny"]
SEED = 0


class Settings:
    """What a benchmark is asked for; notes what it chooses, for the record."""

    def __init__(self, effort: Effort = "full", device: str = "cpu") -> None:
        self.effort = effort
        self.device = device
        self.noted: dict[str, Any] = {"effort": effort, "device": device, "seed": SEED}

    def pick(self, name: str, full: Value, reduced: Value, tiny: Value) -> Value:
        """One of the three, noted under its name."""
        chosen = {"full": full, "reduced": reduced, "tiny": tiny}[self.effort]
        self.noted[name] = list(chosen) if isinstance(chosen, tuple) else chosen
        return chosen
