"""Nanbeige 4.2 (3B): a looped Llama: every token passes through all layers more than once, each time with its own keys and values; the
final norm is applied to the residual stream after each loop."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map
from .llama import with_entry_norm

# Settings of features that are refused: n-gram embeddings, partial loops, hyper-connections, depth attention.
KEYS_HARMLESS = frozenset({
    "depth_attention_recent_window", "depth_attention_static_anchor_once", "depth_attention_stride", "emb_split_num", "emb_tp_num",
    "enable_h_res_identity", "insert_ngram_layer_idx", "loop_middle_layers", "loop_share_kv", "mhc_diff_for_loop",
    "mhc_double_stream_position_for_loop", "mhc_identity_nohresparam", "mhc_init_gating_factor", "mhc_sinkhorn_iterations",
    "ngram_compressed_tokenizer", "ngram_embedding_hidden_size", "ngram_fused_mode", "ngram_insert_all_layers",
    "ngram_layer_downproject_size", "ngram_mod_force_prime", "ngram_vocab_size_ratio", "num_residual_streams", "skip_ngram_for_input"})
REFUSED_UNLESS = {
    "emb_neighbor_num": None, "enable_depth_attention": False, "enable_double_loop_split": False, "enable_hyper_connection": False,
    "enable_mhc": False, "layer_types": None, "loop_loss_weights": [], "mlp_bias": False, "qk_layernorm": False,
    "skip_loop_final_norm": False, "sliding_window": None}
CODE = r"(configuration|modeling)_nanbeige\.Nanbeige\w+"


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, bos=1, eos=(2,))
    config = looped_config(keys, base, keys.integer("num_loops", 1, high=MAX_LAYERS), qkv_bias=bias, o_bias=bias)
    if keys.integer("kv_channels", config.head_dim) != config.head_dim:
        raise keys.fail("kv_channels", f"the {config.head_dim} of a head")
    return config


def looped_config(keys: Keys, base: Defaults, loops: int, **features: object) -> ModelConfig:
    """`decoder_config` of a model whose stored layers are run `loops` times. Raises ConfigError."""
    layers = base.size(keys, "num_hidden_layers") * loops
    if layers > MAX_LAYERS:
        raise ConfigError(f"config.json: {layers} layers, counted as often as they are repeated, are more than any model has")
    return decoder_config(keys.with_values(num_hidden_layers=layers), base, loops=loops, **features)


def with_loop_norm(config: ModelConfig, layer: int, rules: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """The tensors `rules` of a stored layer, with the final norm as entry norm where another loop begins."""
    starts_loop = layer > 0 and layer % config.stored_layers == 0
    return rules | ({"entry_norm": TensorRule("model.norm.weight", (config.hidden_size,))} if starts_loop else {})


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    return with_loop_norm(config, layer, llama.layer_tensors(config, layer % config.stored_layers))


block = with_entry_norm(llama.block)
