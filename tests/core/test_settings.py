"""The settings of objects as their users wrote them."""

from __future__ import annotations

from inspect import isabstract
from pathlib import Path

from torch import nn

import lightning_tricks as lt
from lightning_tricks.core.report import described, settings
from lightning_tricks.core.trick import Trick
from tests.conformance.settings import SETTINGS


def test_the_first_and_what_is_no_default() -> None:
    assert settings(lt.EMA()) == {"decay": 0.999}
    assert settings(lt.EMA(validate="both")) == {"decay": 0.999, "validate": "both"}
    assert settings(lt.EMA(), always=("start",)) == {"decay": 0.999, "start": 0}
    assert settings(lt.SAM(0.3, adaptive=True)) == {"rho": 0.3, "adaptive": True}


def test_options_of_a_constructor_that_keeps_them_elsewhere_are_left_out() -> None:
    assert settings(lt.LRSchedule("flat_cos", flat=0.5)) == {"curve": "flat_cos"}


def test_every_callback_is_shown_as_its_user_wrote_it() -> None:
    """The code that ``repr`` shows makes another one with the same arguments."""
    names = {**vars(lt), "PosixPath": Path, "nan": float("nan")}
    callbacks = [callback for trick in SETTINGS.values() for callback in trick.make_callbacks("on")]
    written = {type(callback).__name__: callback for callback in callbacks if isinstance(callback, Trick)}
    assert {*written} >= {name for name in dir(lt) if is_trick(getattr(lt, name))}
    for callback in written.values():
        if any(isinstance(given, nn.Module) for given in callback._arguments().values()):
            assert repr(callback) == callback.written()
            continue
        if "<" in repr(callback):  # holds a function or an object of another library
            assert type(callback).__name__ in ("BatchTransform",), repr(callback)
            continue
        again = eval(repr(callback), names)
        assert repr(again) == repr(callback)
        assert again._arguments() == callback._arguments()


def is_trick(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Trick) and not isabstract(thing)


def test_options_that_a_constructor_keeps_elsewhere_are_shown() -> None:
    assert repr(lt.LRSchedule("cosine", warmup=0.1)) == "LRSchedule(curve='cosine', warmup=0.1)"
    tail = lt.LRSchedule("swa_tail", of="cosine", swa_lr=0.01, replace=True)
    assert repr(tail) == "LRSchedule(curve='swa_tail', replace=True, of='cosine', swa_lr=0.01)"


def test_as_python_writes_it() -> None:
    assert described(lt.HardExampleFilter(0.3, mode="loss")) == "HardExampleFilter(keep=0.3, mode='loss')"
