"""Mistral Small 4 (119B-A6B), text: DeepSeek's MLA, position-dependent scaling of queries as in Ministral 3, and softmax routing with a
shared expert. Multimodal checkpoints hold the same tensors under another prefix."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..config_rope import QUERY_SCALING_BETA
from . import TensorRule, deepseek_v3, llama, with_multimodal_names
from .deepseek_v3 import mla_config
from .glm4_moe import shared_moe_config
from .ministral3 import with_query_scaling

LIKE = deepseek_v3
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "n_group": 1, "sliding_window": None, "topk_group": 1}
SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
MLA_DIMS = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
        "mscale_all_dim": 1.0, QUERY_SCALING_BETA: 0.1}  # if the config has no rope_parameters
ROTATED_SHARE_KEY = "partial_rotary_factor"  # stated beside MLA's widths, from which it follows


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=2**20, sizes=SIZES, bos=1, eos=(2,))
    moe = shared_moe_config(keys, base.size(keys, "num_hidden_layers"), 128, 4, 0, keys.flag("norm_topk_prob", True), 2048, 1)
    section = dict(keys.section("rope_scaling") or keys.section("rope_parameters") or YARN)
    stated_share = section.pop(ROTATED_SHARE_KEY, None)
    resolved = keys.with_values(rope_scaling=None, rope_parameters=section)
    config = mla_config(resolved, base, MLA_DIMS, 1024, keys.flag("rope_interleave", True), moe=moe)
    rotated_share = config.mla.rope / (config.mla.rope + config.mla.nope)
    if stated_share not in (None, rotated_share):
        name = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
        raise ConfigError(f"config.json: {name}.{ROTATED_SHARE_KEY} = {show(stated_share)} is not supported",
                          f"the rotated part of a head is {rotated_share:g}, by the widths of its parts")
    rope_keys = Keys(section, "config.json: rotary positions")
    if QUERY_SCALING_BETA not in section:
        return config
    return replace(config, ropes=(with_query_scaling(config.ropes[0], rope_keys),) * len(config.ropes))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_multimodal_names(deepseek_v3.layer_tensors(config, layer))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return with_multimodal_names(llama.outer_tensors(config))
