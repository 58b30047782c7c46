"""Parses a checkpoint's `config.json` into a `ModelConfig`.

Each family reads the keys it uses, and lists those that do not matter at inference and those it supports only at their default: an
unsupported feature is refused by name instead of giving a wrong answer. An unknown key is a warning (an error with `strict`), because new
keys appear every month and most are bookkeeping. Both dialects are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the newer
`rope_parameters` + `dtype`. Defaults of absent keys are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import UsageError
from ..offload.safetensors_header import is_gguf
from .config_keys import KEYS_HARMLESS, READ_BY_SOME, REASONS, REFUSED_UNLESS
from .config_reader import REQUIRED, ConfigError, Keys, of_class, read_model, show, special_tokens
from .config_rope import MAX_POSITIONS, RopeConfig, rope_config, unknown_rope_keys
from .images import input_modalities
from .model_config import ModelConfig
from .speculation.draft_types import refuse_alone
from .stores.composite import INNER, OUTER_CLASSES, text_model_config, unknown_outer_keys

ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
        "relu2": "relu2"}
MAX_LAYERS = 2048
MAX_TOTAL_EXPERTS = 2**16  # of all layers: each takes memory before a tensor is looked for
MAX_SIZES = {"hidden_size": 2**20,
             **dict.fromkeys(("intermediate_size", "block_ff_dim", "ffn_dim", "shared_intermediate_size", "moe_intermediate_size"), 2**22),
             "num_hidden_layers": MAX_LAYERS, "num_attention_heads": 4096, "vocab_size": 2**24}
DTYPES = ("float32", "float16", "bfloat16")
GENERATOR, SEVERAL = "ForCausalLM", "ForConditionalGeneration"  # endings of architectures: text alone, and with images
BARE = "Model"  # of those that make vectors and have no head
# Families whose tokens see both ways where is_causal says so, and what configs of such models say beside: code that comes with them does
# just that, for programs that did not know the key.
BOTH_WAYS, ALSO = ("llama", "ministral3", "mistral", "qwen2", "qwen3"), frozenset({"is_causal", "auto_map", "pooling", "temperature"})
READING_SECTIONS = ("gpt_oss",)  # families that judge quantization_config themselves
LISTWISE, LISTED = "JinaForRanking", 512  # of Qwen 3 models that rank documents of one text, and how many numbers they compare
OLDER = "LMHeadModel"  # as GPT-2's of the former
SPEAKING = ("OmniModel", "Omni_Reasoning_V3")  # and what models that hear and see were called


@dataclass(frozen=True)
class Defaults:
    """transformers' defaults for keys that a family's config leaves out."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    eps_key: str | None = "rms_norm_eps"  # None: the config states no epsilon of the norms, `norm_eps` is that of every model
    norm_eps: float = 1e-6
    tied: bool = False
    theta: float = 10_000.0
    rope: Mapping[str, object] = field(default_factory=dict)  # what else `rope_config` is told
    act: tuple[str, str] = ("hidden_act", "silu")  # key, value
    sizes: Mapping[str, int] = field(default_factory=dict)
    rotary: bool = True  # False: neither rotary positions nor keys about them
    grouped: bool = True  # False: as many key-value heads as heads, which share the width, and no keys about them
    ffn_key: str = "intermediate_size"

    def size(self, keys: Keys, name: str) -> int:
        """A width or count; required if the family has no default."""
        return keys.integer(name, self.sizes.get(name, REQUIRED), high=MAX_SIZES[name])


def read_config(folder: Path, strict: bool = False) -> ModelConfig:
    """The config of a model folder or GGUF file.

    Raises ModelNotFound, ConfigError or CheckpointError, and with `strict` UsageError for unknown keys.
    """
    if is_gguf(folder):
        from .gguf.store import read_gguf_config

        return read_gguf_config(folder, strict)
    return parse_config(read_model(folder), strict)


