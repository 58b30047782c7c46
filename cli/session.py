"""`effllm session list|rm`: saved sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import UsageError
from .flags import add_command, flag
from .help import PlainGroup
from .number_format import duration
from .options import OUTPUT, Json, Yes, complete_session
from .screen import Screen, cell_width, truncate

EXAMPLES = """examples

  effllm run fable --session tale "Tell me a story about a fox."
  effllm session list
  effllm session rm tale --cache
"""

COLUMNS = ("session", "model", "messages", "tokens", "cache", "size", "its own", "saved", "begins")
NUMBERS = ("messages", "tokens", "size", "its own")
SECONDARY = ("its own", "cache", "tokens", "size")  # columns that a narrow terminal drops first; --json has all
MORE = " ..."
LEAST_WORDS = 20  # columns that suffice to recognize a conversation

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
    found, now = store.listed(), time.time()
    if json:
        screen.json({"folder": str(store.folder), "bytes": store.nbytes(), "sessions": [
            {"name": each.name, "model": each.model, "messages": each.messages, "tokens": each.tokens, "kv": each.kv or None,
             "size_bytes": each.nbytes, "own_bytes": each.own_nbytes, "saved": each.saved, "begins": each.begins,
             "problem": each.problem or None}
            for each in found]})
        return
    rows = [(each.name, each.model, str(each.messages), str(each.tokens), each.kv or "-", format_size(each.nbytes),
             format_size(each.own_nbytes), f"{duration(max(0.0, now - each.saved))} ago", each.begins)
            for each in found if not each.problem]
    columns, rows = within(screen.report_width, COLUMNS, rows)
    if rows or screen.report_width is None:  # a heading alone is for scripts
        screen.table(columns, rows, right=[index for index, name in enumerate(columns) if name in NUMBERS])
    for each in found:
        if each.problem:
            screen.note(each.problem)
    screen.note(f"{format_size(store.nbytes())} in {store.folder}" if found else
                "no session is saved: effllm run MODEL --session NAME saves one")


def within(width: int | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Columns and rows for a terminal of `width` columns, all of them for None: the last column is cut to the remaining width, and
    SECONDARY columns are dropped in a narrow one."""
    if width is None or not rows:
        return columns, [*rows]
    kept = [*range(len(columns))]
    for name in ("", *SECONDARY):
        kept = [index for index in kept if columns[index] != name]
        left = width - sum(2 + max(cell_width(row[index]) for row in (columns, *rows)) for index in kept[:-1])
        if left >= LEAST_WORDS:
            break
    shown = [[row[index] for index in kept] for row in rows]
    return [columns[index] for index in kept], [[*row, shortened(last, max(left, LEAST_WORDS))] for *row, last in shown]


def shortened(text: str, width: int) -> str:
    """As many of its first words as fit in `width` columns."""
    if cell_width(text) <= width:
        return text
    start = truncate(text, width - len(MORE))
    return f"{start.rpartition(' ')[0] or start}{MORE}"


def rm(context: typer.Context, names: Names, cache: Cache = False, yes: Yes = False, json: Json = False) -> None:
    """Remove sessions. Asks first; -y answers yes."""
    from ..offload.size import format_size
    from ..runtime.sessions.session_name import rm_command
    from ..runtime.sessions.session_store import SessionStore

    screen = Screen(context.obj)
    store = SessionStore(screen.environment.sessions_folder)
    store.demand(names)
    if not cache and not yes:
        what = f"{', '.join(names)}: {'this conversation' if len(names) == 1 else 'these conversations'} would be lost"
        if not screen.environment.is_interactive:
            raise UsageError(what, f"-y removes {'it' if len(names) == 1 else 'them'}: {rm_command(*names, more='-y')}")
        if not screen.confirm(f"{what}. Remove?", default=False):
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
