"""Mistral Large 4 (1T-A52B), text: MLA with sparse attention as in GLM 5; some layers have no positions, some attend to an earlier layer's
latents, and queries are scaled by position with learned numbers per head.

NoPE layers have no rotary channels, so their cached latents are narrower. RoPE frequencies are multiplied by factors from the checkpoint.
Index queries are projected from the layer's normed input, normed once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...kernels.indexer_shape import IndexShape
from ..config import Defaults, ModelConfig
from ..config_reader import ConfigError, Keys, show
from ..indexer_config import IndexerConfig, sources_of
from ..layer import Layer, last_of
from ..rope import LOG_POSITIONS
from ..weights.index_weights import choose
from . import TensorRule, deepseek_v3, deepseek_v32, glm_moe_dsa, llama
from .deepseek_v3 import mla_config
from .deepseek_v32 import INDEX_NORM_EPS, INDEXED, with_mlp_layer_types
from .glm4_moe import shared_moe_config
from .glm_moe_dsa import indexer_layers
from .llama import decoder_block
from .smollm3 import rotated_layers

LIKE = deepseek_v3
KEYS_HARMLESS = glm_moe_dsa.KEYS_HARMLESS
REFUSED_UNLESS = {"indexer_rope_interleave": True, "mlp_bias": False, "n_group": 1, "norm_topk_prob": True, "rope_interleave": True,
                  "sliding_window": None, "topk_group": 1}
SIZES = {"vocab_size": 204_800, "hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 72, "num_attention_heads": 64}
MLA_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0, "original_max_position_embeddings": 512, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.0}  # if the config has no rope_parameters


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError."""
    base = Defaults(max_position_embeddings=2**20, norm_eps=1e-5, sizes=SIZES, bos=1, eos=(2,))
    layers = base.size(keys, "num_hidden_layers")
    keys.layer_types("layer_types", layers, (INDEXED,))
    resolved = keys if keys.section("rope_scaling") or keys.section("rope_parameters") else keys.with_values(rope_parameters=YARN)
    moe = with_mlp_layer_types(keys, layers, shared_moe_config(keys, layers, 128, 4, 1, True, 6144, 1))
    config = mla_config(resolved, base, MLA_DIMS, None, True, moe=moe, query_position_scaling=True, learned_rope_alpha=True,
                        final_logit_softcapping=keys.number("final_logit_softcapping", 30.0))
    rotated, mla = rotated_layers(keys.with_values(num_hidden_layers=layers)), config.mla
    for key, is_set, value in (("attention_bias", config.o_bias, config.o_bias),
                               ("q_lora_rank", mla.query_rank is not None, mla.query_rank)):
        if is_set:
            raise ConfigError(f"config.json: {key} = {show(value)} is not supported for mistral_large4_text models",
                              "this family projects queries directly from the layer's input, and has no biases")
    width, top_tokens = keys.integer("index_head_dim", 128, high=1024), keys.integer("index_topk", deepseek_v32.INDEX_TOPK, high=2**27)
    if width < mla.rope:
        raise ConfigError(f"config.json: index_head_dim {width} with qk_rope_head_dim {mla.rope} is not supported",
                          "a part of each index query is rotated")
    index_shape = IndexShape(keys.integer("index_n_heads", 32, high=1024), width, mla.rope, top_tokens)
    mla_without_rope = replace(mla, nope=mla.query, rope=0)
    layer_mla = tuple(mla if is_rotated else mla_without_rope for is_rotated in rotated)
    ropes = tuple(rope if is_rotated else None for rope, is_rotated in zip(config.ropes, rotated, strict=True))
    return replace(config, mla_norm_eps=config.norm_eps, ropes=ropes,
                   layer_mla=layer_mla, layer_kv_heads=tuple((1, layer.key) for layer in layer_mla), kv_sources=_kv_sources(keys, rotated),
                   indexer=IndexerConfig(index_shape, sources_of(indexer_layers(keys, layers)), True, ("layer", INDEX_NORM_EPS)))


