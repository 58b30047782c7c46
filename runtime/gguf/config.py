"""GGUF metadata translated to the `config.json` its checkpoint had, and validated by the same rules.

Errors name each key as the file spells it. What a family cannot run is refused by name; unlisted keys of the architecture cause a
warning, as those of a config.json do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ... import EffllmError, UsageError
from ...offload.gguf_header import GgufHeader, GgufTensor, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged, shown
from ...quant.weight import to_f32
from ..config import ModelConfig, parse_config
from ..config_rope import QUERY_SCALING_BETA
from . import (
    deci,
    gemma3n,
    gemma4,
    gemma_embedding2,
    glm5_next,
    kimi_delta_attention,
    laguna,
    latent_attention,
    listwise,
    mellum,
    mimo2,
    minicpm3,
    mrope_sections,
    nemotron_h,
    qwen4,
    recurrent_layers,
    step35,
    yarn,
)
from .architecture import (
    DEEPSEEK_OCR,
    IGNORED_KEYS,
    LONG_ROPE_FACTORS,
    NEUTRAL_VALUES,
    RMS_NORM,
    ROPE_FACTORS,
    ROPE_FINETUNED,
    SHORT_ROPE_FACTORS,
    Architecture,
)
from .architectures import architecture
from .family_context import WINDOW_PATTERN_SUFFIX, layer_types
from .family_keys import DAMAGED_HINT, add_family

# Key below the architecture's name -> key of config.json.
KEYS = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    RMS_NORM: "rms_norm_eps", "rope.freq_base": "rope_theta", "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim", "attention.sliding_window": "sliding_window",
}
REQUIRED_KEYS = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length")
TEMPERATURE_LENGTH = "attention.temperature_length"  # must equal the original context length
UNTRANSLATED_KEYS = frozenset({TEMPERATURE_LENGTH, "attention.value_length", "rope.dimension_count", "rope.scale_linear"})  # not translated
ROPE_SCALING_PREFIX = "rope.scaling."
ROPE_SCALING_KEYS = frozenset(ROPE_SCALING_PREFIX + name for name in ("type", "factor", "original_context_length", *yarn.KEYS))

# Architecture -> keys with a value for each layer, which are not translated.
PER_LAYER_KEYS = {gemma3n.NAME: gemma3n.PER_LAYER_KEYS, gemma4.NAME: gemma4.PER_LAYER_KEYS,
                  gemma_embedding2.NAME: gemma_embedding2.PER_LAYER_KEYS,
                  deci.NAME: deci.PER_LAYER_KEYS, mimo2.NAME: mimo2.PER_LAYER_KEYS,
                  **dict.fromkeys((nemotron_h.DENSE, nemotron_h.MOE), nemotron_h.PER_BLOCK_KEYS)}
# Architectures with heads and windows by layer, which add all of their rotary positions.
PER_LAYER_HEADS = {gemma4.NAME: gemma4.add_gemma4, gemma_embedding2.NAME: gemma_embedding2.add_gemma_embedding2}
# Architectures whose layers with a window have a rotary table of their own.
TWO_ROPE_TABLES = {laguna.NAME: laguna.split_rope_tables, mellum.NAME: mellum.split_rope_tables, step35.NAME: step35.split_rope_tables}
RopeFactors = Mapping[str, np.ndarray]  # tensor name -> rotary divisors


def model_config(header: GgufHeader, factors: RopeFactors, strict: bool = False) -> ModelConfig:
    """The config of a file. `factors`: its rotary divisors. Raises CheckpointError naming the key, and UsageError for unknown keys if
    `strict`."""
    return parse_gguf_config(header, config_json(header, factors), strict)


def parse_gguf_config(header: GgufHeader, raw: Mapping[str, object], strict: bool = False) -> ModelConfig:
    """`parse_config` with the file's own names in its errors."""
    name = header.metadata["general.architecture"]
    try:
        config = parse_config(raw, strict)
    except EffllmError as error:
        message = error.message.replace("config.json", str(header.path))
        names = {config_key: gguf_key for gguf_key, config_key in {**KEYS, **architecture(header.path, name).keys}.items()}
        pattern = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        message = re.sub(rf"\b(?:{pattern})\b", lambda found: f"{name}.{names[found.group()]}", message)
        message = message.replace("rope_scaling: short_factor", ROPE_FACTORS if ROPE_FACTORS in header.tensors else SHORT_ROPE_FACTORS)
        raise CheckpointError(message, error.hint or DAMAGED_HINT) from error
    if name == qwen4.NAME:
        qwen4.check_hashing(header, name, config)
    if name == "granite" and header.metadata.get(f"{name}.{ROPE_FINETUNED}") is False:  # it has no rotary positions
        config = replace(config, ropes=(None,) * config.num_hidden_layers)
    if notice := rope_notice(header, name, raw):
        config = replace(config, warnings=(*config.warnings, notice))
    if header.left_out:
        notice = f"{header.path.name} holds {len(header.left_out)} tensors for images or audio, which are ignored: only text input works"
        config = replace(config, warnings=(*config.warnings, notice))
    unknown = sorted(unknown_keys(header, name, architecture(header.path, name)))
    if not unknown:
        return config
    listed = ", ".join(shown(key) for key in unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    if strict:
        raise UsageError(f"{header.path} has keys that effllm does not know: {listed}", "without --strict they are ignored with a warning")
    return replace(config, warnings=(*config.warnings, f"{header.path.name} has keys that effllm does not know and ignores: {listed}"))


def rope_notice(header: GgufHeader, name: str, raw: Mapping[str, object]) -> str:
    """A notice about how a file's YaRN scaling is read; empty for most."""
    rope = raw.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "yarn":
        return ""
    return yarn.rope_scaling(header.path, f"{name}.{ROPE_SCALING_PREFIX}", header.metadata, raw["max_position_embeddings"])[1]


def required_keys(architecture: Architecture) -> tuple[str, ...]:
    """The keys below an architecture's name without which there is no config."""
    return (*(key for key in REQUIRED_KEYS if key not in architecture.optional_keys), architecture.epsilon_key, *architecture.required_keys)


def config_json(header: GgufHeader, factors: RopeFactors) -> dict[str, object]:
    """The equivalent config.json."""
    data, path = header.metadata, header.path
    name = data.get("general.architecture")
    arch = architecture(path, name)
    _check_neutral_values(header, name, arch)
    raw: dict[str, object] = {"model_type": arch.family, "hidden_act": "silu", **arch.config}
    num_experts = data.get(f"{name}.expert_count", 0)
    is_dense = arch.experts is None or (isinstance(num_experts, int | float) and num_experts == 0)
    for key in (*required_keys(arch), *(() if is_dense else ("expert_used_count",))):
        if f"{name}.{key}" not in data:
            damaged(path, f"lacks key {name}.{key}")
    for gguf_key, config_key in {**KEYS, **arch.keys}.items():
        if gguf_key in PER_LAYER_KEYS.get(name, ()):
            continue
        if (value := data.get(f"{name}.{gguf_key}")) is not None:
            if gguf_key == recurrent_layers.KV_HEADS and arch.layer_kinds and isinstance(value, np.ndarray) and (value == 0).any():
                value, raw["layer_types"] = recurrent_layers.split_kv_heads(path, f"{name}.{gguf_key}", value, raw["num_hidden_layers"],
                                                                            arch.layer_kinds)
            if gguf_key == laguna.QUERY_HEADS and name in (laguna.NAME, step35.NAME):
                value = laguna.query_heads(value, raw)
            raw[config_key] = _uniform(path, f"{name}.{gguf_key}", value)
    embedding = _tensor(header, "token_embd.weight")
    if len(embedding.shape) != 2:
        damaged(path, f"has tensor token_embd.weight of shape {list(embedding.shape)}, expected rows and columns")
    raw["vocab_size"] = embedding.shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in header.tensors
    if name in PER_LAYER_HEADS:
        kinds = layer_types(header, raw["num_hidden_layers"], 1)
        PER_LAYER_HEADS[name](header, raw, kinds, factors.get(ROPE_FACTORS), raw.pop("sliding_window"))
    else:
        if name not in (kimi_delta_attention.KIMI, kimi_delta_attention.LING, deci.NAME, glm5_next.NAME,
                        *latent_attention.MLA_ARCHITECTURES,
                        mimo2.NAME, minicpm3.NAME):
            _check_head_widths(header, name, raw, arch)
        add_family(header, raw)
        if name in mrope_sections.INTERLEAVED:
            heads = raw["num_attention_heads"]
            width = raw.get("head_dim") or (raw["hidden_size"] // heads if type(heads) is int and heads > 0 else 0)
            mrope_sections.check(header, name, int(width * raw.get("partial_rotary_factor", 1.0)) // 2, mrope_sections.INTERLEAVED[name])
    query_scaling = raw.pop(QUERY_SCALING_BETA, None)
    raw |= {} if name in PER_LAYER_HEADS else _rope_scaling(header, name, raw, factors)
    if name in TWO_ROPE_TABLES:
        TWO_ROPE_TABLES[name](header, raw)
    if query_scaling is not None:
        _add_query_scaling(header, name, raw, query_scaling)
    for role in ("bos", "eos"):
        value = data.get(f"tokenizer.ggml.{role}_token_id")
        raw[f"{role}_token_id"] = value if type(value) is int else None
    if name == qwen4.NAME:
        qwen4.add_eos_token(header, name, raw)
    if listwise.has_ranking_file(path, name):
        raw["architectures"] = [listwise.CLASS]
    return raw


def _uniform(path: Path, key: str, value: Value) -> object:
    """A value for all layers; some writers repeat it for each. Raises CheckpointError for different ones."""
    if isinstance(value, np.ndarray) and value.size:
        if (value != value[0]).any():
            raise CheckpointError(f"{path} states another {key} for every layer, which is not supported",
                                  "only models with equal layers are supported")
        return value[0].item()
    if not isinstance(value, int | float):
        damaged(path, f"states {key} {shown_value(value)}, expected a number")
    return value


def _tensor(header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} holds no tensor {name}", "it holds only a vocabulary: give a model file")
    return header.tensors[name]


def _check_head_widths(header: GgufHeader, name: str, raw: dict[str, object], architecture: Architecture) -> None:
    """Check that all head widths agree, because families have one for all; add the partial rotary factor."""
    data = header.metadata
    width = raw.get("head_dim")
    if width is None and isinstance(raw["num_attention_heads"], int) and raw["num_attention_heads"] > 0:
        width = raw["hidden_size"] // raw["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        value = data.get(f"{name}.{key}")
        value = None if value is None else _uniform(header.path, f"{name}.{key}", value)
        is_partial = key == "rope.dimension_count" and type(value) is int and type(width) is int and 0 < value < width
        if architecture.partial_rotary and is_partial:
            raw["partial_rotary_factor"] = value / width
        elif value is not None and value != width and (name, value) != (DEEPSEEK_OCR, 0):
            raise CheckpointError(f"{header.path} states {name}.{key} {shown_value(value)} for heads of {width}, which is not supported",
                                  "keys and values must have one width and be rotated entirely")


def _add_query_scaling(header: GgufHeader, name: str, raw: dict[str, object], beta: object) -> None:
    """Add to rope_scaling how queries grow with their positions."""
    section = raw.get("rope_scaling")
    if not isinstance(section, dict) or section.get("rope_type") != "yarn":
        raise CheckpointError(f"{header.path} states {name}.attention.temperature_scale and rotary positions that are not yarn's, which is "
                              "not supported", yarn.ORIGINAL_HINT)
    length, original = header.metadata.get(f"{name}.{TEMPERATURE_LENGTH}"), section["original_max_position_embeddings"]
    if length not in (None, original):
        raise CheckpointError(f"{header.path} states {name}.{TEMPERATURE_LENGTH} {shown_value(length)} beside an original length of "
                              f"{shown_value(original)}, which is not supported", yarn.ORIGINAL_HINT)
    section[QUERY_SCALING_BETA] = beta


def _check_neutral_values(header: GgufHeader, name: str, architecture: Architecture) -> None:
    data, path = header.metadata, header.path
    for key, neutral in NEUTRAL_VALUES.items():
        value = None if key in architecture.keys or key in architecture.other_keys else data.get(f"{name}.{key}")
        allowed = neutral if isinstance(neutral, tuple) else (neutral,)
        if value is not None and (isinstance(value, np.ndarray | list) or value not in allowed):
            raise CheckpointError(f"{path}: {name}.{key} = {shown_value(value)} is not supported for this architecture",
                                  "give the folder of the original checkpoint, if its family is supported")


def unknown_keys(header: GgufHeader, name: str, architecture: Architecture) -> Iterator[str]:
    """Keys of the architecture that no code reads."""
    known = {*KEYS, *architecture.keys, *architecture.other_keys, *UNTRANSLATED_KEYS, *ROPE_SCALING_KEYS, *NEUTRAL_VALUES, *IGNORED_KEYS,
             *((WINDOW_PATTERN_SUFFIX[1:],) if architecture.window_pattern else ())}
    for key in header.metadata:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            yield key


def _rope_scaling(header: GgufHeader, name: str, raw: Mapping[str, object], factors: RopeFactors) -> dict[str, object]:
    """The rope_scaling section of config.json."""
    data, positions = header.metadata, raw["max_position_embeddings"]

    def value_of(key: str, default: object = None, under: str = ROPE_SCALING_PREFIX) -> object:
        value = data.get(f"{name}.{under}{key}", default)
        if isinstance(value, list | np.ndarray):
            damaged(header.path, f"states {name}.{under}{key} {shown_value(value)}, expected one value")
        return value

    kind = value_of("type", "linear")  # llama.cpp's default; older files have the factor under another name
    factor = value_of("factor", value_of("scale_linear", under="rope."))
    original = value_of("original_context_length", positions)
    if (LONG_ROPE_FACTORS in factors) != (SHORT_ROPE_FACTORS in factors):
        damaged(header.path,
                f"holds {LONG_ROPE_FACTORS if LONG_ROPE_FACTORS in factors else SHORT_ROPE_FACTORS} alone, "
                f"expected {LONG_ROPE_FACTORS} and {SHORT_ROPE_FACTORS}")
    if LONG_ROPE_FACTORS in factors:
        section = {"rope_type": "longrope", "short_factor": _floats(factors[SHORT_ROPE_FACTORS]),
                   "long_factor": _floats(factors[LONG_ROPE_FACTORS])}
        scale = value_of("attn_factor")
        return {"rope_scaling": section | ({} if scale is None else {"attention_factor": scale}),
                "original_max_position_embeddings": original}
    if ROPE_FACTORS in factors:
        if kind not in ("none", "linear") or value_of("factor", 1.0) not in (0.0, 1.0):
            raise CheckpointError(f"{header.path} holds {ROPE_FACTORS} and states {name}.rope.scaling.type {shown_value(kind)}",
                                  "only one of the two is allowed")
        divisors = _floats(factors[ROPE_FACTORS])
        return {"rope_scaling": {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0,
                                 "attention_factor": 1.0}, "original_max_position_embeddings": positions}
    if kind == "none" or kind == "linear" and factor in (None, 0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        section = yarn.rope_scaling(header.path, f"{name}.{ROPE_SCALING_PREFIX}", data, positions)[0]
        latent = name in latent_attention.MLA_ARCHITECTURES
        return {"rope_scaling": latent_attention.with_mscale(f"{name}.{ROPE_SCALING_PREFIX}", data, section) if latent else section}
    raise CheckpointError(f"{header.path} states {name}.rope.scaling.type {shown_value(kind)}, which is not supported",
                          "known: none, linear, yarn")


def _floats(values: np.ndarray) -> list[float]:
    return [float(value) for value in values]


def rope_factors(tensor: GgufTensor, raw: np.ndarray, path: Path) -> np.ndarray:
    """The values of a rotary divisor tensor, float32. Raises CheckpointError for another type than F32, or more values than a head has."""
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
        damaged(path, f"has tensor {tensor.name} of type {tensor.type} and shape {list(tensor.shape)}, expected a few F32")
    return to_f32(raw.view(np.float32), "f32")

