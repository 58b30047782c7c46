"""Tensor names of publishers' own code, which transformers translates on load and save, mapped to those of the families here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# By `model_type`, in turn: what a part of a name is called, and what it becomes.
MISTRAL = (
    (r"^tok_embeddings\.", "model.embed_tokens."), (r"^lerope\.alpha$", "model.rotary_emb.alpha"), (r"^output\.", "lm_head."),
    (r"^(layers|norm)\.", r"model.\1."), (r"\.attention\.", ".self_attn."), (r"\.wq\.", ".q_proj."), (r"\.wo\.", ".o_proj."),
    (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."), (r"\.wkv_b\.", ".kv_b_proj."), (r"\.kv_a_norm\.", ".kv_a_layernorm."),
    (r"\.attention_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.feed_forward\.", ".mlp."),
    (r"(\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."), (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."), (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"), (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"))
HUNYUAN = (
    (r"\.hc_pre\.hc_", ".hc_"), (r"\.hc_attn_layer\.hc_", ".attn_hc."), (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)$", r".hc_\1"), (r"\.learnable_sink_param$", ".sinks"), (r"\.linear_gate\.", ".gate_proj."))
TRANSLATED: Mapping[str, Sequence[tuple[str, str]]] = {"hy_v4": HUNYUAN, "mistral_large4_text": MISTRAL}
SCOPES = {"hy_v4": re.compile(r"model\..+"),
         "mistral_large4_text": re.compile(r"(?:tok_embeddings|lerope|output|layers|norm)\..+")}  # the text part


def translated(name: str, model_type: str) -> str:
    """A tensor's name as its family has it; as it is, where it is no name of such a checkpoint's text part."""
    if model_type not in SCOPES or not SCOPES[model_type].fullmatch(name):
        return name
    for pattern, replacement in TRANSLATED[model_type]:
        name = re.sub(pattern, replacement, name)
    return name
