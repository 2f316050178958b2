"""Process groups whose backend is NCCL by name: gloo carries the data, and what NCCL refuses raises.

https://docs.pytorch.org/docs/stable/distributed.html: NCCL takes tensors of its device only, and no integers of 16
bits; objects and barriers go through the device that ``torch.cuda.set_device`` has set, and a barrier makes the host
wait. A group of "cpu:gloo,cuda:nccl" takes tensors in host memory as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tests.device.devices import Device
from tests.device.python_names import simulated
from tests.device.simulation import Simulation
from tests.device.storage import UNKNOWN, notes, on_device, put

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "send", "recv", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_single", "reduce_scatter_single"),  # their new names
)
TYPES = {  # that NCCL has
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


class Groups:
    """The backends that groups were asked for."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.kind = simulation.device.type
        self._of_all = "nccl"  # also of a group that an earlier fit has made
        self._asked: dict[Any, str] = {}

    def begin(self, backend: str | None) -> None:
        """Note that of all processes."""
        self._of_all = backend or f"cpu:gloo,{self.kind}:nccl"

    def note(self, group: Any, backend: str | None) -> None:
        self._asked[group] = backend or self._of_all

    def backend(self, group: Any) -> str:
        """The backend by the name that was asked for; None is the group of all processes."""
        return self._asked.get(group, self._of_all)

    def config(self, group: Any) -> str:
        """The backend of each type of device."""
        backend = self.backend(group)
        return {"nccl": f"{self.kind}:nccl", "gloo": f"cpu:gloo,{self.kind}:gloo"}.get(backend, backend)

    def check(self, group: Any, tensors: list[Tensor]) -> None:
        """Raise for tensors that NCCL refuses."""
        known = dict(each.split(":") for each in self.config(group).split(","))
        for x in tensors:
            kind = self.kind if on_device(x) or UNKNOWN in notes(x) else "cpu"
            if kind not in known:
                raise RuntimeError(f"No backend type associated with device type {kind}")
            if known[kind] == "nccl" and x.dtype not in TYPES and not x.is_complex():
                raise RuntimeError(f"Unconvertible NCCL type {x.dtype}")

    def require_device(self, what: str) -> None:
        if self.simulation.current is None:
            raise RuntimeError(f"{what} goes through device 0 on each rank: no device was set")


@contextmanager
def nccl(simulation: Simulation) -> Iterator[None]:
    """Let groups that are made inside the block have the backend that they are asked for, by name."""
    groups = Groups(simulation)
    names = {
        **making(groups),
        **asking(groups),
        **{name: checked(name, groups) for name in COLLECTIVES if hasattr(c10d, name)},
    }
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(DistributedDataParallel, "register_comm_hook", hooked()))
        undo.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 5)))  # of error messages
        for name, function in names.items():
            for owner in (c10d, dist):
                if hasattr(owner, name):
                    undo.enter_context(mock.patch.object(owner, name, function))
        yield


def making(groups: Groups) -> dict[str, Callable[..., Any]]:
    """Functions that make a group, of gloo."""
    init, new, barrier = c10d.init_process_group, c10d.new_group, c10d.barrier

    @wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs)
        groups.begin(backend)

    @wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        group = new(ranks, timeout, "gloo", **{**kwargs, "device_id": None})
        groups.note(group, backend)
        return group

    @wraps(barrier)
    def waiting(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        if "nccl" in groups.backend(group):
            if device_ids is None:
                groups.require_device("a barrier")
            groups.simulation.waits_for("barrier")
        return barrier(group, async_op, **kwargs)

    return {"init_process_group": init_process_group, "new_group": new_group, "barrier": waiting}


def asking(groups: Groups) -> dict[str, Callable[..., Any]]:
    """Functions that tell what a group is."""

    def object_device(group: Any = None) -> str:
        if "cpu" in groups.config(group):
            return "cpu"
        groups.require_device("an object")
        return groups.kind

    return {
        "get_backend": lambda group=None: groups.backend(group),
        "get_backend_config": lambda group=None: groups.config(group),
        "get_default_backend_for_device": lambda device: "gloo" if torch.device(device).type == "cpu" else "nccl",
        "is_nccl_available": lambda: True,
        "_get_object_coll_device": object_device,
    }


def hooked() -> Callable[..., None]:
    """DDP's buckets are made by C++ code, and are on the device."""
    register = DistributedDataParallel.register_comm_hook

    def register_comm_hook(self: Any, state: Any, hook: Callable[..., Any]) -> None:
        @wraps(hook)  # torch looks at its name and annotations
        def on_it(state: Any, bucket: Any) -> Any:
            put(bucket.buffer(), True)
            return hook(state, bucket)

        register(self, state, on_it)

    return register_comm_hook


def checked(name: str, groups: Groups) -> Callable[..., Any]:
    """A collective that checks its tensors, and takes the mean as well, which gloo has not."""
    function = getattr(c10d, name)

    @wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        groups.check(group, tensors)
        takes_mean = any(map(is_mean, (*args, *kwargs.values())))
        args = tuple(dist.ReduceOp.SUM if is_mean(each) else each for each in args)
        kwargs = {name: dist.ReduceOp.SUM if is_mean(each) else each for name, each in kwargs.items()}
        later = kwargs.pop("async_op", False)
        with torch._C._DisableTorchDispatch():  # gloo's own copies
            function(*args, **kwargs)
        if takes_mean:
            with torch.no_grad():
                tensors[0].copy_(tensors[0] / dist.get_world_size(group))  # of integers the whole part
        return Done(tensors) if later else None

    return collective


class Done:
    """The work of a collective that is over: what comes after it is done in this thread, which knows the device."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None: ...

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(self.tensors)
        return done


def is_mean(op: Any) -> bool:
    return isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType) and op == dist.ReduceOp.AVG


@contextmanager
def rank_with_nccl(**settings: Any) -> Iterator[Simulation]:
    """This process as one that torchrun has started on a machine with a device for each.

    Its group stays when the block ends, as Lightning's does after a fit, and is the group of later blocks.
    """
    index, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    with simulated(index=index, count=count, **settings) as simulation, nccl(simulation):
        yield simulation


@contextmanager
def rank_device(on: str) -> Iterator[Device]:
    """The device of this rank, by one of the names of ``CUDA``, or "host cpu"."""
    if on == "simulated cuda":
        with rank_with_nccl() as simulation:
            yield Device("cuda", simulation)
    else:
        yield Device(on.split()[1])
