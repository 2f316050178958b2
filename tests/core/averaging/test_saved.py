"""Saves that are asked for while weights change places, and that end in an interrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.core.averaging import transfer
from tests.nets import PlainNet, assert_equal, build, fit, loader, trainer, weights


@pytest.mark.parametrize("call", [1, 2])  # in and out
def test_a_save_that_waited_is_made_after_an_interrupt_and_never_again(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, path = transfer.copy_, 0, tmp_path / "x.ckpt"
    module, ema = build(PlainNet), lt.EMA(0.9)
    run = trainer(callbacks=[ema], max_epochs=4)

    def interrupted(targets: Any, sources: Any) -> None:
        nonlocal calls
        calls += 1
        real(targets[:2], sources[:2])
        if calls == call:
            run.save_checkpoint(path, weights_only=True)
            run.save_checkpoint(path)  # replaces the first
            raise KeyboardInterrupt
        real(targets, sources)

    monkeypatch.setattr(transfer, "copy_", interrupted)
    with pytest.raises(SystemExit):
        run.fit(module, loader(), loader(24))
    monkeypatch.setattr(transfer, "copy_", real)
    raw = weights(module)
    saved = torch.load(path, weights_only=True)
    assert_equal({**saved["state_dict"], **saved["callbacks"]["EMA(decay=0.9)"]["raw"]}, raw)
    assert_equal(saved["state_dict"], ema.averaged_state_dict())
    path.unlink()
    fit(build(PlainNet), callbacks=[ema])
    assert not path.exists()
