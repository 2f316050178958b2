"""Data parallelism: the DDP presets."""
