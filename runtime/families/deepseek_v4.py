"""DeepSeek V4: attention to a window of tokens, and beyond it to compressed keys of several tokens each (`kernels/compressed_shape.py`), a
few heavily compressed or many selected by an indexer; hyper-connections (`kernels/reference_hyper_connections.py`); and a MoE with
sqrt-softplus routing, in the first layers by a hash table of token ids.

Keys are the values too, so the attention output has been rotated as keys are, and is rotated back by the position of its token. The output
projection is low-rank, in groups of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...kernels.compressed_shape import CompressedShape
from ...kernels.indexer_shape import IndexShape
from ...kernels.layout import SILU_LIMIT
from ..compressed_config import CompressedAttentionConfig
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import MAX_POSITIONS, RopeConfig, rope_from_section
from ..indexer_config import IndexerConfig
from ..layer import Layer, last_of, narrowing
from ..moe_config import MoEConfig
from . import TensorRule
from .mixtral import MAX_EXPERTS, moe_config, moe_tensors

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import GatedResidual, HyperConnection
    from ...quant.weight import Linear
    from ..block_ops import BlockOps

# Of training, and of layers that predict tokens ahead, which are left out.
KEYS_HARMLESS = frozenset({"dspark_block_size", "dspark_markov_rank", "dspark_target_layer_ids", "num_nextn_predict_layers",
                           "router_jitter_noise"})
REFUSED_UNLESS = {
    "attention_bias": False, "mlp_bias": False, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
    "swiglu_limit": SILU_LIMIT, "topk_method": "noaux_tc"}
SIZES = {"vocab_size": 129_280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64}
NEAR, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BY_RATIO = {0: NEAR, 4: CHOSEN, 128: HEAVY}  # of the list that published configs have
RATES = {CHOSEN: 4, HEAVY: 128}
PICKED, ROUTED = "hash_moe", "moe"
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERTS_IN = ("fp4", "fp8", "bf16", "bfloat16")  # of what a config says of them
MAIN, LONG = "main", "compress"  # sections of rotary positions


def config(keys: Keys) -> ModelConfig:
    section = keys.raw.get("quantization_config")
    stored = keys.text("expert_dtype", None) or (section.get("expert_dtype") if isinstance(section, dict) else None)
    if stored not in (None, *EXPERTS_IN):
        raise ConfigError(f"config.json: expert_dtype = {show(stored)} is not supported for deepseek_v4 models",
                          "experts in FP4, FP8 or 16 bits are: take an upload of those")
    base = Defaults(max_position_embeddings=2**20, num_key_value_heads=1, head_dim=512, bos=0, eos=(1,), sizes=SIZES,
                    ffn_key="moe_intermediate_size")
    layers = base.size(keys, "num_hidden_layers")
    keys.integer("intermediate_size", None, high=2**22)  # of no layer: each has experts
    kinds, rates, window = _kinds(keys, layers), _rates(keys), keys.integer("sliding_window", 128, high=2**20)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        near, far = _ropes(keys, head_dim, positions)
        return tuple(near if kind == NEAR else far for kind in kinds)

    config = decoder_config(keys, base, ropes, windows=(window,) * layers, moe=_moe_config(keys, layers),
                            residual_streams=keys.integer("hc_mult", 4, low=2, high=16))
    if config.num_key_value_heads != 1 or config.hidden_act != "silu":
        raise ConfigError(f"config.json: num_key_value_heads {config.num_key_value_heads} with hidden_act {config.hidden_act} is not "
                          "supported for deepseek_v4 models", "one KV head, and silu")
    own, indexed = _compressed(keys, config, kinds, rates, window)
    shapes = [shape for shape in own.shapes if shape is not None]
    return replace(config, hidden_act="clamped_silu", compressed_attention=own, indexer=indexed,
                   recurrent=max(shapes, key=lambda each: sum(each.projection_widths)),
                   recurrent_layers=tuple(layer for layer, shape in enumerate(own.shapes) if shape), hybrid_layers=tuple(range(layers)))


def _kinds(keys: Keys, layers: int) -> tuple[str, ...]:
    """By layer the type of its attention beyond the window."""
    ratios = keys.raw.get("compress_ratios") if keys.has("compress_ratios") else None
    found = keys.layer_types("layer_types", layers, (NEAR, CHOSEN, HEAVY))
    if found is None and ratios is not None:
        if not isinstance(ratios, list) or len(ratios) < layers or any(each not in BY_RATIO for each in ratios):
            raise keys.fail("compress_ratios", f"0, 4 or 128 for each of {layers} layers")
        found = tuple(BY_RATIO[each] for each in ratios[:layers])
    found = found or (HEAVY,) * min(layers, 2) + tuple(CHOSEN if i % 2 else HEAVY for i in range(layers - 2))
    if all(kind == NEAR for kind in found):
        raise ConfigError("config.json: every layer of this model is limited to its window, which is not supported",
                          f"at least one must be {CHOSEN} or {HEAVY}")
    return found


def _rates(keys: Keys) -> dict[str, int]:
    """By layer type the number of tokens in a compressed key."""
    section = Keys(keys.section("compress_rates") or {}, "config.json: compress_rates")
    older = {CHOSEN: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    return {kind: keys.integer(older[kind], section.integer(kind, RATES[kind], high=4096), high=4096) for kind in RATES}


def _ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers that attend to a window only, and of the others, which alone have context extension."""
    turned = keys.integer("qk_rope_head_dim", None, low=2, high=head_dim)
    share = keys.number("partial_rotary_factor", 64 / 512 if turned is None else turned / head_dim)
    thetas = keys.number("rope_theta", 10_000.0, above=1.0), keys.number("compress_rope_theta", 160_000.0, above=1.0)
    older, newer = keys.section("rope_scaling"), keys.section("rope_parameters")
    stated, original = older or newer or {}, keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
    own, far = stated.get(MAIN), stated.get(LONG)
    if not isinstance(own, dict) or not isinstance(far, dict):
        far = {name: value for name, value in stated.items() if name not in (MAIN, LONG)} | {"rope_theta": thetas[1]}
        if far.get("rope_type", far.get("type")) == "yarn":
            far = {"attention_factor": 1.0} | far  # cos and sin keep their size
        own = {"rope_theta": thetas[0]}
    return tuple(rope_from_section(Keys({"partial_rotary_factor": share, **section}, f"config.json: rotary positions of {name}"), head_dim,
                                   positions,
                                   theta, original if name == LONG else None, partial=True)
                 for name, section, theta in ((MAIN, own, thetas[0]), (LONG, far, thetas[1])))


