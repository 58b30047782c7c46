"""Parser of AMD Quark's quantization config: FP8 under one scale per tensor or per row, and MXFP4, for all weights or by name pattern.
Quantization of activations and caches is ignored, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_reader import show

METHOD = "quark"
# What is said of weights -> the key of `ENDINGS` by which they lie.
FORMS = {("fp8_e4m3", "per_tensor"): "fp8", ("fp8_e4m3", "per_channel"): "fp8", ("fp4", "per_group"): "mxfp4 in unsigned bytes"}
GROUP, SCALES = 32, "e8m0"  # of MXFP4
TURNING = ("rotation", "quarot")  # algorithms that turn activations in every pass
KNOWN = "of Quark: all weights in fp8_e4m3 with one scale or one a row, or all in fp4 by groups of 32 under e8m0"
Section = Mapping[str, object]


def layout(section: Section) -> str | None:
    """Key of the layout that all weights share; None where that is not a supported one."""
    found = {_form(weights) for weights in _weights(section)}
    return found.pop() if len(found) == 1 else None


def unsupported(section: Section) -> tuple[str, str] | None:
    """Key and value that are unsupported in a section."""
    algorithms = section.get("algo_config")
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(each, dict) and any(name in str(each.get("name")).lower() for name in TURNING):
            return f"algo_config {show(each.get('name'))}", "weights without a rotation for every pass"
    written = section.get("export")
    stored = written.get("weight_format", "real_quantized") if isinstance(written, dict) else "real_quantized"
    if stored != "real_quantized":
        return f"weight_format {show(stored)}", f"{KNOWN}, stored as real_quantized"
    odd = next((each for each in _weights(section) if _form(each) is None), None)
    if odd is not None:
        first = odd[0] if isinstance(odd, list) and odd and isinstance(odd[0], dict) else odd
        said = {key: first[key] for key in ("dtype", "qscheme", "group_size") if key in first} if isinstance(first, dict) else first
        return f"weights of {show(said)}{' and more beside' if isinstance(odd, list) else ''}", KNOWN
    if layout(section) is None:
        return f"{'weights in several forms' if _weights(section) else 'no word of weights'}", KNOWN
    return None


def _weights(section: Section) -> list[object]:
    """What is said of weights: of all, and of those with names like a pattern."""
    others = section.get("layer_quant_config")
    every = [section.get("global_quant_config"), *(others.values() if isinstance(others, dict) else ())]
    return [each["weight"] for each in every if isinstance(each, dict) and each.get("weight") is not None]


def _form(weights: object) -> str | None:
    """The key of `ENDINGS`; None for weights that are not read."""
    if not isinstance(weights, dict) or weights.get("is_dynamic"):
        return None
    found = FORMS.get((str(weights.get("dtype")), str(weights.get("qscheme"))))
    grouped = weights.get("group_size") == GROUP and weights.get("scale_format") == SCALES
    return found if found == "fp8" or grouped else None
