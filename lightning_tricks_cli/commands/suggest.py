"""Suggest a strategy preset for a model and the machines there are."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.target import add_target, size


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    suggest = commands.add_parser(
        "suggest",
        help="suggest a strategy preset, batch size and accumulation",
        description="The fastest strategy preset that fits the memory of the devices, with reasons; see memory for what"
        " TARGET can be. What is not said of the machines is taken from this one.",
        epilog="example: lightning-tricks suggest 7B --device-memory 80GB --devices 8 --host-memory 1TB",
    )
    suggest.set_defaults(run=run)
    add_target(suggest)
    suggest.add_argument("--batch-size", type=int, metavar="N", help="samples of an optimizer step, over all devices")
    suggest.add_argument("--device-memory", type=size, metavar="SIZE", help="of each device, for example 24GB")
    suggest.add_argument("--host-memory", type=size, metavar="SIZE", help="of each node")
    suggest.add_argument("--nvme", type=size, metavar="SIZE", help="of each node's disk (default: none)")
    suggest.add_argument("--devices", type=int, metavar="N", help="of each node")
    suggest.add_argument("--links", choices=("fast", "slow"), default="fast", help="NVLink and InfiniBand, or not")
    suggest.add_argument("--no-bf16", action="store_true", help="the devices do not compute in bf16 (V100, T4)")


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.advisor import Hardware, suggest_strategy
    from lightning_tricks_cli.runs.target import read_target

    known = {name: getattr(options, name) for name in ("device_memory", "host_memory", "nvme", "devices")}
    known = {name: value for name, value in known.items() if value is not None}
    if options.no_bf16:
        known["bf16"] = False
    hardware = Hardware.detect(nodes=options.nodes, links=options.links, **known)
    model, batch = read_target(options)
    suggestion = suggest_strategy(
        model, hardware=hardware, batch=batch, batch_size=options.batch_size, optimizer=options.optimizer
    )
    print(json.dumps(suggestion.to_dict()) if options.json else suggestion)
