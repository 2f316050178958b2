"""Suggest a strategy preset for a model and the available machines."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.target import add_target, at_least_one, size, with_flags

KINDS = ("a100-40gb", "a100", "h100-500w", "h100", "h200")  # of lightning_tricks, which is not imported for --help


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    suggest = commands.add_parser(
        "suggest",
        help="suggest a strategy preset, batch size and accumulation",
        description="Suggest the fastest strategy preset that fits into the memory of the devices, with reasons. See"
        " lightning-tricks memory for TARGET. By default the devices and memory of this machine are used. With --device"
        " the presets are compared by their simulated tokens a second, for thousands of devices, too; TARGET is then a"
        " transformer: a number of parameters, or a transformers configuration.",
        epilog="examples: lightning-tricks suggest 7B --device-memory 80GB --devices 8 --host-memory 1TB\n"
        "          lightning-tricks suggest 70B --device h100 --nodes 32 --batch-size 1024",
    )
    add_target(suggest)
    suggest.add_argument(
        "--batch-size", type=at_least_one, metavar="N", help="number of samples of an optimizer step, over all devices"
    )
    suggest.add_argument("--device", choices=KINDS, help="simulate training on this kind, 8 on each node")
    suggest.add_argument("--device-memory", type=size, metavar="SIZE", help="memory of each device, for example 24GB")
    suggest.add_argument("--host-memory", type=size, metavar="SIZE", help="memory of each node (default: as here)")
    suggest.add_argument("--nvme", type=size, metavar="SIZE", help="space on each node's NVMe disk (default: none)")
    suggest.add_argument("--devices", type=at_least_one, metavar="N", help="number of devices per node")
    suggest.add_argument(
        "--links",
        choices=("fast", "slow"),
        default="fast",
        help="fast: NVLink and InfiniBand; slow: PCIe, Ethernet (default: fast)",
    )
    suggest.add_argument("--no-bf16", action="store_true", help="the devices do not compute in bf16 (V100, T4)")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    if options.device is not None:
        run_plan(options)
        return
    from dataclasses import replace

    from lightning_tricks.advisor import Hardware, suggest_strategy
    from lightning_tricks.core.report import table
    from lightning_tricks_cli.runs.target import read_target

    model, batch = read_target(options)
    known = {name: getattr(options, name) for name in ("device_memory", "host_memory", "nvme", "devices")}
    known = {name: value for name, value in known.items() if value is not None}
    if options.no_bf16:
        known["bf16"] = False
    hardware = Hardware.detect(nodes=options.nodes, links=options.links, **known)
    if options.batch_size is not None and batch is None:
        raise ValueError(f"batch_size={options.batch_size} needs a model to measure, got TARGET {options.target!r}.")
    suggestion = suggest_strategy(
        model, hardware=hardware, batch=batch, batch_size=options.batch_size, optimizer=options.optimizer
    )
    if options.json:
        print(json.dumps(suggestion.to_dict()))
        return
    notes = replace(suggestion, reasons=suggestion.reasons[len(suggestion.faster) :], alternatives=())
    first, *rest = with_flags(str(notes), options).splitlines()
    rows = [(*row[:-1], with_flags(row[-1], options)) for row in suggestion.rows()]
    print("\n".join([first, table(("strategy", "each device", "fits", ""), rows), *rest]))


def run_plan(options: argparse.Namespace) -> None:
    """Compare the presets on devices of a kind."""
    from lightning_tricks.advisor import Hardware, suggest_plan
    from lightning_tricks.core.report import table
    from lightning_tricks_cli.runs.target import read_shape

    for name in ("host_memory", "nvme", "no_bf16"):
        if value := getattr(options, name):
            raise ValueError(f"{name}={value} is not simulated: leave it out, or device={options.device}.")
    known = {} if options.device_memory is None else {"device_memory": options.device_memory}
    machines = {"devices": options.devices or 8, "nodes": options.nodes, "links": options.links}
    hardware = Hardware.of(options.device, **machines, **known)
    shape = read_shape(options)
    plan = suggest_plan(shape, hardware=hardware, batch_size=options.batch_size, optimizer=options.optimizer)
    if options.json:
        print(json.dumps(plan.to_dict()))
        return
    grid = plan._grid()
    print("\n".join([*grid.above, table(grid.columns, grid.rows), *grid.below]))
