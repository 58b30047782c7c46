"""GGUF metadata of an exported model, family by family, and the limits of what it can express.

Much of a family is not written to the file but hard-coded in its readers: which layers have a window or no rotary positions, how scores
are scaled, that embeddings are multiplied. A model that departs from what llama.cpp assumes is refused, because it would run as another
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ... import EffllmError
from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..config_rope import QUERY_SCALING_BETA
from ..moe_config import MoEConfig
from . import (
    apertus,
    bitnet,
    cohere2_moe,
    deci,
    gemma4,
    glm5_next,
    gpt_oss,
    granite_swash,
    hy_v4,
    jamba,
    kimi_delta_attention,
    kolibri1,
    laguna,
    latent_attention,
    llama4,
    mellum,
    mimo2,
    minicpm3,
    minimax3,
    muse_glimmer,
    nemotron_h,
    qwen4,
    recurrent_layers,
    rwkv7,
    sparse_indexer,
    step35,
    transformer_names,
)
from .architecture import ROPE_FINETUNED, Architecture
from .architectures import ARCHITECTURES
from .family_context import (
    AFMOE_WINDOW_PERIOD,
    COHERE2_WINDOW_PERIOD,
    EXAONE4_WINDOW_PERIOD,
    EXAONE4_WINDOWED_LAYERS,
    OLMO3_WINDOW_PERIOD,
    SIGMOID,
)
from .family_keys import QUERY_SCALE_BY_WIDTH_LAYERS
from .file_architecture import ARCHITECTURE_BY_FAMILY, file_architecture
from .rope_export import FOLDER_HINT, PLACEHOLDER_ROPE, export_rope_table, rope_scaling_keys

FILE_TYPES = {"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2}  # type of the matrices -> general.file_type
QUANTIZATION_VERSION = 2
INDEXER_REASON = ": exporting their indexer is not supported"
UNTESTED_REASON = ": exporting them is not supported"
# Families that are not exported -> the reason, appended to the error.
UNSUPPORTED_REASONS = {**dict.fromkeys(("axk1", "cohere_compass_text", "cwm", "deepseek_ocr2_text", "ernie4_5_vl_moe_text", "helium",
                                        "hyperclovax", "lfm3", "longcat_flash", "minimax", "molmo2_text", "olmo_hybrid", "persimmon",
                                "nanbeige", "ouro", "phi4_multimodal", "unlimited_ocr_text", "vaultgemma", "youtu"), UNTESTED_REASON),
                       **dict.fromkeys(("beam", "codegen", "diffllama", "doge", "flex_olmo", "flint", "gpt_neo", "gptj", "lara_mini",
                                        "mistral_large4_text", "modernbert_decoder", "nanochat", "zamba2", "zaya"),
                                       ": llama.cpp does not support them"),
                       "ministral": ": llama.cpp ignores their sliding windows",
                       "phimoe": ": llama.cpp weights their experts differently",
                       "bamba": ": llama.cpp runs them as Granite 4, which rotates whole heads",
                       "axk2": INDEXER_REASON, "deepseek_v4": INDEXER_REASON,
                       **dict.fromkeys(("embedding_gemma2_text", "gemma3n_text"), UNTESTED_REASON),
                       **dict.fromkeys(("mllama_text_model", "whisper"), ": llama.cpp does not support them"),
                       "opt": ": llama.cpp does not support them"}
WINDOW_IGNORED = ("mistral", "mixtral", "phi3", "starcoder2")  # families whose sliding windows llama.cpp ignores
# Family -> n: llama.cpp assumes a sliding window in all layers but every n-th.
WINDOW_PERIODS = {"afmoe": AFMOE_WINDOW_PERIOD, "cohere2": COHERE2_WINDOW_PERIOD, "exaone_moe": EXAONE4_WINDOW_PERIOD, "gemma2": 2,
                  "gemma3_text": 6,
                  gpt_oss.FAMILY: gpt_oss.WINDOW_PERIOD, "olmo3": OLMO3_WINDOW_PERIOD}
# Families for which llama.cpp reads no RoPE frequency factor tensors.
WITHOUT_ROPE_FACTORS = ("afmoe", "bailing_moe_v2", "bitnet", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3",
                        "deepseek_v32",
             "dots1", "ernie4_5", "ernie4_5_moe", "exaone_moe", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
             "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", gpt_oss.FAMILY, "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4",
             "internlm2", "kolibri1", "lfm2", "lfm2_moe", "mimo", "minimax_m2", "muse_glimmer_text", "nemotron", "olmo", "olmo2", "olmo3",
             "olmoe", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
                        "smollm3", "solar_open", "stablelm", "starcoder2", qwen4.FAMILY)
REQUIRES_HEAD = ("dots1", "exaone_moe", "internlm2", "minimax_m2", "qwen2_moe")  # families that llama.cpp requires an untied head of
# Families for which llama.cpp assumes head_dim * heads = hidden size.
HEADS_SPAN_WIDTH = ("bailing_moe_v2", "bitnet", "cohere", "cohere2", "exaone", "exaone4", "falcon", "glm", "jamba", "lfm2", "lfm2_moe",
                    "nemotron", "olmo", "olmo2", "olmo3", "phi", "qwen2_moe", "stablelm", "starcoder2")
REQUIRES_BIASES = ("bloom", "gpt_bigcode", "gpt_neox", gpt_oss.FAMILY, "jais2", "starcoder2")  # families that llama.cpp requires biases of
# Activation that llama.cpp assumes by family; SiLU for the others.
ACTIVATIONS = {"apertus": "xielu", "falcon": "gelu", glm5_next.FAMILY: "clamped_silu", "gpt_neox": "gelu",
               **dict.fromkeys((gpt_oss.FAMILY, minimax3.FAMILY), "clamped_swish"), "mpt": "gelu",
               **dict.fromkeys(("arcee", "jais2", "nemotron", "nemotron_h", rwkv7.FAMILY), "relu2"),
               **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "phi", "starcoder2", "bloom", "gpt_bigcode"),
                               "gelu_tanh")}
# Families whose files state which layers have experts, or whose layers all have some.
STATES_EXPERT_LAYERS = (cohere2_moe.FAMILY, nemotron_h.FAMILY, jamba.FAMILY, kolibri1.FAMILY, mimo2.FAMILY, minimax3.FAMILY, step35.FAMILY)
WITHOUT_GQA = ("dots1", "olmoe")  # families for which llama.cpp assumes a KV head per query head
# Families whose files state the expert gating function, scale and normalization.
STATES_EXPERT_SCORING = ("afmoe", "bailing_moe_v2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe",
                         "glm4_moe_lite",
                         "glm_moe_dsa", "hy_v3", "hy_v4", "laguna", "mistral4", "solar_open", kimi_delta_attention.KIMI_FAMILY,
                         kimi_delta_attention.LING_FAMILY, glm5_next.FAMILY)
LEADING_DENSE = (*STATES_EXPERT_SCORING, "ernie4_5_moe", "lfm2_moe")  # families whose first layers may be dense
SHORT_CONV_FAMILIES = ("lfm2", "lfm2_moe")
# Family -> module with its own `export_keys`.
FAMILY_MODULES = {module.FAMILY: module for module in (bitnet, cohere2_moe, deci, gemma4, hy_v4, kolibri1, laguna, llama4, mellum, mimo2,
                                                       minimax3, muse_glimmer, qwen4, step35)}
FAMILY_MODULES |= dict.fromkeys((granite_swash.DENSE, granite_swash.MOE), granite_swash)
# Family -> `export_limits` of its module, which covers sliding windows too.
FAMILY_EXPORT_LIMITS = {bitnet.FAMILY: bitnet.export_limits, cohere2_moe.FAMILY: cohere2_moe.export_limits,
                        gemma4.FAMILY: gemma4.export_limits,
                        kolibri1.FAMILY: kolibri1.export_limits, laguna.FAMILY: laguna.export_limits, mellum.FAMILY: mellum.export_limits,
                        muse_glimmer.FAMILY: muse_glimmer.export_limits, qwen4.FAMILY: qwen4.export_limits,
                        step35.FAMILY: step35.export_limits, mimo2.FAMILY: mimo2.export_limits, minimax3.FAMILY: minimax3.export_limits,
                        **dict.fromkeys(transformer_names.COMPLETE_CONFIG, transformer_names.export_limits),
                        **dict.fromkeys((granite_swash.DENSE, granite_swash.MOE), granite_swash.export_limits)}
COHERE_QK_NORM_LAYERS = 64  # llama.cpp assumes QK norms in Command R models with at least as many layers
SMOLLM3_NO_ROPE_PERIOD = 4  # llama.cpp assumes that every fourth layer has no RoPE


def export_architecture(config: ModelConfig) -> Architecture:
    """The architecture to export as. Raises EffllmError for families without one, and for models that GGUF cannot express."""
    family = config.family
    if family not in ARCHITECTURE_BY_FAMILY:
        raise EffllmError(f"{family} models are not exported as GGUF{UNSUPPORTED_REASONS.get(family, '')}",
                          f"exported are {', '.join(sorted(ARCHITECTURE_BY_FAMILY))}")
    for applies, description in _export_limits(config):
        if applies:
            raise EffllmError(f"a GGUF file of the {family} family cannot express that this model {description}", FOLDER_HINT)
    return ARCHITECTURES[file_architecture(config)]


def _export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express; the first that applies is the error."""
    family = config.family
    act = ACTIVATIONS.get(family, "silu")
    biased = config.o_bias or config.mlp_bias
    yield biased and family not in (*REQUIRES_BIASES, "gpt2", "phi"), "has biases on o or in its feed-forward"
    yield not (biased and config.qkv_bias) and family in REQUIRES_BIASES, "has no biases"
    yield config.hidden_act != act and family != bitnet.FAMILY, f"has {config.hidden_act} where {act} is meant"
    yield from _window_limits(config)
    yield from _scale_limits(config)
    yield config.bidirectional, "uses bidirectional attention"
    yield config.listwise_reranker, "has a listwise ranking head"
    yield config.extra_embeddings > 0, "reads tokens that it never generates: its head has fewer rows than its embedding"
    yield from _layer_limits(config)
    yield from recurrent_layers.export_limits(config)
    if family == deci.FAMILY:
        yield from deci.export_limits(config)
    if family == minicpm3.FAMILY:
        yield from minicpm3.export_limits(config)
    elif config.mla is not None:
        yield from latent_attention.export_limits(config, 1.0 if config.rope is None else export_rope_table(config).attention_scaling)
        if ARCHITECTURE_BY_FAMILY[family] in (latent_attention.NAME, latent_attention.MISTRAL4):
            yield from latent_attention.query_rank_limits(config)
        elif ARCHITECTURE_BY_FAMILY[family] in sparse_indexer.FAMILIES:
            yield from sparse_indexer.export_limits(config)
    yield from _rope_limits(config)
    yield from _moe_limits(config)


