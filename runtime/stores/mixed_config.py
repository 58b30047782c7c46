"""Splits a `quantization_config` that describes several kinds of weights into plain sections of one kind each.

compressed-tensors has config groups with targets, ModelOpt's MIXED_PRECISION a list of modules, AutoRound per-module overrides. Which
layout a weight has is told by its tensors (`import_index.py`); names only tell what a plan may expect. AutoRound's packings map to those
of GPTQ and AWQ, and to FP8 and compressed-tensors for float weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config_reader import show
from .canonical_names import alone
from .name_patterns import matches

Section = Mapping[str, object]
AUTO_ROUND, MIXED, UNQUANTIZED = "auto-round", "MIXED_PRECISION", "UNQUANTIZED"
PATTERN, EVERY = "re:", "Linear"
# How AutoRound packs -> the method as which codes lie, and how its zero points are stored: less one, or as they are.
PACKINGS = {**dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), ("gptq", "gptq")),
            **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:auto_gptqmodel"), ("gptq", "gptq_v2")),
            **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), ("awq", "gemm"))}
# Of floats, whose tensors lie alike however it calls that; and how they lie, by how the data type begins and by bits.
FLOAT_PACKINGS = ("auto_round:llm_compressor", "auto_round:fp8_static", "auto_round:fp8")
FLOATS = {("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized", ("nv_fp", 4): "nvfp4-pack-quantized", ("fp", 8): "fp8"}
TURNED = ("rotation_config", "transform_config", "hadamard_config")  # of activations in every pass
PACKED_BITS = {"gptq": (2, 3, 4, 5, 6, 7, 8), "awq": (4,)}
WIDE = 16  # bits from which a weight is not quantized


def plain_sections(section: Section) -> tuple[Section, ...]:
    """A `quantization_config` as one section per kind of weight; itself where all weights are alike."""
    return tuple(_plain(section, kind) for kind in _kinds(section)) if is_mixed(section) else (section,)


def is_mixed(section: Section) -> bool:
    """Whether a section may treat some weights differently from others."""
    method = section.get("quant_method")
    found = _groups(section).values() if method == "compressed-tensors" else ()
    return method == AUTO_ROUND or (method == "modelopt" and section.get("quant_algo") == MIXED) or len(found) > 1 or any(
        group.get("format") not in (None, section.get("format")) for group in found)


def unsupported(section: Section) -> tuple[str, str] | None:
    """Key and value that are unsupported in a section with several kinds of weights; None where the plain sections decide."""
    if section.get("quant_method") == "modelopt" and section.get("quant_algo") == MIXED and not _kinds(section):
        return f"quant_algo {show(MIXED)} and no quantized_layers", "hf_quant_config.json may list them: put them into config.json"
    if section.get("quant_method") != AUTO_ROUND:
        return None
    if turned := next((key for key in TURNED if section.get(key)), None):
        return f"{turned} {show(section[turned])}", "weights without a rotation for every pass"
    packing = section.get("packing_format", "auto_round:gptq")
    if not isinstance(packing, str) or packing not in (*PACKINGS, *FLOAT_PACKINGS):
        return f"packing_format {show(packing)}", f"of AutoRound: {', '.join((*PACKINGS, *FLOAT_PACKINGS))}"
    each = (section, *({**section, **rule} for rule in _rules(section).values()))
    return next(filter(None, (_odd(own, packing) for own in each)), None)


def _odd(own: Section, packing: str) -> tuple[str, str] | None:
    """`trouble` of what AutoRound says of some weights."""
    bits, kind, activations = own.get("bits"), own.get("data_type") or "int", own.get("act_bits")
    if type(bits) is int and bits >= WIDE:
        return None
    if kind != "int":
        known = ", ".join(f"{name} of {width} bits" for name, width in FLOATS)
        if _form(kind, bits) is None or own.get("fmt") not in (None, "e4m3") or own.get("sym") is False:
            return f"data_type {show(kind)} and bits {show(bits)}", f"symmetric {known}, of E4M3 or E2M1, and integers"
        if own.get("packing_format") not in (None, *FLOAT_PACKINGS):
            return f"data_type {show(kind)} and packing_format {show(packing)}", f"of floats {', '.join(FLOAT_PACKINGS)}"
        return None
    known = PACKED_BITS[PACKINGS[packing][0]] if packing in PACKINGS else ()
    if bits not in known or type(bits) is not int:
        return f"bits {show(bits)} and packing_format {show(packing)}", f"{', '.join(map(str, known)) or 'no'} bits of integers"
    if type(activations) is int and activations < WIDE:
        return f"data_type {show(kind)} and act_bits {show(activations)}", "integers beside activations of 16 bits"
    return None


def _form(kind: object, bits: object) -> str | None:
    """How floats of AutoRound lie, as FLOATS says; None for what is no such data type."""
    return next((form for (begin, width), form in FLOATS.items() if str(kind).startswith(begin) and width == bits), None)


class Kinds:
    """The kinds of weights of a section that may say several things. `sections` are as of `plain_sections`."""

    def __init__(self, section: Section) -> None:
        self.sections = plain_sections(section)
        self._kinds, self._modules, self._patterns, self._rest = _kinds(section), {}, [], None
        if section.get("quant_method") == "compressed-tensors":
            targets = [(name, target) for name, group in _groups(section).items() for target in _targets(group)]
            self._modules = {alone(target): name for name, target in reversed(targets)}
            self._patterns = [(target.removeprefix(PATTERN), name) for name, target in targets if target.startswith(PATTERN)]
            self._rest = next((name for name, target in targets if target == EVERY), None)
        elif section.get("quant_method") == "modelopt":
            self._modules = {alone(name): algorithm for name, algorithm in _layers(section).items()}
        else:
            self._modules = {alone(name): _packed(section, rule) for name, rule in _rules(section).items()}
            self._patterns, self._rest = list(self._modules.items()), _packed(section, {})
        self._anywhere = section.get("quant_method") == AUTO_ROUND

    def place(self, module: str, by_class: bool = True) -> int | None:
        """Which of `sections` is a module's, None where it is not quantized; not `by_class`: unless it is named."""
        inside = module
        while inside and inside not in self._modules:
            inside = inside.rpartition(".")[0]
        rest = self._rest if by_class else None
        kind = self._modules[inside] if inside else next(
            (kind for pattern, kind in self._patterns if matches(pattern, module, self._anywhere)), rest)
        return self._kinds.index(kind) if kind in self._kinds else None


