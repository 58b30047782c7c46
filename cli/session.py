"""`effllm session list|rm`: saved sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import UsageError
from .flags import add_command, flag
from .help import PlainGroup
from .number_format import age
from .options import OUTPUT, Json, Yes, complete_session
from .screen import Screen, cell_width, truncate

EXAMPLES = """examples

  effllm run fable --session tale "Tell me a story about a fox."
  effllm session list
  effllm session rm tale --cache
"""

COLUMNS = ("session", "model", "messages", "tokens", "cache", "size", "not shared", "saved", "begins")
NUMBER_COLUMNS = ("messages", "tokens", "size", "not shared")
OPTIONAL_COLUMNS = ("not shared", "cache", "tokens", "size")  # columns that a narrow terminal drops first; --json has all
ELLIPSIS = " ..."
MIN_TEXT_WIDTH = 20  # columns by which a conversation is recognized

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="names of sessions", autocompletion=complete_session,
                                            show_default=False)]
Cache = Annotated[bool, flag(OUTPUT, "--cache", "",
                             "remove only the KV cache: the conversation stays, and is read again when it continues")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=PlainGroup, rich_markup_mode=None, help="List and remove saved conversations.")
    add_command(group, "list", "commands", list_sessions, EXAMPLES)
    add_command(group, "rm", "commands", rm, EXAMPLES)
    app.add_typer(group, name="session", rich_help_panel="run a model")


def list_sessions(context: typer.Context, json: Json = False) -> None:
    """List the sessions on this machine, newest first."""
    from ..offload.size import format_size
    from ..runtime.sessions.session_store import SessionStore

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    store = SessionStore(screen.environment.sessions_folder)
    sessions, now = store.listed(), time.time()
    if json:
        screen.json({"folder": str(store.folder), "bytes": store.nbytes(), "sessions": [
            {"name": each.name, "model": each.model, "messages": each.messages, "tokens": each.tokens, "kv": each.kv or None,
             "size_bytes": each.nbytes, "own_bytes": each.own_nbytes, "saved": each.saved, "begins": each.begins,
             "problem": each.problem or None}
            for each in sessions]})
        return
    rows = [(each.name, each.model, str(each.messages), str(each.tokens), each.kv or "-", format_size(each.nbytes),
             format_size(each.own_nbytes), age(max(0.0, now - each.saved)), each.begins)
            for each in sessions if not each.problem]
    columns, rows = fit_columns(screen.report_width, COLUMNS, rows)
    if rows or screen.report_width is None:  # a heading alone is for scripts
        screen.table(columns, rows, right=[index for index, name in enumerate(columns) if name in NUMBER_COLUMNS])
    for each in sessions:
        if each.problem:
            screen.note(each.problem)
    screen.note(f"{format_size(store.nbytes())} in {store.folder}" if sessions else
                "no session is saved: effllm run MODEL --session NAME saves one")


def fit_columns(width: int | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Columns and rows that fit a terminal of that width; None for any. Optional columns are dropped until the last one has room, which is
    then shortened."""
    if width is None or not rows:
        return columns, [*rows]
    kept = [*range(len(columns))]
    for name in ("", *OPTIONAL_COLUMNS):
        kept = [index for index in kept if columns[index] != name]
        available = width - sum(2 + max(cell_width(row[index]) for row in (columns, *rows)) for index in kept[:-1])
        if available >= MIN_TEXT_WIDTH:
            break
    shown = [[row[index] for index in kept] for row in rows]
    return [columns[index] for index in kept], [[*row, shorten(last, max(available, MIN_TEXT_WIDTH))] for *row, last in shown]


def shorten(text: str, width: int) -> str:
    """The first words of a text that fit in `width` columns."""
    if cell_width(text) <= width:
        return text
    start = truncate(text, width - len(ELLIPSIS))
    return f"{start.rpartition(' ')[0] or start}{ELLIPSIS}"


def rm(context: typer.Context, names: Names, cache: Cache = False, yes: Yes = False, json: Json = False) -> None:
    """Remove sessions. Asks first; -y answers yes."""
    from ..offload.size import format_size
    from ..runtime.sessions.session_name import rm_command
    from ..runtime.sessions.session_store import SessionStore

    screen = Screen(context.obj)
    store = SessionStore(screen.environment.sessions_folder)
    store.demand(names)
    if not cache and not yes:
        question = f"{', '.join(names)}: {'this conversation' if len(names) == 1 else 'these conversations'} would be lost"
        if not screen.environment.is_interactive:
            raise UsageError(question, f"-y removes {'it' if len(names) == 1 else 'them'}: {rm_command(*names, more='-y')}")
        if not screen.confirm(f"{question}. Remove?", default=False):
            screen.note("nothing was removed")
            if json:
                screen.json({"removed": [], "cache_only": cache, "freed_bytes": 0})
            return
    freed = store.remove(names, cache)
    if json:
        screen.json({"removed": list(names), "cache_only": cache, "freed_bytes": freed})
    else:
        screen.note(f"{', '.join(names)}: {'cache ' if cache else ''}removed, {format_size(freed)} freed")
    if unread := store.unread():
        screen.note(f"pages stay: session {', '.join(unread)} cannot be read here and may use any of them")