def _window_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Limits on sliding windows; for families in FAMILY_EXPORT_LIMITS all limits of their own."""
    family = config.family
    if family in WINDOW_PERIODS:
        period = WINDOW_PERIODS[family]
        window = next((window for window in config.windows if window is not None), None)
        yield window is None or config.windows != tuple(window if (i + 1) % period else None for i in range(config.num_hidden_layers)), \
            f"does not have a sliding window in all but every {period}th layer"
    elif family == "exaone4":
        is_windowed_size = config.num_hidden_layers == EXAONE4_WINDOWED_LAYERS
        window = next((window for window in config.windows if window is not None), None)
        expected = tuple(window if is_windowed_size and (i + 1) % EXAONE4_WINDOW_PERIOD else None for i in range(config.num_hidden_layers))
        yield config.windows != expected or (window is None) == is_windowed_size, \
            f"has {config.num_hidden_layers} layers and {'no sliding' if window is None else 'sliding'} windows in its layers"
        yield window is None and None in config.ropes, "has layers without rotary positions"
    elif family_limits := FAMILY_EXPORT_LIMITS.get(family):
        yield from family_limits(config)
    else:
        yield family not in WINDOW_IGNORED and set(config.windows) != {None}, "has a sliding window"


def _scale_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Limits on multipliers of embeddings and scores, tied heads, QK norms and softcapping."""
    family = config.family
    if family.startswith("gemma") or family == "afmoe":
        yield not np.isclose(config.embedding_multiplier, config.hidden_size**0.5, rtol=1e-2), "has another embedding multiplier"
    if family in ("gemma2", "gemma3_text"):
        is_scaled_by_width = QUERY_SCALE_BY_WIDTH_LAYERS[ARCHITECTURE_BY_FAMILY[family]] == config.num_hidden_layers
        expected = (config.hidden_size / config.num_attention_heads if is_scaled_by_width else config.head_dim) ** -0.5
        yield not np.isclose(config.attn_scale, expected,
                             rtol=1e-4), f"scales its scores by {config.attn_scale:.4g} instead of {expected:.4g}"
    if family in ("cohere", "cohere2", "gemma", "gemma2"):
        yield not config.tie_word_embeddings, "has an untied output head"
    if family in REQUIRES_HEAD:
        yield config.tie_word_embeddings, "ties its output head to the embedding"
    if family == "cohere":
        yield config.qk_norm != (config.num_hidden_layers >= COHERE_QK_NORM_LAYERS), \
            f"has {config.num_hidden_layers} layers and {'norms' if config.qk_norm else 'no norms'} of queries and keys"
    if family == "gemma2":
        yield config.attn_logit_softcapping is None or config.final_logit_softcapping is None, "has no softcapping"


