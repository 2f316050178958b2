"""What a LightningCLI configuration file asks for trains what the same callback trains in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI

from tests.conformance.runs import last_good, run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.trick import public_name
from tests.nets import assert_equal, loader, quiet, weights
from tests.public import PUBLIC


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("name", every_third(1))
def test_a_configuration_file_gives_the_same(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, cell: Callable[..., None]
) -> None:
    if SETTINGS[name].yaml is None:
        assert callable(PUBLIC[public_name(name)])
        assert SETTINGS[name].schedule
        instead = "names optimizers by class" if public_name(name) == "optimizer" else "has the callback LRSchedule"
        cell(name, "yaml", "none", f"a function, to be called in configure_optimizers; YAML {instead}")
        return
    if SETTINGS[name].stops:
        with pytest.raises(FloatingPointError) as caught:
            trained(SETTINGS[name].yaml, tmp_path, monkeypatch)
        given = trained(SETTINGS[name].yaml, tmp_path, monkeypatch, last_good(caught.value))
    else:
        given = trained(SETTINGS[name].yaml, tmp_path, monkeypatch)
    assert_equal(given, run(SETTINGS[name]))
    cell(name, "yaml")


def trained(
    yaml: dict[str, Any], folder: Any, monkeypatch: pytest.MonkeyPatch, ckpt_path: Path | None = None
) -> dict[str, Any]:
    """The end weights of a fit by a configuration file that holds this."""
    settings = {**quiet, "default_root_dir": str(folder), **yaml.get("trainer", {})}
    model = {"class_path": "tests.nets.NormNet", **yaml.get("model", {})}
    (folder / "config.yaml").write_text(json.dumps({"trainer": settings, "model": model, "seed_everything": 3}))
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(folder / "config.yaml")])
    cli = LightningCLI(save_config_callback=None, run=False)
    L.seed_everything(7, verbose=False)
    cli.trainer.fit(cli.model, loader(), loader(24), ckpt_path=ckpt_path)
    return weights(cli.model)
