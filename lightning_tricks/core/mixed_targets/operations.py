"""What torch's functions do with their arguments; functions are known by their names, as methods or in ``torch``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

from torch import Tensor

Function = Callable[..., Any]
IsLabel = Callable[[Any], bool]  # whether an argument is a tensor of integers that may be labels


class Kind(Enum):
    """What a function of torch does with a target among its arguments."""

    FORM = "uses its shape, dtype and device only"
    READ = "reads its value, without a graph, or one of its attributes"
    GRAPH = "concerns the graph behind it, and not its values"
    WRITE = "writes into its first argument"
    LOSS = "is one of torch's losses"
    REDUCTION = "is a sum or a mean"
    OTHER = "computes anything else from it"


def kind_of(func: Function, args: Sequence[Any]) -> Kind:
    """What a function does with a target among its arguments.

    >>> import torch
    >>> [kind_of(func, ()).name for func in (torch.zeros_like, torch.Tensor.item, torch.Tensor.backward)]
    ['FORM', 'READ', 'GRAPH']
    >>> [kind_of(func, ()).name for func in (torch.Tensor.add_, torch.nn.functional.mse_loss, torch.sum, torch.add)]
    ['WRITE', 'LOSS', 'REDUCTION', 'OTHER']
    """
    name = func.__name__
    if name.endswith("_like") or (name.startswith("new_") and name != "new_tensor"):
        return Kind.FORM
    if (name.endswith("_as") or name == "to") and type(args[0]) is Tensor:  # x.to(target)
        return Kind.FORM
    if name in _READ:
        return Kind.READ
    if name in _OF_THE_GRAPH:
        return Kind.GRAPH
    if name in _ASSIGN or (name.endswith("_") and not name.endswith("__")):
        return Kind.WRITE
    if is_loss(func):
        return Kind.LOSS
    return Kind.REDUCTION if name in ("sum", "mean") else Kind.OTHER


def _signature(func: Function) -> inspect.Signature | None:
    return _signature_of_torch(func) if getattr(func, "__module__", None) == "torch.nn.functional" else None


@cache  # a cache of all functions would keep what `named` makes, and the traced layers in it
def _signature_of_torch(func: Function) -> inspect.Signature | None:
    signature = inspect.signature(func)
    return signature if "reduction" in signature.parameters else None


def is_loss(func: Function) -> bool:
    """Whether a function is one of torch's losses: one in ``torch.nn.functional`` with a ``reduction``.

    >>> import torch
    >>> is_loss(torch.nn.functional.cross_entropy), is_loss(torch.nn.functional.softmax)
    (True, False)
    """
    return _signature(func) is not None


def arguments(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, defaults included."""
    signature = _signature(func)
    assert signature is not None, "is_loss"
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def named(func: Function) -> Function:
    """A function with a name, by which it is known; layers that ``torch.jit`` has traced have none."""
    if hasattr(func, "__name__"):
        return func

    def traced(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return traced


def moves(func: Function) -> bool:
    """Whether a function moves the values of its first argument and changes none, as ``reshape`` and indexing do."""
    return func.__name__ in _MOVE


def keeps_order(func: Function) -> bool:
    """Whether a function only gives a tensor another shape, as ``flatten`` does."""
    return func.__name__ in _RESHAPE


def cuts_behind_samples(func: Function, args: Sequence[Any]) -> bool:
    """Whether a function cuts a tensor after its first dimension alone, as ``x[..., 1:]`` and ``x[:, 0]`` do.

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


def is_linear(func: Function) -> bool:
    """Whether a function of a number is the number times a factor, plus others, in any shape and dtype.

    >>> import torch
    >>> is_linear(torch.Tensor.__rsub__), is_linear(torch.div), is_linear(torch.sqrt), is_linear(torch.Tensor.__rdiv__)
    (True, True, False, False)
    """
    return func.__name__.strip("_").removeprefix("i") in _LINEAR or moves(func) or joins(func)


def compares_entries(func: Function) -> bool:
    """Whether a function of several numbers orders them, or divides each by what all of them are.

    >>> import torch
    >>> compares_entries(torch.topk), compares_entries(torch.softmax), compares_entries(torch.exp)
    (True, True, False)
    """
    return func.__name__ in _COMPARE


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
    kind = kind_of(func, args)
    return kind is Kind.REDUCTION and isinstance(args[0], Tensor) and _in_first_dimension(args, kwargs)


def _in_first_dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = [dims] if isinstance(dims, int) else dims
    count = args[0].ndim if args and isinstance(args[0], Tensor) else 0
    return not isinstance(dims, list | tuple) or not dims or any(dim in (0, -count) for dim in dims)


# -- integers as labels: they are made into codes, or choose among the numbers of a network ---------------------------
#
# A mask of places in a sequence multiplies such numbers as well, and the length of a sequence is the index of its last
# vector. So a product counts if its factor is a code (as by ``one_hot``) or one number for each sample, and an index if
# it chooses single numbers.


def makes_codes(func: Function, args: Sequence[Any], tensors: Sequence[Tensor], is_label: IsLabel) -> bool:
    """Whether a function makes codes of labels: compares them with classes, or looks them up in a table.

    Args:
        func: The function that was called.
        args: Its arguments, with that which it is called on as the first one.
        tensors: All tensors among its arguments.
        is_label: Whether an argument may be labels.
    """
    name = func.__name__.strip("_")
    if name == "setitem":  # codes[range(n), labels] = 1, but not table[labels] = 1
        return isinstance(args[1], tuple) and any(map(is_label, args[1]))
    if name in ("eq", "ne", "lt", "le", "gt", "ge"):  # with classes, or with each other; lengths are so with places
        return len(tensors) > 1 and (name in ("eq", "ne") or all(map(is_label, tensors)))
    return name in _ENCODE or (name in _TAKE and not is_label(args[0])) or name == "embedding"


def picks_numbers(func: Function, args: Sequence[Any], samples: int, is_label: IsLabel) -> bool:
    """Whether a function chooses single numbers of its first argument by labels: ``logits[range(n), labels]``.

    The index of a vector, such as that of the last word, chooses all of its numbers.

    Args:
        func: The function that was called.
        args: Its arguments, with that which it is called on as the first one.
        samples: The number of samples in the batch.
        is_label: Whether an argument may be labels.
    """
    name, value = func.__name__.strip("_"), args[0]
    if name in _PICK:
        index = next((each for each in args[1:] if is_label(each)), None)
        # An index that was expanded has stride 0: it takes whole vectors, each by one number, and labels take numbers.
        sides = [] if index is None else zip(index.shape, index.stride(), strict=True)
        return index is not None and not any(size > 1 and not stride for size, stride in list(sides)[1:])
    if name == "index_select":
        return args[1] not in (0, -value.ndim) and is_label(args[2])
    if name != "getitem":
        return False
    if is_label(args[1]):
        return value.ndim == 1 and len(value) != samples
    keys = args[1] if isinstance(args[1], tuple) else ()
    if len(keys) != value.ndim or any(type(key) is slice for key in keys[1:]):
        return False
    return any(map(is_label, keys[1:])) or (is_label(keys[0]) and len(value) != samples)


def sums_by_labels(func: Function, args: Sequence[Any], samples: int, is_label: IsLabel) -> bool:
    """Whether a function sums the numbers of the samples of each class, as for means: ``sums.index_add(0, y, x)``."""
    return func.__name__.strip("_") in _SUM and any(is_label(each) and each.numel() == samples for each in args[1:])


def weighs_samples(func: Function, result: Any, samples: int) -> bool:
    """Whether a function multiplies the number of each sample by one, or chooses between two."""
    of_samples = isinstance(result, Tensor) and result.numel() == samples
    return multiplies(func) or (weighs(func) and not divides(func) and of_samples)


def leaves_samples_out(func: Function, args: Sequence[Any], samples: int) -> bool:
    """Whether a function, if its index is a mask, takes the numbers of some samples."""
    return func.__name__ in ("__getitem__", "masked_select") and args[0].numel() == samples


def multiplies(func: Function) -> bool:
    """Whether a function multiplies its arguments, and sums."""
    return func.__name__.strip("_") in _MULTIPLY


def is_layer(func: Function, others: Sequence[Tensor]) -> bool:
    """Whether a function is a part of a network: with weights or other outputs, and no formula of a loss.

    Args:
        func: The function that was called.
        others: The tensors with a graph that are its other arguments.
    """
    return any(other.numel() > 1 for other in others) and not (is_elementwise(func) or is_loss(func) or joins(func))


# -- names of functions, most of them without underscores --------------------------------------------------------------

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
_LINEAR = {
    *(*_DIVIDE, "mul", "rmul", "multiply", "add", "radd", "sub", "rsub", "subtract", "neg", "negative", "positive"),
    *("sum", "mean", "where", "masked_fill", "nan_to_num", "clone", "contiguous", "requires_grad", "detach"),
    *("float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", "cuda"),
}
_COMPARE = {
    *("topk", "sort", "msort", "argsort", "kthvalue", "quantile", "nanquantile", "cumsum", "cumprod", "cummax"),
    *("cummin", "logcumsumexp", "softmax", "log_softmax", "softmin", "normalize"),
}
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
_ENCODE = {"one_hot", "scatter"}
_PICK = {"gather", "take", "take_along_dim"}
_TAKE = {*_PICK, "getitem", "index_select"}
_SUM = {"index_add", "index_reduce", "scatter_add", "scatter_reduce"}
_MULTIPLY = {
    *("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "vecdot", "einsum", "tensordot", "linear"),
}
