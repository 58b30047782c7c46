"""Parser of other tools' `quantization_config`: is the method supported, how are the weights laid out, and at how many bits.

GPTQ, AWQ, FP8 (with experts in MXFP4 too, and FBGEMM's), Quark's FP8 and MXFP4 (`quark_config.py`), ModelOpt's FP8, NVFP4, MXFP4 and
MXFP8, BitNet, bitsandbytes, and compressed-tensors: pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized,
mxfp4-pack-quantized, mxfp8-quantized and naive-quantized. A section that describes several kinds of weights is split first
(`mixed_config.py`). All of it is untrusted input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...quant.imports import groups, mlx
from ..config_reader import ConfigError, show
from . import quark_config
from .mixed_config import AUTO_ROUND, MIXED, PATTERN, is_mixed, plain_sections, unsupported
from .name_patterns import matches

if TYPE_CHECKING:
    from ...offload.safetensors_header import TensorInfo

# Roles of the matrices that these methods quantize.
LINEAR_ROLES = ("q", "k", "v", "kv_a", "q_a", "q_b", "attn_gate", "o", "gate", "up", "down", "state_in", "state_gate", "state_r",
           "state_k", "state_v", "state_out", "o_in", "experts_in", "experts_out")
ORIGINAL = "use the original 16-bit checkpoint"
MLX = "mlx"  # its own sections state no method
MLX_PACKED_ROLES = (*LINEAR_ROLES, "embed", "head")  # MLX quantizes matrices of all roles; these stay packed
# Small matrices that route or decay are dequantized to float32, which loses nothing.
MLX_EXACT_ROLES = ("router", "scale", "state_beta", "state_keys", "state_rate", "state_rate_wide")
# Families whose folders written by mlx-lm were tested against mlx-lm itself.
MLX_FAMILIES = ("afmoe", "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone",
                "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe",
                "glm4_moe_lite", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "internlm2",
                "internlm3", "jamba", "lfm2", "lfm2_moe", "llama", "mamba", "mamba2", "mimo", "minicpm", "minicpm3", "minimax_m2",
                "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2",
                "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open",
                "stablelm", "starcoder2")
# Values of config keys that mlx-lm folded into the weights, although its config.json still has the original ones.
MLX_FOLDED_KEYS = {"falcon_h1": {
    "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5,
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier", "lm_head_multiplier",
                     "ssm_in_multiplier", "ssm_out_multiplier"), 1.0)}, "ernie4_5_moe": {"moe_use_aux_free": False}}
# Notices about tensors that mlx-lm drops.
MLX_OMISSION_NOTICES = {
    "ernie4_5_moe": "mlx-lm left out what corrects the scores of this model's routers: it chooses some experts that the published model "
                    "does not"}
FBGEMM = "fbgemm_fp8"  # its FP8 layout is the common one
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", FBGEMM, "modelopt", quark_config.METHOD, "bitnet", "bitsandbytes", AUTO_ROUND, MLX)
# quant_method -> description of a method that is not supported.
UNSUPPORTED_METHODS = {
    "aqlm": "AQLM, sums of codebooks", "eetq": "EETQ, only for CUDA GPUs", "exl2": "ExLlamaV2, only for CUDA GPUs",
    "exl3": "ExLlamaV3, only for CUDA GPUs", "fp_quant": "FP-Quant", "higgs": "HIGGS", "hqq": "HQQ", "quanto": "Quanto", "sinq": "SINQ",
    "spqr": "SpQR", "torchao": "torchao", "vptq": "VPTQ, vectors of codebooks"}
# ModelOpt's quant_algo -> layout. W4A16 and PER_TOKEN concern activations; PB: per block; WO: weights only.
MODELOPT_LAYOUTS = {"FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4 in bytes",
              "W4A16_NVFP4": "nvfp4 in bytes", "W4A8_NVFP4_FP8": "nvfp4 in bytes", "W4A8_MXFP4_FP8": "mxfp4 in unsigned bytes",
              "MXFP8": "mxfp8"}
MODELOPT_BLOCK_ALGORITHM, MODELOPT_BLOCK = "FP8_PB_WO", [128, 128]
BNB_4BIT, BNB_INT8 = "levels beside codes", "bytes by row"  # layouts of bitsandbytes: NF4 and FP4, LLM.int8
# Names of the component that describes bitsandbytes' 4-bit quantization; a weight has one of them.
BNB_QUANT_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
NVFP4 = ("nvfp4", "nvfp4 in bytes")  # layouts
COMPRESSED_TENSORS_FP4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}  # format -> layout
MXFP4_IN_FP8 = "mxfp4 in bytes"  # layout of some weights in FP8 checkpoints: I8 tensors whose bytes hold two E2M1 codes each
MXFP4, MXFP8 = (MXFP4_IN_FP8, "mxfp4 in unsigned bytes", "mxfp4"), "mxfp8"  # layouts with a power-of-two scale per 32 inputs
# Key -> supported values, of quant_method bitnet (`imported_ternary.py`). use_rms_norm would add a norm before each matrix.
TERNARY_KEYS = {"linear_class": ("autobitlinear", "bitlinear"), "quantization_mode": ("offline", "online"), "use_rms_norm": (False,)}
FLOATS, INTEGERS = ("F32", "F16", "BF16"), ("I32", "I64")


@dataclass(frozen=True)
class ComponentKind:
    """What a component tensor of a weight, other than its codes, may be."""

    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    needed: bool = True

    def accepts(self, info: TensorInfo | None) -> bool:
        """Whether a tensor, None where there is none, can be this component."""
        return not self.needed if info is None else info.dtype in self.dtypes and len(info.shape) in self.ranks


WORDS, GROUP_SCALES, SCALES = ComponentKind(("I32",), (2,)), ComponentKind(FLOATS, (2,)), ComponentKind(FLOATS, (0, 1, 2))
EXPONENTS = "F8_E8M0"  # scales that are powers of two
FP8_SCALES = ComponentKind((*FLOATS, EXPONENTS), (0, 1, 2, 4), needed=False)  # rank 4: scales of blocks [n, 1, k, 1]
POWERS = ComponentKind((EXPONENTS,), (2,), needed=False)
BYTE_POWERS = ComponentKind(("U8", EXPONENTS), (2,))
SMALL_SCALES, MATRIX_SCALE = ComponentKind(("F8_E4M3",), (2,)), ComponentKind(("F32",), (0, 1))
ORDER = ComponentKind(INTEGERS, (1, 2), needed=False)
LEVEL_LIST, STATE = ComponentKind(("F32",), (1,)), ComponentKind(("U8",), (1,), needed=False)
OF_SCALES = replace(LEVEL_LIST, needed=False)
# Layout -> (suffix of the tensor that holds a weight's codes, kinds of its other components by suffix).
LAYOUT_TENSORS = {
    "gptq": ("qweight", {"qzeros": WORDS, "scales": GROUP_SCALES, "g_idx": ORDER}),
    "awq": ("qweight", {"qzeros": WORDS, "scales": GROUP_SCALES}),
    "packed": ("weight_packed", {"weight_scale": GROUP_SCALES, "weight_shape": ComponentKind(INTEGERS, (1, 2)),
                                 "weight_zero_point": replace(WORDS, needed=False), "weight_g_idx": ORDER}),
    "integers": ("weight", {"weight_scale": SCALES, "weight_zero_point": ComponentKind(("I8",), (0, 1, 2), needed=False),
                            "weight_g_idx": ORDER}),
    "fp8": ("weight", {"weight_scale_inv": FP8_SCALES, "weight_scale": FP8_SCALES}),
    MXFP4_IN_FP8: ("weight", {"weight_scale_inv": POWERS, "weight_scale": POWERS}),
    "mxfp4 in unsigned bytes": ("weight", {"weight_scale": BYTE_POWERS}),
    "mxfp4": ("weight_packed", {"weight_scale": BYTE_POWERS}),
    MXFP8: ("weight", {"weight_scale": BYTE_POWERS}),
    "nvfp4": ("weight_packed", {"weight_scale": SMALL_SCALES, "weight_global_scale": MATRIX_SCALE}),
    "nvfp4 in bytes": ("weight", {"weight_scale": SMALL_SCALES, "weight_scale_2": MATRIX_SCALE}),
    BNB_4BIT: ("weight", {"weight.absmax": ComponentKind(("F32", "U8"), (1,)), "weight.quant_map": LEVEL_LIST,
                        "weight.nested_absmax": OF_SCALES, "weight.nested_quant_map": OF_SCALES,
                        **dict.fromkeys(BNB_QUANT_STATES, STATE)}),
    BNB_INT8: ("weight", {"SCB": LEVEL_LIST, "weight_format": ComponentKind(("U8",), (0, 1), needed=False)}),
}
# Layout -> component -> (its dimension of outputs, whether they are packed into words). Components that are not listed may have entries for
# several outputs.
OUTPUT_AXES = {
    "gptq": {"qweight": (1, False), "qzeros": (1, True), "scales": (1, False)},
    "awq": {"qweight": (1, True), "qzeros": (1, True), "scales": (1, False)},
    "packed": {"weight_packed": (0, False), "weight_scale": (0, False), "weight_zero_point": (0, True)},
    "integers": {"weight": (0, False)},
    "fp8": {"weight": (0, False)},
    MXFP4_IN_FP8: {"weight": (0, False), "weight_scale_inv": (0, False), "weight_scale": (0, False)},
    **dict.fromkeys(("mxfp4 in unsigned bytes", MXFP8), {"weight": (0, False), "weight_scale": (0, False)}),
    **dict.fromkeys(("mxfp4", "nvfp4"), {"weight_packed": (0, False), "weight_scale": (0, False)}),
    "nvfp4 in bytes": {"weight": (0, False), "weight_scale": (0, False)},
    BNB_4BIT: {},  # sliced by values: blocks do not begin with rows
    BNB_INT8: {"weight": (0, False), "SCB": (0, False)},
}
# Scales of activations and caches, which are not quantized here by a checkpoint's scales.
IGNORED_ENDINGS = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
           "activation_scale", "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
# Dtype of codes in tensors named `weight`; one of another dtype is an unquantized weight.
WEIGHT_CODE_DTYPES = {"integers": "I8", "fp8": "F8_E4M3", MXFP4_IN_FP8: "I8", "mxfp4 in unsigned bytes": "U8", MXFP8: "F8_E4M3",
                      "nvfp4 in bytes": "U8", BNB_INT8: "I8"}
CODE_DTYPES = {**WEIGHT_CODE_DTYPES, "mxfp4": "U8", "nvfp4": "U8"}  # of codes that are not packed into I32 words
BLOCK_SCALED = ("integers", "fp8")  # layouts in which several outputs may share a scale


def quantization_section(raw: Mapping[str, object]) -> dict[str, object] | None:
    """The `quantization_config` of a config.json, None if it has none; MLX's gets a quant_method, and a top-level `expert_dtype` is merged
    into it."""
    section, expert_dtype = raw.get("quantization_config"), raw.get("expert_dtype")
    if isinstance(mlx_section := raw.get("quantization"), dict):
        return {**mlx_section, "quant_method": MLX}  # MLX writes it under the other name too
    if not isinstance(section, dict):
        return None
    return {"expert_dtype": expert_dtype, **section} if expert_dtype is not None else section


def check_method(section: Mapping[str, object]) -> None:
    """Raises ConfigError for a `quantization_config` that is not read, by name."""
    method = section.get("quant_method")

    def refused(what: str, known: str) -> ConfigError:
        return ConfigError(f"config.json: quantization_config with {what} is not supported", f"{known}; or {ORIGINAL}")

    if method not in METHODS:
        description = f" ({UNSUPPORTED_METHODS[method]})" if isinstance(method, str) and method in UNSUPPORTED_METHODS else ""
        raise refused(f"quant_method {show(method)}{description}", f"known: {', '.join(METHODS)}, and GGUF files of the model")
    if problem := unsupported(section):
        raise refused(*problem)
    if method == "compressed-tensors":
        _check_sparsity_and_transforms(section, refused)
    if is_mixed(section):
        for plain_section in plain_sections(section) if method != AUTO_ROUND else ():
            check_method(plain_section)
        return
    bits = section.get("bits")
    if method == MLX and (mlx_form(section) is None):
        raise refused(f"bits {show(bits)}, group_size {show(section.get('group_size'))} and mode {show(section.get('mode', 'affine'))}",
                      "of MLX: affine of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, mxfp8, nvfp4")
    if method == "gptq" and bits not in (2, 3, 4, 8):
        raise refused(f"bits {show(bits)}", "GPTQ of 2, 3, 4 and 8 bits")
    if method == "gptq" and checkpoint_format(section) not in ("gptq", "gptq_v2"):
        raise refused(f"format {show(checkpoint_format(section))}", "GPTQ in the formats gptq and gptq_v2")
    if method == "gptq" and (deviating_bits := _deviating_bits(section)) is not None:
        raise refused(f"dynamic bits {show(deviating_bits)} beside bits {show(bits)}", "GPTQ with the same bits for all weights")
    version = str(section.get("version") or checkpoint_format(section) or "gemm")
    if method == "awq" and (bits not in (4, None) or version.lower() != "gemm"):
        raise refused(f"bits {show(bits)} and version {show(version)}", "AWQ of 4 bits in the gemm layout")
    if method == "bitnet":
        for key, known in TERNARY_KEYS.items():
            if section.get(key) not in (None, *known):
                raise refused(f"{key} {show(section[key])}", f"of BitNet: {', '.join(map(show, known))}")
    if method == quark_config.METHOD and (problem := quark_config.unsupported(section)):
        raise refused(*problem)
    if method == "modelopt" and str(algorithm := section.get("quant_algo")).upper() not in MODELOPT_LAYOUTS:
        raise refused(f"quant_algo {show(algorithm)}", f"of ModelOpt: {', '.join((*MODELOPT_LAYOUTS, MIXED))}")
    if method == "bitsandbytes" and layout_of(section) is None:
        raise refused(f"quant_method {show(method)} and neither load_in_4bit nor load_in_8bit", "4 bits (NF4, FP4) and LLM.int8")
    if method == "compressed-tensors" and layout_of(section) is None:
        raise refused(f"format {show(section.get('format'))} and weights of {_weight_types_text(section)}",
                      "pack-quantized integers of 4 or 8 bits, int-quantized ones of 2 to 8, float-quantized and mxfp8-quantized weights "
                      "of 8, nvfp4-pack-quantized and mxfp4-pack-quantized ones of 4")


def _check_sparsity_and_transforms(section: Mapping[str, object], refused: Callable[[str, str], ConfigError]) -> None:
    """Raises ConfigError for compressed-tensors' sparsity, or transforms that run in every forward pass."""
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise refused(f"sparsity_config of format {show(sparsity['format'])}", "dense weights")
    if location := _runtime_transform(section.get("transform_config")):
        raise refused(f"a transform at {location}", "transforms that are in the weights already")


