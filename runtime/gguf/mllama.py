"""GGUF metadata of the text part of Llama 3.2 Vision, as Ollama's converter writes it: which layers are cross-attention, and their
tensor names. Images are not supported from such files; without one those layers are skipped.
"""

from __future__ import annotations

import numpy as np

from ...offload.gguf_header import shown_value
from ...offload.safetensors_header import damaged
from .family_context import FamilyContext

FAMILY, NAME = "mllama_text_model", "mllama"
CROSS_ATTENTION_LAYERS, HEAD = "attention.cross_attention_layers", "output.weight"
REQUIRED, OTHER_KEYS = (CROSS_ATTENTION_LAYERS,), frozenset({CROSS_ATTENTION_LAYERS})
NAMES = {f"cross_attn_{name}": f"cross_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
FULL_NAMES = {name: name for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate")}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, raw["sliding_window"] = context.header, context.window
    layers = header.metadata[f"{NAME}.{CROSS_ATTENTION_LAYERS}"]
    if not isinstance(layers, np.ndarray) or layers.dtype.kind not in "iu":
        damaged(header.path, f"states {NAME}.{CROSS_ATTENTION_LAYERS} {shown_value(layers)}, expected layer indices")
    head = header.tensors.get(HEAD)
    if head is None or len(head.shape) != 2:
        damaged(header.path, f"holds no tensor {HEAD}" if head is None else f"has tensor {HEAD} of shape {list(head.shape)}")
    raw |= {"cross_attention_layers": layers.tolist(), "vocab_size": head.shape[0]}  # the embedding has more rows than the vocabulary
