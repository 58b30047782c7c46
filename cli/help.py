"""Help screens: plain text in sections, one line per flag.

Drawn here rather than by the library's boxes because a screen of thirty flags is read as a list, because plain text makes a stable
golden file, and because it leaves the terminal library unloaded: `effllm --help` starts faster than a bare app.
"""

from __future__ import annotations

import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import UsageError
from .migration_hints import command_hint, misplaced_flag_hint, subcommand_hint, translate_flags

COLUMN = 28  # where descriptions begin
WIDEST, NARROW = 110, 60
# Flags that the library adds, in our words.
LIBRARY_FLAGS = {"help": "show this help", "install_completion": "install completion of commands and models for this shell",
                 "show_completion": "print what --install-completion would install"}


def write_help(command: TyperCommand | TyperGroup, context: typer.Context, formatter: Any) -> None:
    environment = context.find_root().obj
    width = min(environment.width if environment else 80, WIDEST)
    bold, off = ("\x1b[1m", "\x1b[0m") if environment and environment.is_styled(environment.stdout) else ("", "")
    formatter.write(f"{bold}usage:{off} {filled(f'{context.command_path} {usage(command, context)}', width, ' ' * 7)[7:]}\n")
    if command.help:
        formatter.write("\n" + paragraphs(command.help, width))
    for title, entries in sections(command, context).items():
        formatter.write(f"\n{bold}{filled(title, width)}{off}\n")
        for left, right in entries:
            formatter.write(entry(left, right, width))
    if command.epilog:
        formatter.write("\n" + paragraphs(command.epilog, width))


def usage(command: TyperCommand | TyperGroup, context: typer.Context) -> str:
    if isinstance(command, TyperGroup):
        return "COMMAND ..."
    arguments = [parameter for parameter in command.get_params(context) if parameter.param_type_name == "argument"]
    return " ".join([*(argument.metavar if argument.required else f"[{argument.metavar}]" for argument in arguments), "[flags]"])


def sections(command: TyperCommand | TyperGroup, context: typer.Context) -> dict[str, list[tuple[str, str]]]:
    """Title -> (name, description) of commands, then of flags in declaration order."""
    found: dict[str, list[tuple[str, str]]] = {}
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            if member and not member.hidden:
                found.setdefault(member.rich_help_panel or "commands", []).append((name, (member.help or "").split("\n")[0]))
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and parameter.param_type_name == "argument":
            found.setdefault("arguments", []).append((parameter.metavar or record[0], parameter.help or ""))
        elif record:
            found.setdefault(parameter.rich_help_panel or "general", []).append((record[0], LIBRARY_FLAGS.get(parameter.name, record[1])))
    if "general" in found:
        found["general"] = found.pop("general")
    return found


def entry(left: str, right: str, width: int) -> str:
    """`  left    right`, the right side wrapped under itself; a left side that is too long gets a line of its own, and in a narrow terminal
    every one does."""
    narrow = width < NARROW
    indent = " " * (6 if narrow else COLUMN)
    wrapped, head = filled(right, width, indent), f"  {left}"
    if narrow or len(head) >= COLUMN - 1:
        return "\n".join(filter(None, (head, wrapped))) + "\n"
    return f"{head:<{COLUMN}}{wrapped[COLUMN:]}".rstrip() + "\n"


def filled(text: str, width: int, indent: str = "") -> str:
    """Lines of at most `width` columns, words whole."""
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def paragraphs(text: str, width: int) -> str:
    """Prose is wrapped, indented lines (examples) are kept."""
    blocks = []
    for block in text.strip().split("\n\n"):
        kept = any(line.startswith("  ") for line in block.splitlines())
        blocks.append(block if kept else filled(" ".join(block.split()), width))
    return "\n\n".join(blocks) + "\n"


class PlainCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Errors name this command, also where the library's parser does not know whose line it parses."""
        try:
            return super().parse_args(ctx, args if ctx.resilient_parsing else translate_flags(self, args))
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        return [spared(parameter) for parameter in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The library splits a long flag with one dash: `-hf` would be the help page, and a flag -f."""
        if args and len(args[0]) > 2 and ctx.parent is None and (hint := misplaced_flag_hint(args[0])):
            raise UsageError(f"no such option: {args[0]}", hint)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Unknown commands that another program has get a hint."""
        if not ctx.resilient_parsing and args[0] not in self.commands:
            hint = command_hint(args[0], ctx.obj.variables) if ctx.parent is None else subcommand_hint(ctx.info_name, args[0])
            if hint:
                raise UsageError(f"no such command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        return [spared(parameter) for parameter in super().get_params(ctx)]


def spared(parameter: Any) -> Any:
    """Leave a switch that was not given None instead of converting it: the library's converter takes 70 ms to load."""
    if "process_value" not in vars(parameter):
        library = parameter.process_value
        parameter.process_value = lambda context, value: None if value is None and not parameter.required else library(context, value)
    return parameter