def parse_config(raw: Mapping[str, object], strict: bool = False) -> ModelConfig:
    """`read_config` for an object already in memory."""
    from . import families  # the families import this module
    from .encoders import refuse_writing

    Keys(raw).text("model_type", None)  # what follows looks it up
    raw = of_class(raw)
    refuse_writing(raw)
    refuse_alone(raw)
    architectures = raw.get("architectures") or []
    composite = str(raw.get("model_type")) in families.COMPOSITE
    suffix = SEVERAL if composite and raw.get("model_type") not in families.CAUSAL_LM_COMPOSITES else GENERATOR
    made = families.resolve_model_type(raw)
    sees_both_ways = made.get("is_causal") is False and made.get("model_type") in BOTH_WAYS
    vectors = sees_both_ways or raw.get("use_bidirectional_attention") is True or families.is_embedding_model(made)
    ranks_lists = architectures == [LISTWISE] and made.get("model_type") == "qwen3"
    kind = str(raw.get("model_type"))
    first = OUTER_CLASSES.get(kind, (GENERATOR,) if kind in INNER else ())  # as their own code called them
    endings = (suffix, *(SPEAKING if composite else (OLDER,)), *((BARE,) if vectors else ()), *((LISTWISE,) if ranks_lists else ()), *first)
    if not isinstance(architectures, list) or architectures and not any(str(name).endswith(endings) for name in architectures):
        raise ConfigError(f"config.json: architectures is {show(architectures)}, expected a ...{suffix}",
                          "effllm runs text generation models")
    if composite:
        return _text_part(raw, strict)
    raw = made
    keys = Keys(raw)
    family = families.get(keys.text("model_type"))
    harmless = KEYS_HARMLESS | family.KEYS_HARMLESS | (ALSO if sees_both_ways else frozenset({"auto_map"} if ranks_lists else ()))
    refused = {key: value for key, value in REFUSED_UNLESS.items() if key not in harmless} | family.REFUSED_UNLESS
    section = raw.get("quantization_config") or raw.get("quantization")  # MLX writes both
    if isinstance(section, dict) and (raw["model_type"] not in READING_SECTIONS or isinstance(raw.get("quantization"), dict)):
        from .stores.import_config import check_family, check_method, mlx_says, section_of

        section = section_of(raw)
        check_method(section)
        check_family(section, keys.text("model_type"))
        keys = Keys(mlx_says(section, raw))
        keys.knows("quantization_config")
        refused |= {key: raw.get(key) for key in ("quantization", "compression_config")}  # some say it twice
    if _full_attention_alone(raw):
        refused["layer_types"] = raw["layer_types"]
    _refuse(raw, refused)
    config = family.config(keys)
    known = harmless | keys.asked | refused.keys() | {"architectures"}
    unread = {key: value for key, value in READ_BY_SOME.items() if key not in known}
    _refuse(raw, unread)
    if isinstance(section, dict) and section.get("quant_method") == "bitnet":
        config = replace(config, per_token_scale=True)
    if sees_both_ways:
        # A window is so many tokens on either side, where a causal token is one of its own. A head that is there is not asked.
        windows = tuple(None if window is None else window + 1 for window in config.windows)
        config = replace(config, bidirectional=True, windows=windows, tie_word_embeddings=True)
    if ranks_lists:
        config = replace(config, listwise_reranker=True, pooled_inner_dim=config.hidden_size // 2, pooled_dim=LISTED,
                         tie_word_embeddings=True)
    unknown = sorted(raw.keys() - known - unread.keys())
    unknown += unknown_rope_keys(raw, config.ropes)
    return replace(config, warnings=config.warnings + _judge_unknown(unknown, strict))


def _refuse(raw: Mapping[str, object], refused: Mapping[str, object]) -> None:
    """Raises ConfigError for a key that is not at its only supported value."""
    for key, default in refused.items():
        if raw.get(key) is not None and raw[key] != default:
            why = REASONS.get(key, f"this family runs only {'without it' if default is None else f'with {key} = {show(default)}'}")
            raise ConfigError(f"config.json: {key} = {show(raw[key])} is not supported for {raw['model_type']} models", why)


def _full_attention_alone(raw: Mapping[str, object]) -> bool:
    """Whether `layer_types` says full attention for every layer, without a window."""
    windows = raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    return isinstance(kinds, list) and len(kinds) == layers and not windows and all(kind == "full_attention" for kind in kinds)


def _text_part(raw: Mapping[str, object], strict: bool) -> ModelConfig:
    """The text model within a multimodal one."""
    from . import families

    config = parse_config(text_model_config(raw), strict)
    kind = raw["model_type"]
    beside = input_modalities(raw)
    said = (f"{show(kind)} takes {beside} too: effllm reads its text part, {config.family}",) if beside else ()
    return replace(config, prefix_lm=kind in families.PREFIX_LM,
                   warnings=(*said, *config.warnings, *_judge_unknown(unknown_outer_keys(raw, KEYS_HARMLESS), strict)))


