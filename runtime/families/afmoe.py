"""AFMoE (Arcee Trinity): pre- and post-norms, gated attention, RoPE only in sliding-window layers (every fourth layer has full attention
and no positions), and a MoE with corrected sigmoid routing and a shared expert.

The shared expert is loaded as the MLP of a layer with experts, because one post-norm follows the sum of both.
"""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map
from .mixtral import MAX_EXPERTS, moe_config, moe_tensors
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"load_balance_coeff", "use_grouped_mm"})  # training, and how experts are computed
# Published configs spell out what all models of the family do, and groups of experts under two keys each.
REFUSED_UNLESS = {"mlp_bias": False, "n_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True,
                  "score_func": "sigmoid", "topk_group": 1}
SIZES = {"vocab_size": 200_192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16}
CODE = r"(configuration|modeling)_afmoe\.Afmoe\w+"  # original code of what transformers has adopted


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=16_384, head_dim=128, norm_eps=1e-5, sizes=SIZES)
    layers, hidden, ffn = (base.size(keys, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    bias, every = keys.flag("attention_bias", False), keys.integer("global_attn_every_n_layers", 4, high=MAX_LAYERS)
    window = keys.integer("sliding_window", None if keys.has("sliding_window") else 1024)
    windows = layer_windows(keys, window, [LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)])

    dense, width = keys.integer("num_dense_layers", 1, low=0, high=layers), keys.integer("moe_intermediate_size", 1408, high=2**22)
    shared_width = width * keys.integer("num_shared_experts", 2, high=MAX_EXPERTS)
    moe = moe_config(keys, 64, 6, width, True, range(dense, layers), sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("route_scale", 1.0), parallel_to_mlp=True)
    rotary_layers = [window is not None for window in windows]
    return decoder_config(keys, base, windows=windows, rotary_layers=rotary_layers, qkv_bias=bias, o_bias=bias, qk_norm=True,
                          output_gate=True,
                          moe=moe, layer_intermediate_sizes=(ffn,) * dense + (shared_width,) * (layers - dense),
                          embedding_multiplier=hidden**0.5 if keys.flag("mup_enabled", False) else 1.0)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role. post_attention_layernorm is a post-norm here; in Llama it is the norm before the MLP."""
    rules, prefix, hidden = llama.layer_tensors(config, layer), f"model.layers.{layer}.", config.hidden_size
    names = {"o_norm": "post_attention_layernorm", "post_norm": "pre_mlp_layernorm", "down_norm": "post_mlp_layernorm"}
    rules |= {role: TensorRule(f"{prefix}{name}.weight", (hidden,)) for role, name in names.items()}
    rules["attn_gate"] = TensorRule(f"{prefix}self_attn.gate_proj.weight", (config.num_attention_heads * config.head_dim, hidden))
    if layer not in config.moe.layers:
        return rules
    rules |= moe_tensors(config, f"{prefix}mlp.", NAMES, correction="expert_bias")
    rules["router"] = TensorRule(f"{prefix}mlp.router.gate.weight", rules["router"].shape)
    return rules | {role: TensorRule(f"{prefix}mlp.shared_experts.{name}.weight", rules[role].shape) for role, name in NAMES.items()}
