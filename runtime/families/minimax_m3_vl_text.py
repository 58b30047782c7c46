"""MiniMax M3: QK norms per head, RoPE on half of each head, MLPs and experts with clamped gates, and in most layers an indexer that
selects blocks of tokens for each KV head (`kernels/indexer_shape.py`)."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.indexer_shape import IndexShape
from ...kernels.layout import PAGE, SWISH_LIMIT, SWISH_SLOPE
from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import RopeConfig, rope_config
from ..indexer_config import IndexerConfig
from ..layer import Layer, last_of, narrowing
from ..weights.index_weights import choose
from . import TensorRule, llama, mixtral, qwen3_moe
from .glm4_moe_lite import DENSE, SPARSE
from .llama import feed_forward
from .mixtral import moe_config, moe_tensors

# Training, and MTP layers, which are not loaded.
KEYS_HARMLESS = frozenset({"mtp_transformer_layers", "num_mtp_modules", "num_nextn_predict_layers", "router_jitter_noise", "use_mtp"})
REFUSED_UNLESS = {
    "attention_bias": False, "attention_output_gate": False, "mlp_bias": False, "n_shared_experts": 1, "qk_norm_type": "per_head",
    "scoring_func": "sigmoid", "sliding_window": None, "swiglu_alpha": SWISH_SLOPE, "swiglu_limit": SWISH_LIMIT, "use_gemma_norm": True,
    "use_qk_norm": True, "use_routing_bias": True}
NAMES = qwen3_moe.NAMES  # of an expert's matrices, once the store has split them
SIZES = {"vocab_size": 200_064, "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64}
THETA, FULL, SPARSE_ATTENTION = 5e6, "full_attention", "minimax_m3_sparse"
# Key at the top level -> its name in the section sparse_attention_config; and the only supported values of other keys there.
SECTION_KEYS = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim", "index_block_size": "sparse_block_size",
                "index_topk_blocks": "sparse_topk_blocks", "index_local_blocks": "sparse_local_block"}
SECTION_VALUES = {"sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}
TRANSFORMERS_EXPERTS, PUBLISHED_EXPERTS = "mlp", "block_sparse_moe"  # the experts' module in transformers, and in published checkpoints


def config(keys: Keys) -> ModelConfig:
    act = keys.raw.get("hidden_act")
    keys = keys.with_values(hidden_act="silu") if act == "swigluoai" else keys  # the clamped SwiGLU
    base = Defaults(max_position_embeddings=524_288, num_key_value_heads=4, head_dim=128, bos=200_034, eos=(200_020,), sizes=SIZES)
    layers = base.size(keys, "num_hidden_layers")
    section = Keys(keys.section("sparse_attention_config") or {}, "config.json: sparse_attention_config")

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        rope = rope_config(keys, head_dim, positions, THETA, partial=True)
        stated = keys.integer("rotary_dim", None, low=2, high=head_dim)
        if stated not in (None, int(head_dim * rope.partial_rotary_factor)):
            raise ConfigError(f"config.json: rotary_dim {stated} is not partial_rotary_factor {rope.partial_rotary_factor} of a head of "
                              f"{head_dim}", "partial_rotary_factor takes precedence: remove the other key")
        return (rope,) * layers

    width, shared = base.size(keys, "intermediate_size"), keys.integer("shared_intermediate_size", 3072, high=2**22)
    moe = moe_config(keys, 128, 4, width, True, _sparse_layers(keys, layers), "num_local_experts", sigmoid=True, correction_bias=True,
                     routed_scale=keys.number("routed_scaling_factor", 2.0), shared_expert_dim=shared)
    dense = keys.with_values(intermediate_size=keys.integer("dense_intermediate_size", 12_288, high=2**22))
    config = decoder_config(dense, base, ropes, qk_norm=True, norm_kind="rms+1", moe=moe)
    if config.hidden_act != "silu":
        raise keys.fail("hidden_act", "swigluoai or silu, which mean the clamped SwiGLU of this family")
    return replace(config, hidden_act="clamped_swish", indexer=_indexer_config(keys, section, config))


def _sparse_layers(keys: Keys, layers: int) -> list[int]:
    """The layers with experts: as mlp_layer_types or moe_layer_freq list them, else all."""
    switches, kinds = keys.flags("moe_layer_freq", layers), keys.layer_types("mlp_layer_types", layers, (DENSE, SPARSE))
    sparse = [kind == SPARSE for kind in kinds] if kinds is not None else switches or [True] * layers
    return [layer for layer, is_sparse in enumerate(sparse) if is_sparse]


def _indexer_config(keys: Keys, section: Keys, config: ModelConfig) -> IndexerConfig | None:
    """The indexer, None without sparse layers. Keys in the section take precedence over those at the top level. Raises ConfigError."""
    defaults = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": PAGE, "index_topk_blocks": 16, "index_local_blocks": 1}
    sizes = {name: section.integer(section_key, keys.integer(name, defaults[name], low=0, high=2**20), low=0, high=2**20)
             for name, section_key in SECTION_KEYS.items()}
    for key, value in SECTION_VALUES.items():
        if section.raw.get(key, value) != value:
            raise section.fail(key, show(value))
    layers, kinds = config.num_hidden_layers, keys.layer_types("layer_types", config.num_hidden_layers, (FULL, SPARSE_ATTENTION))
    switches, without_values = section.flags("sparse_attention_freq", layers), section.flags("sparse_disable_index_value", layers)
    is_sparse = [kind == SPARSE_ATTENTION for kind in kinds] if kinds is not None else switches or [False] * layers
    if without_values is not None and any(sparse and not valueless for sparse, valueless in zip(is_sparse, without_values, strict=True)):
        raise section.fail("sparse_disable_index_value", "1 for every sparse layer")
    if not any(is_sparse):
        return None
    heads, width, block, num_blocks, local_blocks = sizes.values()
    rope = int(config.head_dim * config.ropes[0].partial_rotary_factor)
    are_blocks_supported = block >= 1 and PAGE % block == 0 and num_blocks >= 1 and local_blocks <= num_blocks
    if heads != config.num_key_value_heads or not are_blocks_supported or not rope <= width <= 1024:
        raise ConfigError(f"config.json: index_n_heads {heads}, index_head_dim {width}, index_block_size {block}, index_topk_blocks "
                          f"{num_blocks} and index_local_blocks {local_blocks} are not supported together",
                          f"as many heads as num_key_value_heads, at least as wide as the rotated part, blocks that divide {PAGE}")
    shape = IndexShape(heads, width, rope, num_blocks, block, True, local_blocks)
    sources = tuple(layer if sparse else None for layer, sparse in enumerate(is_sparse))
    return IndexerConfig(shape, sources, False, ("rms+1", config.norm_eps))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, under the published names; those of transformers are alternatives."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    rules = llama.layer_tensors(config, layer)
    if layer in config.moe.layers:
        for role in NAMES:
            del rules[role]
        rules |= _expert_tensors(config, prefix)
    else:
        fused, width = f"{prefix}mlp.gate_up_proj.weight", config.intermediate_size
        rules |= {role: replace(rules[role], part_of=(fused, i * width, 2 * width)) for i, role in enumerate(("gate", "up"))}
    index = None if config.indexer is None else config.indexer.shape_of(layer)
    if index is not None:
        attention = f"{prefix}self_attn."
        for matrix, size in (("q", index.heads * index.width), ("k", index.width)):
            rules[f"index_{matrix}"] = TensorRule(f"{attention}index_{matrix}_proj.weight", (size, hidden),
                                                  (f"{attention}indexer.{matrix}_proj.weight",), plain=True)
            rules[f"index_{matrix}_norm"] = TensorRule(f"{attention}index_{matrix}_norm.weight", (index.width,),
                                                       (f"{attention}indexer.{matrix}_norm.weight",))
    return rules


def _expert_tensors(config: ModelConfig, prefix: str) -> dict[str, TensorRule]:
    """Router, experts and the shared expert, whose gate and up are fused in transformers."""
    published = moe_tensors(config, f"{prefix}{PUBLISHED_EXPERTS}.", mixtral.NAMES, correction="e_score_correction_bias")
    transformers, width = moe_tensors(config, f"{prefix}{TRANSFORMERS_EXPERTS}.", NAMES), config.moe.shared_expert_dim
    rules = {}
    for role, rule in published.items():
        name = transformers[role].name if role.startswith("shared.") else rule.name
        rule = replace(rule, name=name.replace(f".{TRANSFORMERS_EXPERTS}.", f".{PUBLISHED_EXPERTS}."), also=(transformers[role].name,))
        if role in ("shared.gate", "shared.up"):
            part = ("shared.gate", "shared.up").index(role)
            rule = replace(rule, part_of=(f"{prefix}{TRANSFORMERS_EXPERTS}.shared_experts.gate_up_proj.weight", part * width, 2 * width))
        rules[role] = rule
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return llama.outer_tensors(config)


@narrowing
def block(x: object, at: Layer) -> object:
    """`llama.block`, with an indexer that selects blocks in sparse layers."""
    ops, w, kv, positions, rope, config = at.ops, at.w, at.kv, at.positions, at.rope, at.config
    if w.indexer is None:
        return llama.block(x, at)
    at.tap("block_in", x)
    heads, (kv_heads, head_dim) = config.num_attention_heads, config.kv_heads_of(at.number)
    q, k, v, *index = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v, w.indexer.q, w.indexer.k])
    choose(ops, w.indexer, *index, None, kv, positions, rope, config.indexer.shape)
    q = ops.rope_heads(q, heads, head_dim, positions, rope, w.q_norm)
    k = ops.rope_heads(k, kv_heads, head_dim, positions, rope, w.k_norm)
    at.tap_heads(q, k, v)
    attended = kv.attend(q, k, v)
    at.tap("attn_out", attended)
    return feed_forward(ops.linear_add(attended, w.o, last_of(x, len(attended))), at)
