"""How each public trick is switched on and brought to its no-op limit: one entry enrols a trick in every regime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from tests.nets import Net


@dataclass(frozen=True)
class Trick:
    """A trick that does something (``on``) and the same trick where it must change nothing (``off``).

    Args:
        callbacks: Callbacks of the trick, made by a function of "on" or "off".
        sam: Radius of SAM, by the same key.
        schedule: Factory for ``configure_optimizers``, by the same key.
        yaml: What a user adds to a LightningCLI configuration for it; None where there is nothing to add.
        refused: The engines, of FSDP2 and DeepSpeed, where it raises an error that names the strategy.
    """

    callbacks: dict[str, Callable[[], list[Callback]]] | None = None
    sam: dict[str, float] | None = None
    schedule: dict[str, Callable[..., Any]] | None = None
    yaml: dict[str, Any] | None = None
    refused: tuple[str, ...] = ()

    def module(self, base: type[Net], state: str) -> type[Net]:
        """``base`` with the trick's mixin or schedule."""
        body: dict[str, Any] = {}
        if self.sam is not None:
            body["sam"] = lt.SAM(self.sam[state])
        if self.schedule is not None:
            factory = self.schedule[state]
            body["configure_optimizers"] = lambda module: factory(base.configure_optimizers(module), module)
        bases = (lt.SAMMixin, base) if self.sam is not None else (base,)
        return type(base)("Tricked", bases, body)

    def make_callbacks(self, state: str) -> list[Callback]:
        return self.callbacks[state]() if self.callbacks else []


def schedule(factory: Callable[..., Any], **off: float) -> Trick:
    return Trick(schedule={"on": factory, "off": partial(factory, floor=1.0, **off)})  # never falls


SETTINGS: dict[str, Trick] = {
    "EMA": Trick(
        callbacks={"on": lambda: [lt.EMA(0.9)], "off": lambda: [lt.EMA(0)]},
        yaml={"trainer": {"callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.9}}]}},
    ),
    "LRSchedule": Trick(
        callbacks={
            "on": lambda: [lt.LRSchedule("cosine", warmup=2)],
            "off": lambda: [lt.LRSchedule("cosine", floor=1.0)],
        },
        yaml={"trainer": {"callbacks": [{"class_path": "LRSchedule", "init_args": {"curve": "cosine", "warmup": 2}}]}},
        refused=("DeepSpeed",),
    ),
    "SAMMixin": Trick(
        sam={"on": 0.1, "off": 0.0},
        yaml={"model": {"class_path": "tests.conformance.test_regimes.YamlSAMNet", "init_args": {"sam": {"rho": 0.1}}}},
        refused=("DeepSpeed",),
    ),
    "SWA": Trick(
        callbacks={
            "on": lambda: [lt.SWA(start=0.5)],
            "off": lambda: [lt.SWA(start=1.0, recalibrate_batchnorm=False)],  # the last weights alone
        },
        yaml={"trainer": {"callbacks": [{"class_path": "SWA", "init_args": {"start": 0.5}}]}},
    ),
    "constant": Trick(schedule={"on": lambda o, m: lt.constant(o, m, warmup=3), "off": lt.constant}),
    "cosine": schedule(lt.cosine),
    "flat_cos": schedule(lt.flat_cos),
    "linear": schedule(lt.linear),
    "one_cycle": schedule(lt.one_cycle, start=1.0),
}

EXEMPT: dict[str, str] = {
    "CurveLR": "what the factories return; tests/schedules/test_scheduler.py",
    "SAM": "the settings of SAMMixin",
    "Sharpness": "what sharpness gives",
    "sharpness": "measures and changes nothing; tests/modules/test_sharpness.py",
    "UnknownTotalSteps": "an error; tests/schedules/test_steps.py",
    "average_checkpoints": "works on files; tests/checkpoints/test_average.py",
    "export_weights": "works on files; tests/checkpoints/test_export.py",
    "greedy_soup": "works on files; tests/checkpoints/test_soup.py",
    "scale_ema_decay": "a formula; tests/callbacks/test_ema.py",
    "optimizer_steps": "counts and changes nothing; tests/schedules/test_steps.py has its regimes",
    "preset": "a strategy, so itself a regime; tests/strategies/test_presets.py",
    "presets": "a list",
}
