"""`effllm plan MODEL`: what a run would take, from headers alone. The same arithmetic decides the run itself."""

from __future__ import annotations

import typer

from .flags import add_command
from .loading import find
from .options import EngineFlags, Json, Model
from .screen import Screen

EXAMPLES = """examples

  effllm plan fable
  effllm plan tinyllama --ram 2G -c 4096
"""


def register(app: typer.Typer) -> None:
    add_command(app, "plan", "look around", plan, EXAMPLES)


def plan(context: typer.Context, model: Model, engine: EngineFlags, json: Json = False) -> None:
    """What goes where, and whether it fits, before a byte is loaded."""
    from ..offload.size import format_size
    from ..runtime.engine import prepare

    screen = Screen(context.obj)
    ref = find(model, screen)
    prepared = prepare(ref.folder, engine.options())
    placement = prepared.placement
    for notice in prepared.notices:
        screen.note(notice)
    devices = {device: placement.devices.count(device) for device in dict.fromkeys(placement.devices)}
    if json:
        screen.json({"model": model, "ctx": placement.ctx, "kv": prepared.options.kv, "devices": devices,
                     "weights_bytes": placement.weights_bytes, "kv_bytes": placement.kv_bytes, "workspace_bytes": placement.workspace_bytes,
                     "baseline_bytes": placement.baseline_bytes, "total_bytes": placement.total_bytes,
                     "ram_bytes": placement.budget.ram, "vram_bytes": placement.budget.vram, "notes": list(placement.notes)})
        return
    screen.pairs((
        ("model", f"{model} ({prepared.config.family})"),
        ("context", f"{placement.ctx} of {prepared.config.max_position_embeddings} tokens"),
        ("layers", ", ".join(f"{count} on {device}" for device, count in devices.items())),
        ("weights", format_size(placement.weights_bytes)),
        ("cache", f"{format_size(placement.kv_bytes)} at {prepared.options.kv}"),
        ("workspace", format_size(placement.workspace_bytes)),
        ("program", format_size(placement.baseline_bytes)),
        ("total", f"{format_size(placement.total_bytes)} of {format_size(placement.budget.ram)}"
                  + (f" and {format_size(placement.budget.vram)} on the GPU" if placement.budget.vram else "")),
    ))
