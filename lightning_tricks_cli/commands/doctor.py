"""Report what this machine has and which presets run on it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_tricks_cli.commands.target import add_config

if TYPE_CHECKING:
    from lightning_tricks.advisor.environment import Environment


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    doctor = commands.add_parser(
        "doctor",
        help="report what this machine has and which presets run on it",
        description="Report the versions, devices and compilers of this machine, and for each strategy preset whether"
        " it runs here, runs slower, or cannot run, why, and what to do about it. With a configuration of LightningCLI,"
        " also report what is probably wrong with its model, with remedies.",
        epilog="example: lightning-tricks doctor -c config.yaml",
    )
    add_config(doctor, required=False)
    doctor.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.advisor.environment import environment_report
    from lightning_tricks.core.report import table

    findings = _findings(options.config) if options.config else []
    report = environment_report()
    if options.json:
        result = report.to_dict() | ({"findings": findings} if options.config else {})
        print(json.dumps(result, indent=1))
        return
    for name, value in _machine(report.environment):
        print(f"{name:<12}{value}")
    rows = [[preset.name, preset.status, "; ".join(preset.reasons)] for preset in report.presets]
    print(table(("preset", "here", "because"), rows))
    for remedy in dict.fromkeys(remedy for preset in report.presets for remedy in preset.remedies):
        names = [preset.name for preset in report.presets if remedy in preset.remedies]
        print(f"{remedy}\n    for {', '.join(names)}")
    for finding in findings:
        print(f"{finding['rule']}: {finding['text']}")
    if options.config and not findings:
        print("the model has no findings")


def _findings(configs: list[Path]) -> list[dict[str, str]]:
    from lightning_tricks.advisor.doctor import lint
    from lightning_tricks_cli.runs.config import read_model

    return [finding._asdict() for finding in lint(read_model(configs).model)]


def _machine(environment: Environment) -> list[tuple[str, str]]:
    """Names and values of the lines about the machine."""
    broken = environment.broken
    lines = [(name, version or broken.get(name, "missing")) for name, version in environment.versions.items()]
    for device in environment.devices:
        bf16 = "bf16" if device.bf16 else "no bf16"
        lines.append((device.kind, f"{device.name}, {device.memory / 2**30:.0f} GiB, {bf16}"))
    lines.append(("distributed", ", ".join(environment.backends) or "missing"))
    lines += [(name, path or "missing") for name, path in environment.tools.items()]
    return lines + [("stale lock", f"{lock}, which the next run removes") for lock in environment.stale_locks]
