"""Model families, one file each; the file's name is the checkpoint's `model_type`.

A family says which config keys it uses, which tensors it has by role, and how a block computes over a backend's `BlockOps`. To add
one: a file with the members of `Family`, and its name in FAMILIES; `docs/architecture/families.md` has the steps. What a file does not say
is as in the family that it names in LIKE, and where it names none, as in Llama.

Roles of a layer: input_norm, q, k, v, q_norm, k_norm, o, o_norm, post_norm, gate, up, down, down_norm, and `<role>_bias`: input_norm and
post_norm come before attention and MLP, `<matrix>_norm` after that matrix, attn_sub_norm and ffn_sub_norm before o and down, entry_norm
before the first layer, or, with middle_norm, in the place of what it norms; sinks are logits of attention, one a query head, and
attn_gate makes gates of what is attended to. In a mixture router and `experts.<number>.<role>` take the place of gate, up and down, and
`shared.<role>` are those of the expert that every token visits, with shared.scale its share; correction is added to a router's scores.
Where rows of pictures have a router, experts and a correction of their own, these are `seen.<role>`.
Experts that are a branch beside the MLP have router_scale, expert_scales, expert_norm and experts_after, and the MLP mlp_after, or none of
them; those that read numbers which a matrix makes of a token have experts_in, and experts_out, which widens what they give. What a layer is
given of a token beside the stream it takes by input_gate, input_out and input_after; layer_scale multiplies what leaves it, low_in, low_out
and low_norm are a branch of what it reads, and where a token has several streams stream_norm, stream_router, predict, correct and
stream_scale say how it meets them; curve_above and curve_below are of its activation. In a bundled folder `bundles` is up and down. Outside
the layers: embed, positions (learned ones), norm, head (absent where it is the embedding) and head_bias, head_in and head_norm, a matrix
between norm and head and the norm behind it, and layer_embed, layer_proj and layer_norm, which make what layers are given of a token, and
`streams.<number>.enter` and `.leave`, which make streams and one of them, and vector, which makes the vector of what is pooled of a text,
behind vector_in where that is there, and `blocks.<number>.<role>` of blocks that layers share. Of such a block a layer has mlp_low,
gate_wide and up_wide, which add to its MLP, q_low, q_wide and so on, and lent_out, which reads it. Layers without keys and values of their
own have neither k, v nor k_norm; those of which a key is the value too have no v. Layers that remember a text in a state have in the place
of q, k, v and o state_in, what goes into it, state_gate of what is read, and state_out behind that; smaller ones are state_rate and
state_beta, what decays and shares are read from, state_conv, state_decay, state_dt, state_skip and state_norm, as far as a kind has them;
state_gate_wide and state_rate_wide widen what state_gate and state_rate narrow, state_keys makes B and C, state_rate_norm, state_b_norm and
state_c_norm are behind these. RWKV 7 has state_r, state_k and state_v in the place of state_in, `state_<letter>_in` and `_out` of low rank,
state_direction, state_remains and state_bonus, and `shift_<letter>` and shift_up, how far rows go to those of the token before. Latent
attention has kv_a, kv_a_norm and kv_b in the place of k and v, and may have q_a, q_a_norm and q_b in that of q. What chooses the tokens
that a layer sees has index_q, index_k and their norms, index_weights, and index_entered, the norm of what index queries are made of;
index_places are added to what tokens of a pool say. Queries that grow with their place have grow_scale and grow_offset, those of what
chooses index_grow_scale and index_grow_offset; rope_alpha, outside the layers, is what a model learned of the frequencies of its positions.
Keys of several tokens are made by key_rows, key_weights, key_bias and key_norm, and those by which they are chosen by index_rows,
index_row_weights, index_bias and index_norm; `groups.<number>.o_in` stand before o. Where a token mixes its streams attn_mix, mlp_mix and
outside the layers leave_mix say how, each with a base and a scale, and `picks.<layer>`, there too, which experts the tokens of a word
visit. Where gates say how, these are `<what>.mix_norm`, `.mix_down`, `.mix_up` and `.mix_in`. Layers that are given rows of n-grams have
ngram_key, ngram_value, ngram_conv and norms, and outside the layers `layers.<number>.ngrams`, their table. Streams whose channels are
multiplied have entry_scale and entry_offset in the first layer, attn_scale, attn_offset, attn_branch_scale and attn_branch_offset, and the
same of mlp; routers that are a network router_in, router_share, router_norm, router_first and router_second before them. Queries and keys
that are convolved are made by state_in, state_conv, state_heads and state_temps. Layers that attend to pictures have attn_share and
mlp_share, numbers that say how much of both they add. Differential attention has lambda_q1, lambda_k1, lambda_q2 and lambda_k2, which say
how much is taken away. Keys that add a number to scores have mark and mark_rate. What norms give is gated by way of a few numbers by
input_norm_in, input_norm_out and the same of post_norm.

A checkpoint of several models that holds a text generator is read as that one: COMPOSITE maps its `model_type` to the generator's, where
there may be several to the one that is meant where it says none and then the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from ..layer import Block

FAMILIES = ("afmoe", "apertus", "arcee", "axk1", "axk2", "bailing_hybrid", "bailing_moe_v2", "bamba", "bitnet", "bloom", "codegen",
            "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dbrx", "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3",
            "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "embedding_gemma2_text", "ernie4_5", "ernie4_5_moe",
            "ernie4_5_vl_moe_text", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "gemma",
            "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm5_next_text",
            "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
            "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4",
            "hyperclovax", "internlm2", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2",
            "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "mellum", "mimo", "mimo_v2_flash", "minicpm",
            "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral4",
            "mistral_large4_text", "mixtral", "mllama_text_model", "modernbert_decoder", "molmo2_text", "mpt", "muse_glimmer_text",
            "nanbeige", "nanochat", "nemotron", "nemotron_h", "nemotron_nas", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt",
            "ouro", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
            "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "rwkv7", "seed_oss", "smollm3", "solar_open", "stablelm",
            "starcoder2", "step3p5", "unlimited_ocr_text", "vaultgemma", "whisper", "youtu", "zamba2", "zaya")
MAKING_VECTORS = ("embedding_gemma2_text",)  # whose tokens see both ways whatever a config says: they write nothing
# As transformers calls it, and as its checkpoints were published; and with those of which the text part alone is read.
NEMOTRON_OMNI = ("nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")
NEMOTRON_SEEING = (*NEMOTRON_OMNI, "NemotronH_Nano_VL_V2")
HYPERCLOVAX_SEEING = ("hyperclovax_vision_v2", "vlm")  # the same
COMPOSITE: Mapping[str, tuple[str, ...]] = {
    "audioflamingo3": ("qwen2",), "aya_vision": ("cohere2",), "blip-2": ("opt",), "cohere2_vision": ("cohere2", "cohere2_moe"),
    "cohere_compass": ("cohere_compass_text",), **dict.fromkeys(("deepseek_ocr", "deepseek_ocr2"), ("deepseek_ocr2_text",)),
    "embedding_gemma2": ("embedding_gemma2_text",),
    **dict.fromkeys(("ernie4_5_moe_vl", "ernie4_5_vl_moe"), ("ernie4_5_vl_moe_text",)),
    "exaone4_5": ("exaone4", "exaone4_5_text"), "fast_vlm": ("qwen2",), "gemma3": ("gemma3_text",), "minicpm_ocr": ("qwen3_5_text",),
    "unlimited_ocr": ("unlimited_ocr_text",),
    "gemma3n": ("gemma3n_text",), "gemma4": ("gemma4_text",), "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_moe_text", "glm4v_text"), "glm4v": ("glm4v_text",), "glm4v_moe": ("glm4v_moe_text",), "glm_ocr": ("glm_ocr_text",),
    "glmasr": ("llama",),
    "glm5_next": ("glm5_next_text",), "granite4_vision": ("granite4_vision_text", "granite"),
    "got_ocr2": ("qwen2",), "granite_docling": ("granite_docling_text",),
    "granite_speech": ("granite",), "hunyuan_vl": ("hunyuan_vl_text",),
    **dict.fromkeys(HYPERCLOVAX_SEEING, ("hyperclovax",)),
    "idefics2": ("mistral",), "idefics3": ("llama",), "internvl": ("qwen2", "qwen3", "llama", "qwen3_moe"),
    "internvl_chat": ("qwen2", "qwen3", "llama", "qwen3_moe", "internlm2"),
    "kimi_k25": ("deepseek_v3", "kimi_k2"), "lfm2_vl": ("lfm2", "lfm2_moe"), "lfm3_vl": ("lfm3",), "lighton_ocr": ("qwen3",),
    "llama4": ("llama4_text",), "llava": ("llama", "mistral", "qwen2"), "llava_next": ("llama", "mistral", "qwen2", "granite"),
    "llava_onevision": ("qwen2",), "llava_qwen2": ("qwen2",), "minicpmv4_6": ("qwen3_5_text",), "minicpmv4_7": ("qwen3_5_text",),
    "minimax_m3_vl": ("minimax_m3_vl_text",), "mistral3": ("mistral", "ministral3", "mistral4"),
    "mistral_large4": ("mistral_large4_text",), "mllama": ("mllama_text_model",), "molmo2": ("molmo2_text",),
    "muse_glimmer": ("muse_glimmer_text",), **dict.fromkeys(NEMOTRON_SEEING, ("nemotron_h",)), "ovis2": ("qwen2",),
    "paddleocr_vl": ("paddleocr_vl_text",), "paligemma": ("gemma", "gemma2"), "perception_lm": ("llama",),
    "qianfan_ocr": ("qwen3",), "qwen2_5_omni": ("qwen2_5_omni_text",), "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_audio": ("qwen2",), "qwen2_vl": ("qwen2_vl_text",), "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_asr": ("qwen3", "qwen3_asr_text"),
    "qwen3_omni_moe": ("qwen3_omni_moe_text",), "qwen3_vl": ("qwen3_vl_text",), "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "qwen4_exp": ("qwen4_exp_text",),
    "smolvlm": ("llama",), "step3p7": ("step3p5",), "voxtral": ("llama",)}
# Those of which a store gives the text part's tensors the names that they would have alone; families know the prefixes of the others.
BY_PREFIX = (*NEMOTRON_SEEING, *HYPERCLOVAX_SEEING, "audioflamingo3", "aya_vision", "blip-2", "cohere2_vision", "cohere_compass",
             "deepseek_ocr", "deepseek_ocr2", "ernie4_5_moe_vl", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "glm46v", "glm4v",
             "glm4v_moe", "glm5_next", "glm_ocr", "glmasr", "got_ocr2", "granite4_vision", "granite_docling", "granite_speech",
             "hunyuan_vl", "idefics2", "idefics3", "internvl", "internvl_chat", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4",
             "llava", "llava_next", "llava_onevision", "llava_qwen2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl",
             "mistral_large4", "mllama", "muse_glimmer", "ovis2", "paddleocr_vl", "paligemma", "perception_lm", "qianfan_ocr",
             "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_asr", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe",
             "qwen4_exp", "smolvlm", "step3p7", "unlimited_ocr", "voxtral")
NAMED_ALONE = ("llava_qwen2",)  # whose architectures are called as those of text
PREFIXED = ("paligemma",)  # whose prompts with pictures see both ways
# A `model_type` -> the family that it is, and what its configs say by saying nothing.
RENAMED: Mapping[str, str] = {
    "AXK1": "axk1",
    "exaone4_5_text": "exaone4", "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe", "glm4v_text": "glm4",
    "granite4_vision_text": "granite", "granite_docling_text": "granite",
    "glm_ocr_text": "glm4", "hunyuan_vl_text": "hunyuan_v1_dense",
    "kimi_k2": "deepseek_v3", "llama_bidirec": "llama", "minimax_m1": "minimax", "minimax_text_01": "minimax",
    "modernbert-decoder": "modernbert_decoder", "nemotron-nas": "nemotron_nas", "paddleocr_vl_text": "llama", "phi4mm": "phi4_multimodal",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_asr_text": "qwen3",
    "qwen3_omni_moe_text": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3"}
_QWEN2_VL = {"bos_token_id": 151_643, "eos_token_id": 151_645, "max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
             "rope_theta": 1e6}
UNSAID: Mapping[str, Mapping[str, object]] = {
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144, "sliding_window": 1024},
    "glm4v_moe_text": {"attention_bias": True, "max_position_embeddings": 65_536, "num_nextn_predict_layers": 0, "vocab_size": 151_424},
    "glm4v_text": {"head_dim": None, "max_position_embeddings": 32_768, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    "glm_ocr_text": {"attention_bias": False, "head_dim": None, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                     "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    "granite_docling_text": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "eos_token_id": 100_257,
                             "logits_scaling": 4.0, "max_position_embeddings": 32_768, "num_key_value_heads": 4,
                             "residual_multiplier": 0.263, "rms_norm_eps": 1e-5},
    "llama_bidirec": {"is_causal": False},
    # What is not normed in its place is another block, and the code of these says no unless a config says yes.
    "minimax_m1": {"postnorm": False}, "minimax_text_01": {"postnorm": False},
    "paddleocr_vl_text": {"head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                          "rope_theta": 500_000.0},
    "qwen2_5_omni_text": {"num_key_value_heads": 4, "rope_theta": 1e6}, "qwen2_5_vl_text": _QWEN2_VL, "qwen2_vl_text": _QWEN2_VL,
    "qwen3_omni_moe_text": {"norm_topk_prob": True, "rope_theta": 1e6, "sliding_window": None},
    "qwen3_vl_moe_text": {"max_position_embeddings": 128_000, "moe_intermediate_size": 1408, "norm_topk_prob": True,
                          "num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 500_000.0},
    "qwen3_vl_text": {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}}
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")  # of checkpoints that take images: older, newer, no head
HEADS = ("language_model.lm_head.weight",)
EXPERT = ("gate", "up", "down")  # roles of a gated MLP
SHARED = ("shared.gate", "shared.up", "shared.down", "shared.scale")  # roles, of which the last may be absent
SEEN = "seen."  # before roles of a router, its experts and its correction, of rows of pictures, where words have others


@dataclass(frozen=True)
class TensorRule:
    """A tensor that a checkpoint must hold: its name there and its shape; `also` are other names under which it is published.

    `part_of`: where no tensor has the name, (name, first row, rows) of a stored one of which this is a range of rows. `plain`: what is done
    with it wants raw values, so codes of other tools are widened. `coefficients`: it has two dimensions and is no matrix of the model's,
    but float32 where it is used, as vectors are. `optional`: a checkpoint need not hold it.
    """

    name: str
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()
    part_of: tuple[str, int, int] | None = None
    plain: bool = False
    coefficients: bool = False
    optional: bool = False


def inside_others(rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The same tensors, also under the prefixes of checkpoints that take images."""
    return {role: replace(rule, also=tuple(prefix + rule.name.removeprefix("model.") for prefix in PREFIXES) if role != "head" else HEADS)
            for role, rule in rules.items()}


