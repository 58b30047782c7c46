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
from .config_reader import REQUIRED, ConfigError, Keys, read_model, resolve_shared_model_type, show, special_tokens
from .config_rope import MAX_POSITIONS, RopeConfig, rope_config, unknown_rope_keys
from .images import input_modalities
from .model_config import ModelConfig
from .speculation.draft_types import refuse_alone
from .stores.composite import OUTER_CLASSES, TEXT_CONFIG_KEYS, text_model_config, unknown_outer_keys

# Activations by the name that a config has for them.
ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
        "relu2": "relu2"}
DTYPES = ("float32", "float16", "bfloat16")

# Limits of sizes, so that an absurd config is refused before anything is allocated.
MAX_LAYERS = 2048
MAX_TOTAL_EXPERTS = 2**16  # of all layers together: each takes memory before a tensor is looked up
MAX_SIZES = {"hidden_size": 2**20,
             **dict.fromkeys(("intermediate_size", "block_ff_dim", "ffn_dim", "shared_intermediate_size", "moe_intermediate_size"), 2**22),
             "num_hidden_layers": MAX_LAYERS, "num_attention_heads": 4096, "vocab_size": 2**24}

# Endings of class names in `architectures`.
CAUSAL_LM = "ForCausalLM"
CONDITIONAL_GENERATION = "ForConditionalGeneration"  # of multimodal models
LM_HEAD_MODEL = "LMHeadModel"  # of GPT-2's time
MULTIMODAL_ENDINGS = ("OmniModel", "Omni_Reasoning_V3")  # of multimodal models with audio
HEADLESS = "Model"  # of embedding models
LISTWISE_RERANKER = "JinaForRanking"

LISTWISE_DIM = 512  # width of the vectors that a listwise reranker compares
# Families in which `is_causal: false` makes an embedding model, and the keys that configs of such models have besides: the code that they
# bring exists for programs that do not know `is_causal`.
BIDIRECTIONAL_FAMILIES = ("llama", "ministral3", "mistral", "qwen2", "qwen3")
BIDIRECTIONAL_KEYS = frozenset({"is_causal", "auto_map", "pooling", "temperature"})
OWN_QUANTIZATION_FAMILIES = ("gpt_oss",)  # those that check quantization_config themselves


