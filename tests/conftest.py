"""What holds for all tests: one thread for tiny tensors, quiet loggers, no process group left behind."""

import logging
import os

import pytest
import torch
import torch.distributed as dist

os.environ["OMP_NUM_THREADS"] = "1"  # for processes that a test starts
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI's use of it, not ours
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _no_process_group() -> object:
    yield
    if dist.is_initialized():  # it would make every later test distributed
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind: use tests.ranks.run_ranks")
