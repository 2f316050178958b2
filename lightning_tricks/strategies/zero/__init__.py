"""DeepSpeed ZeRO: the ZeRO presets."""