def _moe_config(keys: Keys, layers: int) -> MoEConfig:
    width, shared = keys.integer("moe_intermediate_size", 2048, high=2**22), keys.integer("n_shared_experts", 1, high=MAX_EXPERTS)
    first = keys.integer("num_hash_layers", 3, low=0, high=MAX_LAYERS)
    kinds = keys.layer_types("mlp_layer_types", layers, (PICKED, ROUTED)) or (PICKED,) * min(first, layers) + (ROUTED,) * (layers - first)
    return moe_config(keys, 256, 6, width, True, range(layers), "n_routed_experts", routed_scale=keys.number("routed_scaling_factor", 1.5),
                      correction_bias=True, parallel_to_mlp=True, sqrt_softplus=True, shared_expert_dim=width * shared,
                      hash_routed_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == PICKED))


def _compressed(keys: Keys, made: ModelConfig, kinds: tuple[str, ...], rates: Mapping[str, int],
                window: int) -> tuple[CompressedAttentionConfig, IndexerConfig | None]:
    """Compressed attention, and the indexer if a layer has one."""
    rank, heads, width = keys.integer("q_lora_rank", 1024, high=2**16), made.num_attention_heads, made.head_dim
    groups, inner = keys.integer("o_groups", 8, high=4096), keys.integer("o_lora_rank", 1024, high=2**16)
    index = IndexShape(keys.integer("index_n_heads", 64, high=1024), keys.integer("index_head_dim", 128, high=1024),
                       int(width * made.ropes[0].partial_rotary_factor), keys.integer("index_topk", 512, high=2**27),
                       tokens_per_key=rates[CHOSEN])
    if heads % groups:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of o_groups {groups}")
    if width % rates[HEAVY] or width % rates[CHOSEN] or index.width % rates[CHOSEN] or index.width < index.rope or min(rates.values()) < 2:
        raise ConfigError(f"config.json: keys of {rates[CHOSEN]} and {rates[HEAVY]} tokens with head_dim {width} and index_head_dim "
                          f"{index.width} are not supported", "of two tokens or more, whose number divides the widths; an index as wide as "
                          "the rotated part of a head")
    first, behind = (width, rank), (index.heads,)
    of_kind = {NEAR: None, CHOSEN: CompressedShape(width, rates[CHOSEN], True, index.rope, index.width, window, first, behind, 0),
               HEAVY: CompressedShape(width, rates[HEAVY], False, index.rope, 0, window, first, (), 0)}
    room = max(of_kind[kind].layer_state_floats for kind in set(kinds) - {NEAR})
    of_kind |= {kind: replace(shape, state_size=room) for kind, shape in of_kind.items() if shape is not None}
    own = CompressedAttentionConfig(tuple(of_kind[kind] for kind in kinds), rank, groups, inner,
                                    keys.integer("hc_sinkhorn_iters", 20, high=1000),
                     keys.number("hc_eps", 1e-6))
    sources = tuple(layer if kind == CHOSEN else None for layer, kind in enumerate(kinds))
    return own, IndexerConfig(index, sources, True, ("rms", made.norm_eps)) if CHOSEN in kinds else None


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, under the published names."""
    compressed, hidden, width, prefix = config.compressed_attention, config.hidden_size, config.head_dim, f"model.layers.{layer}."
    heads, inside = config.num_attention_heads, config.num_attention_heads * width // compressed.output_groups
    sizes = {"input_norm": ("attn_norm.weight", hidden), "post_norm": ("ffn_norm.weight", hidden), "k": ("attn.wkv.weight", width, hidden),
             "k_norm": ("attn.norm.weight", width), "q_a": ("attn.wq_a.weight", compressed.query_rank, hidden),
             "q_a_norm": ("attn.q_norm.weight", compressed.query_rank), "q_b": ("attn.wq_b.weight", heads * width, compressed.query_rank),
             "sinks": ("attn.attn_sink", heads), "o": ("attn.wo_b.weight", hidden, compressed.output_groups * compressed.output_group_rank)}
    rules = {role: TensorRule(prefix + name, tuple(shape)) for role, (name, *shape) in sizes.items()}
    rules["k_norm"] = replace(rules["k_norm"], also=(f"{prefix}attn.kv_norm.weight",))  # as published; transformers writes the other
    whole = f"{prefix}attn.wo_a.weight"
    for group in range(compressed.output_groups):
        place = (whole, group * compressed.output_group_rank, compressed.output_groups * compressed.output_group_rank)
        rules[f"groups.{group}.o_in"] = TensorRule(f"{prefix}attn.wo_a.{group}.weight", (compressed.output_group_rank, inside),
                                                   part_of=place)
    if (shape := compressed.shapes[layer]) is not None:
        rules |= _key_tensors(f"{prefix}attn.compressor.", ("key_rows", "key_weights", "key_bias", "key_norm"), shape, shape.width, hidden)
    if config.indexer is not None and (index := config.indexer.shape_of(layer)) is not None:
        place, roles = f"{prefix}attn.indexer.", ("index_rows", "index_row_weights", "index_bias", "index_norm")
        rules |= _key_tensors(f"{place}compressor.", roles, shape, index.width, hidden)
        rules |= {"index_q": TensorRule(f"{place}wq_b.weight", (index.heads * index.width, compressed.query_rank), plain=True),
                  "index_weights": TensorRule(f"{place}weights_proj.weight", (index.heads, hidden), plain=True)}
    for role, name in (("attn_mix", "hc_attn"), ("mlp_mix", "hc_ffn")):
        rules |= hyper_connection_tensors(config, role, [f"{prefix}{name}_{part}" for part in ("fn", "base", "scale")],
                                          2 + config.residual_streams, 3)
    experts = moe_tensors(config, f"{prefix}ffn.", NAMES, correction="gate.bias")
    if layer in config.moe.hash_routed_layers:
        experts.pop("correction", None)
    return rules | experts


def _key_tensors(place: str, roles: tuple[str, ...], shape: CompressedShape, width: int, hidden: int) -> dict[str, TensorRule]:
    """Matrices of the compressor, for keys of `width` channels. Not quantized: they select what attention sees, and are small."""
    rows, weights, bias, norm = roles
    made = shape.rows_per_token * width
    return {rows: TensorRule(f"{place}wkv.weight", (made, hidden), plain=True),
            weights: TensorRule(f"{place}wgate.weight", (made, hidden), plain=True),
            bias: TensorRule(f"{place}ape", (shape.tokens_per_key, made), coefficients=True),
            norm: TensorRule(f"{place}norm.weight", (width,))}


def hyper_connection_tensors(config: ModelConfig, role: str, names: list[str], each: int, scales: int,
                 also: tuple[str, ...] = ()) -> dict[str, TensorRule]:
    """What a token says of its streams: so many numbers `each`."""
    count = config.residual_streams
    shapes = (count * each, count * config.hidden_size), (count * each,), (scales,)
    others = [(name,) for name in also] or [()] * 3
    return {role + end: TensorRule(name, shape, other, plain=len(shape) > 1)
            for end, name, shape, other in zip(("", "_base", "_scale"), names, shapes, others, strict=True)}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, moe = (config.vocab_size, config.hidden_size), config.moe
    rules = {"embed": TensorRule("model.embed_tokens.weight", table, ("embed.weight",)),
             "norm": TensorRule("model.norm.weight", (config.hidden_size,))}
    rules |= hyper_connection_tensors(config, "leave_mix", [f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")], 1, 1,
                          ("hc_head_fn", "hc_head_base", "hc_head_scale"))
    rules |= {f"picks.{layer}": TensorRule(f"model.layers.{layer}.ffn.gate.tid2eid", (config.vocab_size, moe.experts_per_token),
                                           coefficients=True)
              for layer in sorted(moe.hash_routed_layers)}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("head.weight", table, ("lm_head.weight",))}


@narrowing
def block(x: object, at: Layer, picked: object | None = None) -> object:
    """As `llama.block`, of residual streams x [T, S * D]. `picked`: corrections of scores [T, E] in hash-routed layers. Taps get a branch's
    input where they get x in other families, except for block_out; q_in, the input of the norm between q_a and q_b; attn_out before o."""
    w = at.w
    compressed = w.compressed_attention
    x = write_branch(at.ops, x, attention(x, at), w.o, compressed.attn_hyper_connection)
    picked = None if picked is None else last_of(picked, len(x))
    return stream_mlp(x, at, compressed.mlp_hyper_connection, at.config.hidden_act, picked)


def write_branch(ops: BlockOps, x: object, gave: object, last: Linear, around: HyperConnection | GatedResidual) -> object:
    """Streams x behind a branch whose `last` matrix reads what it `gave`: of as many tokens, the last ones, as that is of."""
    if len(gave) < len(x):
        x = last_of(x, len(gave))
        ops.read_streams(x, around)  # recompute the coefficients for the remaining rows
    (branch,) = ops.norm_linear(gave, None, [last])
    return ops.write_streams(x, branch, around)


def stream_mlp(x: object, at: Layer, around: HyperConnection | GatedResidual, act: str, picked: object | None = None) -> object:
    """The second half of a block of streams; `act`: the activation of experts, `picked`: what corrects their scores in the layer's
    place."""
    ops, w, config = at.ops, at.w, at.config
    own = ops.read_streams(x, around)
    at.tap("mlp_in", own)
    if w.experts:
        branch = ops.expert_branch(own, w.post_norm, w.router, w.experts, w.parallel_experts, config.moe.routing, act,
                                   at.observer("visits"), w.correction_bias if picked is None else picked, w.shared_expert)
    else:
        branch = ops.shared_block_mlp(own, w.post_norm, w.gate, w.up, w.down, config.hidden_act, (), at.observer("mlp_hidden"))
    x = ops.write_streams(x, branch, around)
    at.tap("block_out", x)
    return x


def attention(x: object, at: Layer) -> object:
    """The attention output before `o`, [T, N]."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    compressed, maker, heads, width = w.compressed_attention, w.compressed_attention.compressor, config.num_attention_heads, config.head_dim
    y = ops.read_streams(x, compressed.attn_hyper_connection)
    at.tap("block_in", y)
    beside = () if maker is None else (*maker.projections, *(() if w.indexer is None else (w.indexer.weights,)))
    k, low, *made = ops.norm_linear(y, w.input_norm, [w.k, compressed.q_a, *beside])
    at.tap("q_in", low)
    if maker is not None:
        kv.compress(made[: len(maker.projections)], maker, rope)
    k = ops.rope_heads(ops.copy(k), 1, width, positions, None, w.k_norm)  # before queries take its place
    k = ops.rope_tails(k, 1, width, positions, rope)
    if w.indexer is not None:
        shape = config.indexer.shape
        (by,) = ops.norm_linear(low, compressed.q_a_norm, [w.indexer.q])
        kv.choose(ops.rope_tails(by, shape.heads, shape.width, positions, rope), None, made[-1])
    (q,) = ops.norm_linear(low, compressed.q_a_norm, [compressed.q_b])
    q = ops.rope_tails(ops.rope_heads(q, heads, width, positions, None, compressed.q_b_norm), heads, width, positions, rope)
    at.tap_heads(q, k, k)
    attended = kv.attend(q, k, k, w.sinks)
    attended = ops.rope_tails(attended, heads, width, last_of(positions, len(attended)), rope, True)
    gave = ops.grouped_linear(attended, compressed.output_groups)
    at.tap("attn_out", gave)
    return gave
