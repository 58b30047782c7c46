"""`effllm verify MODEL`: checks a model's files against their checksums."""

from __future__ import annotations

from pathlib import Path

import typer

from .. import EffllmError
from .flags import add_command
from .loading import final_result, find_model
from .options import Json, Model
from .screen import Screen

MAX_NAMED = 3  # damaged tensors named in the error
EXAMPLES = """examples

  effllm verify ./my-model-4bit
  effllm verify tinyllama
"""


class Damaged(EffllmError):
    """Checksums differ."""


def register(app: typer.Typer) -> None:
    add_command(app, "verify", "convert models", verify, EXAMPLES)


def verify(context: typer.Context, model: Model, json: Json = False) -> None:
    """Check a model's files against their checksums."""
    from ..offload.size import format_size, plural
    from ..runtime.library.verify import Verified
    from ..runtime.library.verify import verify as check

    screen = Screen(context.obj)
    folder = find_model(model, screen).folder
    result = final_result(check(folder), screen, Verified)
    if json:
        screen.json(result.to_json())
    if result.damaged:
        more = f" and {len(result.damaged) - MAX_NAMED} more" if len(result.damaged) > MAX_NAMED else ""
        verb = "are" if len(result.damaged) > 1 else "is"
        is_ours = Path(__file__).resolve().parents[1] in folder.resolve().parents
        raise Damaged(f"{folder} is damaged: {', '.join(result.damaged[:MAX_NAMED])}{more} {verb} not as written",
                      "reinstall effllm, which includes it" if is_ours else "quantize or download it again")
    if not json:
        beside = f" and {plural(result.files, 'file')} beside them" if result.files else ""
        tensors = plural(result.count, result.kind.removesuffix("s"))
        screen.line(f"{tensors}, {format_size(result.nbytes)}{beside}: all match their checksums")
        if result.unknown:
            screen.note(f"not checked, because no checksums were recorded: {', '.join(result.unknown)}")
