"""`mjax COMMAND [arguments]`: one program for all commands of mjax.

A command's module is imported when the command runs, so `mjax --help` starts no JAX. The modules
stay programs of their own: `mjax train` and `python -m mjax.train` are the same.
"""

import contextlib
import difflib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

import mjax
from mjax.errors import UserError, run_cli


class Command(NamedTuple):
    """A command: its line of help and the module whose `main` runs it."""

    about: str
    module: str


DATA = {
    "preprocess": Command("tokenize text into .bin and .idx", "mjax.data.preprocess"),
    "preview": Command("print conversations as a run reads them", "mjax.data.preview"),
    "neighbors": Command("look up RETRO's neighbors of a run's samples", "mjax.data.neighbors"),
}
COMMANDS: dict[str, Command | dict[str, Command]] = {
    "train": Command("train a model from a YAML config", "mjax.train.__main__"),
    "sft": Command("fine-tune a model on conversations", "mjax.post.sft"),
    "preference": Command("train on preferences: DPO, KTO, ORPO, ..", "mjax.post.preference"),
    "reward": Command("train a reward model on pairs or steps", "mjax.post.reward"),
    "reinforce": Command("train a policy on rewards of its answers", "mjax.post.reinforce"),
    "distill": Command("train a student on a teacher", "mjax.post.distill"),
    "prune": Command("make a smaller model of a larger one", "mjax.post.prune"),
    "quantize": Command("round a model to 8 or 4 bits for servers", "mjax.post.quantize"),
    "generate": Command("continue prompts", "mjax.generate.__main__"),
    "chat": Command("talk to a model in the terminal", "mjax.chat.__main__"),
    "serve": Command("serve a model to programs that speak OpenAI's", "mjax.serve.__main__"),
    "evaluate": Command("perplexity of a text, or tasks of a harness", "mjax.evaluate.__main__"),
    "data": DATA,
    "convert": Command("Hugging Face and Megatron weights, in and out", "mjax.convert"),
    "checkpoint": Command("list, show, compare and verify checkpoints", "mjax.checkpoint.__main__"),
    "export": Command("a model as programs that run without mjax", "mjax.export.__main__"),
    "report": Command("one HTML page on runs", "mjax.report.__main__"),
    "doctor": Command("what this machine can do, what is wrong with it", "mjax.doctor.__main__"),
    "bench": Command("measure speed on this machine", "mjax.bench.__main__"),
    "docs": Command("these pages in a browser, offline", "mjax.docs"),
    "prove": Command("compare every feature on every mesh", "mjax.prove.__main__"),
}
ABOUT = {name: c.about for name, c in COMMANDS.items() if isinstance(c, Command)}
ABOUT |= {"data": "prepare a corpus: " + ", ".join(DATA)}
ABOUT |= {"completion": "print a script for bash, zsh or fish"}


def main() -> None:
    """The program `mjax`: runs the command that `sys.argv` names and exits with its code."""
    sys.path.append("")  # for modules that a config names, as with `python -m`
    run_cli(lambda: run(sys.argv[1:]))


