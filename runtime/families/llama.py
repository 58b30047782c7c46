"""Llama 2, 3, 3.1, 3.2 and their many relatives: the pre-norm decoder block with grouped-query attention and a gated MLP.

The math of a block is written here once. Most other families are this one with other biases, norms, multipliers or windows, all of which
are data: a bias is part of its Linear; QK norms are an argument of `rope_heads`, post-norms and multipliers of `linear_add`; windows,
scales and soft caps of scores are bound in the cache.
"""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..layer import Block, Layer, last_of, narrowing
from . import TensorRule

KEYS_HARMLESS: frozenset[str] = frozenset()
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
NAMES: dict[str, str] = {}  # of experts: there are none


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return decoder_config(keys, Defaults(max_position_embeddings=2048, bos=1, eos=(2,)), qkv_bias=bias, o_bias=bias,
                          mlp_bias=keys.flag("mlp_bias", False))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` as stored."""
    hidden, ffn, (kv_heads, head_dim) = config.hidden_size, config.intermediate_size_of(layer), config.kv_heads_of(layer)
    q, kv = config.query_heads_of(layer) * head_dim, kv_heads * head_dim
    queries = 2 * q if config.output_gate_in_q else q
    linears = {  # role: name, out, in, has a bias
        "q": ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        "k": ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        "v": ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        "o": ("self_attn.o_proj", hidden, q, config.o_bias),
        "gate": ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
        "up": ("mlp.up_proj", ffn, hidden, config.mlp_bias),
        "down": ("mlp.down_proj", hidden, ffn, config.mlp_bias),
    }
    norms = {"input_norm": ("input_layernorm", (hidden,)), "post_norm": ("post_attention_layernorm", (hidden,))}
    if config.qk_norm:
        q_shape, k_shape = (head_dim,), (head_dim,)
        if config.qk_norm_per_head:
            q_shape, k_shape = (config.query_heads_of(layer), head_dim), (kv_heads, head_dim)
        elif config.qk_norm_full_width:
            q_shape, k_shape = (q,), (kv,)
        norms |= {"q_norm": ("self_attn.q_norm", q_shape), "k_norm": ("self_attn.k_norm", k_shape)}
    prefix = f"model.layers.{layer}."
    rules = {role: TensorRule(f"{prefix}{name}.weight", shape) for role, (name, shape) in norms.items()}
    for role, (name, out, width, biased) in linears.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", (out, width))
        if biased:
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", (out,))
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, last norm and, unless tied to the embedding, the head; of a listwise reranker the MLP that projects pooled states."""
    table, inner = (config.vocab_size, config.hidden_size), config.pooled_inner_dim
    rules = {"embed": TensorRule("model.embed_tokens.weight", table), "norm": TensorRule("model.norm.weight", (config.hidden_size,))}
    if config.listwise_reranker:
        rules |= {"vector_in": TensorRule("projector.0.weight", (inner, config.hidden_size), plain=True),
                  "vector": TensorRule("projector.2.weight", (config.pooled_dim, inner), plain=True)}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def feed_forward(x: object, at: Layer) -> object:
    """The second half of a block: MLP or experts, added to x."""
    x = mlp_or_experts(x, at)
    at.tap("block_out", x)
    return x


def mlp_or_experts(x: object, at: Layer) -> object:
    """x plus the MLP's or the experts' output. With experts beside an MLP taps get mlp_hidden, then the visits."""
    ops, w, config = at.ops, at.w, at.config
    at.tap("mlp_in", x)
    if w.parallel_experts is not None:
        x = ops.mlp_and_experts(x, w.post_norm, w.gate, w.up, w.down, w.router, w.experts, w.parallel_experts, config.moe.routing,
                                config.hidden_act, at.observer("mlp_hidden"), at.observer("visits"), w.down_norm, w.correction_bias)
    elif w.experts:
        x = ops.moe(x, w.post_norm, w.router, w.experts, config.moe.routing, config.expert_act(at.number), at.observer("visits"),
                    w.correction_bias, w.shared_expert)
    else:
        observer, factor = at.observer("mlp_hidden"), config.residual_multiplier
        if w.bundles is not None:
            x = ops.bundled_mlp(x, w.post_norm, w.gate, w.bundles, config.hidden_act, observer, w.down_norm, factor)
        else:
            x = ops.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act, observer, w.down_norm, factor, w.ffn_sub_norm)
    return x


def attention(x: object, at: Layer) -> object:
    """The first half of a block: attention, added to x. Returns the last rows only, if the cache attends with no others."""
    ops, w, config, positions = at.ops, at.w, at.config, at.positions
    at.tap("block_in", x)
    heads, (kv_heads, head_dim) = config.query_heads_of(at.number), config.kv_heads_of(at.number)
    q, k, v, gates = _project(x, at, heads, head_dim)
    rope = at.rope
    if config.alibi_slopes:
        q, k = add_alibi_channels(q, k, at, kv_heads, head_dim)
        rope = None
    if config.v_head_dim:
        v = ops.pad_heads(v, kv_heads, head_dim, None, 2)
        if config.multipliers:
            ops.scale_in_place(v, config.multiplier("v"))
    q = ops.rope_heads(q, heads, head_dim, positions, rope if rope is None else rope.queries or rope, w.q_norm)
    at.tap("q", q)
    if k is not None:
        k = ops.rope_heads(k, kv_heads, head_dim, positions, rope, w.k_norm)
        if w.v_norm is not None:
            v = ops.rope_heads(v, kv_heads, head_dim, positions, None, w.v_norm)
        at.tap("k", k)
        at.tap("v", v)
    if w.sinks is not None:
        at.tap("sinks", w.sinks)
    attended = at.kv.attend(q, k, v, w.sinks)  # [T or fewer, H * head_dim]
    if config.v_head_dim:
        attended = ops.unpad_heads(attended, heads, config.v_head_dim)
    if config.output_gate_in_q or config.output_gate:
        attended = ops.gate_heads(attended, last_of(gates, len(attended)), heads, head_dim, config.output_gate_softplus)
    if w.attn_sub_norm is not None:
        attended = ops.norm_in_place(attended, w.attn_sub_norm)
    at.tap("attn_out", attended)
    return ops.linear_add(attended, w.o, last_of(x, len(attended)), w.o_norm, config.residual_multiplier)


def _project(x: object, at: Layer, heads: int, head_dim: int) -> tuple[object, object | None, object | None, object | None]:
    """Queries [T, H * head_dim], keys and values [T, KVH * head_dim], and gates of the attention output, which may be fused with the
    queries. Keys and values are None in a layer that uses another layer's, gates in a family without."""
    ops, w, config = at.ops, at.w, at.config
    outputs = ops.norm_linear(x, w.input_norm, [linear for linear in (w.q, w.k, w.v, w.attn_gate) if linear is not None])
    if config.clip_qkv is not None:
        for y in outputs:
            ops.clip(y, config.clip_qkv)
    gates = None
    if w.attn_gate is not None:
        *outputs, gates = outputs
    q, k, v = (*outputs, None, None)[:3]
    if k is not None and v is None:
        v = ops.copy(k)
    if config.output_gate_in_q:
        q, gates = ops.split_query_gates(q, heads, head_dim), q
    return q, k, v, gates


def add_alibi_channels(q: object, k: object, at: Layer, kv_heads: int, head_dim: int) -> tuple[object, object]:
    """Queries and keys [T, H * head_dim] with the channels that add ALiBi's bias to scores."""
    query_channels, key_channels = at.w.alibi_channels
    q = at.ops.pad_heads(q, len(query_channels), head_dim, query_channels, 0)
    k = at.ops.pad_heads(k, kv_heads, head_dim, key_channels, 1)
    return q, at.ops.rope_heads(k, kv_heads, head_dim, at.positions, at.rope, None)


def recurrent_mixer(x: object, at: Layer) -> object:
    """The first half of a block with a recurrent state in place of attention. Taps get state_out, the input of the output matrix, instead
    of q, k, v and attn_out."""
    ops, w = at.ops, at.w
    at.tap("block_in", x)
    mixed = at.kv.mix(ops.norm_linear(x, w.input_norm, w.recurrent.projections), w.recurrent.params)  # [T, values]
    at.tap("state_out", mixed)
    return ops.linear_add(mixed, w.recurrent.out_proj, last_of(x, len(mixed)), w.o_norm, at.config.residual_multiplier)


def decoder_block(attention_half: Block, mlp_half: Block = feed_forward) -> Block:
    """A block x[T, D] -> x[T, D] of two halves: `attention_half`, or in recurrent layers `recurrent_mixer`, then `mlp_half`.

    Taps get views that the next op may overwrite: block_in and mlp_in before their norms, q and k after rotation, attn_out and mlp_hidden
    before `o` and `down`; of experts the visits (`Routed`) instead of mlp_hidden."""

    @narrowing
    def block(x: object, at: Layer) -> object:
        return mlp_half(attention_half(x, at) if at.w.recurrent is None else recurrent_mixer(x, at), at)

    return block


def with_entry_norm(run: Block) -> Block:
    """The same block, where the input of the first layer is replaced by its norm."""

    @narrowing
    def block(x: object, at: Layer) -> object:
        return run(x if at.w.entry_norm is None else at.ops.norm_stream(x, at.w.entry_norm), at)

    return block


block = decoder_block(attention)
