"""GGUF metadata of sparse attention indexers, which select the tokens that latent attention layers attend to: DeepSeek V3.2's, and GLM
5's, where some layers reuse the previous layer's selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig

FAMILIES: Mapping[str, str] = {"deepseek32": "deepseek_v32", "glm-dsa": "glm_moe_dsa", "hy_v4": "hy_v4"}  # architecture -> family
INDEXER_TYPES = "attention.indexer.types"
KEYS = {"attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk"}
_INDEXER = "self_attn.indexer."
NAMES = {"indexer.attn_q_b": f"{_INDEXER}wq_b", "indexer.attn_k": f"{_INDEXER}wk", "indexer.k_norm": f"{_INDEXER}k_norm",
         "indexer.proj": f"{_INDEXER}weights_proj"}
ROLES = {"index_q": "indexer.attn_q_b", "index_k": "indexer.attn_k", "index_k_norm": "indexer.k_norm", "index_weights": "indexer.proj"}
HADAMARD_WIDTH = 64  # channels of an index key that llama.cpp rotates with one Hadamard matrix
# Early files of GLM 5.2 have no key for it: they are recognised by their context length, and which layers choose is known.
LEGACY_SHARING_CONTEXT, LEGACY_SHARING = 1 << 20, {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def add_layer_types(header: GgufHeader, name: str, raw: dict[str, object], blocks: object) -> None:
    """Complete `raw`, the config.json being assembled: which layers have an indexer of their own.

    blocks: number of layers including MTP layers.

    Raises CheckpointError.
    """
    types, layers, positions = header.metadata.get(f"{name}.{INDEXER_TYPES}"), raw["num_hidden_layers"], raw["max_position_embeddings"]
    if types is not None:
        if not isinstance(types, np.ndarray) or len(types) not in (layers, blocks) or not np.isin(types, (0, 1)).all():
            damaged(header.path,
                    f"states {name}.{INDEXER_TYPES} {shown_value(types)}, expected 0 or 1 for each of {shown_value(layers)} layers")
        raw["indexer_types"] = [("shared", "full")[int(each)] for each in types[:layers]]
    elif FAMILIES.get(name) == "glm_moe_dsa" and isinstance(positions, int) and positions >= LEGACY_SHARING_CONTEXT:
        raw |= LEGACY_SHARING


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of an indexer, without the architecture's prefix; none of a model without one."""
    if (indexer := config.indexer) is None:
        return {}
    keys: dict[str, Value] = {"attention.indexer.head_count": indexer.shape.heads, "attention.indexer.key_length": indexer.shape.width,
                              "attention.indexer.top_k": indexer.shape.top_k * indexer.shape.tokens_per_key}
    return keys if config.family == FAMILIES["deepseek32"] else keys | {INDEXER_TYPES: np.array(
        [layer in config.recurrent_layers or indexer.shape_of(layer) is not None for layer in range(config.num_hidden_layers)], np.int32)}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express, or of what llama.cpp computes differently."""
    rope, width = config.rope, config.indexer.shape.width
    yield width % HADAMARD_WIDTH != 0, f"has index keys of {width} numbers, of which llama.cpp rotates {HADAMARD_WIDTH} at a time"
    yield rope.kind == "yarn" and (config.family != FAMILIES["deepseek32"] or rope.params.get("mscale_all_dim") != 1), \
        "scales its index scores differently from llama.cpp"
