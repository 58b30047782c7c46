"""What GGUF files leave to be known of a family, or say by their tensors: put into the config.json that their keys have made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...offload.gguf import GgufHeader, shown_value
from ...offload.header import CheckpointError, damaged
from ..config import MAX_LAYERS
from ..families.hunyuan_v1_dense import STRETCH
from . import (
    apertus,
    bitnet,
    channel_decays,
    cohere2_moe,
    deci,
    deepseek4,
    falcon_h1,
    gemma3n,
    glm5_next,
    half_layers,
    jamba,
    kolibri1,
    laguna,
    latent_attention,
    linear_attention,
    llama4,
    mamba,
    mamba2,
    mellum,
    mimo2,
    minicpm3,
    minimax3,
    mllama,
    muse_glimmer,
    qwen4,
    rwkv7,
    short_conv,
    state_spaces,
    step35,
    swash,
)
from .architecture import SHARED_WIDTH
from .plain_families import PLAIN, USUAL_THETA, add_others
from .windows import AFMOE_EVERY, COHERE2_EVERY, EXAONE4_EVERY, KOLIBRI_EVERY, USUAL_WINDOW_MOE, Given, given

REPAIR = "the file is damaged or was converted wrongly: download it again, or another one"
SIGMOID = 2  # how experts are scored
OTHER_SCALE = {"gemma2": 46, "gemma3": 62, "gemma-embedding": 0}  # the layers of the one size whose scores are scaled by width over heads
Raw = dict[str, object]  # a config.json in the making


def add_family(header: GgufHeader, raw: Raw) -> None:
    """Put into `raw`, a config.json in the making, what the family has beside its keys. Raises CheckpointError."""
    of = given(header, raw)
    if raw.get("num_local_experts") == 0:  # llama files state it of dense models too
        del raw["num_local_experts"]
        raw.pop("num_experts_per_tok", None)
    family = raw["model_type"]
    own = OWN.get(family) or next((add for key, add in BY_KEY.items() if key in raw), None)
    if own is not None:
        own(of, raw)
    PLAIN.get(raw["model_type"], add_others)(of, raw)
    if (layers := OTHER_SCALE.get(of.name)) is not None and isinstance(raw["num_attention_heads"], int):
        whole = raw["num_hidden_layers"] == layers and raw["num_attention_heads"] > 0
        raw["query_pre_attn_scalar"] = raw["hidden_size"] / raw["num_attention_heads"] if whole else raw.get("head_dim", 256)


def _windowed(add: Callable[[GgufHeader, Raw], None]) -> Callable[[Given, Raw], None]:
    """Of a family for which the window is all that is added to what its own file adds."""
    def run(of: Given, raw: Raw) -> None:
        raw["sliding_window"] = of.window
        add(of.header, raw)

    return run


def _named(add: Callable[[GgufHeader, str, Raw], None], scored: bool = False) -> Callable[[Given, Raw], None]:
    """`_windowed` of several architectures, which `add` is told; `scored`: experts by sigmoids alone."""
    def run(of: Given, raw: Raw) -> None:
        if scored:
            _scored(of.header, raw)
        raw["sliding_window"] = of.window
        add(of.header, of.name, raw)

    return run


def _state_spaces(of: Given, raw: Raw) -> None:
    if not of.window:
        state_spaces.add_state_spaces(of.header, of.name, raw)


def _deepseek4(of: Given, raw: Raw) -> None:
    deepseek4.add_deepseek4(of.header, raw, of.window)


def _swash(of: Given, raw: Raw) -> None:
    swash.add_swash(of.header, raw, of.window, of.layer_types(raw, 1))


def _apertus(of: Given, raw: Raw) -> None:
    raw |= {"sliding_window": of.window, "attention_bias": of.has("attn_q.bias")}
    raw.setdefault("rope_theta", USUAL_THETA)
    apertus.add_apertus(of.header, raw)


def _gemma3n(of: Given, raw: Raw) -> None:
    gemma3n.add_gemma3n(of.header, raw, of.layer_types(raw, gemma3n.PATTERN), of.window)


def _ernie_moe(of: Given, raw: Raw) -> None:
    raw |= {"moe_num_shared_experts": raw.get("moe_num_shared_experts", 0), "rope_theta": raw.get("rope_theta", USUAL_THETA)}
    raw["moe_use_aux_free"] = any(name.endswith(".exp_probs_b.bias") for name in of.header.tensors)
    _shared(of.header, raw, "moe_num_shared_experts")


def _minimax(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    raw |= {"sliding_window": of.window, "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}


def _laguna(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    laguna.add_laguna(of.header, raw, of.window)


def _kolibri1(of: Given, raw: Raw) -> None:
    kolibri1.add_kolibri1(of.header, raw, of.window, of.layer_types(raw, KOLIBRI_EVERY))


def _muse_glimmer(of: Given, raw: Raw) -> None:
    muse_glimmer.add_muse_glimmer(raw, of.window, of.layer_types(raw, muse_glimmer.EVERY))


def _step35(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    step35.add_step35(of.header, raw, of.window, of.layer_types(raw, 1))


def _afmoe(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    raw |= {"attention_bias": of.has("attn_q.bias"), "sliding_window": of.window,
            "layer_types": of.layer_types(raw, AFMOE_EVERY if of.window else 1)}
    for key, usual in (("route_norm", False), ("num_dense_layers", 0)):  # what llama.cpp takes for granted
        raw.setdefault(key, usual)


def _bailing(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    raw["sliding_window"] = of.window
    for key, usual in (("routed_scaling_factor", 1.0), ("norm_topk_prob", False), ("partial_rotary_factor", 1.0)):
        raw.setdefault(key, usual)  # what llama.cpp takes for granted
    raw["moe_router_enable_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in of.header.tensors)
    _without_those_behind(raw)


def _cohere2_moe(of: Given, raw: Raw) -> None:
    cohere2_moe.add_cohere2_moe(of.header, raw, of.window, of.layer_types(raw, cohere2_moe.EVERY))


def _cohere(of: Given, raw: Raw) -> None:
    raw |= {"attention_bias": of.has("attn_q.bias"), "sliding_window": of.window, "use_qk_norm": of.has("attn_q_norm.weight")}


def _cohere2(of: Given, raw: Raw) -> None:
    raw |= {"attention_bias": of.has("attn_q.bias"), "sliding_window": of.window, "layer_types": of.layer_types(raw, COHERE2_EVERY)}


def _hunyuan(of: Given, raw: Raw) -> None:
    raw |= {"attention_bias": of.has("attn_q.bias"), "sliding_window": of.window}
    if (stretched := raw.pop(STRETCH, None)) and isinstance(width := raw.get("head_dim"), int) and width > 2:
        raw["rope_theta"] = raw.get("rope_theta", USUAL_THETA) * stretched ** (width / (width - 2))


def _hunyuan_moe(of: Given, raw: Raw) -> None:
    _shared(of.header, raw, "num_shared_expert")
    _hunyuan(of, raw)


def _qwen2_moe(of: Given, raw: Raw) -> None:
    raw["qkv_bias"] = of.has("attn_q.bias")


def _exaone_moe(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    _shared(of.header, raw, "num_shared_experts")
    raw.setdefault("norm_topk_prob", False)
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("routed_scaling_factor", 1.0)  # in a config.json an absent one is 2.5
    _without_those_behind(raw)
    window = USUAL_WINDOW_MOE if of.stated is None else of.window
    raw |= {"sliding_window": window, "layer_types": of.layer_types(raw, EXAONE4_EVERY if window else 1)}


def _mimo2(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    mimo2.add_mimo2(of.header, raw, of.window, of.layer_types(raw, 1))


def _minimax3(of: Given, raw: Raw) -> None:
    _scored(of.header, raw)
    raw["sliding_window"] = of.window
    minimax3.add_minimax3(of.header, raw)


def _minicpm(of: Given, raw: Raw) -> None:
    """Multipliers as they are, which a checkpoint states by depth and width; early files are of models that have the same ones."""
    raw["sliding_window"] = of.window
    raw["attention_bias"] = of.has("attn_q.bias")
    if not {"scale_emb", "scale_depth", "dim_model_base"} & raw.keys():
        raw |= {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
        return
    added, divisor, layers, hidden = (raw.get(key, 1.0) for key in ("scale_depth", "dim_model_base", "num_hidden_layers", "hidden_size"))
    for key, value in (("residual_scale", added), ("logit_scale", divisor)):
        if not isinstance(value, float | int) or not 1e-9 < value < 1e9:
            damaged(of.header.path, f"states minicpm.{key} {shown_value(value)}, expected a number above 0")
    if type(layers) is int and type(hidden) is int and layers > 0:  # else refused for that
        raw |= {"scale_depth": added * layers**0.5, "dim_model_base": max(1, round(hidden / divisor))}


def _hy3(of: Given, raw: Raw) -> None:
    """Which layers have experts is said by their routers alone, and how many are shared by their width."""
    _scored(of.header, raw)
    width, inside = raw.get(SHARED_WIDTH), raw.get("moe_intermediate_size")
    if "num_shared_experts" not in raw and type(width) is type(inside) is int and inside > 0:
        raw["num_shared_experts"] = width // inside
    _shared(of.header, raw, "num_shared_experts")
    for key, usual in (("router_scaling_factor", 1.0), ("route_norm", False), ("num_nextn_predict_layers", 0)):
        raw.setdefault(key, usual)  # what llama.cpp takes for granted
    _without_those_behind(raw)
    raw.pop("first_k_dense_replace", None)
    raw["attention_bias"] = of.has("attn_q.bias")
    layers, tensors = raw["num_hidden_layers"], of.header.tensors
    if type(layers) is int and 0 < layers <= MAX_LAYERS:  # else refused for that
        raw["mlp_layer_types"] = ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(layers)]


def _glm(of: Given, raw: Raw) -> None:
    """What files say otherwise of a mixture whose scores are corrected."""
    _scored(of.header, raw)
    raw["attention_bias"] = of.has("attn_q.bias")
    raw.setdefault("norm_topk_prob", False)  # what llama.cpp takes for granted, as of rotary positions
    if raw["model_type"] == "glm4_moe":
        raw.setdefault("partial_rotary_factor", 1.0)
        raw["use_qk_norm"] = of.has("attn_q_norm.weight")
        _without_those_behind(raw)


def _without_those_behind(raw: Raw) -> None:
    """Count the layers without those behind the last, which files count in."""
    behind, layers = raw.setdefault("num_nextn_predict_layers", 0), raw["num_hidden_layers"]
    if type(behind) is int and type(layers) is int and 0 <= behind < layers:
        raw["num_hidden_layers"] = layers - behind


def _shared(header: GgufHeader, raw: Raw, key: str) -> None:
    """Raises CheckpointError for shared experts, of which `key` is the number, that are together of another width than so many."""
    width, count, inside = raw.pop(SHARED_WIDTH, None), raw.get(key), raw.get("moe_intermediate_size")
    if width is not None and type(count) is type(inside) is int and width != count * inside:
        raise CheckpointError(f"{header.path} states a width of {shown_value(width)} for {shown_value(count)} shared experts of "
                              f"{shown_value(inside)}, which is not supported", REPAIR)


def _scored(header: GgufHeader, raw: Raw) -> None:
    """Raises CheckpointError for scores that are no sigmoids, where the family has no other."""
    name = header.metadata["general.architecture"]
    if raw.pop("scoring_func", SIGMOID) != SIGMOID:
        raise CheckpointError(f"{header.path}: {name}.expert_gating_func is not {SIGMOID}, which is not supported for this architecture",
                              "give the folder of the original checkpoint, if its family is supported")


OWN: Mapping[str, Callable[[Given, Raw], None]] = {
    "afmoe": _afmoe, apertus.FAMILY: _apertus, "bailing_moe_v2": _bailing, bitnet.FAMILY: _windowed(bitnet.add_bitnet), "cohere": _cohere,
    deci.FAMILY: lambda of, raw: deci.add_deci(of.header, raw),
    "cohere2": _cohere2, cohere2_moe.FAMILY: _cohere2_moe, deepseek4.FAMILY: _deepseek4, "dots1": _glm,
    "ernie4_5_moe": _ernie_moe,
    "exaone4": lambda of, raw: _without_those_behind(raw), "exaone_moe": _exaone_moe,
    falcon_h1.FAMILY: _windowed(falcon_h1.add_falcon_h1), gemma3n.FAMILY: _gemma3n,
    "glm4": lambda of, raw: _without_those_behind(raw), "glm4_moe": _glm,
    glm5_next.FAMILY: _named(glm5_next.add_glm5_next, scored=True), "granitemoehybrid": _state_spaces,
    half_layers.FAMILY: _named(half_layers.add_half_layers, scored=True), "hunyuan_v1_dense": _hunyuan, "hunyuan_v1_moe": _hunyuan_moe,
    "hy_v3": _hy3, jamba.FAMILY: _windowed(jamba.add_jamba), kolibri1.FAMILY: _kolibri1, laguna.FAMILY: _laguna,
    mellum.FAMILY: lambda of, raw: mellum.add_mellum(raw, of.window, of.layer_types(raw, mellum.EVERY)),
    llama4.FAMILY: lambda of, raw: llama4.add_llama4(of.header, raw, of.stated), mamba.NAME: _windowed(mamba.add_mamba),
    mamba2.NAME: _windowed(mamba2.add_mamba2), mimo2.FAMILY: _mimo2, minimax3.FAMILY: _minimax3, "minicpm": _minicpm,
    minicpm3.FAMILY: _windowed(minicpm3.add_minicpm3),
    "minimax_m2": _minimax, mllama.FAMILY: _windowed(mllama.add_mllama), muse_glimmer.FAMILY: _muse_glimmer,
    "qwen2_moe": _qwen2_moe, qwen4.FAMILY: _named(qwen4.add_qwen4),
    rwkv7.FAMILY: _windowed(rwkv7.add_rwkv7), step35.FAMILY: _step35, swash.DENSE: _swash,
}
# Where several families have a part, a key of that part tells; one that has two of them, as Kimi Linear, goes by the first.
BY_KEY: Mapping[str, Callable[[Given, Raw], None]] = {
    "linear_head_dim": _named(channel_decays.add_channel_decays, scored=True),
    "kv_lora_rank": lambda of, raw: latent_attention.add_latent_attention(of.header, raw),
    "conv_L_cache": _named(short_conv.add_short_conv),
    "linear_num_key_heads": _named(linear_attention.add_linear_attention),
}
