"""Hyperparameters that name code are refused by their names, and others are what they are."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import pytest

from lightning_tricks.core.safe_load.hyperparameters import OF_CLI, code_in, refuse_instantiator, require_values

CALL = {"class_path": "os.system", "init_args": {"command": "true"}}


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"net": CALL}, "net.class_path"),
        ({"a": [0, ({"b": CALL},)]}, "a.1.0.b.class_path"),
        ({"net": OrderedDict(CALL)}, "net.class_path"),
        ({"a": {"_instantiator": "os.system"}}, "a._instantiator"),
        ({"a": {"_class_path": "os.system"}}, "a._class_path"),
        ({"class_path": "os.system"}, "class_path"),
        ({"a": {"class_path": None}}, "a.class_path"),
    ],
)
def test_a_name_of_code_is_found_wherever_it_is(values: Any, place: str) -> None:
    assert list(code_in(values)) == [place]
    for key in ("hyper_parameters", "hparams", "module_arguments"):
        with pytest.raises(
            ValueError, match=rf"a\.ckpt: its hyperparameter {place} names a class, .* pass \w+= yourself"
        ):
            require_values({key: values}, "a.ckpt")
    assert require_values({"hyper_parameters": values}, "a.ckpt", given=values) == {}


@pytest.mark.parametrize(
    "values", [{}, {"lr": 0.1, "path": "os.system", "classes": ["class_path"], "net": {"path": (1, {2, 3})}}]
)
def test_values_are_left_alone(values: Any) -> None:
    assert require_values({"hyper_parameters": values}, "a.ckpt") == {}
    assert require_values({}, "a.ckpt") == {}


def test_a_value_that_holds_itself_has_an_end() -> None:
    loop: list[Any] = [CALL]
    loop.append(loop)
    assert list(code_in({"a": loop})) == ["a.0.class_path"]
    deep: Any = CALL
    for _ in range(10**5):
        deep = [deep]
    assert len(list(code_in({"a": deep}))) == 1


def test_what_lightning_cli_saves_needs_all_arguments() -> None:
    """Its function would make them from text, by their types."""
    saved = {"hyper_parameters": {"_instantiator": OF_CLI[0], "_class_path": "my.Net", "lr": 0.1, "width": 3}}
    for given, left in (((), "lr=, width="), (("lr",), "width=")):
        with pytest.raises(ValueError, match=rf"its hyperparameter _instantiator names .* yourself, {left}\.$"):
            require_values(saved, "a.ckpt", given)
    assert require_values(saved, "a.ckpt", ("lr", "width")) == {"_instantiator": None}


@pytest.mark.parametrize("name", ["os.system", "", 3, ["lightning.pytorch.cli.instantiate_module"]])
def test_another_function_is_refused_whatever_is_given(name: Any) -> None:
    for key in ("hyper_parameters", "hparams", "module_arguments"):
        for check in (refuse_instantiator, lambda *given: require_values(*given, ("_instantiator", "lr"))):
            with pytest.raises(
                ValueError, match=r"a\.ckpt: its hyperparameter _instantiator names .*, which would run"
            ):
                check({key: {"_instantiator": name, "lr": 0.1}}, "a.ckpt")
    for known in OF_CLI:
        refuse_instantiator({"hyper_parameters": {"_instantiator": known}}, "a.ckpt")


@pytest.mark.parametrize("part", [[("_instantiator", "os.system")], "text", argparse.Namespace(lr=1)])
def test_what_is_no_dictionary_is_refused(part: Any) -> None:
    with pytest.raises(ValueError, match=r"a\.ckpt: its hparams must be a dictionary, got \w+"):
        require_values({"hparams": part}, "a.ckpt")
