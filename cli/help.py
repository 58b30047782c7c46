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

DESCRIPTION_COLUMN = 28  # where descriptions begin
MAX_WIDTH, NARROW_WIDTH = 110, 60
# Flags that the library adds, in our words.
LIBRARY_FLAGS = {"help": "show this help", "install_completion": "install completion of commands and models for this shell",
                 "show_completion": "print what --install-completion would install"}


def write_help(command: TyperCommand | TyperGroup, context: typer.Context, formatter: Any) -> None:
    """Write the help page of a command to the library's formatter."""
    environment = context.find_root().obj
    width = min(environment.width if environment else 80, MAX_WIDTH)
    bold, off = ("\x1b[1m", "\x1b[0m") if environment and environment.is_styled(environment.stdout) else ("", "")
    formatter.write(f"{bold}usage:{off} {wrap_text(f'{context.command_path} {usage_line(command, context)}', width, ' ' * 7)[7:]}\n")
    if command.help:
        formatter.write("\n" + wrap_paragraphs(command.help, width))
    for title, entries in help_sections(command, context).items():
        formatter.write(f"\n{bold}{wrap_text(title, width)}{off}\n")
        for left, right in entries:
            formatter.write(format_entry(left, right, width))
    if command.epilog:
        formatter.write("\n" + wrap_paragraphs(command.epilog, width))


def usage_line(command: TyperCommand | TyperGroup, context: typer.Context) -> str:
    if isinstance(command, TyperGroup):
        return "COMMAND ..."
    arguments = [parameter for parameter in command.get_params(context) if parameter.param_type_name == "argument"]
    return " ".join([*(argument.metavar if argument.required else f"[{argument.metavar}]" for argument in arguments), "[flags]"])


def help_sections(command: TyperCommand | TyperGroup, context: typer.Context) -> dict[str, list[tuple[str, str]]]:
    """Title -> (name, description) of commands, then of flags in declaration order."""
    by_title: dict[str, list[tuple[str, str]]] = {}
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            if subcommand and not subcommand.hidden:
                by_title.setdefault(subcommand.rich_help_panel or "commands", []).append((name, (subcommand.help or "").split("\n")[0]))
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and parameter.param_type_name == "argument":
            by_title.setdefault("arguments", []).append((parameter.metavar or record[0], parameter.help or ""))
        elif record:
            description = LIBRARY_FLAGS.get(parameter.name, record[1])
            by_title.setdefault(parameter.rich_help_panel or "general", []).append((record[0], description))
    if "general" in by_title:
        by_title["general"] = by_title.pop("general")
    return by_title


def format_entry(left: str, right: str, width: int) -> str:
    """`  left    right`, with the right side wrapped in its column. A long left side gets a line of its own; in a narrow terminal, each one
    does."""
    narrow = width < NARROW_WIDTH
    indent = " " * (6 if narrow else DESCRIPTION_COLUMN)
    wrapped, first_line = wrap_text(right, width, indent), f"  {left}"
    if narrow or len(first_line) >= DESCRIPTION_COLUMN - 1:
        return "\n".join(filter(None, (first_line, wrapped))) + "\n"
    return f"{first_line:<{DESCRIPTION_COLUMN}}{wrapped[DESCRIPTION_COLUMN:]}".rstrip() + "\n"


def wrap_text(text: str, width: int, indent: str = "") -> str:
    """Lines of at most `width` columns, words whole."""
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def wrap_paragraphs(text: str, width: int) -> str:
    """Prose is wrapped, indented lines (examples) are kept."""
    blocks = []
    for block in text.strip().split("\n\n"):
        is_preformatted = any(line.startswith("  ") for line in block.splitlines())
        blocks.append(block if is_preformatted else wrap_text(" ".join(block.split()), width))
    return "\n\n".join(blocks) + "\n"


class PlainCommand(TyperCommand):
    """A command with a plain help page and our hints for flags of other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Errors are attributed to this command, even if the library's parser does not set a context."""
        try:
            return super().parse_args(ctx, args if ctx.resilient_parsing else translate_flags(self, args))
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        return [without_bool_conversion(parameter) for parameter in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands with a plain help page and our hints for commands of other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject long flags with one dash, which the library would split: `-hf` would be -h, the help page, and -f."""
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
        return [without_bool_conversion(parameter) for parameter in super().get_params(ctx)]


def without_bool_conversion(parameter: Any) -> Any:
    """Make a boolean flag that was not given None instead of converting it: the library's converter takes 70 ms to load."""
    if "process_value" not in vars(parameter):
        library = parameter.process_value
        parameter.process_value = lambda context, value: None if value is None and not parameter.required else library(context, value)
    return parameter
