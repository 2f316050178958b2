"""Print a script with which a shell completes the command.

bash and zsh have a script of our own, which also completes ``--flag=value``, the form of LightningCLI's arguments; the
script for fish is shtab's.
"""

from __future__ import annotations

import argparse
from typing import Any

from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.commands.names import known_names
from lightning_tricks_cli.commands.trainer import METHODS

SHELLS = ("bash", "zsh", "fish")
SCRIPT = """\
_lightning_tricks() {
    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"
    local start="" known=""
    if [[ "$cur" == -*=* ]]; then  # --flag=value is one word in zsh, three in bash
        start="${cur%%=*}=" before="${cur%%=*}" cur="${cur#*=}"
    elif [[ "$cur" == "=" ]]; then
        cur=""
    elif [[ "$before" == "=" ]]; then
        before="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    if [[ "$COMP_CWORD" == 1 ]]; then
        command=""
    fi
    case "$command $before $cur" in
@CASES@
    esac
    COMPREPLY=($(compgen -P "$start" -W "$known" -- "$cur"))
}
complete -o default -F _lightning_tricks lightning-tricks
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    completion = commands.add_parser(
        "completion",
        help="print a script for tab completion in your shell",
        description="Print a script that completes commands, flags, presets, callbacks and tricks. For bash, write it"
        " to a file in ~/.local/share/bash-completion/completions, or source it in ~/.bashrc; for zsh, source it in"
        " ~/.zshrc after compinit; for fish, write it to a file in ~/.config/fish/completions.",
        epilog="examples:\n"
        "  lightning-tricks completion bash > ~/.local/share/bash-completion/completions/lightning-tricks\n"
        "  lightning-tricks completion zsh > ~/.lightning-tricks.zsh\n"
        "  lightning-tricks completion fish > ~/.config/fish/completions/lightning-tricks.fish",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks_cli.main import parser

    if options.shell == "fish":
        print(_for_fish(parser()))
        return
    cases = "\n".join(f'        {pattern}) known="{" ".join(words)}" ;;' for pattern, words in _cases(parser()))
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    print(zsh + SCRIPT.replace("@CASES@", cases), end="")


def _for_fish(main_parser: argparse.ArgumentParser) -> str:
    """The script of shtab for a parser, which gets the arguments of LightningCLI and the names of tricks."""
    try:
        import shtab
    except ImportError as error:
        from lightning_tricks.core.install import pip_install

        raise ImportError(f"completion in fish needs shtab: {pip_install('cli')}") from error
    names, commands = known_names(), _commands(main_parser)
    values = {
        "--trainer.strategy": [row["name"] for row in names["presets"]],
        "--trainer.callbacks+": [*names["callbacks"], *names["lightning_callbacks"]],
    }
    for name in METHODS:
        for flag in _lightning_flags(names):
            commands[name].add_argument(flag, choices=values.get(flag))
    for short in _subparsers(main_parser)._choices_actions:  # shtab cuts a description to a line
        commands[short.dest].description = short.help
    (word,) = (action for action in commands["tricks"]._actions if action.dest == "words")
    word.choices = _tricks()
    script: str = shtab.complete(main_parser, "fish")
    return script


def _subparsers(main_parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    (commands,) = (action for action in main_parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands


def _commands(main_parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return dict(_subparsers(main_parser).choices)


def _lightning_flags(names: dict[str, Any]) -> list[str]:
    """Arguments of LightningCLI, by their flags."""
    trainer = [f"--trainer.{name}" for name in names["trainer"]]
    return [*trainer, "--trainer.callbacks+", "--model", "--data", "--config", "--ckpt_path", "--seed_everything"]


def _tricks() -> list[str]:
    return [trick for row in CATALOGUE for trick in (*row.names, *row.beside)]


def _cases(main_parser: argparse.ArgumentParser) -> list[tuple[str, list[str]]]:
    """Patterns of ``command, word before, current word``, and the words that fit there; the first match counts."""
    names = known_names()
    presets = [row["name"] for row in names["presets"]]
    callbacks = [*names["callbacks"], *names["lightning_callbacks"]]
    lightning = _lightning_flags(names)
    cases = [
        ('*" --trainer.strategy "*|*" --strategy "*', presets),
        ('*" --trainer.callbacks "*|*" --trainer.callbacks+ "*|*" --with "*|*" --without "*', callbacks),
    ]
    commands = _commands(main_parser)
    for name, command in commands.items():
        flags = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        choices = [action for action in command._actions if action.choices]
        for action in choices:
            cases += [(f'"{name} {flag} "*', list(map(str, action.choices or ()))) for flag in action.option_strings]
        cases.append((f'"{name} "*" -"*', [*flags, *(lightning if name in METHODS else [])]))
        words = [str(word) for action in choices if not action.option_strings for word in action.choices or ()]
        if name == "tricks":
            words = _tricks()
        if words:
            cases.append((f'"{name} {name} "*', words))
    return [*cases, ('" "*', [*commands, "--version", "--help", "--debug"])]
