"""GGUF metadata of EmbeddingGemma 2: Gemma 4's per-layer heads and windows, a bidirectional window stated as the width of both sides,
and a dense projection in place of a head. All channels rotate, so there are no divisors.
"""

from __future__ import annotations

import numpy as np

from ...offload.gguf_header import GgufHeader, shown_value
from ...offload.safetensors_header import damaged
from ..config_rope import GLOBAL, LOCAL
from . import gemma4

NAME, FAMILY = "gemma-embedding2", "embedding_gemma2_text"
PER_LAYER_KEYS = ("attention.head_count_kv",)
_OUTER_TENSORS = ("per_layer_model_proj.weight", "per_layer_proj_norm.weight")
# Fields of `Architecture`. Bidirectional attention and the absence of shared KV layers are implied by the architecture.
ARCHITECTURE = {
    "config": {"hidden_activation": "gelu_pytorch_tanh"},
    "keys": {**{key: gemma4.KEYS[key] for key in ("attention.key_length", "attention.key_length_swa", "embedding_length_per_layer_input",
                                                  "rope.freq_base_swa")}, "embedding_length_out": "embedding_dim"},
    "required_keys": (*gemma4.REQUIRED, "embedding_length_out"),
    "other_keys": frozenset({*gemma4.HEAD_LENGTHS, *PER_LAYER_KEYS, "attention.causal", "attention.shared_kv_layers"}),
    "layer_names": {**{part: gemma4.NAMES[part] for part in ("post_attention_norm", "ffn_norm", "post_ffw_norm")},
                    **{part: f"ple_block.{gemma4.NAMES[part]}" for part in ("inp_gate", "proj", "post_norm")}},
    "full_names": {"layer_output_scale.weight": gemma4.FULL_NAMES["layer_output_scale.weight"]},
    "outer_names": {**{name: gemma4.OUTER[name].replace("model.", "model.ple.", 1) for name in _OUTER_TENSORS},
                    "output.weight": "model.embedding_projection.weight"}}


def add_gemma_embedding2(header: GgufHeader, raw: dict[str, object], kinds: list[str], divisors: np.ndarray | None, window: object) -> None:
    """As `gemma4.add_gemma4`. Raises CheckpointError."""
    if divisors is not None:
        damaged(header.path, "has RoPE frequency factors, which files of this architecture do not have")
    if type(window) is not int or window < 2 or window % 2:
        damaged(header.path, f"states {NAME}.attention.sliding_window {shown_value(window)}, expected an even number: as much on each side")
    raw |= gemma4.per_layer_heads(header, NAME, raw, kinds)
    raw |= {"sliding_window": window // 2, "attention_bias": "blk.0.attn_q.bias" in header.tensors, "tie_word_embeddings": True,
            "rope_parameters": {GLOBAL: {"rope_type": "default", "rope_theta": raw.pop("rope_theta", 1_000_000.0)},
                                LOCAL: {"rope_type": "default", "rope_theta": raw.pop("rope_local_base_freq", 10_000.0)}}}