def joined(rules: Mapping[str, TensorRule], layer: int, inside: Mapping[str, tuple[str, ...]]) -> dict[str, TensorRule]:
    """The same tensors of a layer where some of them are stored as one matrix, by the name of which `inside` lists their roles."""
    found = dict(rules)
    for name, roles in inside.items():
        rows = [rules[role].shape[0] for role in roles]
        for i, role in enumerate(roles):
            found[role] = replace(rules[role], part_of=(f"model.layers.{layer}.{name}.weight", sum(rows[:i]), sum(rows)))
    return found


def is_side_by_side(roles: Collection[str]) -> bool:
    """Whether attention and MLP of a layer both read what came into it, under one norm or under input_norm and mlp_norm."""
    return "input_norm" in roles and "post_norm" not in roles


def is_for_pictures(roles: Collection[str]) -> bool:
    """Whether a layer attends to pictures alone, and is left out of a text without."""
    return "attn_share" in roles


def expert_role(expert: int, role: str) -> str:
    """The role of an expert's gate, up or down."""
    return f"experts.{expert}.{role}"


def expert_roles(expert: int) -> list[str]:
    """The roles of an expert's matrices, as an `Expert` has them; not every mixture has gates."""
    return [expert_role(expert, role) for role in EXPERT]


def expert_of(role: str) -> int | None:
    """The expert that a role belongs to, None for one of the layer."""
    return int(role.split(".")[1]) if role.startswith("experts.") else None


