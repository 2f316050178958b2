"""Data: samplers that batch samples of similar lengths, and the number of workers that loads them in time."""

from lightning_tricks.data.balanced_sampler import balanced_sampler
from lightning_tricks.data.length_buckets import LengthBuckets
from lightning_tricks.data.packing import pack_sequences
from lightning_tricks.data.token_buckets import BatchedDataset, TokenBuckets
from lightning_tricks.data.weighted_sampler import DistributedWeightedSampler
from lightning_tricks.data.workers import WorkersResult, find_num_workers

__all__ = [
    "BatchedDataset",
    "DistributedWeightedSampler",
    "LengthBuckets",
    "TokenBuckets",
    "WorkersResult",
    "balanced_sampler",
    "find_num_workers",
    "pack_sequences",
]