def run(argv: list[str]) -> int | None:
    """Run a command line without the program's name. Raises `UserError` for an unknown one."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage("mjax", {name: ABOUT[name] for name in (*COMMANDS, "completion")}))
        print("`mjax COMMAND --help` lists its options. `mjax --version` prints the version.")
        return 0
    if name == "--version":
        print(f"mjax {mjax.__version__}")
        return 0
    if name == "completion":
        return _completion(argv[1:])
    command, rest = find(name, COMMANDS), argv[1:]
    if isinstance(command, dict):
        if rest[:1] in ([], ["-h"], ["--help"]):
            print(usage(f"mjax {name}", {key: c.about for key, c in command.items()}))
            return 0
        name, command, rest = f"{name} {rest[0]}", find(rest[0], command), rest[1:]
    assert isinstance(command, Command)
    sys.argv = [f"mjax {name}", *rest]  # what `errors.program` names in usage lines
    return _run_module(command.module)


def _run_module(module: str) -> int | None:
    """Run a command. Raises `UserError` where libraries or drivers clash in a known way."""
    try:
        return importlib.import_module(module).main()
    except (ImportError, OSError, RuntimeError) as e:
        from mjax.doctor.clashes import line_on_error

        if line := line_on_error(e):
            raise UserError(line) from e
        raise


def usage(program: str, commands: Mapping[str, str]) -> str:
    """Lines of help: a line for each command."""
    lines = [f"  {name:12}{about}" for name, about in commands.items()]
    return "\n".join([f"usage: {program} COMMAND [arguments]", *lines])


def find(name: str, commands: Mapping[str, Command | dict]) -> Command | dict[str, Command]:
    """Return the command of this name. Raises `UserError` that names the nearest."""
    if name in commands:
        return commands[name]
    near = difflib.get_close_matches(name, [*commands, "completion"], 1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(commands)}"
    raise UserError(f"no command {name!r}; {hint}")


def _completion(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: mjax completion {{{','.join(SHELLS)}}}\n\n{ABOUT['completion']}")
        print("mjax completion bash > ~/.local/share/bash-completion/completions/mjax")
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        shells = ", ".join(SHELLS)
        raise UserError(f"mjax completion {shlex.join(argv)}: name one shell, of {shells}")
    print(SHELLS[argv[0]](words_by_command()), end="")
    return 0


def words_by_command() -> dict[str, list[str]]:
    """Words that may follow each command: its own commands and its options.

    They are read from what `--help` of each prints.
    """
    words = {"": [*COMMANDS, "completion", "--help", "--version"], "completion": [*SHELLS]}
    for name, command in COMMANDS.items():
        if isinstance(command, Command):
            words |= _words_of_help(name)
        else:
            words[name] = [*command]
            for inner in command:
                words |= _words_of_help(f"{name} {inner}")
    return words


def _words_of_help(name: str) -> dict[str, list[str]]:
    """The words after a command, and after each command of its own."""
    text = help_of(name)
    options = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    choices = r"--?[\w-]+ \{.*?\}(\s+\[\{.*?\} \.\.\.\])?"  # of options
    head = re.sub(choices, "", text.partition("\n\n")[0], flags=re.S)
    own = [word for group in re.findall(r"\{(.*?)\}", head, re.S) for word in group.split(",")]
    own = [word.strip() for word in own]
    words = {name: [*own, *options]}
    for inner in own if " " not in name else ():
        words[f"{name} {inner}"] = _words_of_help(f"{name} {inner}")[f"{name} {inner}"]
    return words


def help_of(name: str) -> str:
    """Return the text that `mjax NAME --help` prints."""
    before, text = sys.argv, io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            run([*name.split(), "--help"])
    finally:
        sys.argv = before
    return text.getvalue()


def bash(words: Mapping[str, list[str]]) -> str:
    """A completion script for bash: words by command, else file names; --config takes YAML."""
    longest_first = sorted(words, key=lambda name: -len(name.split()))
    cases = [f'    "{name} "*) words="{" ".join(words[name])}" ;;' for name in longest_first]
    cases[-1] = f'    *) words="{" ".join(words[""])}" ;;'
    return "\n".join(
        [
            "_mjax() {",
            '  local words cur="${COMP_WORDS[COMP_CWORD]}"',
            '  if [ "${COMP_WORDS[COMP_CWORD-1]}" = --config ]; then',
            '    COMPREPLY=($(compgen -f -X "!*.yaml" -- "$cur"; compgen -d -S / -- "$cur"))',
            "    return",
            "  fi",
            '  case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _mjax mjax",
            "",
        ]
    )


def zsh(words: Mapping[str, list[str]]) -> str:
    """The script of bash, through zsh's own adapter."""
    return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + bash(words)


def fish(words: Mapping[str, list[str]]) -> str:
    """A completion script for fish."""
    lines = [f"complete -c mjax -n __fish_use_subcommand -a '{' '.join(words[''])}'"]
    for name in filter(None, words):
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        lines.append(f"complete -c mjax -n '{seen}' -a '{' '.join(words[name])}'")
    return "\n".join(lines) + "\n"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


if __name__ == "__main__":
    main()
