"""Write a sharded checkpoint to one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.target import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    consolidate = commands.add_parser(
        "consolidate",
        help="write a sharded checkpoint to one file",
        description="Write the weights of a sharded checkpoint, a folder by FSDP2 or DeepSpeed, to one file, with"
        " DeepSpeed the fp32 master weights. Tensors are read and written one by one: memory for the largest is enough,"
        " and no GPU is needed.",
        epilog="example: lightning-tricks consolidate last.ckpt -o model.safetensors",
    )
    consolidate.add_argument("checkpoint", type=Path, metavar="FOLDER", help="the checkpoint folder")
    add_output(consolidate)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.checkpoints.consolidate import consolidate

    written = consolidate(options.checkpoint, options.output, force=options.force)
    print(f"wrote {written} ({written.stat().st_size / 1e9:.3g} GB)")
