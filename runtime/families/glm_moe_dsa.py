"""GLM-5: DeepSeek V3.2's sparse attention in GLM's sizes; some layers reuse the indexer selection of the layer before."""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from . import deepseek_v32
from .deepseek_v32 import sparse_mla_config

LIKE = deepseek_v32
INDEXER_LAYER_KEYS = frozenset({"index_skip_topk_offset", "index_topk_freq", "index_topk_pattern", "indexer_types"})
KEYS_HARMLESS = deepseek_v32.KEYS_HARMLESS - INDEXER_LAYER_KEYS
REFUSED_UNLESS = {**deepseek_v32.REFUSED_UNLESS, "indexer_rope_interleave": True}
SIZES = {"vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 78, "num_attention_heads": 64}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
FULL, SHARED = "full", "shared"


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=202_752, norm_eps=1e-5, sizes=SIZES, bos=0, eos=(1,))
    return sparse_mla_config(keys, base, MLA_DIMS, 2048, (1, 1), 32, True, indexer_layers(keys, base.size(keys, "num_hidden_layers")))


def indexer_layers(keys: Keys, layers: int) -> list[bool]:
    """By layer whether it chooses for itself: by its own word, by a letter each, or every so many behind the first."""
    keys.mark_known(*INDEXER_LAYER_KEYS)
    letters = isinstance(keys.raw.get("index_topk_pattern"), str)
    pattern = keys.text("index_topk_pattern") if letters else keys.strings("index_topk_pattern", layers)
    kinds = keys.strings("indexer_types", layers)
    if kinds is None and pattern is not None:
        kinds = [{"F": FULL, "S": SHARED}.get(each, each) for each in pattern]
    if kinds is None:
        every, first = keys.integer("index_topk_freq", 1, low=0), keys.integer("index_skip_topk_offset", 2, low=0)
        return [max(layer - first + 1, 0) % max(every, 1) == 0 for layer in range(layers)]
    if stray := next((kind for kind in kinds if kind not in (FULL, SHARED)), None):
        raise ConfigError(f"config.json: indexer_types or index_topk_pattern holds {show(stray)}, which is not supported",
                          f"known: {FULL}, {SHARED}")
    if len(kinds) != layers or kinds[0] != FULL:
        raise ConfigError(f"config.json: indexer_types or index_topk_pattern of {len(kinds)} layers is not supported for {layers}, nor "
                          f"a first one that is {SHARED}", f"the first layer has no selection to reuse, so it must be {FULL}")
    return [kind == FULL for kind in kinds]
