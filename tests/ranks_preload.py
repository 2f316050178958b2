"""What the forkserver of ``tests.ranks`` imports once, so that its children start fast."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import deepspeed
import lightning.pytorch
import torch

import lightning_tricks

__all__ = ["deepspeed", "lightning", "lightning_tricks", "torch"]
