"""What GGUF files leave to be known of a family, or say by their tensors: put into the config.json that their keys have made."""

from __future__ import annotations

import numpy as np

from ...offload.gguf import GgufHeader, shown_value
from ...offload.header import CheckpointError, damaged
from ..config import MAX_LAYERS
from ..config_rope import GLOBAL, GROWTH, LOCAL
from . import (
    apertus,
    bitnet,
    channel_decays,
    cohere2_moe,
    falcon_h1,
    gemma3n,
    half_layers,
    jamba,
    kolibri1,
    laguna,
    latent_attention,
    linear_attention,
    llama4,
    mamba,
    mamba2,
    minicpm3,
    muse_glimmer,
    short_conv,
    state_spaces,
    swash,
)
from .architectures import SHARED_WIDTH

REPAIR = "the file is damaged or was converted wrongly: download it again, or another one"
SIGMOID = 2  # how experts are scored
USUAL_WINDOW = 4096  # of every size of Gemma 2, EXAONE 4 and StarCoder 2
USUAL_WINDOW_MOE = 128  # of K-EXAONE
USUAL_THETA = 10_000.0
AFMOE_EVERY = OLMO3_EVERY = EXAONE4_EVERY = COHERE2_EVERY = 4  # all but the last of so many layers have a window
KOLIBRI_EVERY = 5  # the same of Kolibri 1
EXAONE4_LAYERS = 64  # of the one size that has windows
PATTERN = ".attention.sliding_window_pattern"
OTHER_SCALE = {"gemma2": 46, "gemma3": 62, "gemma-embedding": 0}  # the layers of the one size whose scores are scaled by width over heads


