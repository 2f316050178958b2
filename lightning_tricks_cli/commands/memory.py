"""Estimate the memory that training takes."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.target import add_target


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    memory = commands.add_parser(
        "memory",
        help="estimate the memory that training takes on each device",
        description="Count weights, gradients and optimizer states, and measure activations on tensors without memory:"
        " of a LightningCLI configuration (its training_step on its data), a model of timm, a configuration of"
        " transformers; of a plain count of parameters without activations.",
        epilog="example: lightning-tricks memory timm:resnet50 --batch-size 64 --strategy ddp_bf16 --devices 8",
    )
    memory.set_defaults(run=run)
    add_target(memory)
    memory.add_argument("--batch-size", type=int, metavar="N", help="samples on each device")
    memory.add_argument("--strategy", metavar="NAME", help="a preset, or ddp (default: one whole model a device)")
    memory.add_argument("--precision", metavar="NAME", help="of Lightning (default: the preset's, or bf16-mixed)")
    memory.add_argument("--devices", type=int, default=1, metavar="N", help="of each node (default: 1)")
    memory.add_argument("--extras", type=_names, default=(), metavar="NAMES", help="copies of the weights: ema,swa,sam")


def _names(text: str) -> list[str]:
    return text.split(",")


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.advisor import estimate_memory
    from lightning_tricks_cli.runs.target import read_target

    model, batch = read_target(options)
    estimate = estimate_memory(
        model,
        optimizer=options.optimizer,
        precision=options.precision,
        strategy=options.strategy,
        devices=options.devices,
        nodes=options.nodes,
        batch=batch,
        batch_size=options.batch_size,
        extras=options.extras,
    )
    if options.json:
        print(json.dumps(estimate.to_dict()))
        return
    table = estimate.table()
    from rich.console import Console

    Console().print(table)
