"""Predicts the formats in which another tool's quantized checkpoint will be held, from its config, before any weights are here.

Used for planning; once the tensors are here they state their own layout (`imported.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...quant.imports import bitsandbytes, fp8, groups, mxfp4, nvfp4, ternary
from ...quant.spec import QuantSpec
from .. import families
from ..config import ModelConfig
from ..families import TensorRule, base_role, expert_of
from .import_config import (
    BNB_4BIT,
    BNB_INT8,
    LINEAR_ROLES,
    MLX,
    MLX_EXACT_ROLES,
    MLX_PACKED_ROLES,
    MXFP4,
    MXFP4_IN_FP8,
    NVFP4,
    bits_of,
    block_of,
    excluded_modules,
    groups_of,
    layout_of,
    layouts_of,
    matches_module,
    mlx_form,
    runs_from_codes,
)
from .mixed_config import WeightKinds, is_mixed

Formats = Callable[[str, TensorRule], QuantSpec | None]  # (role, tensor) -> format; None: as stored
DEQUANTIZED, EXACT = QuantSpec.raw("f16"), QuantSpec.raw("f32")


def expected_formats(section: Mapping[str, object]) -> Formats:
    """The formats in which an `ImportedStore` with `low_bit` will hold matrices, as far as a `quantization_config` tells."""
    if section.get("quant_method") == MLX:
        return _mlx_formats(section)
    if not is_mixed(section):
        return _plain_formats(section)
    kinds = WeightKinds(section)
    plain_formats = [_plain_formats({**plain_section, "lm_head": True}) for plain_section in kinds.sections]
    excluded = excluded_modules(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        index = kinds.index_of(rule.name.removesuffix(".weight"), base_role(role) != "head")
        return None if index is None or any(matches_module(module, rule.name) for module in excluded) else plain_formats[index](role, rule)

    return formats


def expected_specs(config: ModelConfig, section: Mapping[str, object]) -> set[QuantSpec] | None:
    """The packed formats in which matrices will be held. None if the config does not tell: MLX's settings of single modules use its own
    names."""
    if section.get("quant_method") == MLX and any(isinstance(value, dict) for value in section.values()):
        return None
    formats, family = expected_formats(section), families.get(config.family)
    rule_groups = (family.outer_tensors(config), *(family.layer_tensors(config, layer) for layer in range(config.num_hidden_layers)))
    specs = {formats(role, rule) for rules in rule_groups for role, rule in rules.items() if expert_of(role) in (None, 0)}
    return {spec for spec in specs if spec is not None and not spec.is_raw}


def _plain_formats(section: Mapping[str, object]) -> Formats:
    """`expected_formats` of a section with one kind of weights."""
    method, layout = section.get("quant_method"), layout_of(section)
    first = groups_of(section)[0] if method == "compressed-tensors" else section
    block, group = block_of(section), block_of(section)[1] or first.get("group_size", first.get("q_group_size"))
    has_act_order = section.get("desc_act") is True or first.get("actorder") in ("group", True)
    excluded = excluded_modules(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        base = base_role(role)
        is_quantized_head = base == "head" and section.get("lm_head") is True
        if not is_quantized_head and (base not in LINEAR_ROLES or len(rule.shape) != 2):
            return None
        if any(matches_module(module, rule.name) for module in excluded):
            return None
        input_width = rule.shape[1]
        if MXFP4_IN_FP8 in layouts_of(section) and section.get("expert_dtype") == "fp4" and expert_of(role) is not None:
            return mxfp4.SPEC if input_width % mxfp4.GROUP == 0 else DEQUANTIZED
        if layout == "bitnet":
            return ternary.spec_of(input_width)
        if not rule.part_of and layout in MXFP4:
            return mxfp4.SPEC if input_width % mxfp4.GROUP == 0 else DEQUANTIZED
        if not rule.part_of and layout in NVFP4:
            return nvfp4.SPEC if input_width % nvfp4.GROUP == 0 else DEQUANTIZED
        block_rows, block_width = block
        is_split = base == "o_in" and block_rows > 0 == rule.shape[0] % block_rows  # one tensor per group (`canonical_names.split_groups`)
        if (is_split or not rule.part_of) and layout == "fp8":
            scales = (-(-rule.shape[0] // block_rows), -(-input_width // block_width)) if block_rows and block_width else (1,)
            return fp8.spec_of(rule.shape, scales, (block_rows, block_width)) or DEQUANTIZED
        if layout == BNB_4BIT and not rule.part_of:
            return bitsandbytes.spec_of(rule.shape, -(-rule.shape[0] * input_width // bitsandbytes.USUAL)) or DEQUANTIZED
        if layout == BNB_INT8 and not rule.part_of:
            return groups.spec_of(bits_of(section), groups.SCALES[0], input_width, 1) or DEQUANTIZED
        num_groups = input_width // group if type(group) is int and 0 < group < input_width else 1
        has_partial_group = type(group) is int and 0 < group < input_width and input_width % group > 0  # a shorter last block
        if rule.part_of or not runs_from_codes(section) or has_partial_group or (has_act_order and num_groups > 1):
            return DEQUANTIZED
        return groups.spec_of(bits_of(section), "F16", input_width, num_groups) or DEQUANTIZED

    return formats


def _mlx_formats(section: Mapping[str, object]) -> Formats:
    """`expected_formats` of MLX folders. Settings of single modules, which use MLX's names, are ignored: few differ."""
    mlx_format = mlx_form(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        if len(rule.shape) != 2 or mlx_format is None or rule.shape[1] % mlx_format.group:
            return None
        if base_role(role) not in MLX_PACKED_ROLES or rule.plain:
            return EXACT if base_role(role) in MLX_EXACT_ROLES else DEQUANTIZED
        return mlx_format.spec or DEQUANTIZED

    return formats
