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
    BYTES,
    EXACT_OF_MLX,
    FROM_MLX,
    LEVELS,
    LINEARS,
    MLX,
    MXFP4,
    NVFP4,
    PAIRS,
    bits_of,
    block_of,
    groups_of,
    is_named,
    layout_of,
    layouts_of,
    left_out,
    mlx_form,
    runs_from_codes,
)
from .mixed_config import Kinds, is_mixed

Formats = Callable[[str, TensorRule], QuantSpec | None]  # of a role and its tensor; None: as the checkpoint says
WIDENED, EXACT = QuantSpec.raw("f16"), QuantSpec.raw("f32")


def expected_formats(section: Mapping[str, object]) -> Formats:
    """How an `ImportedStore` that keeps codes will hold the matrices of a repository, as far as its `quantization_config` says."""
    if section.get("quant_method") == MLX:
        return _of_mlx(section)
    if not is_mixed(section):
        return _of_one_kind(section)
    kinds = Kinds(section)
    each, named = [_of_one_kind({**plain, "lm_head": True}) for plain in kinds.sections], left_out(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        place = kinds.place(rule.name.removesuffix(".weight"), base_role(role) != "head")
        return None if place is None or any(is_named(module, rule.name) for module in named) else each[place](role, rule)

    return formats


def expected_specs(config: ModelConfig, section: Mapping[str, object]) -> set[QuantSpec] | None:
    """The formats of few bits that matrices of a repository will be held in. None where its config does not tell: MLX names single
    modules in its own words."""
    if section.get("quant_method") == MLX and any(isinstance(own, dict) for own in section.values()):
        return None
    formats, family = expected_formats(section), families.get(config.family)
    groups = (family.outer_tensors(config), *(family.layer_tensors(config, layer) for layer in range(config.num_hidden_layers)))
    found = {formats(role, rule) for rules in groups for role, rule in rules.items() if expert_of(role) in (None, 0)}
    return {spec for spec in found if spec is not None and not spec.is_raw}


def _of_one_kind(section: Mapping[str, object]) -> Formats:
    """`expected_formats` of a section that says one thing of all weights."""
    method, layout = section.get("quant_method"), layout_of(section)
    first = groups_of(section)[0] if method == "compressed-tensors" else section
    stated, group = block_of(section), block_of(section)[1] or first.get("group_size", first.get("q_group_size"))
    ordered = section.get("desc_act") is True or first.get("actorder") in ("group", True)
    named = left_out(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        own = base_role(role)
        head = own == "head" and section.get("lm_head") is True
        if not head and (own not in LINEARS or len(rule.shape) != 2) or any(is_named(each, rule.name) for each in named):
            return None
        depth = rule.shape[1]
        if PAIRS in layouts_of(section) and section.get("expert_dtype") == "fp4" and expert_of(role) is not None:
            return mxfp4.SPEC if depth % mxfp4.GROUP == 0 else WIDENED
        if layout == "bitnet":
            return ternary.spec_of(depth)
        if not rule.part_of and layout in MXFP4:
            return mxfp4.SPEC if depth % mxfp4.GROUP == 0 else WIDENED
        if not rule.part_of and layout in NVFP4:
            return nvfp4.SPEC if depth % nvfp4.GROUP == 0 else WIDENED
        high, wide = stated
        cut = own == "o_in" and high > 0 == rule.shape[0] % high  # codes of which each range of rows is one (`canonical_names.py`)
        if (cut or not rule.part_of) and layout == "fp8":
            scales = (-(-rule.shape[0] // high), -(-depth // wide)) if high and wide else (1,)
            return fp8.spec_of(rule.shape, scales, (high, wide)) or WIDENED
        if layout == LEVELS and not rule.part_of:
            return bitsandbytes.spec_of(rule.shape, -(-rule.shape[0] * depth // bitsandbytes.USUAL)) or WIDENED
        if layout == BYTES and not rule.part_of:
            return groups.spec_of(bits_of(section), groups.SCALES[0], depth, 1) or WIDENED
        count = depth // group if type(group) is int and 0 < group < depth else 1
        in_part = type(group) is int and 0 < group < depth and depth % group > 0  # the last block of a weight
        if rule.part_of or not runs_from_codes(section) or in_part or (ordered and count > 1):
            return WIDENED
        return groups.spec_of(bits_of(section), "F16", depth, count) or WIDENED

    return formats


def _of_mlx(section: Mapping[str, object]) -> Formats:
    """`expected_formats` of what MLX quantized. What it says of single modules has their own names and is not looked up: few differ."""
    form = mlx_form(section)

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        if len(rule.shape) != 2 or form is None or rule.shape[1] % form.group:
            return None
        if base_role(role) not in FROM_MLX or rule.plain:
            return EXACT if base_role(role) in EXACT_OF_MLX else WIDENED
        return form.spec or WIDENED

    return formats
