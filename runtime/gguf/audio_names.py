"""Tensor names of audio encoders in mmproj files, by projector type; the counterpart of `projector_names.py`, for `audio/`.

The same file may hold a vision encoder, whose tensors have other prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .projector_names import Projector

AUDIO_PREFIXES = ("a.", "mm.a.")  # of audio tensors
POSITION_EMBD = "a.position_embd.weight"

_WHISPER = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "fc1", "ffn_down": "fc2"}
_WHISPER_CONVS = {"a.conv1d.1": "audio_tower.conv1", "a.conv1d.2": "audio_tower.conv2"}
_WHISPER_OUTER = {**_WHISPER_CONVS, "a.position_embd": "audio_tower.embed_positions", "a.post_ln": "audio_tower.layer_norm"}
_TWO_LAYER_MLP = {f"mm.a.mlp.{number}": f"multi_modal_projector.linear_{number}" for number in (1, 2)}
_CAUSAL_CONFORMER = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_out": "self_attn.post",
           "ffn_up": "feed_forward1.ffw_layer_1", "ffn_down": "feed_forward1.ffw_layer_2", "ffn_up_1": "feed_forward2.ffw_layer_1",
                     "ffn_down_1": "feed_forward2.ffw_layer_2", "conv_pw1": "lconv1d.linear_start", "conv_pw2": "lconv1d.linear_end"}
_QFORMER = {"self_attn_q": "attention.attention.query", "self_attn_k": "attention.attention.key",
            "self_attn_v": "attention.attention.value",
            "self_attn_out": "attention.output.dense", "self_attn_norm": "attention.output.LayerNorm",
            "cross_attn_q": "crossattention.attention.query", "cross_attn_k": "crossattention.attention.key",
            "cross_attn_v": "crossattention.attention.value",
            "cross_attn_out": "crossattention.output.dense", "cross_attn_norm": "crossattention.output.LayerNorm",
            "ffn_up": "intermediate_query.dense", "ffn_down": "output_query.dense", "ffn_norm": "output_query.LayerNorm"}


def _whisper_projector(outer: Mapping[str, str], width: str, **fields: object) -> Projector:
    return Projector("audio_tower.layers.", _WHISPER, outer, width, blocks_prefix="a.blk", **fields)


# Projector type -> tensor names.
AUDIO_PROJECTORS: Mapping[str, Projector] = {
    "qwen2a": _whisper_projector({**_WHISPER_OUTER, "mm.a.fc": "multi_modal_projector.linear"}, "mm.a.fc.weight",
                                 text_architectures=("qwen2",)),
    "musicflamingo": _whisper_projector({**_WHISPER_OUTER, **_TWO_LAYER_MLP}, "mm.a.mlp.2.weight", text_architectures=("qwen2",)),
    "voxtral": _whisper_projector({**_WHISPER_OUTER, **_TWO_LAYER_MLP}, "mm.a.mlp.2.weight", text_architectures=("llama",)),
    "qwen2.5o": _whisper_projector({**_WHISPER_CONVS, "a.post_ln": "audio_tower.ln_post", "mm.a.fc": "audio_tower.proj"}, "mm.a.fc.weight",
                                   text_architectures=("qwen2vl",), ignored=frozenset({POSITION_EMBD})),
    "qwen3a": _whisper_projector(
        {**{f"a.conv2d.{number}": f"audio_tower.conv2d{number}" for number in (1, 2, 3)}, "a.conv_out": "audio_tower.conv_out",
         "a.post_ln": "audio_tower.ln_post", **{f"mm.a.mlp.{number}": f"audio_tower.proj{number}" for number in (1, 2)}},
         "mm.a.mlp.2.weight",
        text_architectures=("qwen3vl", "qwen3vlmoe", "qwen3"), ignored=frozenset({POSITION_EMBD})),
    "gemma4a": Projector(
        "audio_tower.layers.",
        {**_CAUSAL_CONFORMER, "ffn_norm": "feed_forward1.pre_layer_norm", "ffn_post_norm": "feed_forward1.post_layer_norm",
         "ffn_norm_1": "feed_forward2.pre_layer_norm", "ffn_post_norm_1": "feed_forward2.post_layer_norm", "attn_pre_norm": "norm_pre_attn",
         "attn_post_norm": "norm_post_attn", "attn_k_rel": "self_attn.relative_k_proj", "conv_norm": "lconv1d.pre_layer_norm",
         "norm_conv": "lconv1d.conv_norm", "conv_dw": "lconv1d.depthwise_conv1d", "ln2": "norm_out"},
        {**{f"a.conv1d.{number}{theirs}": f"audio_tower.subsample_conv_projection.layer{number}.{ours}" for number in (0, 1)
            for theirs, ours in (("", "conv"), (".norm", "norm"))},
         "a.input_projection": "audio_tower.subsample_conv_projection.input_proj_linear", "a.pre_encode.out": "audio_tower.output_proj",
         "mm.a.input_projection": "embed_audio.embedding_projection"},
        "mm.a.input_projection.weight", blocks_prefix="a.blk", full_names={"per_dim_scale.weight": "self_attn.per_dim_scale"},
        softplus_suffixes=("per_dim_scale.weight",), clamped_linears=frozenset(_CAUSAL_CONFORMER), text_architectures=("gemma4",)),
    "gemma4ua": Projector("", {}, {"mm.a.input_projection": "embed_audio.embedding_projection"}, "mm.a.input_projection.weight",
                          text_architectures=("gemma4",)),  # no layers
    "granite_speech": Projector(
        "encoder.layers.",
        {"ln1": "attn.pre_norm", "attn_q": "attn.to_q", "attn_k": "attn.to_k", "attn_v": "attn.to_v", "attn_out": "attn.to_out",
         "ln2": "post_norm", "ffn_norm": "ff1.pre_norm", "ffn_up": "ff1.up_proj", "ffn_down": "ff1.down_proj", "ffn_norm_1": "ff2.pre_norm",
         "ffn_up_1": "ff2.up_proj", "ffn_down_1": "ff2.down_proj", "norm_conv": "conv.norm", "conv_pw1": "conv.up_conv",
         "conv_dw": "conv.depth_conv.conv", "conv_norm": "conv.batch_norm", "conv_pw2": "conv.down_conv"},
        {"a.input_projection": "encoder.input_linear", "a.enc_ctc_out": "encoder.out", "a.enc_ctc_out_mid": "encoder.out_mid",
         "a.proj_norm": "projector.qformer.layernorm", "a.proj_linear": "projector.linear"},
        "a.proj_linear.weight", blocks_prefix="a.blk", other_groups={"a.proj_blk": ("projector.qformer.encoder.layer.", _QFORMER)},
        full_names={"attn_rel_pos_emb": "attn.rel_pos_emb.weight", "a.proj_query": "projector.query"},
        fused_parts=("attn.to_k", "attn.to_v"), fused_name="attn.to_kv", text_architectures=("granite",)),
}
