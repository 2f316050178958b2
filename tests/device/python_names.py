"""What Python code asks of tensors, of ``torch`` and of ``torch.cuda`` or the like, for the simulated device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lightning.fabric.accelerators import MPSAccelerator
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.device.simulation import Simulation, aten
from tests.device.storage import ARRIVES, PINNED, notes, on_device, put

Names = dict[tuple[Any, str], Any]  # by their owner
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
)
FACTORIES = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")


@contextmanager
def simulated(kind: str = "cuda", index: int = 0, count: int = 1, **settings: Any) -> Iterator[Simulation]:
    """Let torch and Lightning have ``count`` devices, of which this process uses one; gives what is found.

    Args:
        kind: "cuda", "xpu" or "mps".
        index: The number of the device.
        count: How many there are.
        settings: Further arguments of ``Simulation``.
    """
    simulation = Simulation(torch.device(kind, index), **settings)
    with ExitStack() as undo:
        for names in (tensors(simulation), factories(simulation), module_of(simulation, count), autocast(simulation)):
            for (owner, name), value in names.items():
                undo.enter_context(mock.patch.object(owner, name, value, create=owner is torch._C))
        undo.enter_context(simulation)
        yield simulation


def tensors(simulation: Simulation) -> Names:
    """Attributes and methods of tensors that tell or change where they are."""
    real = {name: getattr(torch._C.TensorBase, name) for name in ("device", "is_cpu")}
    to, tolist, numpy, deepcopy = Tensor.to, Tensor.tolist, Tensor.numpy, Tensor.__deepcopy__
    make_wrapper, parse_to = Tensor._make_wrapper_subclass, torch._C._nn._parse_to

    def there(x: Tensor) -> bool:
        return not simulation.inside and on_device(x)

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.overrides.has_torch_function_unary(self):
            return torch.overrides.handle_torch_function(Tensor.to, (self,), self, *args, **kwargs)
        found = arguments(args) | {name: value for name, value in kwargs.items() if value is not None}
        device = found.pop("device", None)
        known = simulation.is_it(device) or (device is not None and torch.device(device).type == "cpu")
        if not known or simulation.is_it(device) == there(self):
            return to(self, **found, **({"device": device} if device is not None and not known else {}))
        found.pop("copy", None)
        with mock.patch.object(simulation, "moves", True):
            return aten._to_copy(self, **{"dtype": self.dtype, **found}, device=torch.device(device))

    def arguments(given: tuple[Any, ...]) -> dict[str, Any]:
        """The names of ``to``'s positional arguments."""
        given = like(given)
        flags = [each for each in given if isinstance(each, bool)]
        others = [each for each in given if each is not None and not isinstance(each, bool)]
        named = {"dtype" if isinstance(each, torch.dtype) else "device": each for each in others}
        return named | dict(zip(("non_blocking", "copy"), flags, strict=False))

    def like(given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of ``to`` with a tensor's device and type in its place."""
        return (given[0].device, given[0].dtype, *given[1:]) if given and isinstance(given[0], Tensor) else given

    def as_numpy(self: Tensor, *, force: bool = False) -> Any:
        if there(self) and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it first."
            )
        check_arrival(self)
        return numpy(self.cpu() if there(self) else self, force=force)

    def as_list(self: Tensor) -> Any:
        if torch.overrides.has_torch_function_unary(self):
            return torch.overrides.handle_torch_function(Tensor.tolist, (self,), self)
        if there(self):
            simulation.waits_for("tolist")
        check_arrival(self)
        with torch._C._DisableTorchDispatch():
            return tolist(self)

    def check_arrival(x: Tensor) -> None:
        if notes(x).get(ARRIVES, 0) > simulation.arrived:
            simulation.races_with("reads a non_blocking copy, for which nobody has waited")

    def copied(self: Tensor, memo: Any) -> Tensor:
        result = deepcopy(self, memo)
        put(result, there(self))
        return result

    def pin(self: Tensor, *_: Any) -> Tensor:
        result = self.clone()
        notes(result)[PINNED] = True
        return result

    def wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return make_wrapper(*args, device="cpu" if simulation.is_it(device) else device, **kwargs)

    def new_tensor(self: Tensor, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    values = {
        "device": property(lambda self: simulation.device if there(self) else real["device"].__get__(self)),
        f"is_{simulation.device.type}": property(there),
        "is_cpu": property(lambda self: not there(self) and real["is_cpu"].__get__(self)),
        "get_device": lambda self: simulation.device.index if there(self) else -1,
        "to": moved,
        "cpu": lambda self, **kwargs: self.to("cpu"),
        "cuda": lambda self, device=None, **kwargs: self.to("cuda", **kwargs),
        "numpy": as_numpy,
        "tolist": as_list,
        "__deepcopy__": copied,
        "pin_memory": pin,
        "is_pinned": lambda self, *_: PINNED in notes(self),
        "record_stream": lambda self, stream: None,
        "new_tensor": new_tensor,
        "_make_wrapper_subclass": staticmethod(wrapper),
    }
    of_modules = {(torch._C._nn, "_parse_to"): lambda *args, **kwargs: parse_to(*like(args), **kwargs)}
    return {**{(Tensor, name): value for name, value in values.items()}, **of_modules}


def factories(simulation: Simulation) -> Names:
    """Functions that make tensors: only their Python names know whether a device was asked for."""

    def asking(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            # Of autograd's own one knows the device of a node, which C++ code does not.
            with mock.patch.object(simulation, "asks", sys._getframe(1).f_code.co_name != "_make_grads"):
                return function(*args, **kwargs)

        return make

    def of_data(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.tensor`` and the like look for the device before any mode sees them."""

        def make(
            data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any
        ) -> Any:
            if isinstance(data, Tensor):
                same = data if name == "as_tensor" else data.detach().clone()
                made = same.to(device=device or data.device, dtype=dtype or data.dtype)
            else:
                for number in filter(is_on_device, tree_leaves(data)):
                    number.item()  # without being seen by a mode
                made = function(data, dtype=dtype, **kwargs).to(device or "cpu")
            return made.requires_grad_() if requires_grad else made

        return make

    def is_on_device(each: Any) -> bool:
        return isinstance(each, Tensor) and on_device(each)

    names = [(torch, name) for name in (*FACTORIES, "arange", "linspace", "randperm", "eye", "empty_strided")]
    names += [(torch, f"{name}_like") for name in FACTORIES] + [(Tensor, f"new_{name}") for name in FACTORIES[:4]]
    return {
        **{(owner, name): asking(getattr(owner, name)) for owner, name in names},
        **{(torch, name): of_data(name, getattr(torch, name)) for name in ("tensor", "as_tensor")},
    }


def module_of(simulation: Simulation, count: int) -> Names:
    """``torch.cuda`` or that of another device, and what asks for the present accelerator."""

    class Event:
        """Knows which copies were begun before it."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.copies = 0

        def record(self, stream: Any = None) -> None:
            self.copies = simulation.copies

        def query(self) -> bool:
            simulation.arrived = max(simulation.arrived, self.copies)
            return True

        def synchronize(self) -> None:
            simulation.waits_for("synchronize", self.copies)

        def wait(self, stream: Any = None) -> None:
            """Another stream waits, not the host."""

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    class Stream:
        """All of them are one: the device does everything at once."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device, self.cuda_stream = simulation.device, 0

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record()
            return event

        def synchronize(self) -> None:
            self.record_event().synchronize()

        def query(self) -> bool:
            return self.record_event().query()

        def is_capturing(self) -> bool:
            return False

        def wait_event(self, event: Event) -> None:
            """The device waits, not the host."""

        wait_stream = wait_event

    stream = Stream()
    generator = simulation.generator
    nothing = (
        "empty_cache",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "ipc_collect",
        "_lazy_init",
        "init",
    )

    def choose(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        simulation.current = index

    values = {
        **{name: lambda *_, **__: None for name in nothing},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: simulation.current or 0,
        "set_device": choose,
        "_exchange_device": lambda index: simulation.current or 0,
        "_maybe_exchange_device": lambda index: simulation.current or 0,
        "synchronize": lambda *_: stream.synchronize(),
        "get_device_capability": lambda *_: (CARD.major, CARD.minor),
        "get_device_name": lambda *_: CARD.name,
        "get_device_properties": lambda *_: CARD,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "memory_allocated": lambda *_: 2**20,
        "max_memory_allocated": lambda *_: 2**20,
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (79 * 2**30, CARD.total_memory),
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "get_rng_state": lambda *_: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()] * count,
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "default_generators": (generator,) * count,
    }
    group = torch._C._group_tensors_by_device_and_dtype  # looks past .device

    def grouped(*args: Any) -> Any:
        found = group(*args).items()
        return {(lists[0][0].device, dtype): (lists, places) for (_, dtype), (lists, places) in found}

    accelerator = {
        "_accelerator_getAccelerator": lambda: torch.device(simulation.device.type),
        "_accelerator_getDeviceIndex": lambda: simulation.current or 0,
        "_accelerator_getStream": lambda index: stream,
        "_accelerator_synchronizeDevice": lambda index: stream.synchronize(),
        "_cuda_getCurrentRawStream": lambda *_: 0,
        "_group_tensors_by_device_and_dtype": grouped,
    }
    module = torch.get_device_module(simulation.device)
    return {
        **{(module, name): value for name, value in values.items() if hasattr(module, name)},
        **{(torch._C, name): value for name, value in accelerator.items()},
        (torch, "Event"): Event,
        (MPSAccelerator, "is_available"): staticmethod(lambda: simulation.device.type == "mps"),
    }


def autocast(simulation: Simulation) -> Names:
    """Autocast of the device is that of the CPU, which computes."""
    begin, enabled, dtype_of = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def of(kind: str) -> str:
        return "cpu" if simulation.is_it(kind) else kind

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        begin(
            self, of(device_type), dtype or (torch.float16 if simulation.is_it(device_type) else None), *args, **kwargs
        )

    return {
        (torch.autocast, "__init__"): init,
        (torch, "is_autocast_enabled"): lambda kind=None: enabled(of(kind)) if kind else enabled(),
        (torch, "get_autocast_dtype"): lambda kind: dtype_of(of(kind)),
    }