def _judge_unknown(unknown: list[str], strict: bool) -> tuple[str, ...]:
    if not unknown:
        return ()
    named = ", ".join(show(key) for key in unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    if strict:
        raise UsageError(f"config.json has keys that effllm does not know: {named}", "without --strict they are ignored with a warning")
    return (f"config.json has keys that effllm does not know and ignores: {named}",)


Ropes = Callable[[Keys, int, int], "tuple[RopeConfig | None, ...]"]  # keys, head_dim, max_position_embeddings -> one a layer


def decoder_config(keys: Keys, defaults: Defaults, ropes: Ropes | None = None, turned: Iterable[bool] | None = None,
                   **features: object) -> ModelConfig:
    """What every decoder family shares, from its keys. `ropes` reads rotary positions that differ by layer; by default they are the same
    for all layers, or for those that are `turned`. `features`: fields that the family sets; without `windows`, full attention."""
    hidden, layers, heads = (defaults.size(keys, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads, head_dim = _heads(keys, defaults, hidden, heads) if defaults.grouped else (heads, _divided(hidden, heads))
    if head_dim % 2 or head_dim > 1024:
        raise ConfigError(f"config.json: a head dimension of {head_dim} is not supported",
                          "RoPE needs an even one, at most 1024")
    vocab = defaults.size(keys, "vocab_size")
    positions = keys.integer("max_position_embeddings", defaults.max_position_embeddings, high=MAX_POSITIONS)
    bos, eos, warnings = special_tokens(keys, defaults.bos, defaults.eos, vocab)
    dtype = stored_dtype(keys)
    if dtype not in DTYPES:
        warnings += (f"config.json: dtype {show(dtype)} is not known; the weights' own types are used",)
    if ropes is not None:
        by_layer = ropes(keys, head_dim, positions)
    else:
        rope = rope_config(keys, head_dim, positions, defaults.theta, **defaults.rope) if defaults.rotary else None
        by_layer = (rope,) * layers if turned is None else tuple(rope if turns else None for turns in turned)
    fields = {"windows": (None,) * layers, "ropes": by_layer, **features}
    mixture = features.get("moe")
    if mixture is not None and layers * mixture.num_experts > MAX_TOTAL_EXPERTS:
        raise ConfigError(f"config.json: {layers} layers of {mixture.num_experts} experts are more than any model has")
    return ModelConfig(
        family=keys.text("model_type"), vocab_size=vocab, hidden_size=hidden, intermediate_size=defaults.size(keys, defaults.ffn_key),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=positions,
        norm_eps=defaults.norm_eps if defaults.eps_key is None else keys.number(defaults.eps_key, defaults.norm_eps),
        hidden_act=keys.choice(defaults.act[0], ACTS, defaults.act[1]),
        tie_word_embeddings=keys.flag("tie_word_embeddings", defaults.tied), bos_token_id=bos, eos_token_ids=eos, dtype=dtype,
        warnings=warnings, **fields)


def demand_silu(keys: Keys, act: str, why: str = "") -> None:
    """Raises ConfigError for another activation; `why` the family supports only this one."""
    if act != "silu":
        raise ConfigError(f"config.json: hidden_act = {show(keys.raw['hidden_act'])} is not supported for {keys.text('model_type')} models",
                          f"this family runs only with hidden_act = silu{why and f': {why}'}")


def _heads(keys: Keys, defaults: Defaults, hidden: int, heads: int) -> tuple[int, int]:
    """(key-value heads, head dimension)."""
    stated = None if keys.holds("num_key_value_heads") else defaults.num_key_value_heads
    kv_heads = keys.integer("num_key_value_heads", stated or heads, high=4096)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    stated = defaults.head_dim if not keys.holds("head_dim") else None
    return kv_heads, keys.integer("head_dim", stated, high=1024) or _divided(hidden, heads)


def _divided(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(f"config.json: without head_dim, hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
    return hidden // heads


def stored_dtype(keys: Keys) -> str:
    """The dtype that the checkpoint states."""
    newer, older = keys.text("dtype", None), keys.text("torch_dtype", None)
    return (newer or older or "float32").removeprefix("torch.")
