"""`effllm rm MODEL`: remove a model from this machine, whoever made it, after a confirmation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .. import UsageError, typed
from .flags import add_command, flag
from .options import OUTPUT, Json, RemovableModel, Yes
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.library.remove import Removal

EXAMPLES = """examples

  effllm rm llama3:4bit
  effllm rm org/repo@v1.0 --dry-run
  effllm rm org/repo:Q4_K_M           # only this GGUF file, complete or partly downloaded
"""

DryRun = Annotated[bool, flag(OUTPUT, "--dry-run", "", "show what would be removed, and remove nothing")]


def register(app: typer.Typer) -> None:
    add_command(app, "rm", "get and manage models", rm, EXAMPLES)


def rm(context: typer.Context, model: RemovableModel, dry_run: DryRun = False, yes: Yes = False, json: Json = False) -> None:
    """Remove a model. Asks first; -y answers yes."""
    from ..offload.size import format_size
    from ..runtime.library.remove import plan_removal, remove, require_idle

    screen = Screen(context.obj)
    removal = plan_removal(model, screen.environment.variables)
    size = format_size(removal.nbytes)
    if dry_run:
        if json:
            screen.json({**removal.to_json(), "removed": False})
            return
        for path in removal.paths:
            screen.line(str(path))
        screen.note(f"{size} would be freed, all files together; nothing was removed")
        return
    require_idle(removal)  # before the question: a model in use cannot be removed
    if not yes:
        question = removal_question(removal, size)
        if not screen.environment.is_interactive:
            raise UsageError(question, f"-y removes it: effllm rm {typed(model)} -y")
        if not screen.confirm(f"{question}. Remove it?", default=False):
            screen.note("nothing was removed")
            if json:
                screen.json({**removal.to_json(), "removed": False})
            return
    remove(removal, screen.environment.variables)
    if json:
        screen.json({**removal.to_json(), "removed": True})
    else:
        part = "the partial download was removed" if removal.was_pulled else "the unfinished folder was removed"
        outcome = part if removal.is_part else "removed"
        screen.note(f"{removal.folder}: {outcome}, {size} freed")


def removal_question(removal: Removal, size: str) -> str:
    """The question: what is removed, and who else uses it."""
    from ..runtime.library.remove import SHARED

    part = f", partly {'downloaded' if removal.was_pulled else 'made'}," if removal.is_part else ""
    consequence = "is in the hub cache, which other programs share" if removal.owner == SHARED else "would be deleted"
    return f"{removal.folder} ({size} with all files){part} {consequence}"
