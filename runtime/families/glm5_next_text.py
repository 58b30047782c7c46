"""GLM 5.3 Flash (GLM 5 Next), text: Kimi Delta Attention in three of four layers, in the others MLA without positions over pools of tokens
that an indexer selects; hyper-connections as in DeepSeek V4, whose streams are averaged after the last layer.

The key of a pool is a mean of its tokens' index keys, weighed channel by channel by what each of them says (`kernels/indexer_shape.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.indexer_shape import IndexShape
from ...kernels.kda_shape import KdaShape
from ...kernels.layout import SILU_LIMIT
from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..indexer_config import IndexerConfig
from ..layer import Layer, narrowing
from ..moe_config import MoEConfig
from . import TensorRule, deepseek_v32, glm_moe_dsa, kimi_linear
from .deepseek_v3 import NO_ROPE, attention_output, mla_config, mla_tensors, mtp_layers, with_expert_groups
from .deepseek_v4 import hyper_connection_tensors, stream_mlp, write_branch
from .deepseek_v32 import INDEX_NORM_EPS, INDEXED, with_mlp_layer_types
from .glm4_moe import deepseek_moe_config
from .glm_moe_dsa import indexer_layers
from .kimi_linear import kda_tensors
from .mixtral import expert_tensors
from .qwen3_5_text import FULL, LINEAR
from .qwen3_moe import NAMES

# Of training, and of positions that nothing has.
KEYS_HARMLESS = glm_moe_dsa.KEYS_HARMLESS | {"original_max_position_embeddings", "rope_interleave", "rope_parameters",
                                             "rope_scaling", "rope_theta"}
REFUSED_UNLESS = {
    **{key: value for key, value in glm_moe_dsa.REFUSED_UNLESS.items() if key not in ("indexer_rope_interleave", "rope_interleave")},
    "index_kpool_always_select_tail": True, "swiglu_limit": SILU_LIMIT}
SIZES = {"vocab_size": 154_880, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 45, "num_attention_heads": 64}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256}
LOWEST = -5.0  # logarithm of a decay, where a config says none
OF_LINEAR = kimi_linear.LINEAR_ATTENTION_KEYS | {"gate_lower_bound", "safe_gate"}
DENSE_FIRST = 3


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    base = Defaults(max_position_embeddings=2**20, norm_eps=1e-5, sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    usual = tuple(FULL if layer % 4 == 3 else LINEAR for layer in range(layers))
    kinds = keys.layer_types("layer_types", layers, (INDEXED, FULL, LINEAR)) or usual
    states = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if not 0 < len(states) < layers:
        raise ConfigError(f"config.json: layer_types without {LINEAR if not states else INDEXED} is not supported",
                          "this family has layers of both kinds")
    config = mla_config(keys, base, MLA_DIMS, 1536, NO_ROPE, moe=_moe_config(keys, layers), recurrent=_linear(keys),
                        recurrent_layers=states,
                        residual_streams=keys.integer("hc_mult", 4, low=2, high=16),
                        sinkhorn_iterations=keys.integer("hc_sinkhorn_iters", 20, high=1000), sinkhorn_eps=keys.number("hc_eps", 1e-6))
    mla = config.mla
    if config.hidden_act != "silu" or mla.query_rank is None or mla.rope:
        raise ConfigError(f"config.json: hidden_act {config.hidden_act} with q_lora_rank {show(mla.query_rank)} and qk_rope_head_dim "
                          f"{mla.rope} is not supported for glm5_next_text models",
                          "silu, queries projected from q_lora_rank dimensions, no positions")
    return replace(config, hidden_act="clamped_silu", mla_norm_eps=config.norm_eps, mtp_layers=mtp_layers(keys),
                   indexer=_indexed(keys, config, kinds))


def _moe_config(keys: Keys, layers: int) -> MoEConfig:
    moe = deepseek_moe_config(keys, layers, 288, 8, min(DENSE_FIRST, layers), True, 2.5, 2048)
    return replace(with_mlp_layer_types(keys, layers, with_expert_groups(keys, moe, 1, 1)), parallel_to_mlp=True)


def _linear(keys: Keys) -> KdaShape:
    """What layers of linear attention remember. Raises ConfigError."""
    section = dict(keys.section("linear_attn_config") or {})
    for name, value in section.items():
        if name not in OF_LINEAR and value not in (None, False):
            raise ConfigError(f"config.json: linear_attn_config holds {show(name)}, which is not supported",
                              f"known: {', '.join(sorted(OF_LINEAR))}")
    inner = Keys(section, "config.json: linear_attn_config")
    heads, width, taps = (inner.integer(name, keys.integer(outer, default, high=high), high=high) for name, outer, default, high in (
        ("num_heads", "linear_num_heads", 64, 4096), ("head_dim", "linear_head_dim", 128, 1024),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 64)))
    keys.mark_known("linear_lower_bound")
    lowest = section.get("gate_lower_bound", keys.raw.get("linear_lower_bound", LOWEST))
    if lowest is None and section and section.get("safe_gate", True):
        lowest = LOWEST
    if lowest is not None and (isinstance(lowest, bool) or not isinstance(lowest, int | float) or not -1e3 < lowest < 0):
        raise ConfigError(f"config.json: linear_lower_bound or gate_lower_bound = {show(lowest)} is not supported",
                          "a number below 0, or null for no bound")
    return KdaShape.of(heads, width, taps, decay_bound=None if lowest is None else float(lowest))


def _indexed(keys: Keys, made: ModelConfig, kinds: tuple[str, ...]) -> IndexerConfig:
    """What chooses; a layer shares the choice of the one right before it alone."""
    rate, count = keys.integer("index_kpool", 16, high=4096), keys.integer("index_topk", deepseek_v32.INDEX_TOPK, high=2**27)
    if rate < 2 or count % rate:
        raise ConfigError(f"config.json: index_kpool {rate} with index_topk {count} is not supported",
                          "pools of two tokens or more, whose number divides index_topk")
    shape = IndexShape(keys.integer("index_n_heads", 32, high=1024), keys.integer("index_head_dim", 128, high=1024), 0, count // rate,
                       tokens_per_key=rate, pooled=True, weighted_pooling=True)
    chooses, sources = indexer_layers(keys, len(kinds)), []
    for layer, kind in enumerate(kinds):
        if kind != LINEAR and not chooses[layer] and (not layer or sources[-1] is None):
            raise ConfigError(f"config.json: indexer_types has shared for layer {layer}, which is not supported",
                              "a shared layer reuses the selection of the layer before it")
        sources.append(None if kind == LINEAR else layer if chooses[layer] else sources[-1])
    return IndexerConfig(shape, tuple(sources), False, ("layer", INDEX_NORM_EPS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    rules = expert_tensors(config, layer, "mlp", NAMES)
    if layer in config.recurrent_layers:
        rules = kda_tensors(config, layer, rules, (config.recurrent.value_heads,))
    else:
        rules = mla_tensors(config, layer, rules)
    if config.indexer is not None and (own := config.indexer.shape_of(layer)) is not None:
        place = f"{prefix}self_attn.indexer."
        rules |= {"index_q": TensorRule(f"{place}wq_b.weight", (own.heads * own.width, config.mla.query_rank), plain=True),
                  "index_k": TensorRule(f"{place}{JOINED}", (own.pool_row, hidden), plain=True),
                  "index_k_norm": TensorRule(f"{place}k_norm.weight", (own.width,)),
                  "index_k_norm_bias": TensorRule(f"{place}k_norm.bias", (own.width,)),
                  "index_pool_ape": TensorRule(f"{place}index_kpool_compress_ape", (own.tokens_per_key, own.width), coefficients=True),
                  "index_weights": TensorRule(f"{place}weights_proj.weight", (own.heads, hidden), plain=True)}
    for role, name in (("attn_mix", "hc_attn"), ("mlp_mix", "hc_ffn")):
        rules |= hyper_connection_tensors(config, role, [f"{prefix}{name}_{part}" for part in ("fn", "base", "scale")],
                                          2 + config.residual_streams, 3)
    return rules


JOINED = "wk_and_gate.weight"  # index keys, and below them what tokens say of their channels: read at once


def joined_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Names of a layer's tensors that are stored in parts -> those of the parts, with their rows."""
    if layer in config.recurrent_layers:
        return kimi_linear.joined_rows(config, layer)
    if config.indexer is None or (own := config.indexer.shape_of(layer)) is None:
        return {}
    place = f"model.layers.{layer}.self_attn.indexer."
    return {f"{place}{JOINED}": ((f"{place}wk.weight", own.width), (f"{place}index_kpool_compress_gate", own.width))}


@narrowing
def block(x: object, at: Layer) -> object:
    """As `llama.block`, of streams x [T, S * D]. Taps see what a branch reads where they see x of other families, but for block_out."""
    ops, w = at.ops, at.w
    around_attention, around_mlp = w.gated_residuals
    own = ops.read_streams(x, around_attention)
    if w.recurrent is not None:
        at.tap("block_in", own)
        gave, last = at.kv.mix(ops.norm_linear(own, w.input_norm, w.recurrent.projections), w.recurrent.params), w.recurrent.out_proj
        at.tap("state_out", gave)
    else:
        gave, last = attention_output(own, at), w.o
    x = write_branch(ops, x, gave, last, around_attention)
    return stream_mlp(x, at, around_mlp, at.config.hidden_act)
