"""DeepSeek V3.2: V3, whose queries attend to the `index_topk` tokens alone that an indexer chooses.

In a text of no more tokens than that it chooses all, and attention is V3's: so far such a model runs, and no further. The indexer's tensors
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import Defaults, Mixture, ModelConfig
from ..config_reader import ConfigError, Keys, show
from . import deepseek_v3
from .deepseek_v3 import NAMES, QUERY_RANK, SIZES, WIDTHS, block, grouped, latent_config, layer_tensors, mtp_layers, outer_tensors
from .glm4_moe import corrected
from .glm4_moe_lite import DENSE, SPARSE

__all__ = ["KEYS_HARMLESS", "KEYS_USED", "NAMES", "REFUSED_UNLESS", "block", "config", "indexed_config", "layer_tensors", "outer_tensors"]

KEYS_USED = deepseek_v3.KEYS_USED - {"auto_map", "rope_interleave"} | {"index_topk", "layer_types", "mlp_layer_types"}
# Of the indexer alone, which chooses every token here.
KEYS_HARMLESS = deepseek_v3.KEYS_HARMLESS | {"index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq",
                                             "index_topk_pattern", "indexer_rope_interleave", "indexer_types"}
REFUSED_UNLESS: Mapping[str, object] = {**{key: value for key, value in deepseek_v3.REFUSED_UNLESS.items() if key != "layer_types"},
                                        "rope_interleave": True}
CHOSEN, INDEXED = 2048, "indexed_attention"


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=163_840, sizes=SIZES, bos=0, eos=(1,))
    return indexed_config(keys, base, WIDTHS, QUERY_RANK, (8, 4))


def indexed_config(keys: Keys, base: Defaults, widths: Mapping[str, int], query_rank: int, groups: tuple[int, int]) -> ModelConfig:
    """What a config with an indexer says, from keys with these defaults; `groups` of experts, and how many of them a token's are in."""
    layers = base.size(keys, "num_hidden_layers")
    for kind in keys.words("layer_types", layers) or ():
        if kind != INDEXED:
            raise ConfigError(f"config.json: layer_types holds {show(kind)}, which is not supported", f"known: {INDEXED}")
    own = _sparse(keys, layers, corrected(keys, layers, 256, 8, 3, True, 2.5, 2048))
    made = latent_config(keys, base, widths, query_rank, True, mixture=grouped(keys, own, *groups))
    most = keys.integer("index_topk", CHOSEN, high=2**27)
    said = (f"config.json: beyond index_topk = {most} tokens this model attends to chosen ones alone, which effllm does not do: the "
            f"context is {most}",) if most < made.context_length else ()
    return replace(made, mtp_layers=mtp_layers(keys), most_tokens=most, warnings=(*made.warnings, *said))


def _sparse(keys: Keys, layers: int, own: Mixture) -> Mixture:
    """The mixture in the layers that mlp_layer_types says, where it is there."""
    kinds = keys.words("mlp_layer_types", layers)
    if kinds is None:
        return own
    if stray := next((kind for kind in kinds if kind not in (DENSE, SPARSE)), None):
        raise ConfigError(f"config.json: mlp_layer_types holds {show(stray)}, which is not supported", f"known: {DENSE}, {SPARSE}")
    return replace(own, layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == SPARSE))
