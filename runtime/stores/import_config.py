"""Parser of other tools' `quantization_config`: is the method supported, how are the weights laid out, and at how many bits.

GPTQ, AWQ, FP8 (with experts in MXFP4 too, and FBGEMM's), Quark's FP8 and MXFP4 (`quark_config.py`), ModelOpt's FP8, NVFP4, MXFP4 and
MXFP8, BitNet, bitsandbytes, and compressed-tensors: pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized,
mxfp4-pack-quantized, mxfp8-quantized and naive-quantized. A section that describes several kinds of weights is split first
(`mixed_config.py`). All of it is untrusted input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...quant.imports import groups, mlx
from ..config_reader import ConfigError, show
from . import quark_config
from .mixed_config import AUTO_ROUND, MIXED, PATTERN, is_mixed, plain_sections, unsupported
from .name_patterns import matches

# Roles of what these methods quantize.
LINEARS = ("q", "k", "v", "kv_a", "q_a", "q_b", "attn_gate", "o", "gate", "up", "down", "state_in", "state_gate", "state_r",
           "state_k", "state_v", "state_out", "o_in", "experts_in", "experts_out")
ORIGINAL = "use the original 16-bit checkpoint"
MLX = "mlx"  # whose section names no method
FROM_MLX = (*LINEARS, "embed", "head")  # roles that stay codes of those that it quantized, which are all
# And those of small matrices, which choose or decay: float32 holds what their codes mean.
EXACT_OF_MLX = ("router", "scale", "state_beta", "state_keys", "state_rate", "state_rate_wide")
# Families of which the folders that mlx-lm makes were compared with what mlx-lm computes from them.
MLX_FAMILIES = ("afmoe", "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone",
                "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe",
                "glm4_moe_lite", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "internlm2",
                "internlm3", "jamba", "lfm2", "lfm2_moe", "llama", "mamba", "mamba2", "mimo", "minicpm", "minicpm3", "minimax_m2",
                "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2",
                "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open",
                "stablelm", "starcoder2")
# What is in the weights of those folders, whatever their configs go on saying.
MLX_FOLDED = {"falcon_h1": {
    "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5,
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier", "lm_head_multiplier",
                     "ssm_in_multiplier", "ssm_out_multiplier"), 1.0)}, "ernie4_5_moe": {"moe_use_aux_free": False}}
# What is not, of those families.
MLX_LEAVES_OUT = {"ernie4_5_moe": "mlx-lm left out what corrects the scores of this model's routers: it chooses some experts that the "
                                  "published model does not"}
FBGEMM = "fbgemm_fp8"  # Meta's, whose weights lie as those of others in FP8 do
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", FBGEMM, "modelopt", quark_config.METHOD, "bitnet", "bitsandbytes", AUTO_ROUND, MLX)
# Of methods that are not read, whose they are.
OTHERS = {"aqlm": "AQLM, sums of codebooks", "eetq": "EETQ, only for CUDA GPUs", "exl2": "ExLlamaV2, only for CUDA GPUs", "exl3":
          "ExLlamaV3, only for CUDA GPUs", "fp_quant": "FP-Quant", "higgs": "HIGGS", "hqq": "HQQ", "quanto": "Quanto", "sinq": "SINQ",
          "spqr": "SpQR", "torchao": "torchao", "vptq": "VPTQ, vectors of codebooks"}
# Of ModelOpt -> layout. W4A16 and PER_TOKEN speak of activations, PB of blocks, WO of weights alone.
ALGORITHMS = {"FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4 in bytes",
              "W4A16_NVFP4": "nvfp4 in bytes", "W4A8_NVFP4_FP8": "nvfp4 in bytes", "W4A8_MXFP4_FP8": "mxfp4 in unsigned bytes",
              "MXFP8": "mxfp8"}
BY_BLOCKS, BLOCKS = "FP8_PB_WO", [128, 128]
LEVELS, BYTES = "levels beside codes", "bytes by row"  # layouts of bitsandbytes: NF4 and FP4, LLM.int8
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))  # parts, of which a weight has one
NVFP4 = ("nvfp4", "nvfp4 in bytes")  # layouts
FOUR_BITS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}  # of floats of compressed-tensors
PAIRS = "mxfp4 in bytes"  # of some weights beside FP8: whole numbers in the types of a file, which hold two levels of E2M1 each
MXFP4, MXFP8 = (PAIRS, "mxfp4 in unsigned bytes", "mxfp4"), "mxfp8"  # layouts of which 32 inputs share a power of two
# Of quant_method bitnet, whose weights `imported_ternary.py` reads. A norm of its own before each matrix is none of a family's here.
TERNARY_KEYS = {"linear_class": ("autobitlinear", "bitlinear"), "quantization_mode": ("offline", "online"), "use_rms_norm": (False,)}
FLOATS, INTEGERS = ("F32", "F16", "BF16"), ("I32", "I64")


@dataclass(frozen=True)
class PartKind:
    """What a part of a weight may be beside its codes: the types of its values, the numbers of its dimensions; `needed`: never absent."""

    types: tuple[str, ...]
    dimensions: tuple[int, ...]
    needed: bool = True

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in self.types and len(shape) in self.dimensions


WORDS, GROUP_SCALES, SCALES = PartKind(("I32",), (2,)), PartKind(FLOATS, (2,)), PartKind(FLOATS, (0, 1, 2))
EXPONENTS = "F8_E8M0"  # scales that are powers of two
FP8_SCALES = PartKind((*FLOATS, EXPONENTS), (0, 1, 2, 4), needed=False)  # of 4: of blocks, each dimension with one of 1 behind it
POWERS = PartKind((EXPONENTS,), (2,), needed=False)
BYTE_POWERS = PartKind(("U8", EXPONENTS), (2,))
SMALL_SCALES, MATRIX_SCALE = PartKind(("F8_E4M3",), (2,)), PartKind(("F32",), (0, 1))
ORDER = PartKind(INTEGERS, (1, 2), needed=False)
LEVEL_LIST, STATE = PartKind(("F32",), (1,)), PartKind(("U8",), (1,), needed=False)
OF_SCALES = replace(LEVEL_LIST, needed=False)
# Layout -> the ending of the tensor that holds a weight's codes, and those of the others.
ENDINGS = {
    "gptq": ("qweight", {"qzeros": WORDS, "scales": GROUP_SCALES, "g_idx": ORDER}),
    "awq": ("qweight", {"qzeros": WORDS, "scales": GROUP_SCALES}),
    "packed": ("weight_packed", {"weight_scale": GROUP_SCALES, "weight_shape": PartKind(INTEGERS, (1, 2)),
                                 "weight_zero_point": replace(WORDS, needed=False), "weight_g_idx": ORDER}),
    "integers": ("weight", {"weight_scale": SCALES, "weight_zero_point": PartKind(("I8",), (0, 1, 2), needed=False),
                            "weight_g_idx": ORDER}),
    "fp8": ("weight", {"weight_scale_inv": FP8_SCALES, "weight_scale": FP8_SCALES}),
    PAIRS: ("weight", {"weight_scale_inv": POWERS, "weight_scale": POWERS}),
    "mxfp4 in unsigned bytes": ("weight", {"weight_scale": BYTE_POWERS}),
    "mxfp4": ("weight_packed", {"weight_scale": BYTE_POWERS}),
    MXFP8: ("weight", {"weight_scale": BYTE_POWERS}),
    "nvfp4": ("weight_packed", {"weight_scale": SMALL_SCALES, "weight_global_scale": MATRIX_SCALE}),
    "nvfp4 in bytes": ("weight", {"weight_scale": SMALL_SCALES, "weight_scale_2": MATRIX_SCALE}),
    LEVELS: ("weight", {"weight.absmax": PartKind(("F32", "U8"), (1,)), "weight.quant_map": LEVEL_LIST,
                        "weight.nested_absmax": OF_SCALES, "weight.nested_quant_map": OF_SCALES,
                        **dict.fromkeys(STATES, STATE)}),
    BYTES: ("weight", {"SCB": LEVEL_LIST, "weight_format": PartKind(("U8",), (0, 1), needed=False)}),
}
# Layout -> the dimension along which parts hold outputs, and whether as bits in words; scales of the others may be of several outputs.
CUTS = {
    "gptq": {"qweight": (1, False), "qzeros": (1, True), "scales": (1, False)},
    "awq": {"qweight": (1, True), "qzeros": (1, True), "scales": (1, False)},
    "packed": {"weight_packed": (0, False), "weight_scale": (0, False), "weight_zero_point": (0, True)},
    "integers": {"weight": (0, False)},
    "fp8": {"weight": (0, False)},
    PAIRS: {"weight": (0, False), "weight_scale_inv": (0, False), "weight_scale": (0, False)},
    **dict.fromkeys(("mxfp4 in unsigned bytes", MXFP8), {"weight": (0, False), "weight_scale": (0, False)}),
    **dict.fromkeys(("mxfp4", "nvfp4"), {"weight_packed": (0, False), "weight_scale": (0, False)}),
    "nvfp4 in bytes": {"weight": (0, False), "weight_scale": (0, False)},
    LEVELS: {},  # cut by values: rows and blocks begin apart
    BYTES: {"weight": (0, False), "SCB": (0, False)},
}
# Of activations and caches, which are not rounded to a checkpoint's scales here.
IGNORED = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
           "activation_scale", "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
# The type of codes that bear a weight's name; what has another type is a plain weight.
CODES = {"integers": "I8", "fp8": "F8_E4M3", PAIRS: "I8", "mxfp4 in unsigned bytes": "U8", MXFP8: "F8_E4M3", "nvfp4 in bytes": "U8",
         BYTES: "I8"}
TYPES = {**CODES, "mxfp4": "U8", "nvfp4": "U8"}  # of codes that are no words
IN_BLOCKS = ("integers", "fp8")  # layouts in which several outputs may have one scale


def section_of(raw: Mapping[str, object]) -> dict[str, object] | None:
    """What a config says of its quantized weights, where it does; the type of its experts may stand beside that."""
    section, beside = raw.get("quantization_config"), raw.get("expert_dtype")
    if isinstance(of_mlx := raw.get("quantization"), dict):
        return {**of_mlx, "quant_method": MLX}  # MLX writes it under the other name too
    if not isinstance(section, dict):
        return None
    return {"expert_dtype": beside, **section} if beside is not None else section


def check_method(section: Mapping[str, object]) -> None:
    """Raises ConfigError for a `quantization_config` that is not read, by name."""
    method = section.get("quant_method")

    def refused(what: str, known: str) -> ConfigError:
        return ConfigError(f"config.json: quantization_config with {what} is not supported", f"{known}; or {ORIGINAL}")

    if method not in METHODS:
        whose = f" ({OTHERS[method]})" if isinstance(method, str) and method in OTHERS else ""
        raise refused(f"quant_method {show(method)}{whose}", f"known: {', '.join(METHODS)}, and GGUF files of the model")
    if found := unsupported(section):
        raise refused(*found)
    if method == "compressed-tensors":
        _check_beside(section, refused)
    if is_mixed(section):
        for plain in plain_sections(section) if method != AUTO_ROUND else ():
            check_method(plain)
        return
    bits = section.get("bits")
    if method == MLX and (mlx_form(section) is None):
        raise refused(f"bits {show(bits)}, group_size {show(section.get('group_size'))} and mode {show(section.get('mode', 'affine'))}",
                      "of MLX: affine of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, mxfp8, nvfp4")
    if method == "gptq" and bits not in (2, 3, 4, 8):
        raise refused(f"bits {show(bits)}", "GPTQ of 2, 3, 4 and 8 bits")
    if method == "gptq" and order_of(section) not in ("gptq", "gptq_v2"):
        raise refused(f"format {show(order_of(section))}", "GPTQ in the formats gptq and gptq_v2")
    if method == "gptq" and (other := _other_bits(section)) is not None:
        raise refused(f"dynamic bits {show(other)} beside bits {show(bits)}", "GPTQ with the same bits for all weights")
    version = str(section.get("version") or order_of(section) or "gemm")
    if method == "awq" and (bits not in (4, None) or version.lower() != "gemm"):
        raise refused(f"bits {show(bits)} and version {show(version)}", "AWQ of 4 bits in the gemm layout")
    if method == "bitnet":
        for key, known in TERNARY_KEYS.items():
            if section.get(key) not in (None, *known):
                raise refused(f"{key} {show(section[key])}", f"of BitNet: {', '.join(map(show, known))}")
    if method == quark_config.METHOD and (found := quark_config.unsupported(section)):
        raise refused(*found)
    if method == "modelopt" and str(algorithm := section.get("quant_algo")).upper() not in ALGORITHMS:
        raise refused(f"quant_algo {show(algorithm)}", f"of ModelOpt: {', '.join((*ALGORITHMS, MIXED))}")
    if method == "bitsandbytes" and layout_of(section) is None:
        raise refused(f"quant_method {show(method)} and neither load_in_4bit nor load_in_8bit", "4 bits (NF4, FP4) and LLM.int8")
    if method == "compressed-tensors" and layout_of(section) is None:
        raise refused(f"format {show(section.get('format'))} and weights of {_kinds_shown(section)}",
                      "pack-quantized integers of 4 or 8 bits, int-quantized ones of 2 to 8, float-quantized and mxfp8-quantized weights "
                      "of 8, nvfp4-pack-quantized and mxfp4-pack-quantized ones of 4")


def _check_beside(section: Mapping[str, object], refused: Callable[[str, str], ConfigError]) -> None:
    """Raises ConfigError for what compressed-tensors does to weights beside rounding them."""
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise refused(f"sparsity_config of format {show(sparsity['format'])}", "dense weights")
    if place := _turned(section.get("transform_config")):
        raise refused(f"a transform at {place}", "transforms that are in the weights already")


def check_family(section: Mapping[str, object], model_type: str) -> None:
    """Raises ConfigError for a family of which nobody knows what else its quantizing tool changes."""
    if section.get("quant_method") == MLX and model_type not in MLX_FAMILIES:
        raise ConfigError(f"config.json: MLX-quantized weights are not supported for {model_type} models", f"{ORIGINAL}, or a GGUF file")


def mlx_says(section: Mapping[str, object], raw: Mapping[str, object]) -> Mapping[str, object]:
    """What a config says where MLX quantized its weights: multipliers that it took into them are 1, and no other tool did anything."""
    if section.get("quant_method") != MLX:
        return raw
    return {**{key: value for key, value in raw.items() if key != "quantization_config"}, **MLX_FOLDED.get(str(raw.get("model_type")), {})}


def order_of(section: Mapping[str, object]) -> str | None:
    """How the words of GPTQ or AWQ lie, as a section says under the newer key or the older. GPTQ without is the first version."""
    stated = section.get("checkpoint_format") or section.get("format")
    return str(stated).lower() if stated else "gptq" if section.get("quant_method") == "gptq" else None


def _other_bits(section: Mapping[str, object]) -> object:
    """The bits that a rule for some of the weights states, where they are not those of the others."""
    rules = section.get("dynamic")
    for name, rule in rules.items() if isinstance(rules, dict) else ():
        if isinstance(rule, dict) and not name.startswith("-") and rule.get("bits", section.get("bits")) != section.get("bits"):
            return rule["bits"]
    return None


def _turned(transforms: object) -> str | None:
    """Where a `transform_config` asks for a rotation in every forward pass; None where all of it is in the weights."""
    schemes = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for scheme in schemes.values() if isinstance(schemes, dict) else ():
        places = scheme.get("apply") if isinstance(scheme, dict) else None
        for each in places if isinstance(places, list) else ():
            location = each.get("location") if isinstance(each, dict) else None
            if not str(location).startswith("weight_"):
                return show(location)
    return None


def groups_of(section: Mapping[str, object]) -> list[Mapping[str, object]]:
    """What the groups of a compressed-tensors config say of their weights."""
    found = section.get("config_groups")
    said = [group.get("weights") for group in found.values() if isinstance(group, dict)] if isinstance(found, dict) else []
    return [weights for weights in said if isinstance(weights, dict)]


def _kinds(section: Mapping[str, object]) -> list[tuple[object, object]]:
    """Type and bits of every group's weights."""
    return [(weights.get("type", "int"), weights.get("num_bits", 8)) for weights in groups_of(section)]


