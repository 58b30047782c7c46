"""Recognises the configs of draft models that were trained on another model's hidden states and cannot generate alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import UsageError
from ..config_reader import is_count
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYER_CONFIG = "transformer_layer_config"  # the key of the layer's config in heads of the speculators library
SPECULATORS = "speculators_model_type"  # the key of the kind of head there


def is_assistant(raw: Mapping[str, object]) -> bool:
    """Whether this is the config of a Gemma 4 assistant."""
    return raw.get("model_type") in ASSISTANTS


def is_eagle3(raw: Mapping[str, object]) -> bool:
    """Whether this is the config of an EAGLE-3 head."""
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and any(name in EAGLE3_ARCHITECTURES for name in architectures) or raw.get(SPECULATORS) == "eagle3":
        return True
    return raw.get("num_hidden_layers") == 1 and is_count(raw.get("draft_vocab_size"))  # the first heads have the architecture of a Llama


@dataclass(frozen=True)
class DraftShape:
    """What `effllm list` shows of a trained draft model."""

    family: str
    context_length: int


def draft_in(folder: Path) -> DraftShape | None:
    """The draft model in a folder, by its config; None for other models, or if unreadable."""
    try:
        raw = json.loads(read_bounded(folder / "config.json", MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not (is_assistant(raw) or is_eagle3(raw)):
        return None
    inner = next((raw[name] for name in ("text_config", LAYER_CONFIG) if isinstance(raw.get(name), dict)), raw)
    positions = inner.get("max_position_embeddings")
    return DraftShape(str(raw["model_type"]) if is_assistant(raw) else "eagle3", positions if is_count(positions) else 0)


def refuse_alone(raw: Mapping[str, object]) -> None:
    """Raises UsageError for such a config, where a model that generates is required."""
    if is_assistant(raw) or is_eagle3(raw):
        kind = "an assistant of Gemma 4" if is_assistant(raw) else "an EAGLE-3 head"
        raise UsageError(f"this is {kind}: it only drafts for the model it was trained for",
                         "effllm run THAT-MODEL --draft THIS-ONE")
