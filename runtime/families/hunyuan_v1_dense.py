"""Hunyuan (dense, 0.5B to 7B): the Llama block with QK norms after RoPE instead of before it, and NTK-aware RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from ..config_rope import RopeConfig, rope_config
from ..layer import Layer, last_of
from . import TensorRule, llama
from .llama import decoder_block

# The published ones list what models of the family that take images have, and what a head is as wide as, a second time.
KEYS_HARMLESS = frozenset({
    "add_classification_head", "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "attention_head_dim",
    "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id",
    "mask_init_id", "num_media_embeds", "org_vocab_size", "pad_id", "pool_type",
    "routed_scaling_factor", "sep_id", "skip_cls_token", "text_end_id",
    "text_start_id", "video_end_id", "video_start_id", "vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type",
    "vit_norm_type", "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm", "xdrope_section"})
REFUSED_UNLESS = {
    "kv_lora_rank": None, "layer_types": None, "mlp_bias": False, "norm_type": "rms", "num_experts": 1, "position_embedding_xdrope": False,
    "q_lora_rank": None, "sliding_window": None, "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True}
STRETCH = "alpha"  # what the base is multiplied by, to a power
BESIDE = frozenset({"beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"})  # which say nothing where it is given


def config(keys: Keys) -> ModelConfig:
    bias, layers = keys.flag("attention_bias", False), keys.integer("num_hidden_layers", high=MAX_LAYERS)

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        return (_rope(keys, head_dim, positions),) * layers

    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,), norm_eps=1e-5)
    return decoder_config(keys, base, ropes, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _rope(keys: Keys, head_dim: int, positions: int) -> RopeConfig:
    """Of positions called dynamic that state an alpha only the base is larger, whatever the length of the text."""
    section = keys.section("rope_scaling") or keys.section("rope_parameters") or {}
    if "dynamic" not in (section.get("rope_type"), section.get("type")) or not section.get(STRETCH):
        return rope_config(keys, head_dim, positions)
    if head_dim == 2:
        raise ConfigError("config.json: head_dim = 2 is not supported with rotary positions that state an alpha",
                          "NTK scaling by alpha is undefined for heads of two channels")
    plain = {name: value for name, value in section.items() if name == "rope_theta"}
    theta = rope_config(keys.with_values(rope_scaling=None, rope_parameters=plain), head_dim, positions).theta
    alpha = Keys(section, "config.json: rotary positions").number(STRETCH)
    stated = {name: section[name] for name in BESIDE if name in section}
    return RopeConfig(theta * alpha ** (head_dim / (head_dim - 2)), "default", {STRETCH: alpha, **stated})


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return attention_names(llama.layer_tensors(config, layer), layer)


def attention_names(rules: Mapping[str, TensorRule], layer: int) -> dict[str, TensorRule]:
    """The tensors of a layer with the names that norms of q and k have here."""
    prefix = f"model.layers.{layer}.self_attn."
    return {**rules, "q_norm": TensorRule(f"{prefix}query_layernorm.weight", rules["q_norm"].shape),
            "k_norm": TensorRule(f"{prefix}key_layernorm.weight", rules["k_norm"].shape)}


def attention(x: object, at: Layer) -> object:
    """The first half of a block: Llama's, but for the place of the norms of q and k."""
    ops, w, positions, config = at.ops, at.w, at.positions, at.config
    at.tap("block_in", x)
    q, k, v = ops.norm_linear(x, w.input_norm, [w.q, w.k, w.v])
    for y, heads, norm in ((q, config.num_attention_heads, w.q_norm), (k, config.num_key_value_heads, w.k_norm)):
        ops.rope_heads(y, heads, config.head_dim, positions, at.rope, None)
        ops.rope_heads(y, heads, config.head_dim, positions, None, norm)
    at.tap_heads(q, k, v)
    attended = at.kv.attend(q, k, v, None)
    at.tap("attn_out", attended)
    return ops.linear_add(attended, w.o, last_of(x, len(attended)))


block = decoder_block(attention)