def _layer_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Limits on head widths and on the parts that a layer must have."""
    family = config.family
    if family == "gemma3_text":
        yield config.final_logit_softcapping is not None, "softcaps its logits"
        local = [rope for rope, window in zip(config.ropes, config.windows) if window is not None]
        yield any(rope.kind != "default" for rope in local), "scales RoPE in layers with a window"
    yield family in HEADS_SPAN_WIDTH and config.head_dim * config.num_attention_heads != config.hidden_size, \
        f"has {config.num_attention_heads} heads of {config.head_dim} for a width of {config.hidden_size}"
    yield family in SHORT_CONV_FAMILIES and config.recurrent is None, "has no convolution"
    yield family == "granitemoehybrid" and config.recurrent is None and config.moe is not None, "has experts but no state-space layers"
    yield family in (nemotron_h.FAMILY, jamba.FAMILY) and config.recurrent is None, "has no state space"
    yield family == "falcon" and not config.parallel_block, "has its MLP after attention instead of beside it"
    yield family == "gpt2" and config.attn_scale is not None, "does not scale its scores by head_dim"


def _rope_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Limits on RoPE scaling, bases and layers without RoPE."""
    family = config.family
    if family in WITHOUT_ROPE_FACTORS:
        yield config.rope.kind not in ("default", "linear", "yarn"), f"has rotary positions of kind {config.rope.kind}"
    if family == "ministral3":
        yield config.rope.kind != "yarn", f"has rotary positions of kind {config.rope.kind}"
    if family == "olmo3":
        local_ropes = [rope for rope, window in zip(config.ropes, config.windows) if window is not None]
        yield any(rope.kind != "default" for rope in local_ropes), "scales RoPE in layers with a window"
        yield any(rope.theta != config.rope.theta for rope in local_ropes), "has another rope_theta in layers with a window"
    if family == "smollm3":
        expected = [(layer + 1) % SMOLLM3_NO_ROPE_PERIOD != 0 for layer in range(config.num_hidden_layers)]
        yield [rope is not None for rope in config.ropes] != expected, \
            f"does not leave out RoPE in exactly every {SMOLLM3_NO_ROPE_PERIOD}th layer"