def check_family(section: Mapping[str, object], model_type: str) -> None:
    """Raises ConfigError for a family of which nobody knows what else its quantizing tool changes."""
    if section.get("quant_method") == MLX and model_type not in MLX_FAMILIES:
        raise ConfigError(f"config.json: MLX-quantized weights are not supported for {model_type} models", f"{ORIGINAL}, or a GGUF file")


def with_mlx_overrides(section: Mapping[str, object], raw: Mapping[str, object]) -> Mapping[str, object]:
    """A config with the values that MLX folded into the weights; unchanged if another tool quantized them."""
    if section.get("quant_method") != MLX:
        return raw
    folded = MLX_FOLDED_KEYS.get(str(raw.get("model_type")), {})
    return {**{key: value for key, value in raw.items() if key != "quantization_config"}, **folded}


def checkpoint_format(section: Mapping[str, object]) -> str | None:
    """The word format of GPTQ or AWQ, under the newer key or the older one; gptq if a GPTQ section states none."""
    value = section.get("checkpoint_format") or section.get("format")
    return str(value).lower() if value else "gptq" if section.get("quant_method") == "gptq" else None


def _deviating_bits(section: Mapping[str, object]) -> object:
    """The bits of a `dynamic` rule for some weights that differ from those of the others; None if there is none."""
    rules = section.get("dynamic")
    for name, rule in rules.items() if isinstance(rules, dict) else ():
        if isinstance(rule, dict) and not name.startswith("-") and rule.get("bits", section.get("bits")) != section.get("bits"):
            return rule["bits"]
    return None