def add_family(header: GgufHeader, raw: dict[str, object]) -> None:
    """Put into `raw`, a config.json in the making, what the family has beside its keys. Raises CheckpointError."""
    stated = raw.pop("sliding_window", None)
    window = stated or None  # files of Phi 4 state 0 for none
    if raw["model_type"] == "gemma2" and stated is None:
        window = USUAL_WINDOW  # early files leave it out
    if raw["model_type"] in ("gemma2", "gemma3_text", "gemma3n_text") and not window:
        key = f"{header.metadata['general.architecture']}.attention.sliding_window"
        how = "lacks key" if stated is None else "states 0 for"
        raise CheckpointError(f"{header.path} {how} {key}: how far its layers with a window see is not known",
                              "the file was converted wrongly: take another conversion, or the folder of the checkpoint")
    if raw.get("num_local_experts") == 0:  # llama files state it of dense models too
        del raw["num_local_experts"]
        raw.pop("num_experts_per_tok", None)
    if raw["model_type"] == minicpm3.FAMILY:
        raw["sliding_window"] = window
        minicpm3.add_minicpm3(header, raw)
    elif "linear_head_dim" in raw:
        _scored(header, raw)
        raw["sliding_window"] = window
        channel_decays.add_channel_decays(header, header.metadata["general.architecture"], raw)
    elif "kv_lora_rank" in raw:
        latent_attention.add_latent_attention(header, raw)
    elif raw["model_type"] in ("dots1", "glm4_moe"):
        _glm(header, raw)
    elif raw["model_type"] == bitnet.FAMILY:
        raw["sliding_window"] = window
        bitnet.add_bitnet(header, raw)
    elif raw["model_type"] == mamba.NAME:
        raw["sliding_window"] = window
        mamba.add_mamba(header, raw)
    elif raw["model_type"] == mamba2.NAME:
        raw["sliding_window"] = window
        mamba2.add_mamba2(header, raw)
    elif raw["model_type"] == jamba.FAMILY:
        raw["sliding_window"] = window
        jamba.add_jamba(header, raw)
    elif "conv_L_cache" in raw:
        raw["sliding_window"] = window
        short_conv.add_short_conv(header, header.metadata["general.architecture"], raw)
    elif "linear_num_key_heads" in raw:
        raw["sliding_window"] = window
        linear_attention.add_linear_attention(header, header.metadata["general.architecture"], raw)
    elif raw["model_type"] == llama4.FAMILY:
        llama4.add_llama4(header, raw, stated)
    elif raw["model_type"] == swash.DENSE:
        swash.add_swash(header, raw, window, layer_types(header, raw["num_hidden_layers"], 1))
    elif raw["model_type"] == apertus.FAMILY:
        raw |= {"sliding_window": window, "attention_bias": "blk.0.attn_q.bias" in header.tensors}
        raw.setdefault("rope_theta", USUAL_THETA)
        apertus.add_apertus(header, raw)
    elif raw["model_type"] == gemma3n.FAMILY:
        gemma3n.add_gemma3n(header, raw, layer_types(header, raw["num_hidden_layers"], gemma3n.PATTERN), window)
    elif raw["model_type"] == falcon_h1.FAMILY:
        raw["sliding_window"] = window
        falcon_h1.add_falcon_h1(header, raw)
    elif raw["model_type"] == half_layers.FAMILY:
        _scored(header, raw)
        raw["sliding_window"] = window
        half_layers.add_half_layers(header, header.metadata["general.architecture"], raw)
    elif raw["model_type"] == "ernie4_5_moe":
        raw |= {"moe_num_shared_experts": raw.get("moe_num_shared_experts", 0), "rope_theta": raw.get("rope_theta", USUAL_THETA)}
        _shared(header, raw, "moe_num_shared_experts")
    elif raw["model_type"] == "minimax_m2":
        _scored(header, raw)
        raw |= {"sliding_window": window, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
    elif raw["model_type"] == laguna.FAMILY:
        _scored(header, raw)
        laguna.add_laguna(header, raw, window)
    elif raw["model_type"] == kolibri1.FAMILY:
        kolibri1.add_kolibri1(header, raw, window, layer_types(header, raw["num_hidden_layers"], KOLIBRI_EVERY))
    elif raw["model_type"] == muse_glimmer.FAMILY:
        muse_glimmer.add_muse_glimmer(raw, window, layer_types(header, raw["num_hidden_layers"], muse_glimmer.EVERY))
    elif raw["model_type"] == "afmoe":
        _scored(header, raw)
        raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": window, "layer_types":
                layer_types(header, raw["num_hidden_layers"], AFMOE_EVERY if window else 1)}
        for key, usual in (("route_norm", False), ("num_dense_layers", 0)):  # what llama.cpp takes for granted
            raw.setdefault(key, usual)
    elif raw["model_type"] == "exaone_moe":
        _exaone_moe(header, raw, window if stated is not None else USUAL_WINDOW_MOE)
    elif raw["model_type"] == "minicpm":
        raw["sliding_window"] = window
        _minicpm(header, raw)
    elif raw["model_type"] == "bailing_moe_v2":
        _scored(header, raw)
        raw["sliding_window"] = window
        for key, usual in (("routed_scaling_factor", 1.0), ("norm_topk_prob", False), ("partial_rotary_factor", 1.0)):
            raw.setdefault(key, usual)  # what llama.cpp takes for granted
        raw["moe_router_enable_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
        _without_those_behind(raw)
    elif raw["model_type"] == "hy_v3":
        _hy3(header, raw)
    elif raw["model_type"] == cohere2_moe.FAMILY:
        cohere2_moe.add_cohere2_moe(header, raw, window, layer_types(header, raw["num_hidden_layers"], cohere2_moe.EVERY))
    elif raw["model_type"] in ("cohere", "cohere2"):
        raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": window}
        if raw["model_type"] == "cohere":
            raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
        if raw["model_type"] == "cohere2":
            raw["layer_types"] = layer_types(header, raw["num_hidden_layers"], COHERE2_EVERY)
    elif raw["model_type"] in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        if raw["model_type"] == "hunyuan_v1_moe":
            _shared(header, raw, "num_shared_expert")
        raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": window}
    elif raw["model_type"] == "qwen2_moe":
        raw["qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
    if raw["model_type"] == "llama" and "num_local_experts" in raw:
        raw |= {"model_type": "mixtral", "sliding_window": window}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "llama":
        biased = "blk.0.attn_q.bias" in header.tensors
        if window:
            raw |= {"model_type": "mistral", "sliding_window": window}
        else:
            raw |= {"attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "ministral3":
        if not raw.get(GROWTH):  # as files of Mistral Small have none
            raw |= {"model_type": "mistral"}
            raw.pop(GROWTH, None)
        raw["sliding_window"] = window
    elif raw["model_type"] == "seed_oss":
        raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": window,
                "attention_out_bias": "blk.0.attn_output.bias" in header.tensors}
    elif raw["model_type"] in ("ernie4_5", "glm", "glm4"):
        biased = any(f"blk.0.{part}.bias" in header.tensors for part in ("attn_q", "attn_qkv"))
        raw |= {"sliding_window": window, "use_bias" if raw["model_type"] == "ernie4_5" else "attention_bias": biased}
        if isinstance(heads := raw["num_attention_heads"], int) and heads > 0:  # where the families have widths of their own
            raw.setdefault("head_dim", raw["hidden_size"] // heads)
        raw.setdefault(*(("rope_theta", USUAL_THETA) if raw["model_type"] == "ernie4_5" else ("partial_rotary_factor", 1.0)))
    elif raw["model_type"] == "nemotron":
        raw |= {"sliding_window": window, "attention_bias": "blk.0.attn_output.bias" in header.tensors,
                "mlp_bias": "blk.0.ffn_up.bias" in header.tensors, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
    elif raw["model_type"] == "stablelm":
        raw |= {"sliding_window": window, "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
                "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
                "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
                "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "falcon":  # of which llama.cpp runs those with attention and MLP side by side alone
        apart = "blk.0.attn_norm_2.weight" in header.tensors
        raw |= {"sliding_window": window, "bias": "blk.0.attn_qkv.bias" in header.tensors, "new_decoder_architecture": True,
                "num_ln_in_parallel_attn": 2 if apart else 1}
        raw.setdefault("num_kv_heads", raw["num_attention_heads"])
        raw.pop("head_dim", None)
    elif raw["model_type"] == "gpt_neox":
        raw |= {"sliding_window": window, "attention_bias": any(f"blk.0.{part}.bias" in header.tensors for part in ("attn_qkv", "attn_q")),
                "rotary_pct": raw.pop("partial_rotary_factor", 1.0)}
    elif raw["model_type"] == "internlm2":
        raw |= {"sliding_window": window, "bias": "blk.0.attn_q.bias" in header.tensors}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "olmo":
        raw |= {"sliding_window": window, "clip_qkv": raw.get("clip_qkv") or None,  # 0 for none
                "attention_bias": "blk.0.attn_q.bias" in header.tensors}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "phi":
        raw |= {"sliding_window": window, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}
        raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    elif raw["model_type"] == "starcoder2":
        if stated is None:  # llama.cpp passes it over, and converters do not write it
            window = USUAL_WINDOW
        raw |= {"use_bias": "blk.0.attn_output.bias" in header.tensors, "sliding_window": window}
    elif raw["model_type"] == "exaone4":
        if stated is None and raw["num_hidden_layers"] == EXAONE4_LAYERS:
            window = USUAL_WINDOW
        every = EXAONE4_EVERY if window else 1
        raw |= {"sliding_window": window, "layer_types": layer_types(header, raw["num_hidden_layers"], every)}
    elif raw["model_type"] == "olmo2":
        local = raw.pop("rope_local_base_freq", raw.get("rope_theta", USUAL_THETA))
        if window:
            raw |= {"model_type": "olmo3", "sliding_window": window, "rope_parameters": {LOCAL: {"rope_theta": local}},
                    "layer_types": layer_types(header, raw["num_hidden_layers"], OLMO3_EVERY)}
            raw.setdefault("rope_theta", USUAL_THETA)
    elif window and raw["model_type"].startswith("qwen"):
        raw |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    elif raw["model_type"] in ("gemma2", "gemma3_text", "phi3") or window:
        raw["sliding_window"] = window
    elif raw["model_type"] == "granitemoehybrid":
        state_spaces.add_state_spaces(header, header.metadata["general.architecture"], raw)
    elif raw["model_type"] in ("granite", "granitemoe"):
        if raw.get("shared_intermediate_size") == 0:
            del raw["shared_intermediate_size"]
        if "shared_intermediate_size" in raw:
            raw["model_type"] = "granitemoeshared"
        biased = "blk.0.attn_q.bias" in header.tensors
        raw |= {"attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors}
        if "attention_multiplier" not in raw:
            damaged(header.path, f"lacks key {raw['model_type']}.attention.scale")
    if (layers := OTHER_SCALE.get(header.metadata["general.architecture"])) is not None and isinstance(raw["num_attention_heads"], int):
        whole = raw["num_hidden_layers"] == layers and raw["num_attention_heads"] > 0
        raw["query_pre_attn_scalar"] = raw["hidden_size"] / raw["num_attention_heads"] if whole else raw.get("head_dim", 256)


def _exaone_moe(header: GgufHeader, raw: dict[str, object], window: int | None) -> None:
    _scored(header, raw)
    _shared(header, raw, "num_shared_experts")
    raw.setdefault("norm_topk_prob", False)
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("routed_scaling_factor", 1.0)  # in a config.json an absent one is 2.5
    _without_those_behind(raw)
    layers = raw["num_hidden_layers"]
    every = EXAONE4_EVERY if window else 1
    raw |= {"sliding_window": window, "layer_types": layer_types(header, layers, every)}


def _minicpm(header: GgufHeader, raw: dict[str, object]) -> None:
    """Multipliers as they are, which a checkpoint states by depth and width; early files are of models that have the same ones."""
    raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if not {"scale_emb", "scale_depth", "dim_model_base"} & raw.keys():
        raw |= {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
        return
    added, divisor, layers, hidden = (raw.get(key, 1.0) for key in ("scale_depth", "dim_model_base", "num_hidden_layers", "hidden_size"))
    for key, value in (("residual_scale", added), ("logit_scale", divisor)):
        if not isinstance(value, float | int) or not 1e-9 < value < 1e9:
            damaged(header.path, f"states minicpm.{key} {shown_value(value)}, expected a number above 0")
    if type(layers) is int and type(hidden) is int and layers > 0:  # else refused for that
        raw |= {"scale_depth": added * layers**0.5, "dim_model_base": max(1, round(hidden / divisor))}


def _without_those_behind(raw: dict[str, object]) -> None:
    """Count the layers without those behind the last, which files count in."""
    behind, layers = raw.setdefault("num_nextn_predict_layers", 0), raw["num_hidden_layers"]
    if type(behind) is int and type(layers) is int and 0 <= behind < layers:
        raw["num_hidden_layers"] = layers - behind


def _hy3(header: GgufHeader, raw: dict[str, object]) -> None:
    """Which layers have experts is said by their routers alone, and how many are shared by their width."""
    _scored(header, raw)
    width, inside = raw.get(SHARED_WIDTH), raw.get("moe_intermediate_size")
    if "num_shared_experts" not in raw and type(width) is type(inside) is int and inside > 0:
        raw["num_shared_experts"] = width // inside
    _shared(header, raw, "num_shared_experts")
    for key, usual in (("router_scaling_factor", 1.0), ("route_norm", False), ("num_nextn_predict_layers", 0)):
        raw.setdefault(key, usual)  # what llama.cpp takes for granted
    _without_those_behind(raw)
    raw.pop("first_k_dense_replace", None)
    raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    layers = raw["num_hidden_layers"]
    if type(layers) is int and 0 < layers <= MAX_LAYERS:  # else refused for that
        raw["mlp_layer_types"] = ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors else "dense" for layer in range(layers)]


def _shared(header: GgufHeader, raw: dict[str, object], key: str) -> None:
    """Raises CheckpointError for shared experts, of which `key` is the number, that are together of another width than so many."""
    width, count, inside = raw.pop(SHARED_WIDTH, None), raw.get(key), raw.get("moe_intermediate_size")
    if width is not None and type(count) is type(inside) is int and width != count * inside:
        raise CheckpointError(f"{header.path} states a width of {shown_value(width)} for {shown_value(count)} shared experts of "
                              f"{shown_value(inside)}, which is not supported", REPAIR)


def _scored(header: GgufHeader, raw: dict[str, object]) -> None:
    """Raises CheckpointError for scores that are no sigmoids, where the family has no other."""
    name = header.metadata["general.architecture"]
    if raw.pop("scoring_func", SIGMOID) != SIGMOID:
        raise CheckpointError(f"{header.path}: {name}.expert_gating_func is not {SIGMOID}, which is not supported for this architecture",
                              "give the folder of the original checkpoint, if its family is supported")


def _glm(header: GgufHeader, raw: dict[str, object]) -> None:
    """What files say otherwise of a mixture whose scores are corrected."""
    _scored(header, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    raw.setdefault("norm_topk_prob", False)  # what llama.cpp takes for granted, as of rotary positions
    if raw["model_type"] == "glm4_moe":
        raw.setdefault("partial_rotary_factor", 1.0)
        raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
        _without_those_behind(raw)

def layer_types(header: GgufHeader, layers: object, every: int) -> list[str]:
    """Which layers have a window: as the file lists, one truth a layer, or all but the last of so many as it states, else of `every`."""
    key = f"{header.metadata['general.architecture']}{PATTERN}"
    stated = header.metadata.get(key, every)
    if isinstance(stated, np.ndarray) and stated.dtype.kind in "biu" and len(stated) == layers and np.isin(stated, (0, 1)).all():
        return [LOCAL if each else GLOBAL for each in stated]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        return []  # refused for that
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 1:
        damaged(header.path, f"states {key} {shown_value(stated)}, expected a truth for each of {layers} layers, or a number")
    return [LOCAL if (layer + 1) % stated else GLOBAL for layer in range(layers)]
