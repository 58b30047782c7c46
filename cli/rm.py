"""`effllm rm MODEL`: remove a model from this machine, and never what other programs share without being told to."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import UsageError, typed
from .flags import add_command, flag
from .options import OUTPUT, Json, Model, Yes
from .screen import Screen

EXAMPLES = """examples

  effllm rm llama3:4bit
  effllm rm org/repo@v1.0 --dry-run
  effllm rm org/repo:Q4_K_M           # of a GGUF file, whole or partly downloaded, and no other
"""

DryRun = Annotated[bool, flag(OUTPUT, "--dry-run", "", "say what would go and remove nothing")]


def register(app: typer.Typer) -> None:
    add_command(app, "rm", "get and keep models", rm, EXAMPLES)


def rm(context: typer.Context, model: Model, dry_run: DryRun = False, yes: Yes = False, json: Json = False) -> None:
    """Remove a model. Asks first where other programs share its files, in the hub cache, or takes -y."""
    from ..offload.size import format_size
    from ..runtime.library.remove import SHARED, plan_removal, remove

    screen = Screen(context.obj)
    removal = plan_removal(model, screen.environment.variables)
    size = format_size(removal.nbytes)
    if dry_run:
        if json:
            screen.json({**removal.to_json(), "removed": False})
            return
        for path in removal.paths:
            screen.line(str(path))
        screen.note(f"{size} would be freed; nothing was removed")
        return
    if removal.owner == SHARED and not yes:
        part = ", partly downloaded," if removal.is_part else ""
        what = f"{removal.folder} ({size}){part} is in the hub cache, which other programs share"
        if not screen.environment.can_ask:
            raise UsageError(what, f"-y removes it: effllm rm {typed(model)} -y")
        if not screen.ask(f"{what}. Remove it?", bare=False):
            screen.note("nothing was removed")
            return
    remove(removal, screen.environment.variables)
    if json:
        screen.json({**removal.to_json(), "removed": True})
    else:
        part = "what had come of its download was removed" if removal.was_pulled else "what there was of it was removed"
        what = part if removal.is_part else "removed"
        screen.note(f"{removal.folder}: {what}, {size} freed")