@dataclass(frozen=True)
class Defaults:
    """transformers' defaults for keys that a family's config leaves out."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    bos: int | None = None
    eos: tuple[int, ...] = ()
    eps_key: str | None = "rms_norm_eps"  # key of the norms' epsilon; None: configs have none, and `norm_eps` applies
    norm_eps: float = 1e-6
    tied: bool = False  # tie_word_embeddings
    theta: float = 10_000.0  # rope_theta
    rope: Mapping[str, object] = field(default_factory=dict)  # further arguments of `rope_config`
    act: tuple[str, str] = ("hidden_act", "silu")  # key of the activation, and its default
    sizes: Mapping[str, int] = field(default_factory=dict)  # sizes by key; one without a default is required
    rotary: bool = True  # False: the family has no rotary positions and reads no keys about them
    grouped: bool = True  # False: the family has as many KV heads as query heads and reads no keys about them
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
    from .encoders import refuse_generation

    Keys(raw).text("model_type", None)  # must be a string: it is looked up in tables below
    raw = resolve_shared_model_type(raw)
    refuse_generation(raw)
    refuse_alone(raw)
    text_config = families.resolve_model_type(raw)
    bidirectional = text_config.get("is_causal") is False and text_config.get("model_type") in BIDIRECTIONAL_FAMILIES
    listwise = raw.get("architectures") == [LISTWISE_RERANKER] and text_config.get("model_type") == "qwen3"
    _check_architectures(raw, text_config, bidirectional, listwise)
    if str(raw.get("model_type")) in families.COMPOSITE:
        return _parse_text_part(raw, strict)
    raw = text_config
    keys = Keys(raw)
    family = families.get(keys.text("model_type"))
    harmless = KEYS_HARMLESS | family.KEYS_HARMLESS
    if bidirectional:
        harmless |= BIDIRECTIONAL_KEYS
    elif listwise:
        harmless |= {"auto_map"}
    refused = {key: value for key, value in REFUSED_UNLESS.items() if key not in harmless} | family.REFUSED_UNLESS
    section = raw.get("quantization_config") or raw.get("quantization")  # MLX writes both
    if isinstance(section, dict) and (raw["model_type"] not in OWN_QUANTIZATION_FAMILIES or isinstance(raw.get("quantization"), dict)):
        from .stores.import_config import check_family, check_method, quantization_section, with_mlx_overrides

        section = quantization_section(raw)
        check_method(section)
        check_family(section, keys.text("model_type"))
        keys = Keys(with_mlx_overrides(section, raw))
        keys.mark_known("quantization_config")
        refused |= {key: raw.get(key) for key in ("quantization", "compression_config")}  # some configs repeat the section
    if _has_only_full_attention(raw):
        refused["layer_types"] = raw["layer_types"]
    _refuse(raw, refused)
    config = family.config(keys)
    known = harmless | keys.accessed | refused.keys() | {"architectures"}
    unread = {key: value for key, value in READ_BY_SOME.items() if key not in known}
    _refuse(raw, unread)
    if isinstance(section, dict) and section.get("quant_method") == "bitnet":
        config = replace(config, per_token_scale=True)
    if bidirectional:
        # A bidirectional window counts the tokens on either side, a causal one includes the token itself. A head, if stored, is not used.
        windows = tuple(None if window is None else window + 1 for window in config.windows)
        config = replace(config, bidirectional=True, windows=windows, tie_word_embeddings=True)
    if listwise:
        config = replace(config, listwise_reranker=True, pooled_inner_dim=config.hidden_size // 2, pooled_dim=LISTWISE_DIM,
                         tie_word_embeddings=True)
    unknown = sorted(raw.keys() - known - unread.keys())
    unknown += unknown_rope_keys(raw, config.ropes)
    return replace(config, warnings=config.warnings + _warn_of_unknown(unknown, strict))


def _check_architectures(raw: Mapping[str, object], text_config: Mapping[str, object], bidirectional: bool, listwise: bool) -> None:
    """Raises ConfigError for `architectures` without a class that generates text, or that embeds or reranks if the model does that."""
    from . import families

    model_type = str(raw.get("model_type"))
    composite = model_type in families.COMPOSITE
    expected = CONDITIONAL_GENERATION if composite and raw.get("model_type") not in families.CAUSAL_LM_COMPOSITES else CAUSAL_LM
    endings = [expected, *(MULTIMODAL_ENDINGS if composite else (LM_HEAD_MODEL,))]
    if bidirectional or raw.get("use_bidirectional_attention") is True or families.is_embedding_model(text_config):
        endings.append(HEADLESS)
    if listwise:
        endings.append(LISTWISE_RERANKER)
    # Names that a model's own code had, before transformers adopted it.
    endings += OUTER_CLASSES.get(model_type, (CAUSAL_LM,) if model_type in TEXT_CONFIG_KEYS else ())
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or architectures and not any(str(name).endswith(tuple(endings)) for name in architectures):
        raise ConfigError(f"config.json: architectures is {show(architectures)}, expected a ...{expected}",
                          "effllm runs text generation models")


def _refuse(raw: Mapping[str, object], refused: Mapping[str, object]) -> None:
    """Raises ConfigError for a key that is not at its only supported value."""
    for key, default in refused.items():
        if raw.get(key) is not None and raw[key] != default:
            why = REASONS.get(key, f"this family runs only {'without it' if default is None else f'with {key} = {show(default)}'}")
            raise ConfigError(f"config.json: {key} = {show(raw[key])} is not supported for {raw['model_type']} models", why)


def _has_only_full_attention(raw: Mapping[str, object]) -> bool:
    """Whether `layer_types` lists full attention for every layer, and the model has no window."""
    has_window = raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False
    types, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    return isinstance(types, list) and len(types) == layers and not has_window and all(name == "full_attention" for name in types)


def _parse_text_part(raw: Mapping[str, object], strict: bool) -> ModelConfig:
    """The text model within a multimodal one."""
    from . import families

    config = parse_config(text_model_config(raw), strict)
    model_type = raw["model_type"]
    modalities = input_modalities(raw)
    warnings = (f"{show(model_type)} takes {modalities} too: effllm reads its text part, {config.family}",) if modalities else ()
    return replace(config, prefix_lm=model_type in families.PREFIX_LM,
                   warnings=(*warnings, *config.warnings, *_warn_of_unknown(unknown_outer_keys(raw, KEYS_HARMLESS), strict)))


def _warn_of_unknown(unknown: list[str], strict: bool) -> tuple[str, ...]:
    """The warning about unknown keys, if there are any. Raises UsageError instead if `strict`."""
    if not unknown:
        return ()
    listed = ", ".join(show(key) for key in unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    if strict:
        raise UsageError(f"config.json has keys that effllm does not know: {listed}", "without --strict they are ignored with a warning")
    return (f"config.json has keys that effllm does not know and ignores: {listed}",)


Ropes = Callable[[Keys, int, int], "tuple[RopeConfig | None, ...]"]  # (keys, head_dim, max_position_embeddings) -> one for each layer


def decoder_config(keys: Keys, defaults: Defaults, ropes: Ropes | None = None, rotary_layers: Iterable[bool] | None = None,
                   **features: object) -> ModelConfig:
    """A ModelConfig from the keys that all decoder families share. Raises ConfigError.

    defaults: the family's, for keys that are absent.
    ropes: reads rotary positions that differ by layer. None: `rope_config` for every layer.
    rotary_layers: by layer whether it has rotary positions. None: all have.
    features: further fields of the ModelConfig. Without `windows`, all layers have full attention.
    """
    hidden, layers, heads = (defaults.size(keys, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads, head_dim = _kv_heads(keys, defaults, hidden, heads) if defaults.grouped else (heads, _default_head_dim(hidden, heads))
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
        layer_ropes = ropes(keys, head_dim, positions)
    else:
        rope = rope_config(keys, head_dim, positions, defaults.theta, **defaults.rope) if defaults.rotary else None
        layer_ropes = (rope,) * layers if rotary_layers is None else tuple(rope if rotary else None for rotary in rotary_layers)
    moe = features.get("moe")
    if moe is not None and layers * moe.num_experts > MAX_TOTAL_EXPERTS:
        raise ConfigError(f"config.json: {layers} layers of {moe.num_experts} experts are more than any model has")
    features = {"windows": (None,) * layers, "ropes": layer_ropes} | features
    return ModelConfig(
        family=keys.text("model_type"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=defaults.size(keys, defaults.ffn_key),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        norm_eps=defaults.norm_eps if defaults.eps_key is None else keys.number(defaults.eps_key, defaults.norm_eps),
        hidden_act=keys.choice(defaults.act[0], ACTS, defaults.act[1]),
        tie_word_embeddings=keys.flag("tie_word_embeddings", defaults.tied),
        bos_token_id=bos,
        eos_token_ids=eos,
        dtype=dtype,
        warnings=warnings,
        **features)


def demand_silu(keys: Keys, act: str, why: str = "") -> None:
    """Raises ConfigError for an activation other than SiLU. `why`: the reason why the family supports no other."""
    if act != "silu":
        raise ConfigError(f"config.json: hidden_act = {show(keys.raw['hidden_act'])} is not supported for {keys.text('model_type')} models",
                          f"this family runs only with hidden_act = silu{why and f': {why}'}")


def _kv_heads(keys: Keys, defaults: Defaults, hidden: int, heads: int) -> tuple[int, int]:
    """(key-value heads, head dimension). A null key means none, not the family's default."""
    default = None if keys.has("num_key_value_heads") else defaults.num_key_value_heads
    kv_heads = keys.integer("num_key_value_heads", default or heads, high=4096)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    default = defaults.head_dim if not keys.has("head_dim") else None
    return kv_heads, keys.integer("head_dim", default, high=1024) or _default_head_dim(hidden, heads)


def _default_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(f"config.json: without head_dim, hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
    return hidden // heads


def stored_dtype(keys: Keys) -> str:
    """The dtype that the checkpoint states."""
    dtype, torch_dtype = keys.text("dtype", None), keys.text("torch_dtype", None)
    return (dtype or torch_dtype or "float32").removeprefix("torch.")
