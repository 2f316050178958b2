"""Write the averaged or raw weights of a checkpoint for a plain module."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.target import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    export = commands.add_parser(
        "export",
        help="write the averaged or raw weights of a checkpoint for a plain module",
        description="Write the weights of a checkpoint as a plain state_dict: the averaged ones if a callback such as"
        " EMA has saved some, or the raw ones. Folders by FSDP and DeepSpeed become full tensors.",
        epilog="example: lightning-tricks export best.ckpt -o model.safetensors --strip-prefix model.",
    )
    export.add_argument("checkpoint", type=Path, metavar="CKPT", help="the checkpoint file or folder")
    export.add_argument(
        "--which", choices=("averaged", "raw"), default="averaged", help="the weights to write (default: averaged)"
    )
    export.add_argument(
        "--callback", metavar="KEY", help="the callback whose averages to write, if several have saved some"
    )
    export.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="write only this submodule, without its name"
    )
    adapters = export.add_mutually_exclusive_group()
    adapters.add_argument("--merge", action="store_true", help="merge the adapters of LoRA into the weights")
    adapters.add_argument("--peft", action="store_true", help="write the adapters of LoRA as a folder for peft")
    export.add_argument(
        "--base", type=Path, metavar="BASE", help="a file with the weights of before the training, for --merge"
    )
    add_output(export)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.checkpoints import export_adapters, export_weights

    if options.peft:
        export_adapters(
            options.checkpoint,
            options.output,
            strip_prefix=options.strip_prefix,
            base=options.base,
            force=options.force,
        )
        print(f"wrote {options.output}")
        return
    export_weights(
        options.checkpoint,
        options.output,
        which=options.which,
        callback=options.callback,
        strip_prefix=options.strip_prefix,
        merge=options.merge,
        base=options.base,
        force=options.force,
    )
    print(f"wrote {options.output}")
