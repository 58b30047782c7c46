"""DeepSeek V2 and V2-Lite, also the Coders: V3's attention, with softmax routing."""

from __future__ import annotations

from ..config import Defaults, ModelConfig
from ..config_reader import REQUIRED, ConfigError, Keys, show
from ..moe_config import MoEConfig
from . import deepseek_v3
from .deepseek_v3 import check_auto_map, mla_config, with_expert_groups
from .glm4_moe import shared_moe_config

LIKE = deepseek_v3
REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
                  "sliding_window": None, "use_mla": True}
SIZES = {"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32}
CODE = r"(configuration|modeling)_deepseek(_v2)?\.DeepseekV2\w+"
GREEDY, LIMITED = "greedy", "group_limited_greedy"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=2048, sizes=SIZES, bos=1, eos=(2,))
    moe = with_topk_method(keys, shared_moe_config(keys, base.size(keys, "num_hidden_layers"), 64, REQUIRED, 0, False, 1407, 2))
    return mla_config(keys, base, deepseek_v3.MLA_DIMS, deepseek_v3.QUERY_RANK, True, moe=moe)


def with_topk_method(keys: Keys, moe: MoEConfig) -> MoEConfig:
    """The mixture with groups of experts, where the config chooses experts by them. Raises ConfigError."""
    keys.mark_known("n_group", "topk_group")
    method = keys.text("topk_method", GREEDY)
    if method not in (GREEDY, LIMITED):
        raise ConfigError(f"config.json: topk_method {show(method)} is not supported", f"known: {GREEDY}, {LIMITED}")
    return with_expert_groups(keys, moe, 1, 1) if method == LIMITED else moe
