"""The kinds of draft models that are trained for a target: recognised by their config, planned by the module of the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.checkpoint import TensorStore
from ...offload.torch_checkpoint import open_folder
from ...quant.kv import codec
from ..config_reader import read_json
from ..stores.quantizing_store import format_like
from . import assistant, eagle3
from .draft_types import is_assistant, is_eagle3
from .trained_draft import DraftRun, TrainedDraft

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..prepare import EngineOptions
    from ..stores.container import Container

Planner = Callable[[Path, Mapping[str, object], TensorStore, "ModelConfig", DraftRun], TrainedDraft]
NEEDS_KV_IN_MEMORY = "reads this model's keys and values, which must then all stay in memory"


def planner_of(folder: Path) -> tuple[Planner, Mapping[str, object]] | None:
    """(planner, content of config.json) of the draft model in a folder; None for a standalone model, or if there is no config.json."""
    if not (folder / "config.json").is_file():
        return None
    raw = read_json(folder / "config.json")
    planner = assistant.plan_assistant if is_assistant(raw) else eagle3.plan_eagle3 if is_eagle3(raw) else None
    return None if planner is None else (planner, raw)


def trained_in(folder: Path, target: ModelConfig, options: EngineOptions, container: Container | None = None) -> TrainedDraft | None:
    """The plan of a draft model trained for `target`; None if `folder` holds another kind. If `container` says that the target is
    quantized, the draft is quantized to as many bits. Raises UsageError for a draft of another target, and what opening it raises."""
    from ..prepare import worker_count

    found = planner_of(folder)
    if found is None:
        return None
    kv = codec(options.kv)
    run = DraftRun(options.ctx or target.context_length, worker_count(options), kv.is_packed, bool(kv.policy), format_like(container))
    planner, raw = found
    store = open_folder(folder)  # the first heads were published by torch.save
    try:
        draft = planner(folder, raw, store, target, run)
        if draft.inputs.kv_cache and options.kv_ram:
            raise UsageError(f"the draft model {folder} {NEEDS_KV_IN_MEMORY}; --kv-ram puts some on the disk", "drop one of them")
    except BaseException:
        store.close()
        raise
    return draft
