"""The settings of objects as their users wrote them."""

from __future__ import annotations

import lightning_tricks as lt
from lightning_tricks.core.report import described, settings


def test_the_first_and_what_is_no_default() -> None:
    assert settings(lt.EMA()) == {"decay": 0.999}
    assert settings(lt.EMA(validate="both")) == {"decay": 0.999, "validate": "both"}
    assert settings(lt.EMA(), always=("start",)) == {"decay": 0.999, "start": 0}
    assert settings(lt.SAM(0.3, adaptive=True)) == {"rho": 0.3, "adaptive": True}


def test_options_of_a_constructor_that_keeps_them_elsewhere_are_left_out() -> None:
    assert settings(lt.LRSchedule("flat_cos", flat=0.5)) == {"curve": "flat_cos"}


def test_as_python_writes_it() -> None:
    assert described(lt.HardExampleFilter(0.3, mode="loss")) == "HardExampleFilter(keep=0.3, mode='loss')"
