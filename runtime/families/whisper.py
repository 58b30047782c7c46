"""Whisper, speech to text: OPT's layers with cross attention to the audio between self-attention and MLP.

A decoder layer of the checkpoint is two layers here: self-attention, then cross-attention with the MLP. Without audio the second is an MLP
alone. Keys and values of audio are computed once (`runtime/kv/cross_attention_cache.py`).
"""

from __future__ import annotations

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..layer import Layer, narrowing
from . import TensorRule
from .llama import attention
from .opt import feed_forward

# The encoder, which `runtime/audio/whisper.py` reads; training; forced tokens, which generation_config.json states too; and the scale of
# embeddings, which transformers reads and does not apply.
KEYS_HARMLESS = frozenset({
    "activation_dropout", "apply_spec_augment", "classifier_proj_size", "decoder_layerdrop", "dropout",
    "encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers", "forced_decoder_ids", "head_dim", "hidden_act",
    "init_std", "is_encoder_decoder", "mask_feature_length", "mask_feature_min_masks",
    "mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "max_source_positions",
    "median_filter_width", "num_key_value_heads", "num_mel_bins",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "scale_embedding",
    "use_weighted_layer_sum"})
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
# Standard key -> Whisper's, and its default.
SIZES = {"hidden_size": ("d_model", 384), "num_hidden_layers": ("decoder_layers", 4), "num_attention_heads": ("decoder_attention_heads", 6),
         "intermediate_size": ("decoder_ffn_dim", 1536), "max_position_embeddings": ("max_target_positions", 448)}
DEFAULTS = Defaults(max_position_embeddings=448, bos=50_256, eos=(50_256,), tied=True, act=("activation_function", "gelu"), rotary=False,
                    grouped=False, eps_key=None, norm_eps=1e-5, sizes={"vocab_size": 51_865})  # torch's epsilon


def config(keys: Keys) -> ModelConfig:
    limits = {**MAX_SIZES, "num_hidden_layers": MAX_LAYERS // 2, "max_position_embeddings": 1 << 20}
    sizes = {name: keys.integer(whisper_key, default, high=limits[name]) for name, (whisper_key, default) in SIZES.items()}
    layers = sizes["num_hidden_layers"] = 2 * sizes["num_hidden_layers"]
    return decoder_config(keys.with_values(**sizes), DEFAULTS, qkv_bias=True, o_bias=True, mlp_bias=True, norm_kind="layer",
                          position_offset=0, layers_without_mlp=tuple(range(0, layers, 2)),
                          cross_attention_layers=tuple(range(1, layers, 2)))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer, half of a stored one, by role."""
    hidden, ffn, is_cross = config.hidden_size, config.intermediate_size, layer in config.cross_attention_layers
    attention_name = "encoder_attn" if is_cross else "self_attn"
    linears = {role: (f"{attention_name}.{role}_proj", hidden, hidden) for role in "qkv"}
    linears["o"] = f"{attention_name}.out_proj", hidden, hidden
    norms = {"input_norm": f"{attention_name}_layer_norm"}
    if is_cross:
        linears |= {"up": ("fc1", ffn, hidden), "down": ("fc2", hidden, ffn)}
        norms["post_norm"] = "final_layer_norm"
    prefix, rules = f"model.decoder.layers.{layer // 2}.", {}
    for role, name in norms.items():
        rules |= _norm(role, prefix + name, hidden)
    for role, (name, out, width) in linears.items():
        rules[role] = TensorRule(f"{prefix}{name}.weight", (out, width))
        if role != "k":
            rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", (out,))
    return rules


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, positions, final norm and, unless tied to the embedding, the head."""
    table, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    rules = {"embed": TensorRule("model.decoder.embed_tokens.weight", table),
             "positions": TensorRule("model.decoder.embed_positions.weight", (config.max_position_embeddings, hidden)),
             **_norm("norm", "model.decoder.layer_norm", hidden)}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("proj_out.weight", table)}


def _norm(role: str, name: str, width: int) -> dict[str, TensorRule]:
    return {f"{role}{end}": TensorRule(f"{name}.{kind}", (width,)) for end, kind in (("", "weight"), ("_bias", "bias"))}


@narrowing
def block(x: object, at: Layer) -> object:
    """Half of a decoder layer. Taps of cross-attention see the inputs of all matrices but k and v, for tokens with audio."""
    ops, w, kv, config = at.ops, at.w, at.kv, at.config
    if at.number not in config.cross_attention_layers:
        x = attention(x, at)
        at.tap("block_out", x)
        return x
    for span in kv.spans:
        with kv.within(span, w):
            rows = x[span.rows]
            at.tap("block_in", rows)
            attended = kv.attend(ops.norm_linear(rows, w.input_norm, [w.q])[0], span.images)
            at.tap("attn_out", attended)
            ops.linear_add(attended, w.o, rows)
    return feed_forward(x, at)