def _kinds(section: Section) -> list[object]:
    """What tells its kinds of weights from one another: names of groups, of algorithms, or bits and sizes of groups."""
    if section.get("quant_method") == "compressed-tensors":
        return list(_groups(section))
    if section.get("quant_method") == "modelopt":
        return list(dict.fromkeys(each for each in _layers(section).values() if each != UNQUANTIZED))
    found = (_packed(section, rule) for rule in ({}, *_rules(section).values()))
    return list(dict.fromkeys(each for each in found if each is not None))


def _plain(section: Section, kind: object) -> Section:
    """The section that says one of its kinds of all weights."""
    if section.get("quant_method") == "compressed-tensors":
        group = _groups(section)[str(kind)]
        written = group.get("format") or section.get("format")
        return {**section, "format": written, "config_groups": {kind: {**group, "format": written}}}
    beside = {key: section[key] for key in ("ignore", "modules_to_not_convert") if key in section}
    if section.get("quant_method") == "modelopt":
        return {**beside, "quant_method": "modelopt", "quant_algo": kind}
    bits, group, form = kind
    if form == "fp8":
        return {**beside, "quant_method": "fp8", "weight_block_size": list(group) if isinstance(group, tuple) else None}
    if form is not None:
        weights = {"type": "float", "num_bits": bits, "group_size": group}
        return {**beside, "quant_method": "compressed-tensors", "format": form, "config_groups": {form: {"weights": weights}}}
    method, order = PACKINGS.get(str(section.get("packing_format", "auto_round:gptq")), ("gptq", "gptq"))
    return {**beside, "quant_method": method, "bits": bits, "group_size": group, "checkpoint_format": order}


def _groups(section: Section) -> dict[str, Section]:
    """Those of compressed-tensors that say something of weights."""
    found = section.get("config_groups")
    return {name: group for name, group in found.items() if isinstance(group, dict) and isinstance(group.get("weights"), dict)
            } if isinstance(found, dict) else {}


def _targets(group: Section) -> list[str]:
    found = group.get("targets", [EVERY])
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _layers(section: Section) -> dict[str, str]:
    """Module -> algorithm, of ModelOpt."""
    found = section.get("quantized_layers")
    return {name: str(rule.get("quant_algo")) for name, rule in found.items() if isinstance(rule, dict)} if isinstance(found, dict) else {}


def _rules(section: Section) -> dict[str, Section]:
    """Module, or pattern -> what holds for it alone, of AutoRound."""
    found = section.get("extra_config")
    return {name: rule for name, rule in found.items() if isinstance(rule, dict)} if isinstance(found, dict) else {}


def _packed(section: Section, rule: Section) -> tuple[object, object, str | None] | None:
    """Bits, size of a group and form of floats under a rule of AutoRound; None where they are those of weights that are not quantized."""
    bits, group, kind = (rule.get(key, section.get(key)) for key in ("bits", "group_size", "data_type"))
    if type(bits) is int and bits >= WIDE:
        return None
    block = tuple(group) if isinstance(group, list) and all(type(size) is int for size in group) else None
    return show(bits) if isinstance(bits, (list, dict)) else bits, group if type(group) is int else block, _form(kind, bits)
