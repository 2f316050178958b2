"""The processes that train on different samples: all of them, unless several compute one batch together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_groups: list[dist.ProcessGroup] = []  # Of the strategies that are set up, the present one last.


def sample_group() -> Any:
    """The group of the processes that train on different samples."""
    return _groups[-1] if _groups else dist.group.WORLD


def samples_differ_in(group: dist.ProcessGroup) -> Callable[[], None]:
    """Let ``sample_group`` give this group until the returned function is called."""
    _groups.append(group)
    return lambda: _groups.remove(group)
