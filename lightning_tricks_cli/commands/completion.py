"""Print a script with which bash or zsh complete the command."""

from __future__ import annotations

import argparse

from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.commands.names import known_names
from lightning_tricks_cli.commands.trainer import METHODS

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
        help="print a script for tab completion in bash or zsh",
        description="Print a script that completes commands, flags, presets, callbacks and tricks. For bash, write it"
        " to a file in ~/.local/share/bash-completion/completions, or source it in ~/.bashrc; for zsh, source it in"
        " ~/.zshrc after compinit.",
        epilog="examples:\n"
        "  lightning-tricks completion bash > ~/.local/share/bash-completion/completions/lightning-tricks\n"
        "  lightning-tricks completion zsh > ~/.lightning-tricks.zsh",
    )
    completion.set_defaults(run=run)
    completion.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks_cli.main import parser

    cases = "\n".join(f'        {pattern}) known="{" ".join(words)}" ;;' for pattern, words in _cases(parser()))
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    print(zsh + SCRIPT.replace("@CASES@", cases), end="")


def _cases(main_parser: argparse.ArgumentParser) -> list[tuple[str, list[str]]]:
    """Patterns of ``command, word before, current word``, and the words that fit there; the first match counts."""
    names = known_names()
    presets = [row["name"] for row in names["presets"]]
    callbacks = [*names["callbacks"], *names["lightning_callbacks"]]
    lightning = [f"--trainer.{name}" for name in names["trainer"]]
    lightning += ["--trainer.callbacks+", "--model", "--data", "--config", "--ckpt_path", "--seed_everything"]
    cases = [
        ('*" --trainer.strategy "*|*" --strategy "*', presets),
        ('*" --trainer.callbacks "*|*" --trainer.callbacks+ "*|*" --with "*|*" --without "*', callbacks),
    ]
    (commands,) = (action for action in main_parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        flags = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        choices = [action for action in command._actions if action.choices]
        for action in choices:
            cases += [(f'"{name} {flag} "*', list(map(str, action.choices or ()))) for flag in action.option_strings]
        cases.append((f'"{name} "*" -"*', [*flags, *(lightning if name in METHODS else [])]))
        words = [str(word) for action in choices if not action.option_strings for word in action.choices or ()]
        if name == "tricks":
            words = [trick for row in CATALOGUE for trick in (*row.names, *row.beside)]
        if words:
            cases.append((f'"{name} {name} "*', words))
    return [*cases, ('" "*', [*commands.choices, "--version", "--help", "--debug"])]
