"""`effllm`: the application, its commands, and `main`.

A command module imports only flags at its top, and what it needs to run in its body, so that `--help` loads neither NumPy nor Numba nor the
hub client. If the command line names a command, only that one is built: the flags of all others would be a third of the start-up time.
`program` parses and runs, and catches nothing; every exception ends in `errors.guarded`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .. import UsageError, __version__
from .completion import join_bash_words, patch_zsh_script
from .environment import Environment
from .errors import run_guarded, wants_json
from .help import PlainGroup
from .interrupt import silence_unraisable
from .migration_hints import intended_variable, translate_commands

# Command -> its module, in the order of the help page.
COMMANDS = {"run": "run", "chat": "chat", "embed": "embed", "transcribe": "transcribe", "serve": "serve", "session": "session",
            "search": "search", "pull": "pull", "rm": "rm", "alias": "alias", "list": "list_", "show": "show", "plan": "plan",
            "quantize": "quantize", "export": "export", "verify": "verify", "bench": "bench", "eval": "eval",
            "calibrate-sparsity": "calibrate_sparsity", "doctor": "doctor", "config": "config"}
HELP = "Run large language models on the machine you have."
EXAMPLES = """examples

  effllm run fable "Tell me a story about the fox and the king."
  effllm chat fable
  effllm serve fable
  effllm run ./my-model -f question.txt > answer.txt
  effllm pull qwen3-4b --bits 4
  effllm plan tinyllama --ram 2G -c 4096
  effllm quantize ./my-model -o ./my-model-4bit --bits 4
  effllm bench fable -p 512 -n 64

The answer goes to stdout, everything else to stderr. Every flag has an environment variable: EFFLLM_CTX_SIZE for --ctx-size (a flag with
another name for its variable says so). Most can also be set in a file: ctx-size = 4096 in effllm.toml (`effllm config show --help`).

exit codes: 0 ok, 1 failure, 2 usage, 3 model not found or gated, 4 does not fit, 5 context overflow, 6 download failed or offline,
130 interrupted
"""


def show_version(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_root().obj.write(f"effllm {__version__}\n")
        raise typer.Exit
    return value


Version = Annotated[bool, typer.Option("--version", help="print the version", callback=show_version, is_eager=True)]


def root(context: typer.Context, version: Version = False) -> None:
    """`effllm` without a command: print the help page."""
    if context.invoked_subcommand is None:
        context.obj.write(context.get_help() + "\n")


def command_name(argv: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """The command that a command line runs, or that the shell is completing; None if all commands have to be built."""
    words = [word for word in argv if not word.startswith("-")][:1]
    if "_EFFLLM_COMPLETE" in variables:
        line = variables.get("COMP_WORDS") or variables.get("_TYPER_COMPLETE_ARGS") or ""
        words = line.split()[1:]
        words = words if len(words) > 1 or line[-1:].isspace() else []  # the last word is still being typed
    return words[0] if words and words[0] in COMMANDS else None


def build(only: str | None = None) -> typer.Typer:
    """The application with all commands, or with `only` the named one."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="effllm", cls=PlainGroup, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=settings)
    app.callback(cls=PlainGroup, invoke_without_command=True, help=HELP, epilog=EXAMPLES)(root)
    for module in COMMANDS.values() if only is None else (COMMANDS[only],):
        import_module(f".{module}", __package__).register(app)
    return app


def warn_unknown_variables(command: Any, argv: Sequence[str], environment: Environment) -> None:
    """Warn about misspelled EFFLLM_ variables, which would otherwise be ignored silently. Only for commands that accept settings. Raises
    UsageError with --strict."""
    from .env_variables import VARIABLES

    unknown = {name for name in environment.variables if name.startswith("EFFLLM_")} - VARIABLES
    if not unknown or "_EFFLLM_COMPLETE" in environment.variables or not accepts_settings(command):
        return
    for name in sorted(unknown):
        from .screen import Screen

        suggestion = intended_variable(name.removeprefix("EFFLLM_"), command_variables(command))
        message = f"{name} is not the variable of any flag{f', did you mean {suggestion}?' if suggestion else ''}"
        if is_strict(command, argv, environment):
            raise UsageError(f"--strict refuses this: {message}", "correct the variable, or unset it")
        Screen(environment).note(message)


def is_strict(command: Any, argv: Sequence[str], environment: Environment) -> bool:
    """Whether --strict is set by an unparsed command line, a variable or a settings file; False for commands without that flag."""
    from .config import BOOLEANS

    if "EFFLLM_STRICT" not in command_variables(command) or "--strict" in argv:
        return "--strict" in argv
    text, setting = environment.variables.get("EFFLLM_STRICT", "").lower(), environment.settings.get("strict")
    return BOOLEANS[text] if text in BOOLEANS else setting is not None and bool(setting.value)


def command_variables(command: Any) -> set[str]:
    """The environment variables of a command and its subcommands."""
    subcommands = getattr(command, "commands", {})
    return {parameter.envvar for parameter in command.params if parameter.envvar}.union(*map(command_variables, subcommands.values()))


def accepts_settings(command: Any) -> bool:
    """Whether a command or a subcommand has flags that settings files may set (`config show` lists them)."""
    subcommands = getattr(command, "commands", {})
    return bool(getattr(command, "grouped", ())) or "config" in subcommands or any(map(accepts_settings, subcommands.values()))


def program(argv: Sequence[str], environment: Environment) -> int:
    """Run a command line; returns the exit code. Errors are left to `main`."""
    argv = translate_commands(argv)
    command = typer.main.get_command(build(command_name(argv, environment.variables)))
    environment.json_pending = wants_json(command, argv, environment.variables)
    warn_unknown_variables(command, argv, environment)
    patch_zsh_script(argv)
    with join_bash_words():
        code = command.main(args=argv, prog_name="effllm", standalone_mode=False, obj=environment)
    return code or 0


def main(argv: Sequence[str] | None = None, environment: Environment | None = None) -> int:
    """Run a command line and return the exit code. Defaults: the arguments and the environment of this process."""
    if environment is None:
        silence_unraisable()
        environment = Environment.of_process()
    return run_guarded(lambda: program(sys.argv[1:] if argv is None else argv, environment), environment)