def _kinds_shown(section: Mapping[str, object]) -> str:
    return ", ".join(dict.fromkeys(f"{show(kind)} {show(bits)}" for kind, bits in _kinds(section))) or "no kind that it names"


def layout_of(section: Mapping[str, object]) -> str | None:
    """The key of ENDINGS that says how weights lie; None for a compressed-tensors format that is not read."""
    if section.get("quant_method") == "modelopt":
        return ALGORITHMS.get(str(section.get("quant_algo")).upper())
    if section.get("quant_method") == "bitsandbytes":
        ways = {LEVELS: "load_in_4bit", BYTES: "load_in_8bit"}
        return next((layout for layout, key in ways.items() if section.get(key) is True), None)
    if section.get("quant_method") == quark_config.METHOD:
        return quark_config.layout(section)
    if section.get("quant_method") != "compressed-tensors":
        return "fp8" if section.get("quant_method") == FBGEMM else str(section.get("quant_method"))
    kinds, written = _kinds(section), section.get("format")
    if not kinds or any(type(bits) is not int for _, bits in kinds):
        return None
    if written == "pack-quantized":
        return "packed" if kinds[0] in (("int", 4), ("int", 8)) and kinds.count(kinds[0]) == len(kinds) else None
    if written in ("int-quantized", "naive-quantized") and all(kind == "int" and 2 <= bits <= 8 for kind, bits in kinds):
        return "integers"
    if written in FOUR_BITS and all(kind == ("float", 4) for kind in kinds):
        return FOUR_BITS[written]
    if written == "mxfp8-quantized" and all(kind == ("float", 8) for kind in kinds):
        return MXFP8
    return "fp8" if written in ("float-quantized", "naive-quantized") and all(kind == ("float", 8) for kind in kinds) else None


