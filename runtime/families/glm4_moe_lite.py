"""GLM-4.7-Flash: DeepSeek V3's MLA in a smaller model, with one group of experts as in GLM."""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from . import deepseek_v3
from .deepseek_v3 import mla_config, mtp_layers, with_expert_groups
from .glm4_moe import deepseek_moe_config

LIKE = deepseek_v3
SIZES = {"vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240, "num_hidden_layers": 47, "num_attention_heads": 20}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
DENSE, SPARSE = "dense", "sparse"


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=202_752, norm_eps=1e-5, sizes=SIZES, bos=0, eos=(1,))
    layers = base.size(keys, "num_hidden_layers")
    own = replace(deepseek_moe_config(keys, layers, 64, 4, 1, True, 1.8, 1536), layers=sparse_layers(keys, layers))
    config = mla_config(keys, base, MLA_DIMS, 768, keys.flag("rope_interleave", True), moe=with_expert_groups(keys, own, 1, 1))
    return replace(config, mtp_layers=mtp_layers(keys))


def sparse_layers(keys: Keys, layers: int) -> frozenset[int]:
    """The layers with experts: those that mlp_layer_types lists, by default all but the first. Raises ConfigError if first_k_dense_replace
    disagrees."""
    found = sparse_layers_of(keys.strings("mlp_layer_types", layers) or (DENSE, *[SPARSE] * (layers - 1)))
    first = keys.integer("first_k_dense_replace", None, low=0, high=layers)
    if first is not None and found != frozenset(range(first, layers)):
        raise ConfigError(f"config.json: first_k_dense_replace {first} disagrees with mlp_layer_types, one dense layer by default",
                          "mlp_layer_types takes precedence: remove the other key")
    return found


def sparse_layers_after(keys: Keys, layers: int, dense: int) -> frozenset[int]:
    """The layers with experts: those that mlp_layer_types lists, or else all but the first first_k_dense_replace (default: `dense`)."""
    first = keys.integer("first_k_dense_replace", dense, low=0, high=MAX_LAYERS)
    return sparse_layers_of(keys.strings("mlp_layer_types", layers) or tuple(DENSE if layer < first else SPARSE for layer in range(layers)))


def sparse_layers_of(kinds: tuple[str, ...]) -> frozenset[int]:
    """The layers of type SPARSE. Raises ConfigError for a type that is neither SPARSE nor DENSE."""
    for kind in kinds:
        if kind not in (DENSE, SPARSE):
            raise ConfigError(f"config.json: mlp_layer_types holds {show(kind)}, which is not supported", f"known: {DENSE}, {SPARSE}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == SPARSE)