def _moe_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Limits on which layers have experts and how their weights are normalized."""
    family, moe = config.family, config.moe
    yield family == "bailing_moe_v2" and not moe.shared_expert_dim, "has no shared expert"
    if family == llama4.FAMILY:
        yield from llama4.export_limits(config)
    elif moe is not None and family not in STATES_EXPERT_LAYERS:
        dense = min(moe.layers, default=config.num_hidden_layers) if family in LEADING_DENSE else 0
        yield moe.layers != frozenset(range(dense, config.num_hidden_layers)), "has layers without experts"
        yield family not in STATES_EXPERT_SCORING and moe.renormalise != (family not in ("olmoe", "qwen2_moe")), \
            f"{'normalizes' if moe.renormalise else 'does not normalize'} its expert weights"
        yield family in WITHOUT_GQA and config.num_key_value_heads != config.num_attention_heads, "has fewer key-value heads than heads"


def ignored_window(config: ModelConfig) -> int | None:
    """The sliding window that llama.cpp ignores; None if there is none or llama.cpp applies it."""
    return config.windows[0] if config.family in WINDOW_IGNORED else None


def config_metadata(config: ModelConfig, name: str, kind: str) -> dict[str, Value]:
    """The metadata describing the model, without the tokenizer."""
    arch, without_rope = file_architecture(config), config.rope is None
    if without_rope:
        config = replace(config, ropes=(PLACEHOLDER_ROPE,) * config.num_hidden_layers)
    general: dict[str, Value] = {"general.architecture": arch, "general.type": "model", "general.name": name,
                                 "general.file_type": FILE_TYPES[kind],
                                 "general.quantization_version": QUANTIZATION_VERSION}
    keys: dict[str, Value] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, ARCHITECTURES[arch].epsilon_key: float(config.norm_eps),
        "attention.key_length": config.projected_head_dim, "attention.value_length": config.v_head_dim or config.head_dim,
        "rope.dimension_count": int(config.projected_head_dim * config.rope.partial_rotary_factor),
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size}
    keys |= _family_keys(config) | recurrent_layers.export_keys(config) | rope_scaling_keys(config)
    if without_rope:
        keys[ROPE_FINETUNED] = False
    if config.mla is not None:
        keys |= (minicpm3 if config.family == minicpm3.FAMILY else latent_attention).export_keys(config)
    absent_keys = rwkv7.ABSENT_KEYS if config.family == rwkv7.FAMILY else ()
    return general | {f"{arch}.{key}": value for key, value in keys.items() if key not in absent_keys} | apertus.export_keys(config)


def _family_keys(config: ModelConfig) -> dict[str, Value]:
    """Keys that only some families have, without the architecture's prefix."""
    keys: dict[str, Value] = {}
    window = next((window for window in config.windows if window is not None), None)
    if window is not None or config.family == "starcoder2":  # without the key its files are read with the default window
        keys["attention.sliding_window"] = window or 0
    if config.attn_logit_softcapping is not None:
        keys["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if config.family == "gemma3_text":
        local = next((rope for rope, window in zip(config.ropes, config.windows) if window is not None), config.rope)
        keys["rope.freq_base_swa"] = float(local.theta)
    if config.family == "gpt_neox":
        keys["use_parallel_residual"] = config.parallel_block
    if config.family == "mpt":
        keys |= transformer_names.ALIBI_METADATA
    if config.clip_qkv is not None:
        keys["attention.clamp_kqv"] = float(config.clip_qkv)
    if config.family in ("cohere", "cohere2"):
        keys["logit_scale"] = float(1 / config.logits_scaling)
    if config.family.startswith("granite"):
        keys |= {"attention.scale": float(config.attn_scale), "embedding_scale": float(config.embedding_multiplier),
                 "residual_scale": float(config.residual_multiplier), "logit_scale": float(config.logits_scaling)}
    if config.family == "minicpm":
        keys |= {"embedding_scale": float(config.embedding_multiplier), "residual_scale": float(config.residual_multiplier),
                 "logit_scale": float(config.logits_scaling)}
    if config.rope.params.get(QUERY_SCALING_BETA):
        keys["attention.temperature_scale"] = float(config.rope.params[QUERY_SCALING_BETA])
    if config.moe is not None:
        keys |= _moe_keys(config, config.moe)
    module = FAMILY_MODULES.get(config.family)
    return keys if module is None else keys | module.export_keys(config)


def _moe_keys(config: ModelConfig, mixture: MoEConfig) -> dict[str, Value]:
    """Keys of a mixture of experts, without the architecture's prefix."""
    keys: dict[str, Value] = {"expert_count": mixture.num_experts, "expert_used_count": mixture.experts_per_token}
    if config.family in (gpt_oss.FAMILY, mellum.FAMILY, "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", *LEADING_DENSE):
        keys["expert_feed_forward_length"] = mixture.expert_dim
    if config.family in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        keys["expert_shared_feed_forward_length"] = mixture.shared_expert_dim
    if config.family in LEADING_DENSE and config.family not in SHORT_CONV_FAMILIES:
        keys |= {"expert_shared_count": (mixture.shared_expert_dim or 0) // mixture.expert_dim,
                 "leading_dense_block_count": min(mixture.layers, default=config.num_hidden_layers)}
    if config.family == "afmoe":  # its shared experts are an MLP here
        keys["expert_shared_count"] = config.intermediate_size_of(config.num_hidden_layers - 1) // mixture.expert_dim
    if config.family == "hunyuan_v1_moe":
        keys |= {"expert_feed_forward_length": mixture.expert_dim, "expert_shared_count": 1,
                 "expert_shared_feed_forward_length": mixture.shared_expert_dim}
    if config.family in ("granitemoeshared", granite_swash.MOE):
        keys |= {"feed_forward_length": mixture.expert_dim, "expert_shared_feed_forward_length": mixture.shared_expert_dim or 0}
    if config.family == "minimax_m2":
        keys |= {"expert_feed_forward_length": mixture.expert_dim, "expert_gating_func": SIGMOID}
    if config.family == "exaone_moe":
        keys |= {"expert_shared_feed_forward_length": mixture.shared_expert_dim, "expert_group_count": mixture.num_groups,
                 "expert_group_used_count": mixture.top_groups}
    if config.family in STATES_EXPERT_SCORING:
        keys |= {"expert_gating_func": SIGMOID if mixture.sigmoid else 1, "expert_weights_scale": float(mixture.routed_scale),
                 "expert_weights_norm": mixture.renormalise}
    if config.family == "bailing_moe_v2":  # its shared experts are joined into one
        keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": mixture.shared_expert_dim,
                 "expert_group_count": mixture.num_groups, "expert_group_used_count": mixture.top_groups}
    if config.family == kimi_delta_attention.LING_FAMILY:  # SHARED_EXPERT_WIDTH is the width of all together
        keys["expert_shared_count"] = 1
    if config.family == "hy_v3":
        keys["expert_shared_feed_forward_length"] = mixture.shared_expert_dim
    if config.family == "ernie4_5_moe":
        keys |= {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": mixture.shared_expert_dim or 0}
    return keys
