"""`effllm`: the application, its commands, and `main`.

A command module imports nothing but flags; what it needs to work is imported in its body, so that `--help` loads neither NumPy nor
Numba nor the hub. `program` parses and calls, and catches nothing; every exception ends in `errors.guarded`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from . import alias, bench, chat, config, doctor, list_, plan, pull, quantize, rm, run, show, verify
from . import eval as evaluation
from .environment import Environment
from .errors import guarded
from .help import PlainGroup

HELP = "Run large language models on the machine you have."
EXAMPLES = """examples

  effllm run fable "Tell me a story about the fox and the king."
  effllm chat fable
  effllm run ./my-model -f question.txt > answer.txt
  effllm pull qwen3-4b --bits 4
  effllm plan tinyllama --ram 2G -c 4096
  effllm quantize ./my-model -o ./my-model-4bit --bits 4
  effllm bench fable -p 512 -n 64

The answer goes to stdout, everything else to stderr. Every flag is also a variable: --ctx-size is EFFLLM_CTX_SIZE, and most may stand
in a file: ctx-size = 4096 in effllm.toml (`effllm config show --help`).

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
    if context.invoked_subcommand is None:
        context.obj.write(context.get_help() + "\n")


def build() -> typer.Typer:
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="effllm", cls=PlainGroup, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=settings)
    app.callback(cls=PlainGroup, invoke_without_command=True, help=HELP, epilog=EXAMPLES)(root)
    for module in (run, chat, pull, rm, alias, list_, show, plan, quantize, verify, bench, evaluation, doctor, config):
        module.register(app)
    return app


def program(argv: Sequence[str], environment: Environment) -> int:
    command = typer.main.get_command(build())
    code = command.main(args=list(argv), prog_name="effllm", standalone_mode=False, obj=environment)
    return code or 0


def main(argv: Sequence[str] | None = None, environment: Environment | None = None) -> int:
    environment = environment or Environment.of_process()
    return guarded(lambda: program(sys.argv[1:] if argv is None else argv, environment), environment)
