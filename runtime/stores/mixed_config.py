"""Splits a `quantization_config` that describes several kinds of weights into plain sections of one kind each.

compressed-tensors has config groups with targets, ModelOpt's MIXED_PRECISION a list of modules, AutoRound per-module overrides. Which
layout a weight has is told by its tensors (`import_index.py`); names only tell what a plan may expect. AutoRound's packings map to those
of GPTQ and AWQ, and to FP8 and compressed-tensors for float weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_reader import show
from .canonical_names import standalone_name
from .name_patterns import matches

Section = Mapping[str, object]
AUTO_ROUND, MIXED, UNQUANTIZED = "auto-round", "MIXED_PRECISION", "UNQUANTIZED"
PATTERN, ALL_LINEARS = "re:", "Linear"
# AutoRound's packing_format -> (equivalent quant_method, checkpoint format; gptq stores zero points less one, gptq_v2 as they are).
PACKINGS = {**dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), ("gptq", "gptq")),
            **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:auto_gptqmodel"), ("gptq", "gptq_v2")),
            **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), ("awq", "gemm"))}
# AutoRound's packing formats of float weights, which are all laid out alike; and (beginning of the data type, bits) -> layout.
FLOAT_PACKINGS = ("auto_round:llm_compressor", "auto_round:fp8_static", "auto_round:fp8")
FLOAT_FORMATS = {("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized", ("nv_fp", 4): "nvfp4-pack-quantized",
                 ("fp", 8): "fp8"}
ROTATION_KEYS = ("rotation_config", "transform_config", "hadamard_config")  # rotations of activations in every forward pass
PACKED_BITS = {"gptq": (2, 3, 4, 5, 6, 7, 8), "awq": (4,)}
MIN_UNQUANTIZED_BITS = 16  # bits from which a weight is not quantized


def plain_sections(section: Section) -> tuple[Section, ...]:
    """A `quantization_config` as one section per kind of weight; itself where all weights are alike."""
    return tuple(_plain_section(section, kind) for kind in _kinds(section)) if is_mixed(section) else (section,)


def is_mixed(section: Section) -> bool:
    """Whether a section may treat some weights differently from others."""
    method = section.get("quant_method")
    config_groups = _groups(section).values() if method == "compressed-tensors" else ()
    return method == AUTO_ROUND or (method == "modelopt" and section.get("quant_algo") == MIXED) or len(config_groups) > 1 or any(
        group.get("format") not in (None, section.get("format")) for group in config_groups)


def unsupported(section: Section) -> tuple[str, str] | None:
    """Key and value that are unsupported in a section with several kinds of weights; None where the plain sections decide."""
    if section.get("quant_method") == "modelopt" and section.get("quant_algo") == MIXED and not _kinds(section):
        return f"quant_algo {show(MIXED)} and no quantized_layers", "hf_quant_config.json may list them: put them into config.json"
    if section.get("quant_method") != AUTO_ROUND:
        return None
    if rotation_key := next((key for key in ROTATION_KEYS if section.get(key)), None):
        return f"{rotation_key} {show(section[rotation_key])}", "weights without a rotation for every pass"
    packing = section.get("packing_format", "auto_round:gptq")
    if not isinstance(packing, str) or packing not in (*PACKINGS, *FLOAT_PACKINGS):
        return f"packing_format {show(packing)}", f"of AutoRound: {', '.join((*PACKINGS, *FLOAT_PACKINGS))}"
    settings = (section, *({**section, **rule} for rule in _extra_rules(section).values()))
    return next(filter(None, (_unsupported_rule(setting, packing) for setting in settings)), None)


def _unsupported_rule(settings: Section, packing: str) -> tuple[str, str] | None:
    """`unsupported` for the settings of some weights under AutoRound."""
    bits, data_type, act_bits = settings.get("bits"), settings.get("data_type") or "int", settings.get("act_bits")
    if type(bits) is int and bits >= MIN_UNQUANTIZED_BITS:
        return None
    if data_type != "int":
        supported = ", ".join(f"{name} of {width} bits" for name, width in FLOAT_FORMATS)
        if _float_format(data_type, bits) is None or settings.get("fmt") not in (None, "e4m3") or settings.get("sym") is False:
            return f"data_type {show(data_type)} and bits {show(bits)}", f"symmetric {supported}, of E4M3 or E2M1, and integers"
        if settings.get("packing_format") not in (None, *FLOAT_PACKINGS):
            return f"data_type {show(data_type)} and packing_format {show(packing)}", f"of floats {', '.join(FLOAT_PACKINGS)}"
        return None
    supported = PACKED_BITS[PACKINGS[packing][0]] if packing in PACKINGS else ()
    if bits not in supported or type(bits) is not int:
        return f"bits {show(bits)} and packing_format {show(packing)}", f"{', '.join(map(str, supported)) or 'no'} bits of integers"
    if type(act_bits) is int and act_bits < MIN_UNQUANTIZED_BITS:
        return f"data_type {show(data_type)} and act_bits {show(act_bits)}", "integers beside activations of 16 bits"
    return None


def _float_format(data_type: object, bits: object) -> str | None:
    """The layout of AutoRound's float weights; None for another data type."""
    return next((layout for (prefix, layout_bits), layout in FLOAT_FORMATS.items()
                 if str(data_type).startswith(prefix) and layout_bits == bits), None)


