"""Errors that say that memory has run out, and what is freed after one."""

from __future__ import annotations

import traceback

import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error

_OUT_OF_MEMORY_TEXTS = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory"),
    *("std::bad_alloc", "ALLOC_FAILED"),
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device, the host, cuDNN or cuBLAS has run out of memory.

    >>> out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_oom_error(error):
        return True
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def free_memory_of(error: BaseException) -> None:
    """Free the tensors in the frames that an error has come through, such as a batch and its activations."""
    traceback.clear_frames(error.__traceback__)
    garbage_collection_cuda()
