"""BLOOM (560M to 176B, BLOOMZ): ALiBi as in MPT, layer norms and matrices with biases, and a layer norm after the embedding, which is
merged into it here.

Checkpoints fuse q, k and v head by head, as GPT-NeoX's do; `tensor_views.py` splits them.
"""

from __future__ import annotations

import numpy as np

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import MAX_POSITIONS
from . import TensorRule, opt
from .llama import with_entry_norm
from .mpt import MAX_ALIBI_BIAS, with_alibi
from .stablelm import bias_rule

# Training and inference code, and keys that have a meaning in other families only.
KEYS_HARMLESS = frozenset({
    "attention_softmax_in_fp32", "bias_dropout_fusion", "gradient_checkpointing", "head_dim", "masked_softmax_fusion",
    "num_key_value_heads", "offset_alibi", "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"})
REFUSED_UNLESS = {"apply_residual_connection_post_layernorm": False, "layer_types": None, "n_inner": None, "sliding_window": None}
PREFIX = "transformer."
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}  # role -> name after splitting
FUSED_QKV = "self_attention.query_key_value"


def config(keys: Keys) -> ModelConfig:
    size_keys = {"hidden_size": ("n_embed", 64, MAX_SIZES["hidden_size"]), "num_hidden_layers": ("n_layer", 2, MAX_LAYERS),
             "num_attention_heads": ("n_head", 8, 4096), "max_position_embeddings": ("seq_length", 2048, MAX_POSITIONS)}
    sizes = {name: keys.integer(alias, keys.integer(name, default, high=limit), high=limit)
             for name, (alias, default, limit) in size_keys.items()}
    keys.integer("intermediate_size", None)  # ignored: it is always four times hidden_size
    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,), tied=True, act=("hidden_act", "gelu_pytorch_tanh"), rotary=False,
                    grouped=False, eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 250_880})
    resolved = keys.with_values(**sizes, intermediate_size=4 * sizes["hidden_size"], hidden_act="gelu_pytorch_tanh")
    config = decoder_config(resolved, base, norm_kind="layer", qkv_bias=True, o_bias=True, mlp_bias=True)
    return with_alibi(config, alibi_slopes(config.num_attention_heads))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head. Heads beyond the largest power of two get every second slope of the next power."""
    power = 1 << heads.bit_length() - 1
    slopes = 0.5 ** (np.arange(1, 2 * power + 1) * (MAX_ALIBI_BIAS / (2 * power)))
    return (*slopes[1::2].tolist(), *slopes[::2][: heads - power].tolist())


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` after splitting."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"{PREFIX}h.{layer}."
    matrices = {**{role: (f"self_attention.{name}", hidden, hidden) for role, name in PARTS.items()},
                "o": ("self_attention.dense", hidden, hidden), "up": ("mlp.dense_h_to_4h", ffn, hidden),
                "down": ("mlp.dense_4h_to_h", hidden, ffn)}
    norms = {"input_norm": f"{prefix}input_layernorm", "post_norm": f"{prefix}post_attention_layernorm",
             **({"entry_norm": f"{PREFIX}word_embeddings_layernorm"} if layer == 0 else {})}
    rules = {role: TensorRule(f"{name}.weight", (hidden,)) for role, name in norms.items()}
    rules |= {role: TensorRule(f"{prefix}{name}.weight", (out, width)) for role, (name, out, width) in matrices.items()}
    return rules | {f"{role}_bias": bias_rule(rule) for role, rule in rules.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, norm = (config.vocab_size, config.hidden_size), TensorRule(f"{PREFIX}ln_f.weight", (config.hidden_size,))
    rules = {"embed": TensorRule(f"{PREFIX}word_embeddings.weight", table), "norm": norm, "norm_bias": bias_rule(norm)}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a layer's q, k or v or its bias -> (fused tensor, rows): each head has its q, k and v rows in turn."""
    prefix, (heads, depth) = f"{PREFIX}h.{layer}.", (config.num_attention_heads, config.projected_head_dim)
    rows = np.arange(heads * 3 * depth).reshape(heads, 3, depth)
    return {f"{prefix}self_attention.{name}.{kind}": (f"{prefix}{FUSED_QKV}.{kind}", rows[:, i].reshape(-1))
            for i, name in enumerate(PARTS.values()) for kind in ("weight", "bias")}


block = with_entry_norm(opt.block)