def layouts_of(section: Mapping[str, object]) -> tuple[str, ...]:
    """`layout_of`, and how some of its weights may lie beside it."""
    layout = str(layout_of(section))
    return (layout, PAIRS) if section.get("quant_method") == "fp8" else (layout,)


def bits_of(section: Mapping[str, object]) -> int:
    """Bits of a section's integers as they lie; of those in bytes, that kernels take: 4 where no weight needs more, else 8."""
    if section.get("quant_method") != "compressed-tensors":
        return int(section["bits"]) if section.get("quant_method") == "gptq" else 8 if layout_of(section) == BYTES else 4
    return 4 if max(bits for _, bits in _kinds(section)) <= 4 else 8


def block_of(section: Mapping[str, object]) -> tuple[int, int]:
    """Rows and inputs that share a scale of a weight in GPTQ, FP8 or compressed-tensors, 0 for what is not said or not the same in all
    groups."""
    def stated(block: object, group: object) -> tuple[int, int]:
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
        return 0, group if type(group) is int and group > 0 else 0

    if section.get("quant_method") == "fp8":
        return stated(section.get("weight_block_size"), None)
    if section.get("quant_method") == "modelopt":
        return stated(BLOCKS if str(section.get("quant_algo")).upper() == BY_BLOCKS else None, None)
    if section.get("quant_method") == "gptq":
        return stated(None, section.get("group_size"))
    found = {stated(weights.get("block_structure"), weights.get("group_size")) for weights in groups_of(section)}
    return found.pop() if len(found) == 1 else (0, 0)


