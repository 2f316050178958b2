"""What holds for all tests: one thread for tiny tensors, quiet loggers, no process group left behind."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import fresh  # noqa: F401  # before anything else imports lightning_tricks
from tests.few import keep_few
from tests.speed import Garbage, cache_entry_points, cache_signatures, leave_devices_out, listen_to_lightning

os.environ["OMP_NUM_THREADS"] = "1"  # for processes that a test starts
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI's use of it, not ours
collect_ignore = ["ranks_preload.py", "pytorch_lightning/namespace.py"]  # no tests: for other processes
torch.set_num_threads(1)
cache_entry_points()
cache_signatures()
leave_devices_out()
listen_to_lightning()
garbage = Garbage()
HERE = pytest.StashKey[set[str]]()
CHECKOUT = Path(__file__).parents[1]  # rootpath is another folder where tests run tests of a temporary one
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    keep_few(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # item.keywords has the names of folders, too
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as there are cores: a worker waits for the ranks that it has started."""
    return 2 * (os.cpu_count() or 1)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    from tests.warm import fork_workers

    asked = [Path(argument.split("::")[0]) for argument in config.args]
    files = {file for path in asked for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    fork_workers(len(specs), [file.resolve().relative_to(CHECKOUT) for file in sorted(files)])


def names_here() -> set[str]:
    return {name for name in os.listdir(CHECKOUT) if not name.startswith(".")}


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[HERE] = names_here()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where tests have left files in the checkout, which would be committed."""
    if left := names_here() - session.config.stash[HERE]:
        raise pytest.UsageError(f"tests have left in {CHECKOUT}: {sorted(left)}. Give them tmp_path.")


def pytest_runtest_setup() -> None:
    garbage.freeze()


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """The values of a parameter in the tests of this module that are to run: ``selected("name", engine="FSDP2")``.

    A fixture that prepares something for many tests at once prepares no more than these need.
    """
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]

    def values(name: str, **others: Any) -> list[Any]:
        calls = [item.callspec.params for item in mine]
        return list(dict.fromkeys(call[name] for call in calls if name in call and others.items() <= call.items()))

    return values


@pytest.fixture(autouse=True)
def _no_process_group() -> object:
    yield
    if dist.is_initialized():  # it would make every later test distributed
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind: use tests.ranks.run_ranks")