class WeightKinds:
    """Looks up which of a section's `plain_sections`, here `sections`, applies to a module."""

    def __init__(self, section: Section) -> None:
        self.sections = plain_sections(section)
        self._kinds, self._modules, self._patterns, self._rest = _kinds(section), {}, [], None
        if section.get("quant_method") == "compressed-tensors":
            targets = [(name, target) for name, group in _groups(section).items() for target in _targets(group)]
            self._modules = {standalone_name(target): name for name, target in reversed(targets)}
            self._patterns = [(target.removeprefix(PATTERN), name) for name, target in targets if target.startswith(PATTERN)]
            self._rest = next((name for name, target in targets if target == ALL_LINEARS), None)
        elif section.get("quant_method") == "modelopt":
            self._modules = {standalone_name(name): algorithm for name, algorithm in _quantized_layers(section).items()}
        else:
            self._modules = {standalone_name(name): _kind_of_rule(section, rule) for name, rule in _extra_rules(section).items()}
            self._patterns, self._rest = list(self._modules.items()), _kind_of_rule(section, {})
        self._anywhere = section.get("quant_method") == AUTO_ROUND

    def index_of(self, module: str, by_class: bool = True) -> int | None:
        """Index into `sections` for a module, None if it is not quantized. Without `by_class`, only settings that name the module count."""
        ancestor = module
        while ancestor and ancestor not in self._modules:
            ancestor = ancestor.rpartition(".")[0]
        default = self._rest if by_class else None
        kind = self._modules[ancestor] if ancestor else next(
            (kind for pattern, kind in self._patterns if matches(pattern, module, self._anywhere)), default)
        return self._kinds.index(kind) if kind in self._kinds else None


def _kinds(section: Section) -> list[object]:
    """A key for each kind of weights: the name of a config group, of an algorithm, or (bits, group size, float layout)."""
    if section.get("quant_method") == "compressed-tensors":
        return list(_groups(section))
    if section.get("quant_method") == "modelopt":
        return list(dict.fromkeys(each for each in _quantized_layers(section).values() if each != UNQUANTIZED))
    found = (_kind_of_rule(section, rule) for rule in ({}, *_extra_rules(section).values()))
    return list(dict.fromkeys(each for each in found if each is not None))


def _plain_section(section: Section, kind: object) -> Section:
    """A section that applies one kind to all weights."""
    if section.get("quant_method") == "compressed-tensors":
        group = _groups(section)[str(kind)]
        weight_format = group.get("format") or section.get("format")
        return {**section, "format": weight_format, "config_groups": {kind: {**group, "format": weight_format}}}
    exclusions = {key: section[key] for key in ("ignore", "modules_to_not_convert") if key in section}
    if section.get("quant_method") == "modelopt":
        return {**exclusions, "quant_method": "modelopt", "quant_algo": kind}
    bits, group, layout = kind
    if layout == "fp8":
        return {**exclusions, "quant_method": "fp8", "weight_block_size": list(group) if isinstance(group, tuple) else None}
    if layout is not None:
        weights = {"type": "float", "num_bits": bits, "group_size": group}
        return {**exclusions, "quant_method": "compressed-tensors", "format": layout, "config_groups": {layout: {"weights": weights}}}
    method, order = PACKINGS.get(str(section.get("packing_format", "auto_round:gptq")), ("gptq", "gptq"))
    return {**exclusions, "quant_method": method, "bits": bits, "group_size": group, "checkpoint_format": order}


def _groups(section: Section) -> dict[str, Section]:
    """The config groups of compressed-tensors that have settings of weights."""
    found = section.get("config_groups")
    return {name: group for name, group in found.items() if isinstance(group, dict) and isinstance(group.get("weights"), dict)
            } if isinstance(found, dict) else {}


def _targets(group: Section) -> list[str]:
    found = group.get("targets", [ALL_LINEARS])
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _quantized_layers(section: Section) -> dict[str, str]:
    """ModelOpt's module -> algorithm."""
    found = section.get("quantized_layers")
    return {name: str(rule.get("quant_algo")) for name, rule in found.items() if isinstance(rule, dict)} if isinstance(found, dict) else {}


def _extra_rules(section: Section) -> dict[str, Section]:
    """AutoRound's module or pattern -> its own settings."""
    found = section.get("extra_config")
    return {name: rule for name, rule in found.items() if isinstance(rule, dict)} if isinstance(found, dict) else {}


def _kind_of_rule(section: Section, rule: Section) -> tuple[object, object, str | None] | None:
    """(bits, group size, float layout) under a rule of AutoRound; None if it leaves weights unquantized."""
    bits, group, data_type = (rule.get(key, section.get(key)) for key in ("bits", "group_size", "data_type"))
    if type(bits) is int and bits >= MIN_UNQUANTIZED_BITS:
        return None
    block = tuple(group) if isinstance(group, list) and all(type(size) is int for size in group) else None
    return show(bits) if isinstance(bits, (list, dict)) else bits, group if type(group) is int else block, _float_format(data_type, bits)
