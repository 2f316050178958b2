"""Make one file from a sharded checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.output import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    consolidate = commands.add_parser(
        "consolidate",
        help="make one file from a sharded checkpoint",
        description="Write the weights of a sharded checkpoint, a folder by FSDP2 or DeepSpeed, to one file: whole"
        " tensors, of DeepSpeed the fp32 masters, read and written one after the other. No GPU is needed, and memory"
        " for one tensor. Take only folders that you trust, since reading them can run code.",
        epilog="example: lightning-tricks consolidate last.ckpt -o model.safetensors",
    )
    consolidate.set_defaults(run=run)
    consolidate.add_argument("checkpoint", type=Path, metavar="FOLDER", help="the checkpoint")
    add_output(consolidate)


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.checkpoints.consolidate import consolidate

    tensors = consolidate(options.checkpoint, options.output, force=options.force)
    print(f"wrote {options.output} ({tensors} tensors, {options.output.stat().st_size / 1e9:.3g} GB)")
