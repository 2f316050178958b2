"""What the forkserver of ``tests.ranks`` imports once, so that its children start fast."""

import os
from contextlib import suppress
from importlib import import_module

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import deepspeed
import lightning.pytorch
import pytest
import torch

import lightning_tricks
import tests.nets
from tests.speed import Garbage, cache_entry_points, cache_signatures, connect_at_once, leave_devices_out

__all__ = ["deepspeed", "lightning", "lightning_tricks", "pytest", "tests", "torch"]

# Modules that DeepSpeed and torch import at the first use, which takes three seconds; another version may lack some.
LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # asked about every optimizer; it imports torch's compiler
    "torch._dynamo.backends.inductor",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)
for name in LATE:
    with suppress(ImportError):
        import_module(name)

_ = deepspeed.ops.__compatible_ops__  # compiles a probe at the first use
cache_entry_points()
cache_signatures()
leave_devices_out()
connect_at_once()
Garbage().freeze()  # which leaves pages shared, too
