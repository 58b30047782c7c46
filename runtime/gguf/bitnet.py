"""GGUF metadata of BitNet: the activation's name, where stated, and tied embeddings.

llama.cpp's converter states no activation. Until August 2026 llama.cpp assumed SiLU for all, which is wrong for the published model.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError, shown
from ..config import ModelConfig
from .family_context import FamilyContext

FAMILY = NAME = "bitnet"
NAMES = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
ROLES = {target: target for target in NAMES}
ACTIVATION = "hidden_activation"
ACTIVATIONS = ("silu", "relu2")  # files that state none mean the first, except those of the published model
PUBLISHED_SIZES = {"num_hidden_layers": 30, "hidden_size": 2560, "intermediate_size": 6912}  # its files mean relu2
OLD_LLAMA_CPP_NOTICE = "llama.cpp reads this model's activation since August 2026: older versions run the file with SiLU, as another model"
OTHER_FILE_HINT = "use the folder of the checkpoint, or a file that a current llama.cpp converter writes"


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled: the activation. Raises CheckpointError, also for files with separate scale
    tensors, as early ones had."""
    header, raw["sliding_window"] = context.header, context.window
    published = all(raw.get(key) == value for key, value in PUBLISHED_SIZES.items())
    act = header.metadata.get(f"{NAME}.{ACTIVATION}", ACTIVATIONS[published])
    if act not in ACTIVATIONS:
        raise CheckpointError(f"{header.path} states {NAME}.{ACTIVATION} {shown_value(act)}, which is not supported",
                              f"known: {', '.join(ACTIVATIONS)}")
    if scale := next((name for name in header.tensors if name.endswith(".scale")), None):
        raise CheckpointError(f"{header.path} holds {shown(scale)}, a scale beside a ternary matrix, which this version does not read",
                              OTHER_FILE_HINT)
    raw |= {"hidden_act": act, "attention_bias": "blk.0.attn_q.bias" in header.tensors}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata key of the family, without the architecture's prefix."""
    return {ACTIVATION: config.hidden_act}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield config.hidden_act not in ACTIVATIONS, f"has {config.hidden_act} where {' or '.join(ACTIVATIONS)} is meant"
    yield not config.tie_word_embeddings, "has an untied output head"