def runs_from_codes(section: Mapping[str, object]) -> bool:
    """Whether weights of a `quantization_config` are such that kernels multiply their codes, as far as it says."""
    if is_mixed(section):
        return any(map(runs_from_codes, plain_sections(section)))
    layout = layout_of(section)
    if layout == MLX:
        form = mlx_form(section)
        return form is not None and form.spec is not None
    of_words = ("awq", "packed", *(("gptq",) if section.get("bits") in groups.BITS else ()))
    return layout in (*of_words, "integers", "fp8", "bitnet", LEVELS, BYTES, *MXFP4, *NVFP4)


def mlx_form(section: Mapping[str, object]) -> mlx.MlxFormat | None:
    """How MLX says that weights lie, but for those of which it says something else."""
    bits, group, mode = section.get("bits"), section.get("group_size"), section.get("mode", "affine")
    if type(bits) is not int or type(group) is not int:
        return None
    known = bits in mlx.BITS and group in mlx.GROUPS if mode == "affine" else mlx.FLOATS.get((bits, group)) == mode
    return mlx.MlxFormat(bits, group, str(mode)) if known else None


def are_floats(section: Mapping[str, object]) -> bool:
    """Whether its weights, or some of them, are floats of eight bits."""
    return any(layout_of(plain) == "fp8" for plain in plain_sections(section))


def is_quantized(section: Mapping[str, object]) -> bool:
    """Whether weights of a `quantization_config` will, as far as it says, run from the codes of whoever quantized them."""
    return section.get("quant_method") == "mxfp4" or runs_from_codes(section)


def left_out(section: Mapping[str, object]) -> list[str]:
    """Modules, or parts of their names, that a section says were not quantized."""
    lists = [section.get(key) for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude")]
    found = [each for names in lists if isinstance(names, list) for each in names if isinstance(each, str)]
    starred = (each for each in found if "*" in each and not each.startswith(PATTERN))
    patterns = {each: PATTERN + each.replace(".", r"\.").replace("*", ".*") + "$" for each in starred}
    return [patterns.get(each, each) for each in found]


def is_named(ignored: str, tensor: str) -> bool:
    """Whether a module that was left out, a part of its name or a pattern of it, is a tensor's."""
    if ignored.startswith(PATTERN):
        return matches(ignored.removeprefix(PATTERN), tensor.removesuffix(".weight"))
    return f".{ignored.strip('.')}." in f".{tensor}"