def kind_of(role: str) -> str:
    """A role without its expert: gate for `experts.7.gate`."""
    return role.rpartition(".")[2]


@dataclass(frozen=True)
class Family:
    """What modules of this folder define. The keys go before those of `config_keys.py`, which hold for every family; NAMES are
    those of an expert's matrices by role. What follows is asked of families alone that `stores/parted_rows.py` lists."""

    KEYS_HARMLESS: frozenset[str]
    REFUSED_UNLESS: Mapping[str, object]
    NAMES: Mapping[str, str]
    config: Callable[[Keys], ModelConfig]
    layer_tensors: Callable[[ModelConfig, int], dict[str, TensorRule]]
    outer_tensors: Callable[[ModelConfig], dict[str, TensorRule]]
    block: Block
    stored_rows: Callable[[ModelConfig, int], dict[str, tuple[str, np.ndarray]]] | None
    joined_rows: Callable[[ModelConfig, int], dict[str, tuple[tuple[str, int], ...]]] | None
    stacked_rows: Callable[[ModelConfig, int], dict[str, tuple[str, ...]]] | None
    turned_columns: Callable[[ModelConfig, int], dict[str, tuple[str, int]]] | None


# Where a family is not known: two hundred names would say less.
OTHERS = "effllm search WORDS finds models that run here, docs/models.md has all families; a newer effllm may have more"


def of_its_family(raw: Mapping[str, object]) -> dict[str, object]:
    """A config as its family spells it, where its `model_type` is another name of it."""
    kind = str(raw.get("model_type"))
    return {**UNSAID.get(kind, {}), **raw, "model_type": RENAMED[kind]} if kind in RENAMED else dict(raw)


def makes_vectors(raw: Mapping[str, object]) -> bool:
    """Whether a config is of a family, by itself or inside others, that does nothing else."""
    kind = str(raw.get("model_type"))
    return {kind, *COMPOSITE.get(kind, ())} & {*MAKING_VECTORS} != set()


def get(model_type: str) -> Family:
    """The family of a `model_type`. Raises ConfigError naming it."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {show(model_type)} is not supported", OTHERS)
    return _members(model_type)


@cache
def _members(name: str) -> Family:
    from . import llama  # which imports this module

    module = import_module(f".{name}", __name__)
    said = vars(module)
    while module is not llama:
        module = vars(module).get("LIKE", llama)
        said = {**vars(module), **said}
    return Family(**{field.name: said.get(field.name) for field in fields(Family)})
