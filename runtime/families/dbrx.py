"""DBRX (Databricks, 132B-A36B): Llama's attention with bias-free layer norms and clipped q, k and v, and sixteen experts in every layer,
four per token.

Checkpoints fuse q, k and v, and stack the gate, up and down matrices of a layer's experts; `dbrx_experts.py` splits the latter.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, MAX_POSITIONS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import RopeConfig, rope_config
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map
from .mixtral import moe_config, moe_tensors

KEYS_HARMLESS = frozenset({"emb_pdrop", "rms_norm_eps"})
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "sliding_window": None}
CODE = r"(configuration|modeling)_dbrx\.Dbrx\w+"  # original code of what transformers has adopted
NAMES = {"gate": "w1", "up": "v1", "down": "w2"}
ATTENTION = "norm_attn_norm.attn"
FUSED_QKV = f"{ATTENTION}.Wqkv"
PLACES = {"o": "norm_attn_norm.attn.out_proj", "input_norm": "norm_attn_norm.norm_1", "post_norm": "norm_attn_norm.norm_2"}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    size_keys = {"hidden_size": ("d_model", 2048, MAX_SIZES["hidden_size"]), "num_hidden_layers": ("n_layers", 24, MAX_LAYERS),
             "num_attention_heads": ("n_heads", 16, 4096), "max_position_embeddings": ("max_seq_len", 2048, MAX_POSITIONS)}
    sizes = {name: keys.integer(alias, default, high=limit) for name, (alias, default, limit) in size_keys.items()}
    attn, ffn = (Keys(keys.section(name) or {}, f"config.json: {name}") for name in ("attn_config", "ffn_config"))
    activation = (ffn.section("ffn_act_fn") or {}).get("name", "silu")
    power = ffn.number("moe_normalize_expert_weights", 1.0 if "moe_normalize_expert_weights" not in ffn.raw else None)
    if activation != "silu" or power not in (1.0, None):
        name, value = ("ffn_act_fn", activation) if activation != "silu" else ("moe_normalize_expert_weights", power)
        raise ConfigError(f"config.json: ffn_config.{name} = {show(value)} is not supported for dbrx models",
                          "this family runs only with silu, and expert weights normalized to 1 or not at all")
    experts = Keys({"num_local_experts": ffn.integer("moe_num_experts", 4), "num_experts_per_tok": ffn.integer("moe_top_k", 1)})
    theta = attn.number("rope_theta", 10_000.0, above=1.0)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return (rope_config(keys, head_dim, positions, theta),) * sizes["num_hidden_layers"]

    width = ffn.integer("ffn_hidden_size", 3584, high=2**22)
    moe = moe_config(experts, 4, 1, width, power is not None, range(sizes["num_hidden_layers"]), "num_local_experts")
    base = Defaults(max_position_embeddings=2048, eps_key=None, norm_eps=1e-5, sizes={"vocab_size": 32_000})  # torch's epsilon
    if keys.flag("tie_word_embeddings", False):
        raise ConfigError("config.json: tie_word_embeddings = true is not supported for dbrx models", "this family unties its output head")
    resolved = keys.with_values(**sizes, hidden_act="silu", intermediate_size=width,
                           num_key_value_heads=attn.integer("kv_n_heads", 1, high=4096))
    return decoder_config(resolved, base, ropes, norm_kind="layer", clip_qkv=attn.number("clip_qkv", None), moe=moe)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role. Parts of the fused matrix may also be stored under Llama's names."""
    prefix = f"transformer.blocks.{layer}."
    rules = {role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in NAMES}
    sizes, first = [rules[role].shape[0] for role in ("q", "k", "v")], 0
    for role, rows in zip(("q", "k", "v"), sizes, strict=True):
        rules[role] = TensorRule(f"{prefix}{ATTENTION}.{role}_proj.weight", rules[role].shape, (rules[role].name,),
                                 part_of=(f"{prefix}{FUSED_QKV}.weight", first, sum(sizes)))
        first += rows
    rules |= {role: replace(rules[role], name=f"{prefix}{place}.weight") for role, place in PLACES.items()}
    rules |= moe_tensors(config, f"{prefix}ffn.", NAMES)
    return rules | {"router": replace(rules["router"], name=f"{prefix}ffn.router.layer.weight")}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    names = {"embed": "transformer.wte.weight", "norm": "transformer.norm_f.weight"}
    return {role: replace(rule, name=names.get(role, rule.name)) for role, rule in llama.outer_tensors(config).items()}
