"""Write the averaged or raw weights of a checkpoint for a bare module."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.output import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    export = commands.add_parser(
        "export",
        help="write the averaged or raw weights of a checkpoint for a bare module",
        description="Write the weights of a checkpoint as a plain state_dict: the averaged ones if a callback such as"
        " EMA kept some, or the raw ones. Folders of FSDP and DeepSpeed become whole tensors; export only folders that"
        " you trust, since reading them can run code.",
        epilog="example: lightning-tricks export best.ckpt -o model.safetensors --strip-prefix model.",
    )
    export.set_defaults(run=run)
    export.add_argument("checkpoint", type=Path, metavar="CKPT", help="the checkpoint file or folder")
    export.add_argument(
        "--which", choices=("averaged", "raw"), default="averaged", help="which weights (default: averaged)"
    )
    export.add_argument("--callback", metavar="KEY", help="whose averages, if several callbacks kept some")
    export.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="take only this submodule, without its name"
    )
    add_output(export)


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.checkpoints import export_weights

    export_weights(
        options.checkpoint,
        options.output,
        which=options.which,
        callback=options.callback,
        strip_prefix=options.strip_prefix,
        force=options.force,
    )
    print(f"wrote {options.output}")
