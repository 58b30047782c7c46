"""Falcon 1 and 2 (7B, 40B, 180B; 11B): layer norms, an ungated MLP parallel to attention, under one norm or one of its own, and
multi-query or grouped-query attention. QKV is fused, group by group (`tensor_views.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from . import TensorRule, gpt_neox
from .deepseek_v3 import check_auto_map
from .stablelm import bias_rule

LIKE = gpt_neox
# Keys that have a meaning in other families; transformers ignores them in this one.
KEYS_HARMLESS = frozenset({"apply_residual_connection_post_layernorm", "hidden_act", "rms_norm_eps"})
REFUSED_UNLESS = {"alibi": False, "layer_types": None, "sliding_window": None}
SIZES = {"vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
CODE = r"(configuration|modeling)_(falcon|RW)\.(Falcon|RW)\w+"  # original code of what transformers has adopted
PREFIX = "transformer."
# Role -> name after splitting, and as stored.
PARTS = {"q": "self_attention.q_proj", "k": "self_attention.k_proj", "v": "self_attention.v_proj"}
NAMES = {"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
FUSED_QKV = "self_attention.query_key_value"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    hidden, heads = (keys.integer(name, SIZES[name], high=2**20) for name in ("hidden_size", "num_attention_heads"))
    keys.mark_known("multi_query")  # read only by the older architecture
    newer, parallel = keys.flag("new_decoder_architecture", False), keys.flag("parallel_attn", True)
    kv_heads = keys.integer("num_kv_heads", heads, high=4096)
    groups = kv_heads if newer else 1 if keys.flag("multi_query", True) else heads
    norms = keys.integer("num_ln_in_parallel_attn", 2 if newer else 1, high=2)
    if newer and not parallel or norms == 2 and not newer:
        raise ConfigError(f"config.json: num_ln_in_parallel_attn = {norms} and parallel_attn = {parallel} are not supported with "
                          f"new_decoder_architecture = {newer}", "no published model has this combination")
    sizes = {"num_key_value_heads": groups, "head_dim": None, "intermediate_size": keys.integer("ffn_hidden_size", 4 * hidden, high=2**22),
             "num_hidden_layers": keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS)}
    base = Defaults(max_position_embeddings=2048, bos=11, eos=(11,), tied=True, act=("activation", "gelu"), eps_key="layer_norm_epsilon",
                    norm_eps=1e-5, sizes=SIZES)
    bias = keys.flag("bias", False)
    return decoder_config(keys.with_values(**sizes), base, qkv_bias=bias, o_bias=bias, mlp_bias=bias, norm_kind="layer",
                          parallel_block=parallel, parallel_block_norms=norms == 2)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` after splitting."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}."
    kv = config.num_key_value_heads * config.head_dim
    norms = {"input_norm": "input_layernorm"}
    if config.parallel_block_norms:
        norms = {"input_norm": "ln_attn", "mlp_norm": "input_layernorm"}  # published as ln_mlp
    elif not config.parallel_block:
        norms["post_norm"] = "post_attention_layernorm"
    rules = {role: TensorRule(f"{prefix}{name}.weight", (hidden,)) for role, name in norms.items()}
    rules |= {f"{role}_bias": bias_rule(rules[role]) for role in norms}
    shapes = {**dict.fromkeys(("q", "o"), (hidden, hidden)), **dict.fromkeys(("k", "v"), (kv, hidden)), "up": (ffn, hidden), "down":
              (hidden, ffn)}
    for role, name in {**PARTS, **NAMES}.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", shapes[role])
        if config.mlp_bias:
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", shapes[role][:1])
    renamed = {"input_layernorm": "ln_mlp"} if config.parallel_block_norms else {}
    return {role: replace(rule, also=(_published(rule.name, renamed),)) for role, rule in rules.items()}


def _published(name: str, renamed: Mapping[str, str]) -> str:
    """The name of a tensor in published checkpoints."""
    return ".".join(renamed.get(part, part) for part in name.replace("model.layers.", f"{PREFIX}h.", 1).split("."))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, width = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    rules = {"embed": TensorRule("model.embed_tokens.weight", table, also=(f"{PREFIX}word_embeddings.weight",)),
             "norm": TensorRule("model.norm.weight", width, also=(f"{PREFIX}ln_f.weight",)),
             "norm_bias": TensorRule("model.norm.bias", width, also=(f"{PREFIX}ln_f.bias",))}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a layer's q, k or v or its bias -> (fused tensor, rows): each KV head has the rows of its queries, key and value."""
    prefix, groups = f"{PREFIX}h.{layer}.", config.num_key_value_heads
    queries = config.num_attention_heads // groups
    rows = np.arange(groups * (queries + 2) * config.head_dim).reshape(groups, queries + 2, config.head_dim)
    parts = {"q": rows[:, :queries], "k": rows[:, queries], "v": rows[:, queries + 1]}
    return {f"{prefix}{PARTS[role]}.{kind}": (f"{prefix}{FUSED_QKV}.{kind}", part.reshape(-1))
            for role, part in parts.items() for kind in ("weight", *(("bias",) if config.mlp_bias else ()))}
