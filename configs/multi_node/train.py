"""Handwritten digits on any number of machines, by LightningCLI: see docs/multi_node.md.

python train.py fit -c digits.yaml --trainer.strategy ddp_bf16
"""

from lightning.pytorch.cli import LightningCLI

import lightning_tricks  # noqa: F401  registers the presets' names

if __name__ == "__main__":
    LightningCLI(save_config_kwargs={"overwrite": True})  # a job that was queued again has the same folder
