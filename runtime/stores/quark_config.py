"""Parser of AMD Quark's quantization config: FP8 under one scale per tensor or per row, and MXFP4, for all weights or by name pattern.
Quantization of activations and caches is ignored, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_reader import show

METHOD = "quark"
# (dtype, qscheme) of weights -> layout, a key of `LAYOUT_TENSORS`.
LAYOUTS = {("fp8_e4m3", "per_tensor"): "fp8", ("fp8_e4m3", "per_channel"): "fp8", ("fp4", "per_group"): "mxfp4 in unsigned bytes"}
GROUP, SCALES = 32, "e8m0"  # of MXFP4
ROTATIONS = ("rotation", "quarot")  # algorithms that rotate activations in every forward pass
SUPPORTED = "of Quark: all weights in fp8_e4m3 with one scale or one a row, or all in fp4 by groups of 32 under e8m0"
Section = Mapping[str, object]


def layout(section: Section) -> str | None:
    """Key of the layout that all weights share; None where that is not a supported one."""
    layouts = {_layout_of(weights) for weights in _weights(section)}
    return layouts.pop() if len(layouts) == 1 else None


def unsupported(section: Section) -> tuple[str, str] | None:
    """Key and value that are unsupported in a section."""
    algorithms = section.get("algo_config")
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(each, dict) and any(name in str(each.get("name")).lower() for name in ROTATIONS):
            return f"algo_config {show(each.get('name'))}", "weights without a rotation for every pass"
    export = section.get("export")
    weight_format = export.get("weight_format", "real_quantized") if isinstance(export, dict) else "real_quantized"
    if weight_format != "real_quantized":
        return f"weight_format {show(weight_format)}", f"{SUPPORTED}, stored as real_quantized"
    unsupported_weights = next((each for each in _weights(section) if _layout_of(each) is None), None)
    if unsupported_weights is not None:
        first = unsupported_weights
        if isinstance(first, list) and first and isinstance(first[0], dict):
            first = first[0]
        description = {key: first[key] for key in ("dtype", "qscheme", "group_size") if key in first} if isinstance(first, dict) else first
        return f"weights of {show(description)}{' and more beside' if isinstance(unsupported_weights, list) else ''}", SUPPORTED
    if layout(section) is None:
        return f"{'weights in several forms' if _weights(section) else 'no word of weights'}", SUPPORTED
    return None


def _weights(section: Section) -> list[object]:
    """The settings of weights: global ones and those by name pattern."""
    by_pattern = section.get("layer_quant_config")
    settings = [section.get("global_quant_config"), *(by_pattern.values() if isinstance(by_pattern, dict) else ())]
    return [each["weight"] for each in settings if isinstance(each, dict) and each.get("weight") is not None]


def _layout_of(weights: object) -> str | None:
    """The layout, a key of `LAYOUT_TENSORS`; None for unsupported weights."""
    if not isinstance(weights, dict) or weights.get("is_dynamic"):
        return None
    known_layout = LAYOUTS.get((str(weights.get("dtype")), str(weights.get("qscheme"))))
    is_mxfp4 = weights.get("group_size") == GROUP and weights.get("scale_format") == SCALES
    return known_layout if known_layout == "fp8" or is_mxfp4 else None
