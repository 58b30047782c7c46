"""LongCat Flash (560B-A27B): a checkpoint layer is two blocks of MLA and MLP; its experts read the first MLP's input, and their sum is
added after the second MLP (shortcut-connected MoE). Some experts are identity functions.

Each of the two blocks is a layer here; the experts' sum travels in a second residual stream (`ModelConfig.residual_streams`).
"""

from __future__ import annotations

from dataclasses import replace

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig
from ..config_reader import ConfigError, Keys
from ..layer import Layer, last_of, narrowing
from ..moe_config import MoEConfig
from . import TensorRule, llama
from .deepseek_v3 import attention, check_auto_map, mla_config, mla_tensors
from .mixtral import MAX_EXPERTS, moe_tensors
from .qwen3_moe import NAMES

KEYS_HARMLESS = frozenset({"attention_method"})
REFUSED_UNLESS = {"layer_types": None, "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "mlp_bias": False, "norm_topk_prob": False,
                  "router_bias": False, "sliding_window": None, "zero_expert_type": "identity"}
SIZES = {"vocab_size": 131_072, "hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 56, "num_attention_heads": 64}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CODE = r"(configuration|modeling)_longcat_flash\.LongcatFlash\w+"  # auto_map of published checkpoints; part of transformers now
QUERY_RANK = 1536
STREAMS = 2  # the residual stream, and the experts' sum that is added after the second MLP


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    check_auto_map(keys, CODE)
    pairs = keys.integer("num_layers", keys.integer("num_hidden_layers", SIZES["num_hidden_layers"], high=MAX_LAYERS) // 2,
                         high=MAX_LAYERS // 2)
    ffn = keys.integer("ffn_hidden_size",
                       keys.integer("intermediate_size", SIZES["intermediate_size"], high=MAX_SIZES["intermediate_size"]),
                       high=MAX_SIZES["intermediate_size"])
    resolved = keys.with_values(num_hidden_layers=2 * pairs, intermediate_size=ffn)
    base = Defaults(max_position_embeddings=131_072, sizes=SIZES, bos=1, eos=(2,), norm_eps=1e-5, theta=1e7)
    config = mla_config(resolved, base, MLA_DIMS, QUERY_RANK, True, moe=_moe_config(keys, pairs), residual_streams=STREAMS)
    mla, hidden = config.mla, config.hidden_size
    if (stated := keys.integer("qk_head_dim", mla.query)) != mla.query:
        raise ConfigError(f"config.json: qk_head_dim = {stated} is not supported for longcat_flash models",
                          f"it is the sum of qk_nope_head_dim and qk_rope_head_dim, {mla.query}")
    if mla.query_rank is None:
        raise ConfigError("config.json: q_lora_rank = null is not supported for longcat_flash models",
                          "this family projects queries from a latent")
    return replace(config, multipliers=(("q_a_norm", (hidden / mla.query_rank) ** 0.5), ("kv_a_norm", (hidden / mla.rank) ** 0.5)))


def _moe_config(keys: Keys, pairs: int) -> MoEConfig:
    """The experts, which the first layer of every pair has. Raises ConfigError."""
    experts = keys.integer("n_routed_experts", 512, high=MAX_EXPERTS)
    zero_experts = keys.integer("zero_expert_num", 256, low=0, high=MAX_EXPERTS)
    experts_per_token = keys.integer("moe_topk", 12, high=MAX_EXPERTS)
    if experts_per_token > experts + zero_experts:
        raise ConfigError(f"config.json: moe_topk {experts_per_token} is more than the {experts + zero_experts} experts there are")
    return MoEConfig(experts, experts_per_token, keys.integer("expert_ffn_hidden_size", 2048, high=2**22), renormalise=False,
                     layers=frozenset(range(0, 2 * pairs, 2)), routed_scale=keys.number("routed_scaling_factor", 6.0),
                     correction_bias=True, parallel_to_mlp=True, zero_experts=zero_experts)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: half of a checkpoint layer."""
    rules = mla_tensors(config, layer, llama.layer_tensors(config, layer))
    prefix, stored_prefix, half = f"model.layers.{layer}.", f"model.layers.{layer // 2}.", layer % 2
    parts = {"self_attn.": f"self_attn.{half}.", "mlp.": f"mlps.{half}.", "input_layernorm.": f"input_layernorm.{half}.",
             "post_attention_layernorm.": f"post_attention_layernorm.{half}."}
    for role, rule in rules.items():
        name = rule.name.removeprefix(prefix)
        part = next(part for part in parts if name.startswith(part))
        rules[role] = replace(rule, name=stored_prefix + parts[part] + name.removeprefix(part))
    if layer not in config.moe.layers:
        return rules
    moe = config.moe
    experts, num_candidates = moe_tensors(config, f"{stored_prefix}mlp.", NAMES), moe.num_experts + moe.zero_experts
    router = {"router": ("classifier.weight", (num_candidates, config.hidden_size)),
              **({"correction": ("e_score_correction_bias", (num_candidates,))} if moe.correction_bias else {})}
    return rules | experts | {role: TensorRule(f"{stored_prefix}mlp.router.{name}", shape) for role, (name, shape) in router.items()}


@narrowing
def block(x: object, at: Layer) -> object:
    """Streams x[T, 2 * D] -> x[T, 2 * D], with the taps of `llama.block` over the first stream; with experts, visits come first."""
    ops, w, config = at.ops, at.w, at.config
    hidden = attention(ops.first_stream(x, STREAMS), at)
    x = last_of(x, len(hidden))
    at.tap("mlp_in", hidden)
    if w.experts:
        experts = ops.expert_branch(hidden, w.post_norm, w.router, w.experts, w.parallel_experts, config.moe.routing, config.hidden_act,
                                    at.observer("visits"), w.correction_bias)
        x = ops.put_stream(x, experts, 1)
    hidden = ops.gated_mlp(hidden, w.post_norm, w.gate, w.up, w.down, config.hidden_act, at.observer("mlp_hidden"))
    if not w.experts:
        hidden = ops.add_scaled(hidden, ops.second_stream(x, STREAMS), 1.0)
    x = ops.put_stream(x, hidden, 0)
    at.tap("block_out", x)
    return x
