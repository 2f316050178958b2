"""Tensors without memory, and a count of the bytes that they would take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What CUDA's autocast runs in fp32 and the CPU's does not, by the names of the functions.
CUDA_FP32 = {
    *("layer_norm", "group_norm", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow"),
    *("softplus", "cosine_similarity", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "logsumexp"),
    *("binary_cross_entropy_with_logits", "cross_entropy", "cdist", "norm", "__pow__", "__rpow__"),
}
CUDA_FP32_RESULT = {"softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum"}  # these read 16 bits, and write 32

DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}  # where it is among the arguments


def fake_mode() -> FakeTensorMode:
    """Inside it tensors have a shape and no memory; real ones that come in are taken as such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that functions return inside it, less those that are freed.

    Args:
        on_cpu: Whether the CPU's libraries are meant.

    Attributes:
        now: The bytes there are.
        peak: The most there were since it was set.
        times: The bytes after each function.
        casts: The most bytes of 16-bit casts of parameters there were; they are in the others, too.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self.now = self.peak = self.casts = self._casts_now = 0
        self.times: list[int] = []
        self._known: dict[int, bool] = {}  # whether a storage is one of a parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and self._known.get(args[0].untyped_storage()._cdata, False)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage(), cast)
        inside = _inside(func, args) if self._on_cpu else 0
        self.times.append(self.now + inside)
        self.peak = max(self.peak, self.now)
        return result

    def leave_out(self, tensor: Tensor, *, parameter: bool = False) -> None:
        """Do not count a tensor that was there before."""
        self._known[tensor.untyped_storage()._cdata] = parameter

    def _watch(self, storage: torch.UntypedStorage, cast: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = False
        size = storage.nbytes()
        self.now += size
        if cast:
            self._casts_now += size
            self.casts = max(self.casts, self._casts_now)
        weakref.finalize(storage, self._freed, key, size, cast).atexit = False

    def _freed(self, key: int, size: int, cast: bool) -> None:
        self.now -= size
        self._casts_now -= size if cast else 0
        del self._known[key]


def _inside(func: Any, args: Any) -> int:
    """Bytes that oneDNN, on the CPU, takes inside of a convolution: the weights or their gradient in its own layout."""
    if func is torch.ops.aten.convolution.default:
        return args[1].numel() * args[1].element_size()
    if func is torch.ops.aten.convolution_backward.default:
        return args[2].numel() * args[2].element_size()
    return 0


def _number(tensor: Tensor) -> float | bool:
    """What ``.item()`` gives of a tensor that has no value: steps take numbers to log them, and truths to check."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point:
        return 0.5
    raise ValueError(
        "the step takes a whole number out of a tensor, .item() or int(...), and what memory it needs may depend on it:"
        " pass a module whose step takes sizes from shapes, or estimate without batch=."
    )


class LikeCUDA(TorchFunctionMode):
    """Lets functions on the CPU hold what they hold on CUDA.

    Autocast has other lists of what to compute in fp32 there, and attention with dropout does not make its matrix.

    Args:
        autocast: Whether autocast is on.
    """

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        place = DROPOUT.get(name)
        if place is not None and not kwargs.get("need_weights", name == "multi_head_attention_forward"):
            args, kwargs = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        elif self._autocast and name in CUDA_FP32:
            args, kwargs = tree_map(_wide, (args, kwargs))
        elif self._autocast and name in CUDA_FP32_RESULT and isinstance(args[0], Tensor) and _is_narrow(args[0]):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return func(*args, **kwargs)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _wide(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value
