"""GGUF metadata of families whose checkpoints use their own code's layer names rather than `model.layers`: StarCoder 1, BLOOM, MPT and
DBRX, with q, k and v fused in one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from ..families import bloom, dbrx, mpt
from .architecture import CLAMP_KQV, LAYER_NORM, ROUTER, Architecture
from .family_context import FamilyContext

Raw = dict[str, object]  # the config.json being assembled
MAX_ALIBI_BIAS = "attention.max_alibi_bias"
DBRX_NORM_EPSILON = 1e-5  # of DBRX's norms; no config states it
_QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}


def _outer(embed: str, norm: str) -> dict[str, str]:
    return {"token_embd.weight": f"transformer.{embed}.weight", "output_norm.weight": f"transformer.{norm}.weight",
            "output_norm.bias": f"transformer.{norm}.bias"}


ARCHITECTURES = {
    "starcoder": Architecture("gpt_bigcode", layers_prefix="transformer.h", config={"activation_function": "gelu_pytorch_tanh"}, fused=_QKV,
                              epsilon_key=LAYER_NORM, roles={"positions": "position_embd"}, outer_names={
                                  "position_embd.weight": "model.embed_positions.weight", "output_norm.bias": "model.norm.bias"}, keys={
                                  LAYER_NORM: "layer_norm_epsilon", "feed_forward_length": "n_inner"}, layer_names={
                                  "attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_q": "attn.q_proj", "attn_k": "attn.k_proj",
                                  "attn_v": "attn.v_proj", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "bloom": Architecture("bloom", layers_prefix="transformer.h", fused=_QKV, epsilon_key=LAYER_NORM,
                          roles={"entry_norm": "token_embd_norm"}, outer_names={
        **_outer("word_embeddings", "ln_f"), **{f"token_embd_norm.{kind}": f"transformer.word_embeddings_layernorm.{kind}"
                                                for kind in ("weight", "bias")}}, keys={LAYER_NORM: "layer_norm_epsilon"}, layer_names={
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", **{
            f"attn_{role}": f"self_attention.{target}" for role, target in bloom.PARTS.items()}, "attn_output": "self_attention.dense",
            "ffn_up":
        "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}),
    "mpt": Architecture("mpt", layers_prefix="transformer.blocks", fused=_QKV, epsilon_key=LAYER_NORM,
                        other_keys=frozenset({MAX_ALIBI_BIAS}),
                        required_keys=(MAX_ALIBI_BIAS,), outer_names=_outer("wte", "norm_f"),
                        keys={LAYER_NORM: "layer_norm_epsilon",
                              CLAMP_KQV: "clip_qkv"}, layer_names={
                            "attn_norm": "norm_1", "ffn_norm": "norm_2", **{f"attn_{role}": f"attn.{role}_proj" for role in "qkv"},
                            "attn_output": mpt.NAMES["o"], "ffn_up": mpt.NAMES["up"], "ffn_down": mpt.NAMES["down"]}),
    "dbrx": Architecture("dbrx", layers_prefix="transformer.blocks", fused=_QKV, epsilon_key=LAYER_NORM, required_keys=(CLAMP_KQV,
        "expert_count"), roles={
        "post_norm": "attn_output_norm"}, outer_names=_outer("wte", "norm_f"), experts=("ffn", dbrx.NAMES), full_names={
        f"{ROUTER}.weight": "ffn.router.layer.weight"}, keys={
        CLAMP_KQV: "clip_qkv", "expert_count": "moe_num_experts", "expert_used_count": "moe_top_k",
        "feed_forward_length": "ffn_hidden_size"}, other_keys=frozenset({LAYER_NORM}), layer_names={
        "attn_norm": dbrx.PLACES["input_norm"], "attn_output_norm": dbrx.PLACES["post_norm"], "attn_output": dbrx.PLACES["o"], **{
            f"attn_{role}": f"{dbrx.ATTENTION}.{role}_proj" for role in "qkv"}})}


def add_starcoder(context: FamilyContext, raw: Raw) -> None:
    """Complete `raw`, the config.json being assembled, as the functions below do. Raises CheckpointError."""
    raw["sliding_window"] = context.window
    if raw.pop("num_key_value_heads", 1) != 1:
        raise CheckpointError(f"{context.header.path} states several KV heads, which is not supported for this architecture",
                              "models of this family have one for all queries")


def add_bloom(context: FamilyContext, raw: Raw) -> None:
    raw["sliding_window"] = context.window


def add_mpt(context: FamilyContext, raw: Raw) -> None:
    if (stated := context.numbers(MAX_ALIBI_BIAS, 0)) != [mpt.MAX_ALIBI_BIAS]:
        raise CheckpointError(f"{context.header.path} states {context.name}.{MAX_ALIBI_BIAS} {shown_value(stated)}, which is not supported",
                              f"slopes of this family reach {mpt.MAX_ALIBI_BIAS}")
    raw |= {"sliding_window": context.window, "attn_config": {"clip_qkv": raw.pop("clip_qkv", None) or None}}


def add_dbrx(context: FamilyContext, raw: Raw) -> None:
    epsilon = context.numbers(LAYER_NORM, 0)
    if len(epsilon) != 1 or not math.isclose(epsilon[0], DBRX_NORM_EPSILON, rel_tol=1e-5):
        raise CheckpointError(f"{context.header.path} states {context.name}.{LAYER_NORM} {shown_value(epsilon)}, which is not supported",
                              f"norms of this family have an epsilon of {DBRX_NORM_EPSILON:g}")
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "max_position_embeddings": "max_seq_len"}
    raw |= {"sliding_window": context.window, **{config_key: raw[name] for name, config_key in names.items()}, "attn_config": {
        "clip_qkv": raw.pop("clip_qkv") or None, "kv_n_heads": raw.pop("num_key_value_heads", raw["num_attention_heads"]),
        "rope_theta": raw.pop("rope_theta", 10_000.0)},
            "ffn_config": {key: raw.pop(key) for key in ("moe_num_experts", "moe_top_k", "ffn_hidden_size")}}


COMPLETE_CONFIG = {"gpt_bigcode": add_starcoder, "bloom": add_bloom, "mpt": add_mpt, "dbrx": add_dbrx}
ALIBI_METADATA: dict[str, Value] = {MAX_ALIBI_BIAS: float(mpt.MAX_ALIBI_BIAS)}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express, or of what llama.cpp assumes otherwise."""
    width = config.projected_head_dim * config.num_attention_heads
    heads = f"{config.num_attention_heads} heads of {config.projected_head_dim}"
    yield width != config.hidden_size, f"has {heads} for a width of {config.hidden_size}"
    yield config.attn_scale not in (None, config.projected_head_dim**-0.5), "does not scale its scores by head_dim"
    yield config.family == "dbrx" and not config.moe.renormalise, "does not normalize its expert weights"
    yield config.family == "dbrx" and config.clip_qkv is None, "does not cut what attention reads"