def _kv_sources(keys: Keys, rotated: Sequence[bool]) -> tuple[int, ...]:
    """By layer, the layer whose latents it attends to; empty if every layer has its own. Raises ConfigError."""
    sources = keys.layer_indices("kv_source_layers", len(rotated))
    shared_layers = {source for layer, source in enumerate(sources or ()) if source != layer}  # layers whose latents others attend to
    for layer, source in enumerate(sources or ()):
        last = max((shared for shared in shared_layers if shared < layer and rotated[shared] == rotated[layer]), default=layer)
        if source != layer and (source != last or sources[source] != source):
            raise ConfigError(f"config.json: kv_source_layers has {source} for layer {layer}, which is not supported",
                              "a layer attends to the last one before it whose latents are lent and that has positions if it has them")
    return sources if shared_layers else ()


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    rules = deepseek_v32.layer_tensors(config, layer)
    prefix, heads, hidden = f"model.layers.{layer}.self_attn.", config.num_attention_heads, config.hidden_size
    if config.kv_sources and config.kv_sources[layer] != layer:
        del rules["kv_a"], rules["kv_a_norm"]
    rules |= {"query_scale_slope": TensorRule(f"{prefix}softmax_scaling.scale", (heads,)),
              "query_scale_offset": TensorRule(f"{prefix}softmax_scaling.bias", (heads,))}
    if "index_q" in rules:
        index, prefix = config.indexer.shape, f"{prefix}indexer."
        rules |= {"index_q": replace(rules["index_q"], shape=(index.heads * index.width, hidden)),
                  "index_entered": TensorRule(f"{prefix}q_input_norm.weight", (hidden,)),
                  "index_entered_bias": TensorRule(f"{prefix}q_input_norm.bias", (hidden,)),
                  "index_query_scale_slope": TensorRule(f"{prefix}softmax_scaling.scale", (index.heads,)),
                  "index_query_scale_offset": TensorRule(f"{prefix}softmax_scaling.bias", (index.heads,))}
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return llama.outer_tensors(config) | {"rope_alpha": TensorRule("model.rotary_emb.alpha", (config.mla.rope // 2,))}


def attention(x: object, at: Layer) -> object:
    """`deepseek_v3.attention`; a layer without latents of its own attends to those that an earlier layer cached."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    at.tap("block_in", x)
    mla, shape, heads = w.mla, config.mla_of(at.number), config.num_attention_heads
    y, norm, index_linears = x, w.input_norm, ()
    if w.indexer is not None:  # its queries need the normed input
        y, norm, index_linears = ops.norm(x, w.input_norm), None, (w.indexer.k, w.indexer.weights)
    down_projections = () if mla.kv_a is None else (mla.kv_a,)
    q, *projections = ops.norm_linear(y, norm, [mla.q_b, *down_projections, *index_linears])  # [T, H * (nope + rope)], [T, rank + rope]
    k = None
    if down_projections:
        k = ops.rope_heads(ops.latent_keys(projections.pop(0), shape, mla.kv_a_norm), 1, shape.key, positions, rope, None)
    q = ops.scale_queries(q, heads, shape.query, positions, LOG_POSITIONS, w.query_scaling)
    q = ops.rope_heads(ops.latent_queries(q, heads, shape, mla.kv_b), heads, shape.key, positions, rope, None)
    if w.indexer is not None:
        (index_queries,) = ops.norm_linear(y, w.indexer.input_norm, [w.indexer.q])
        index_queries = ops.scale_queries(index_queries, config.indexer.shape.heads, config.indexer.shape.width, positions, LOG_POSITIONS,
                                          w.indexer.query_scaling)
        choose(ops, w.indexer, index_queries, *projections, kv, positions, rope, config.indexer.shape)
    at.tap("q", q)
    if k is not None:
        at.tap("k", k)
        at.tap("v", k)
    attended = ops.latent_values(kv.attend(q, k, k), heads, shape, mla.kv_b)  # [T, H * value]
    at.tap("attn_out", attended)
    return ops.linear_add(attended, w.o, last_of(x, len(attended)), None, config.residual_multiplier)


block = decoder_block(attention)