def _runtime_transform(transforms: object) -> str | None:
    """The location of a transform that runs in every forward pass; None if all transforms are folded into the weights."""
    schemes = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for scheme in schemes.values() if isinstance(schemes, dict) else ():
        applications = scheme.get("apply") if isinstance(scheme, dict) else None
        for application in applications if isinstance(applications, list) else ():
            location = application.get("location") if isinstance(application, dict) else None
            if not str(location).startswith("weight_"):
                return show(location)
    return None


def groups_of(section: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The `weights` objects of all groups of a compressed-tensors config."""
    config_groups = section.get("config_groups")
    if not isinstance(config_groups, dict):
        return []
    weight_sections = [group.get("weights") for group in config_groups.values() if isinstance(group, dict)]
    return [weights for weights in weight_sections if isinstance(weights, dict)]


def _weight_types(section: Mapping[str, object]) -> list[tuple[object, object]]:
    """(type, bits) of every group's weights."""
    return [(weights.get("type", "int"), weights.get("num_bits", 8)) for weights in groups_of(section)]


def _weight_types_text(section: Mapping[str, object]) -> str:
    types = dict.fromkeys(f"{show(weight_type)} {show(bits)}" for weight_type, bits in _weight_types(section))
    return ", ".join(types) or "no kind that it names"


def layout_of(section: Mapping[str, object]) -> str | None:
    """The layout of the weights, a key of LAYOUT_TENSORS; None for an unsupported format."""
    method = section.get("quant_method")
    if method == "modelopt":
        return MODELOPT_LAYOUTS.get(str(section.get("quant_algo")).upper())
    if method == "bitsandbytes":
        flags = {BNB_4BIT: "load_in_4bit", BNB_INT8: "load_in_8bit"}
        return next((layout for layout, key in flags.items() if section.get(key) is True), None)
    if method == quark_config.METHOD:
        return quark_config.layout(section)
    if method == "compressed-tensors":
        return _compressed_tensors_layout(section)
    return "fp8" if method == FBGEMM else str(method)


def _compressed_tensors_layout(section: Mapping[str, object]) -> str | None:
    weight_types, weight_format = _weight_types(section), section.get("format")
    if not weight_types or any(type(bits) is not int for _, bits in weight_types):
        return None
    first = weight_types[0]
    are_alike, are_fp8 = weight_types.count(first) == len(weight_types), all(each == ("float", 8) for each in weight_types)
    if weight_format == "pack-quantized":
        return "packed" if first in (("int", 4), ("int", 8)) and are_alike else None
    if weight_format in ("int-quantized", "naive-quantized") and all(kind == "int" and 2 <= bits <= 8 for kind, bits in weight_types):
        return "integers"
    if weight_format in COMPRESSED_TENSORS_FP4 and all(each == ("float", 4) for each in weight_types):
        return COMPRESSED_TENSORS_FP4[weight_format]
    if weight_format == "mxfp8-quantized" and are_fp8:
        return MXFP8
    return "fp8" if weight_format in ("float-quantized", "naive-quantized") and are_fp8 else None


def layouts_of(section: Mapping[str, object]) -> tuple[str, ...]:
    """`layout_of`, and the layout that some of the weights may have instead."""
    layout = str(layout_of(section))
    return (layout, MXFP4_IN_FP8) if section.get("quant_method") == "fp8" else (layout,)


def bits_of(section: Mapping[str, object]) -> int:
    """Bits of a section's integers as stored; for integers in bytes, the bits of the kernels' format: 4 if no weight needs more, else 8."""
    if section.get("quant_method") != "compressed-tensors":
        return int(section["bits"]) if section.get("quant_method") == "gptq" else 8 if layout_of(section) == BNB_INT8 else 4
    return 4 if max(bits for _, bits in _weight_types(section)) <= 4 else 8


def block_of(section: Mapping[str, object]) -> tuple[int, int]:
    """(rows, inputs) that share a scale in GPTQ, FP8 or compressed-tensors; 0 if not stated, or not the same in all groups."""
    def stated(block: object, group: object) -> tuple[int, int]:
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
        return 0, group if type(group) is int and group > 0 else 0

    if section.get("quant_method") == "fp8":
        return stated(section.get("weight_block_size"), None)
    if section.get("quant_method") == "modelopt":
        return stated(MODELOPT_BLOCK if str(section.get("quant_algo")).upper() == MODELOPT_BLOCK_ALGORITHM else None, None)
    if section.get("quant_method") == "gptq":
        return stated(None, section.get("group_size"))
    blocks = {stated(weights.get("block_structure"), weights.get("group_size")) for weights in groups_of(section)}
    return blocks.pop() if len(blocks) == 1 else (0, 0)


def runs_from_codes(section: Mapping[str, object]) -> bool:
    """Whether kernels can multiply the codes of the weights as stored, as far as a `quantization_config` tells."""
    if is_mixed(section):
        return any(map(runs_from_codes, plain_sections(section)))
    layout = layout_of(section)
    if layout == MLX:
        mlx_format = mlx_form(section)
        return mlx_format is not None and mlx_format.spec is not None
    word_layouts = ("awq", "packed", *(("gptq",) if section.get("bits") in groups.BITS else ()))
    return layout in (*word_layouts, "integers", "fp8", "bitnet", BNB_4BIT, BNB_INT8, *MXFP4, *NVFP4)


def mlx_form(section: Mapping[str, object]) -> mlx.MlxFormat | None:
    """MLX's format of all weights without settings of their own; None for an unsupported one."""
    bits, group, mode = section.get("bits"), section.get("group_size"), section.get("mode", "affine")
    if type(bits) is not int or type(group) is not int:
        return None
    is_known = bits in mlx.BITS and group in mlx.GROUPS if mode == "affine" else mlx.FLOATS.get((bits, group)) == mode
    return mlx.MlxFormat(bits, group, str(mode)) if is_known else None


def has_fp8_weights(section: Mapping[str, object]) -> bool:
    """Whether some weights are FP8."""
    return any(layout_of(plain) == "fp8" for plain in plain_sections(section))


def is_quantized(section: Mapping[str, object]) -> bool:
    """Whether weights will run packed, as far as a `quantization_config` tells."""
    return section.get("quant_method") == "mxfp4" or runs_from_codes(section)


def excluded_modules(section: Mapping[str, object]) -> list[str]:
    """Names, parts of names or patterns of the modules that a section excludes from quantization."""
    lists = [section.get(key) for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude")]
    names = [name for entries in lists if isinstance(entries, list) for name in entries if isinstance(name, str)]
    globs = (name for name in names if "*" in name and not name.startswith(PATTERN))
    patterns = {name: PATTERN + name.replace(".", r"\.").replace("*", ".*") + "$" for name in globs}
    return [patterns.get(name, name) for name in names]


def matches_module(module: str, tensor: str) -> bool:
    """Whether an entry of `excluded_modules` applies to a tensor."""
    if module.startswith(PATTERN):
        return matches(module.removeprefix(PATTERN), tensor.removesuffix(".weight"))
    return f".{module.strip('.')}." in f".{tensor}"
