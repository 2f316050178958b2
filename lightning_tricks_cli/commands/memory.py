"""Estimate the memory that training takes on each device."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.target import add_target, at_least_one


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    memory = commands.add_parser(
        "memory",
        help="estimate the memory that training takes on each device",
        description="Count weights, gradients and optimizer states, and measure activations with fake tensors. TARGET"
        " is a LightningCLI configuration (its training_step on its data), a timm model, a transformers configuration,"
        " or a number of parameters, for which activations are not measured.",
        epilog="example: lightning-tricks memory timm:resnet50 --batch-size 64 --strategy ddp_bf16 --devices 8",
    )
    add_target(memory)
    memory.add_argument("--batch-size", type=at_least_one, metavar="N", help="number of samples on each device")
    memory.add_argument("--strategy", metavar="NAME", help="a preset, or ddp (default: a full model on each device)")
    memory.add_argument(
        "--precision", metavar="NAME", help="Lightning's precision (default: the preset's, or bf16-mixed)"
    )
    memory.add_argument(
        "--devices", type=at_least_one, default=1, metavar="N", help="number of devices per node (default: 1)"
    )
    memory.add_argument(
        "--extras", type=_names, default=(), metavar="NAMES", help="tricks that copy the weights: ema,swa,sam"
    )


def _names(text: str) -> list[str]:
    return text.split(",")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
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
