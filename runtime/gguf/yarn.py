"""YaRN scaling in GGUF metadata, and in `config.json`.

cos and sin are multiplied by 0.1 ln(factor) + 1 unless another number is stated, in one of two ways. `attn_factor` multiplies that
default; llama.cpp reads it for every architecture. `yarn_attn_factor` is where converters put the checkpoint's own `attention_factor`;
llama.cpp reads it only for architectures that are not among ours, and uses the default for the others. In mistral3 files with
`yarn_log_multiplier` 1 cos and sin are unscaled: the default is divided by itself; with 0, or none, it holds. `yarn_beta_fast` and
`yarn_beta_slow` delimit the scaled channels; llama.cpp reads them for mistral3 and assumes 32 and 1 for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged

KEYS = ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor", "yarn_log_multiplier")
ORIGINAL_HINT = "give the folder of the original checkpoint, if its family is supported"
UNSCALED_ALLOWED = ("mistral3",)  # architectures with a setting that leaves cos and sin unscaled
# Architectures whose multiplier, if any, scales attention scores (`latent_attention.with_mscale`), not cos and sin.
SCORE_SCALING = ("deepseek2", "deepseek32", "deepseek4", "glm-dsa", "hy_v4", "mistral4")
UNTRUNCATED = ("gpt-oss",)  # the scaled range ends between two channels; no key states it and llama.cpp rounds
# Early files state the checkpoint's factor as `attn_factor`, which llama.cpp applies on top of the default.
LEGACY_ATTN_FACTOR = ("olmo2",)
DEFAULT_BETAS = (32.0, 1.0)  # (beta_fast, beta_slow) that llama.cpp assumes
READS_BETAS = ("mistral3",)  # architectures for which llama.cpp reads the keys of the two
FACTOR_TOLERANCE = 1e-3  # relative; files hold rounded factors


def default_attention_factor(factor: float) -> float:
    """The default multiplier of cos and sin (https://arxiv.org/abs/2309.00071)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_scaling(path: Path, prefix: str, data: Mapping[str, Value], positions: object) -> tuple[dict[str, object], str]:
    """(`rope_scaling` section, notice about how it is read or "") of a file with YaRN scaling.

    prefix: of its keys, ending in a dot.
    positions: the original context length if the file states none.

    Raises CheckpointError naming the key.
    """
    factor = _number(path, prefix, data, "factor")
    if factor is None:
        damaged(path, f"lacks key {prefix}factor")
    if (ext_factor := _number(path, prefix, data, "yarn_ext_factor")) is not None and 0 <= ext_factor != 1:  # below 0 it is not set
        raise CheckpointError(f"{path} states {prefix}yarn_ext_factor {ext_factor:g}, which is not supported", ORIGINAL_HINT)
    arch, log_multiplier = prefix.partition(".")[0], _number(path, prefix, data, "yarn_log_multiplier")
    is_unscaled = arch in UNSCALED_ALLOWED and log_multiplier == 1
    if arch in SCORE_SCALING:
        if _number(path, prefix, data, "attn_factor") not in (None, 1.0):
            raise CheckpointError(f"{path} states {prefix}attn_factor, which is not supported for this architecture", ORIGINAL_HINT)
        is_unscaled = True
    elif log_multiplier and not is_unscaled:
        raise CheckpointError(f"{path} states {prefix}yarn_log_multiplier {log_multiplier:g}, which is not supported", ORIGINAL_HINT)
    section = {"rope_type": "yarn", "factor": factor,
               "original_max_position_embeddings": data.get(f"{prefix}original_context_length", positions)}
    for config_key, gguf_key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (value := _number(path, prefix, data, gguf_key)) is not None:
            section[config_key] = value
    if arch in UNTRUNCATED:
        section["truncate"] = False
    if is_unscaled and arch not in SCORE_SCALING:
        section |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    default_factor = 1.0 if is_unscaled else default_attention_factor(factor)
    attn_factor, stated_factor = (_number(path, prefix, data, key) for key in ("attn_factor", "yarn_attn_factor"))
    if attn_factor not in (None, 1.0) and stated_factor not in (None, 1.0):
        raise CheckpointError(f"{path} states both {prefix}attn_factor {attn_factor:g} and {prefix}yarn_attn_factor {stated_factor:g}",
                              "only one of the two is allowed")
    if arch in LEGACY_ATTN_FACTOR and attn_factor is not None and math.isclose(attn_factor, default_factor, rel_tol=FACTOR_TOLERANCE):
        return section, (f"{path.name} states {prefix}attn_factor {attn_factor:g}, the number that positions are scaled by anyway: "
                         f"it is taken once, as in the checkpoint; llama.cpp takes it twice, {attn_factor * default_factor:.4g}")
    if attn_factor not in (None, 1.0):
        return section | {"attention_factor": attn_factor * default_factor}, ""
    if stated_factor is None or math.isclose(stated_factor, default_factor, rel_tol=FACTOR_TOLERANCE):
        return section, ""
    if stated_factor == 1.0:  # converters that know nothing of it write it too
        return section, (f"{path.name} states {prefix}yarn_attn_factor 1, which is read as none: positions are scaled by "
                         f"{default_factor:.4g}, as in llama.cpp; a checkpoint that means 1 by it gives other answers")
    notice = (f"{path.name} states {prefix}yarn_attn_factor {stated_factor:g}: positions are scaled by it, as in the checkpoint; "
              f"llama.cpp ignores it and scales them by {default_factor:.4g}")
    return section | {"attention_factor": stated_factor}, notice


def _number(path: Path, prefix: str, data: Mapping[str, Value], key: str) -> float | None:
    value = data.get(prefix + key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
        damaged(path, f"states {prefix}{key} {shown_value(value)}, expected a number")
    return None if value is None else float(value)


def export_keys(params: Mapping[str, object], scaling: float, arch: str) -> dict[str, Value]:
    """Keys below `rope.scaling.` of a model whose positions are yarn's (`RopeConfig.params`), cos and sin times `scaling`."""
    keys: dict[str, Value] = {"type": "yarn", "factor": float(params["factor"]),
                              "original_context_length": int(params["original_max_position_embeddings"]),
                              "yarn_beta_fast": float(params["beta_fast"]), "yarn_beta_slow": float(params["beta_slow"])}
    if arch in UNSCALED_ALLOWED:
        is_unscaled = math.isclose(scaling, 1.0, rel_tol=1e-6)
        keys["yarn_log_multiplier"] = 1.0 if is_unscaled else 0.0
        if is_unscaled:
            return keys
    attn_factor = 1.0 if arch in SCORE_SCALING else scaling / default_attention_factor(params["factor"])
    return keys if math.isclose(attn_factor, 1.0, rel_tol=1e-6) else {**keys, "attn_factor": float(attn_factor)}


def ignored_settings(params: Mapping[str, object], arch: str) -> str:
    """A notice about the YaRN settings that llama.cpp ignores; empty if it reads them all."""
    if arch in UNTRUNCATED and not params["truncate"]:
        return "llama.cpp rounds the YaRN boundaries of this model to whole channels: its answers differ slightly"
    betas = (params["beta_fast"], params["beta_slow"])
    if arch in READS_BETAS or betas == DEFAULT_BETAS:
        return ""
    return (f"llama.cpp scales RoPE of this family with beta_fast {DEFAULT_BETAS[0]:g} and beta_slow {DEFAULT_BETAS[1]:g}, "
            f"whatever a file says: with this model's {betas[0]:g} and {betas[1]:g} its answers differ")
