"""Fake tensors, which have no memory, and a count of the bytes that they would take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it.
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Names of the functions that autocast runs in fp32 on CUDA but not on a CPU.
CUDA_FP32 = {
    *("layer_norm", "group_norm", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow"),
    *("softplus", "cosine_similarity", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "logsumexp"),
    *("binary_cross_entropy_with_logits", "cross_entropy", "cdist", "norm", "__pow__", "__rpow__"),
}
# Names of the functions that read 16 bits and return fp32 under CUDA's autocast.
CUDA_FP32_RESULT = {"softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum"}

# The position of the dropout probability among the arguments.
DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


def fake_mode() -> FakeTensorMode:
    """A context in which new tensors have no memory; real ones from outside are accepted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of the storages that functions return, until they are freed.

    Args:
        on_cpu: Whether to count the workspace of the CPU's libraries.

    Attributes:
        now: The current number of bytes.
        peak: The largest number of bytes since it was last set.
        times: The number of bytes after each function.
        casts: The largest number of bytes of 16-bit casts of parameters, which the other counts include.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self.now = self.peak = self.casts = self._casts_now = 0
        self.times: list[int] = []
        self._known: dict[int, bool] = {}  # By the key of a storage, whether it belongs to a parameter.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and self._known.get(args[0].untyped_storage()._cdata, False)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage(), cast)
        workspace = _onednn_workspace(func, args) if self._on_cpu else 0
        self.times.append(self.now + workspace)
        self.peak = max(self.peak, self.now)
        return result

    def leave_out(self, tensor: Tensor, *, parameter: bool = False) -> None:
        """Exclude a tensor that existed before from the count.

        Args:
            tensor: The tensor.
            parameter: Whether it is a parameter, whose casts are counted.
        """
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


def _onednn_workspace(func: Any, args: Any) -> int:
    """The bytes of oneDNN's reordered copy of a convolution's weights, or of their gradient, on a CPU."""
    if func is torch.ops.aten.convolution.default:
        return args[1].numel() * args[1].element_size()
    if func is torch.ops.aten.convolution_backward.default:
        return args[2].numel() * args[2].element_size()
    return 0


def _number(tensor: Tensor) -> float | bool:
    """A substitute for the value of a fake tensor: steps read numbers to log them, and booleans to check something."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point:
        return 0.5
    raise ValueError(
        "the step reads an integer from a tensor, .item() or int(...), and its memory may depend on the value: pass a"
        " module whose step takes sizes from shapes, or estimate without batch=."
    )


class LikeCUDA(TorchFunctionMode):
    """A context in which functions on a CPU keep what they keep on CUDA.

    CUDA's autocast computes other functions in fp32, and attention with dropout does not store the attention matrix.

    Args:
        autocast: Whether autocast is on.
    """

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        position = DROPOUT.get(name)
        if position is not None and not kwargs.get("need_weights", name == "multi_head_attention_forward"):
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        elif self._autocast and name in CUDA_FP32:
            args, kwargs = tree_map(lambda x: x.float() if _is_16_bit(x) else x, (args, kwargs))
        elif self._autocast and name in CUDA_FP32_RESULT and _is_16_bit(args[0]):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return func(*args, **kwargs)


def _is_16_bit(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
