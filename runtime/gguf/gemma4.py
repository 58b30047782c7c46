"""GGUF metadata of Gemma 4: heads, widths and windows per layer, and partial rotation of wide heads through frequency divisors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import GgufHeader, Value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import ModelConfig
from ..config_rope import GLOBAL, LOCAL, ROTATED_SHARE

NAME, FAMILY = "gemma4", "gemma4_text"
# Key below the architecture's name -> key of config.json.
KEYS = {"attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
        "attention.shared_kv_layers": "num_kv_shared_layers", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts", "expert_feed_forward_length": "moe_intermediate_size",
        "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"}
PER_LAYER_KEYS = ("attention.head_count_kv", "feed_forward_length")  # keys with one value, or one per layer
HEAD_LENGTHS = ("attention.value_length", "attention.value_length_swa", "rope.dimension_count", "rope.dimension_count_swa")
REQUIRED = ("attention.key_length", "attention.key_length_swa", "attention.sliding_window", "attention.sliding_window_pattern",
            "embedding_length_per_layer_input")
# Tensor of a layer in the file -> in the checkpoint, without kind; FULL_NAMES with kind.
NAMES = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
         "post_norm": "post_per_layer_input_norm", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
         "post_ffw_norm_1": "post_feedforward_layernorm_1",
         "post_ffw_norm_2": "post_feedforward_layernorm_2"}
FULL_NAMES = {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.weight": "router.proj.weight",
              "ffn_gate_inp.scale": "router.scale",
              "ffn_down_exps.scale": "router.per_expert_scale"}
OUTER = {"per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
         "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
         "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}
ROLES = {"layer_scale": "layer_output_scale.weight", "router_scale": "ffn_gate_inp.scale", "expert_scales": "ffn_down_exps.scale",
         "input_gate": "inp_gate", "input_out": "proj", "input_after": "post_norm", "expert_norm": "pre_ffw_norm_2",
         "experts_after": "post_ffw_norm_2", "mlp_after": "post_ffw_norm_1", "layer_embed": "per_layer_token_embd",
         "layer_proj": "per_layer_model_proj",
         "layer_norm": "per_layer_proj_norm"}
NO_ROTATION = 1e30  # frequency factor of a channel pair that does not rotate
# Written also for layers that share the keys and values of an earlier layer.
UNUSED_TENSORS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\..+")


def per_layer(header: GgufHeader, name: str, key: str, layers: object) -> list[int]:
    """The values of a per-layer key of architecture `name`; a single value is repeated. Raises CheckpointError."""
    value = header.metadata.get(f"{name}.{key}")
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) == layers:
        return value.tolist()
    if type(value) is not int or type(layers) is not int:
        damaged(header.path, f"states {name}.{key} that is neither a number nor one for each layer")
    return [value] * min(layers, 1 << 16)


def per_layer_heads(header: GgufHeader, name: str, raw: dict[str, object], kinds: list[str]) -> dict[str, object]:
    """Entries of config.json for head widths and KV heads, which differ between layers with and without a sliding window.

    Removes the widths from `raw`. Raises CheckpointError.
    """
    heads = per_layer(header, name, PER_LAYER_KEYS[0], len(kinds))
    local_head_dim, global_head_dim = raw.pop("head_dim"), raw.pop("global_head_dim")
    for key, expected in zip(HEAD_LENGTHS, (global_head_dim, local_head_dim) * 2, strict=True):
        if header.metadata.get(f"{name}.{key}", expected) != expected:
            raise CheckpointError(f"{header.path} states {name}.{key} {header.metadata[f'{name}.{key}']} for heads of {expected}, "
                                  "which is not supported", "keys and values must have one width and be rotated entirely")
    local_kv_heads = next((count for count, kind in zip(heads, kinds) if kind == LOCAL), heads[0])
    return {"head_dim": local_head_dim, "num_key_value_heads": local_kv_heads, "layer_types": kinds, "per_layer_config": {
        str(i): {"head_dim": global_head_dim, "num_key_value_heads": count}
        for i, (count, kind) in enumerate(zip(heads, kinds)) if kind == GLOBAL}}


def add_gemma4(header: GgufHeader, raw: dict[str, object], kinds: list[str], divisors: np.ndarray | None, window: object) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states.

    kinds: layer types.
    divisors: RoPE frequency factors, None if the file has none.
    window: width of the sliding window.

    Raises CheckpointError.
    """
    layers, tensors = len(kinds), header.tensors
    global_head_dim, widths = raw["global_head_dim"], per_layer(header, NAME, PER_LAYER_KEYS[1], layers)
    shared = raw.setdefault("num_kv_shared_layers", 0)
    raw |= {**per_layer_heads(header, NAME, raw, kinds), "sliding_window": window}
    first_shared = layers - shared if type(shared) is int and 0 <= shared < layers else layers
    is_double_wide = first_shared < layers and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (1 + (is_double_wide and i >= first_shared)) for i in range(layers)]:
        damaged(header.path, f"states {NAME}.feed_forward_length that differs by layer, but not where keys and values are shared")
    raw |= {"intermediate_size": widths[0], "use_double_wide_mlp": is_double_wide, "attention_bias": "blk.0.attn_q.bias" in tensors,
            "attention_k_eq_v": any(kind == GLOBAL and f"blk.{i}.attn_v.weight" not in tensors
                                    for i, kind in enumerate(kinds[:first_shared])),
            "enable_moe_block": bool(raw.get("num_experts"))}
    if not raw["enable_moe_block"]:
        raw |= {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
    per_layer_embedding = tensors.get("per_layer_token_embd.weight")
    if per_layer_embedding is not None:
        raw["vocab_size_per_layer_input"] = per_layer_embedding.shape[0]
    rotated_share = 1.0
    if divisors is not None:
        count = int((divisors == 1.0).sum())
        if len(divisors) != global_head_dim // 2 or (divisors[:count] != 1.0).any() or (divisors[count:] < NO_ROTATION / 1e9).any():
            damaged(header.path, "has RoPE frequency factors that neither keep nor disable a channel pair")
        rotated_share = count / len(divisors)
    raw["rope_parameters"] = {GLOBAL: {"rope_type": "proportional", ROTATED_SHARE: rotated_share,
                                       "rope_theta": raw.pop("rope_theta", 1_000_000.0)},
                              LOCAL: {"rope_type": "default", "rope_theta": raw.pop("rope_local_base_freq", 10_000.0)}}


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint tensor is a K or V weight of a layer that uses an earlier layer's KV cache; converters write them anyway."""
    match = UNUSED_TENSORS.fullmatch(name)
    return bool(config.kv_sources) and match is not None and int(match[1]) not in config.attention_layers


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the family, without the architecture's prefix."""
    global_layer = next(layer for layer, window in enumerate(config.windows) if window is None)
    local_layer = next(layer for layer, window in enumerate(config.windows) if window is not None)
    (_, global_head_dim), (_, local_head_dim) = config.kv_heads_of(global_layer), config.kv_heads_of(local_layer)
    layers = range(config.num_hidden_layers)
    lengths = dict(zip(HEAD_LENGTHS, (global_head_dim, local_head_dim) * 2, strict=True))
    keys: dict[str, Value] = {
        "attention.key_length": global_head_dim, "attention.key_length_swa": local_head_dim, **lengths,
        "rope.freq_base_swa": float(config.ropes[local_layer].theta),
        "attention.shared_kv_layers": config.num_hidden_layers - len(config.attention_layers),
        "embedding_length_per_layer_input": config.per_layer_input_dim,
        "attention.sliding_window_pattern": np.array([config.windows[layer] is not None for layer in layers], np.int32),
        "attention.head_count_kv": np.array([config.kv_heads_of(layer)[0] for layer in layers], np.int32),
        "feed_forward_length": np.array([config.intermediate_size_of(layer) for layer in layers], np.int32)}
    return keys if config.moe is None else {**keys, "expert_feed_forward_length": config.moe.expert_dim}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    kinds = {window is None for window in config.windows}
    yield len(kinds) < 2, "has only one type of layer"
    global_ropes, local_ropes = ([rope for rope, window in zip(config.ropes, config.windows) if (window is None) == is_global]
                                 for is_global in (True, False))
    yield any(rope.kind != "proportional" or rope.params["factor"] != 1.0 for rope in global_ropes), "scales its RoPE"
    yield any(rope.kind != "default" for rope in local_ropes), "scales RoPE in layers with a window"
    first_shared = len(config.attention_layers)
    shared = {(config.windows[layer] is None, source) for layer, source in enumerate(config.kv_sources) if layer >= first_shared}
    # llama.cpp assumes that the last two layers with their own KV are one with a window and one without, in this order.
    yield bool(shared - {(True, first_shared - 1),
                         (False, first_shared - 2)}), "shares keys and values of other layers than the last two that have some"
    other_vocab = bool(config.per_layer_input_dim) and config.per_layer_input_vocab != config.vocab_size
    yield other_vocab, "has another vocabulary in what layers are given"


def rope_factors(config: ModelConfig) -> np.ndarray:
    """RoPE frequency factors of layers without a window, float32 [head_dim / 2]."""
    global_layer = next(layer for layer, window in enumerate(config.windows) if window is None)
    channel_pairs = config.kv_heads_of(global_layer)[1] // 2
    rotated_pairs = int(config.ropes[global_layer].params[ROTATED_SHARE] * channel_pairs)
    return np.where(np.arange(channel_pairs) < rotated_pairs, 1.0, NO_ROTATION).astype("<f4")

