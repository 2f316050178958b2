"""Fully sharded data parallelism: the FSDP2 presets."""
