"""The curves by their names."""

from __future__ import annotations

from lightning_tricks.schedules.factories import (
    constant,
    cosine,
    cosine_restarts,
    flat_cos,
    inverse_sqrt,
    linear,
    one_cycle,
    polynomial,
    step_decay,
    wsd,
)

CURVES = {
    factory.__name__: factory
    for factory in (
        *(constant, cosine, cosine_restarts, flat_cos, inverse_sqrt),
        *(linear, one_cycle, polynomial, step_decay, wsd),
    )
}
