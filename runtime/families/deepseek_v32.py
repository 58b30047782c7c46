"""DeepSeek V3.2: V3 with sparse attention: queries attend only to the `index_topk` tokens that an indexer selects
(`kernels/indexer_shape.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...kernels.indexer_shape import IndexShape
from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..indexer_config import IndexerConfig, sources_of
from ..moe_config import MoEConfig
from . import TensorRule, deepseek_v3
from .deepseek_v3 import MLA_DIMS, QUERY_RANK, SIZES, mla_config, mtp_layers, with_expert_groups
from .glm4_moe import deepseek_moe_config
from .glm4_moe_lite import sparse_layers_of

LIKE = deepseek_v3
# GLM 5's keys of layers that share a selection.
KEYS_HARMLESS = deepseek_v3.KEYS_HARMLESS | {"index_skip_topk_offset", "index_topk_freq", "index_topk_pattern", "indexer_types"}
REFUSED_UNLESS = {**{key: value for key, value in deepseek_v3.REFUSED_UNLESS.items() if key != "layer_types"},
                  "indexer_rope_interleave": False, "rope_interleave": True}
INDEX_TOPK, INDEXED, INDEX_NORM_EPS = 2048, "indexed_attention", 1e-6


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=163_840, sizes=SIZES, bos=0, eos=(1,))
    return sparse_mla_config(keys, base, MLA_DIMS, QUERY_RANK, (8, 4), 64, False)


def sparse_mla_config(keys: Keys, base: Defaults, dims: Mapping[str, int], query_rank: int, groups: tuple[int, int], heads: int,
                      index_interleaved: bool, has_indexer: Sequence[bool] | None = None, moe: MoEConfig | None = None,
                      interleaved: bool = True) -> ModelConfig:
    """The config of a model with latent attention and an indexer. Raises ConfigError.

    base, dims, query_rank: as of `mla_config`.
    groups: defaults of n_group and topk_group.
    heads: default of index_n_heads.
    index_interleaved, interleaved: whether RoPE of the indexer, and of attention, is interleaved.
    has_indexer: by layer; a layer without reuses the selection of the layer before. None: all have.
    moe: the experts, with their groups to be read. None: those of V3.
    """
    layers = base.size(keys, "num_hidden_layers")
    keys.layer_types("layer_types", layers, (INDEXED,))
    moe = with_mlp_layer_types(keys, layers, moe or deepseek_moe_config(keys, layers, 256, 8, 3, True, 2.5, 2048))
    config = mla_config(keys, base, dims, query_rank, interleaved, moe=with_expert_groups(keys, moe, *groups))
    rope, rank = config.mla.rope, config.mla.query_rank
    width, count = keys.integer("index_head_dim", 128, high=1024), keys.integer("index_topk", INDEX_TOPK, high=2**27)
    if width < rope or rank is None:
        raise ConfigError(f"config.json: index_head_dim {width} with qk_rope_head_dim {rope} and q_lora_rank {show(rank)} is not supported",
                          "index queries are projected from q_lora_rank dimensions, and a part of each is rotated")
    shape = IndexShape(keys.integer("index_n_heads", heads, high=1024), width, rope, count)
    indexer = IndexerConfig(shape, sources_of(has_indexer or [True] * layers), index_interleaved, ("layer", INDEX_NORM_EPS))
    return replace(config, mtp_layers=mtp_layers(keys), indexer=indexer)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules, shape = deepseek_v3.layer_tensors(config, layer), None if config.indexer is None else config.indexer.shape_of(layer)
    if shape is None:
        return rules
    prefix, hidden = f"model.layers.{layer}.self_attn.indexer.", config.hidden_size
    # Not quantized: they select what attention sees, and are a hundredth of a layer.
    return rules | {"index_q": TensorRule(f"{prefix}wq_b.weight", (shape.heads * shape.width, config.mla.query_rank), plain=True),
                    "index_k": TensorRule(f"{prefix}wk.weight", (shape.width, hidden), plain=True),
                    "index_k_norm": TensorRule(f"{prefix}k_norm.weight", (shape.width,)),
                    "index_k_norm_bias": TensorRule(f"{prefix}k_norm.bias", (shape.width,)),
                    "index_weights": TensorRule(f"{prefix}weights_proj.weight", (shape.heads, hidden), plain=True)}


def with_mlp_layer_types(keys: Keys, layers: int, moe: MoEConfig) -> MoEConfig:
    """`moe` in the layers that mlp_layer_types lists, if there is such a key."""
    kinds = keys.strings("mlp_layer_types", layers)
    return moe if kinds is None else replace(moe, layers=sparse_layers_of(kinds))
