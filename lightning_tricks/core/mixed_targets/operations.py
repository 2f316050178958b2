"""What torch's functions do with their arguments; functions are told apart by name, as methods or in ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


def named(func: Function) -> Function:
    """A function with a name, by which it is known; layers that ``torch.jit`` has traced have none."""
    if hasattr(func, "__name__"):
        return func

    def traced(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return traced


def writes(func: Function) -> bool:
    """Whether a function writes into its first argument.

    >>> import torch
    >>> writes(torch.Tensor.add_), writes(torch.Tensor.__setitem__), writes(torch.add)
    (True, True, False)
    """
    name = func.__name__
    return name in _ASSIGN or (name.endswith("_") and not name.endswith("__"))


def uses_metadata_only(func: Function, args: Sequence[Any]) -> bool:
    """Whether a function uses only the shape, dtype and device of a target, as ``zeros_like`` and ``x.to(y)`` do."""
    name = func.__name__
    if name.endswith("_like") or (name.startswith("new_") and name != "new_tensor"):
        return True
    return (name.endswith("_as") or name == "to") and type(args[0]) is Tensor


def differentiates(func: Function) -> bool:
    """Whether a function concerns the graph behind a tensor, and not its values."""
    return func.__name__ in _OF_THE_GRAPH


def reads_value(func: Function) -> bool:
    """Whether a function reads the value of a tensor, without a graph, or one of its attributes.

    >>> import torch
    >>> reads_value(torch.Tensor.item), reads_value(torch.Tensor.__float__), reads_value(torch.Tensor.exp)
    (True, True, False)
    """
    return func.__name__ in _READ


def moves(func: Function) -> bool:
    """Whether a function moves the values of its first argument and changes none, as ``reshape`` and indexing do."""
    return func.__name__ in _MOVE


def keeps_order(func: Function) -> bool:
    """Whether a function only gives a tensor another shape, as ``flatten`` does."""
    return func.__name__ in _RESHAPE


def cuts_behind_samples(func: Function, args: Sequence[Any]) -> bool:
    """Whether a function cuts a tensor behind its first dimension alone, as ``x[..., 1:]`` and ``x[:, 0]`` do.

    >>> import torch
    >>> cuts_behind_samples(torch.Tensor.__getitem__, (torch.zeros(2, 3), (..., slice(1, None))))
    True
    """
    if func.__name__ != "__getitem__" or not isinstance(args[1], tuple):
        return False
    first, *rest = args[1]
    whole = first is Ellipsis or (type(first) is slice and first == slice(None))
    return whole and len(rest) < args[0].ndim and all(type(key) in (slice, int) for key in rest)


def keeps_samples(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the i-th entry of the result depends only on the i-th entries of the arguments."""
    name = func.__name__.strip("_")
    if name == "pad":
        return len(kwargs.get("pad", args[1:2] and args[1])) < 2 * args[0].ndim
    return name in _ELEMENTWISE or name in _LOOKUP or (name in _BY_DIMENSION and not _in_first_dimension(args, kwargs))


def is_elementwise(func: Function) -> bool:
    """Whether a function works entry by entry, with broadcasting."""
    return func.__name__.strip("_") in _ELEMENTWISE


def weighs(func: Function) -> bool:
    """Whether a function multiplies or divides its arguments, or replaces some entries by those of another."""
    return func.__name__.strip("_").removeprefix("i") in _WEIGH


def joins(func: Function) -> bool:
    """Whether a function puts tensors beside one another."""
    return func.__name__ in ("cat", "concat", "stack", "hstack", "vstack")


def divides(func: Function) -> bool:
    """Whether a function divides its first argument by the second.

    >>> import torch
    >>> divides(torch.div), divides(torch.Tensor.__itruediv__), divides(torch.Tensor.__rtruediv__)
    (True, True, False)
    """
    return func.__name__.strip("_").removeprefix("i") in _DIVIDE


def writes_by_sample(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into the i-th entry of its first argument by the i-th entry of a target."""
    name = func.__name__.strip("_")
    if name == "setitem":  # x[range(n), y] = 1, but not x[y] = 1
        return isinstance(args[1], tuple) and type(args[1][0]) in (slice, range, list, Tensor)
    if name == "scatter":
        return not _in_first_dimension(args, kwargs)
    return name == "copy" or name.removeprefix("i") in _ELEMENTWISE


def reduces_samples(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is a sum or a mean over the first dimension, alone or with others."""
    return func.__name__ in ("sum", "mean") and isinstance(args[0], Tensor) and _in_first_dimension(args, kwargs)


def _in_first_dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = [dims] if isinstance(dims, int) else dims
    count = args[0].ndim if args and isinstance(args[0], Tensor) else 0
    return not isinstance(dims, list | tuple) or not dims or any(dim in (0, -count) for dim in dims)


_ASSIGN = {
    *("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}
_OF_THE_GRAPH = {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_READ = {
    *("detach", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__get__", "__array__", "__float__"),
    *("__int__", "__bool__", "__index__", "__complex__", "__format__", "__repr__"),
}
_RESHAPE = {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"}
_MOVE = {
    *(*_RESHAPE, "__get__"),
    *("__getitem__", "index_select", "masked_select", "narrow", "select", "repeat", "repeat_interleave", "expand"),
    *("expand_as", "unbind", "flip", "permute", "transpose", "t", "movedim", "swapaxes", "swapdims"),
}
_DIVIDE = {"div", "divide", "truediv", "true_divide"}
_WEIGH = {*_DIVIDE, "mul", "rmul", "multiply", "where", "masked_fill", "setitem"}
_ELEMENTWISE = {
    *("add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply", "div", "rdiv", "divide", "truediv", "neg"),
    *("rtruediv", "true_divide", "pow", "rpow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log"),
    *("log1p", "log2", "abs", "sign", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where"),
    *("sigmoid", "logsigmoid", "tanh", "relu", "softplus", "lerp", "addcmul", "addcdiv", "masked_fill", "nan_to_num"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "logical_not", "logical_and", "logical_or"),
    *("float", "double", "half", "bfloat16", "long", "int", "bool", "to", "type", "type_as", "contiguous", "clone"),
    *("detach", "cpu", "cuda", "requires_grad", "round", "floor", "ceil", "fmod"),
    *("remainder", "isnan", "isfinite", "isin", "xlogy", "erf", "sin", "cos", "log_sigmoid"),
}
_LOOKUP = {"one_hot", "getitem", "embedding"}
_BY_DIMENSION = {
    *("sum", "mean", "max", "min", "amax", "amin", "prod", "logsumexp", "norm", "vector_norm", "var", "std", "any"),
    *("all", "argmax", "argmin", "softmax", "log_softmax", "cumsum", "gather", "take_along_dim", "scatter", "cat"),
    *("stack", "index_select"),
}
