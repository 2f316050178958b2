"""Whatever is given to anything public is taken and can be used, or refused by an error that names the argument."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conformance.settings import SETTINGS
from tests.fuzz.arguments import LEFT_OUT, NAMES, NEEDED, changes, fitting, make_files, needed, parameters, problem
from tests.fuzz.profiles import cases
from tests.nets import Net, fit, loader
from tests.public import PUBLIC

CASES = 10_000  # of the slow suite, over all names
CALLBACKS = [name for name in NAMES if inspect.isclass(PUBLIC[name]) and issubclass(PUBLIC[name], Callback)]

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about values that they take


@pytest.fixture(autouse=True, scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files to read and a folder to write to, and no word about devices from each Trainer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        patch.setattr(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "disabled", True)
        make_files()
        yield


def test_every_public_name_is_tried_or_has_a_reason() -> None:
    assert {*NAMES} | LEFT_OUT.keys() == {*PUBLIC}
    assert NEEDED.keys() <= {*NAMES}
    assert all(parameters(name) for name in NAMES)


@pytest.mark.few(64)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_what_it_needs_is_right(name: str) -> None:
    assert problem(name, {}) is None


@cases(100)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_an_argument_is_taken_or_named(data: st.DataObject, name: str) -> None:
    changed = data.draw(changes(name))
    assert problem(name, changed) is None, (name, changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_more_arguments_are_taken_or_named(name: str) -> None:
    @cases(CASES // len(NAMES) + 1)
    @given(changed=changes(name))
    def check(changed: dict[str, Any]) -> None:
        assert problem(name, changed) is None, changed

    check()


# -- what is taken can be used ----------------------------------------------------------------------------------------


def taken(name: str, changed: dict[str, Any]) -> Callback | None:
    try:
        return PUBLIC[name](**{**needed(name), **changed})
    except (ValueError, TypeError):
        return None


def used(name: str, data: st.DataObject) -> bool:
    """Whether a fit of two steps takes random settings that the constructor takes; else it refuses them by name."""
    hints = parameters(name)
    chosen = data.draw(st.lists(st.sampled_from(sorted(hints)), min_size=1, max_size=3, unique=True))
    changed = {each: data.draw(fitting(hints[each])) for each in chosen}
    callback = taken(name, changed)
    assume(callback is not None)
    module = SETTINGS[name].plain(Net)()
    try:
        fit(module, train=loader(16), val=loader(8), max_epochs=1, callbacks=[callback])
    except (MisconfigurationException, ValueError) as error:
        if not any(each in str(error) for each in (name, *changed)):
            raise
        return False
    return True


USED = [name for name in CALLBACKS if name not in ("Compile", "LeanLoss")]  # takes seconds; has a module's name only


@cases(10)
@given(data=st.data(), name=st.sampled_from(USED))
def test_accepted_settings_of_a_callback_can_be_used(data: st.DataObject, name: str) -> None:
    used(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_many_more_accepted_settings_of_a_callback_can_be_used(name: str) -> None:
    found: list[bool] = []
    cases(60)(given(data=st.data())(lambda data: found.append(used(name, data))))()
    assert sum(found) >= len(found) / 10, f"{name} was accepted with {sum(found)} of {len(found)} settings"
