"""`ModelConfig`: what a checkpoint's `config.json` says, checked and in one dialect.

Each family lists the keys it uses, those that change nothing at inference, and those it can only take at their default: a feature
that is not supported is refused by name instead of giving a wrong answer. A key on no list is a warning (an error with `strict`),
because new keys appear every month and most are bookkeeping. Both dialects are read: `rope_theta` + `rope_scaling` + `torch_dtype`,
and the newer `rope_parameters` + `dtype`. Where transformers has a default for an absent key, it is ours too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .. import UsageError
from .config_reader import REQUIRED, ConfigError, Keys, read_json, show

ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
DTYPES = ("float32", "float16", "bfloat16")
MAX_POSITIONS = 2**27

# Read for every family, here.
KEYS_USED = frozenset({
    "architectures", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings",
    "torch_dtype", "vocab_size",
})
# Training, bookkeeping and the sampling defaults that old versions kept here (generation_config.json is where we read them).
KEYS_HARMLESS = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "attention_dropout", "attn_implementation", "begin_suppress_tokens",
    "chunk_size_feed_forward", "classifier_dropout", "do_sample", "early_stopping", "finetuning_task", "hidden_dropout", "id2label",
    "initializer_range", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "min_length", "name_or_path",
    "neftune_noise_alpha", "no_repeat_ngram_size", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "repetition_penalty",
    "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers_version",
    "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})
# Key -> the one value that means "not used". null always does.
REFUSED_UNLESS: Mapping[str, object] = {
    "add_cross_attention": False, "attention_multiplier": 1.0, "attn_logit_softcapping": None, "auto_map": None,
    "cross_attention_hidden_size": None,
    "embedding_multiplier": 1.0, "final_logit_softcapping": None, "is_encoder_decoder": False, "logits_scaling": 1.0, "num_experts": None,
    "num_local_experts": None, "partial_rotary_factor": 1.0, "per_layer_config": None, "pruned_heads": {}, "quantization_config": None,
    "query_pre_attn_scalar": None, "residual_multiplier": 1.0, "rope_interleaved": False, "use_qk_norm": False,
}
REASONS = {
    "auto_map": "the checkpoint brings its own code, which is never run",
    "quantization_config": "this version reads unquantized weights: take the original 16-bit checkpoint",
}

# Rotary kinds -> the keys of the section that they use, beyond the kind itself and rope_theta.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
                       "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}),
}
ROPE_HARMLESS = frozenset({"finetuned"})


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions as the checkpoint states them; `rope.rope_table` turns them into frequencies. `params` by ROPE_KEYS."""

    theta: float
    kind: str
    params: Mapping[str, object]
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """The experts of a mixture: how many, how many a token visits, the width inside one, whether a token's shares add up to 1, and which
    layers have them."""

    experts: int
    per_token: int
    width: int
    renormalise: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Names as in config.json. `windows`: per layer, None is full attention, else a query at p sees keys later than p - window."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads together instead of each for itself
    norm_kind: str = "rms"
    mixture: Mixture | None = None
    warnings: tuple[str, ...] = ()

    @property
    def context_length(self) -> int:
        """Tokens the model is said to handle: yarn's extension counts, also where max_position_embeddings was left as it was."""
        if self.rope.kind != "yarn":
            return self.max_position_embeddings
        extended = self.rope.params["original_max_position_embeddings"] * self.rope.params["factor"]
        return max(self.max_position_embeddings, int(min(extended, MAX_POSITIONS)))


@dataclass(frozen=True)
class Defaults:
    """What transformers takes for keys that a family's config leaves out."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    theta: float = 10_000.0


def read_config(folder: Path, strict: bool = False) -> ModelConfig:
    """The config of a model folder. Raises ModelNotFound, ConfigError, and with `strict` UsageError for keys that nobody knows."""
    return parse_config(read_json(folder / "config.json"), strict)


def parse_config(raw: Mapping[str, object], strict: bool = False) -> ModelConfig:
    """`read_config` for an object already in memory."""
    from . import families  # the families import this module

    keys = Keys(raw)
    family = families.get(keys.text("model_type"))
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or architectures and not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise ConfigError(f"config.json: architectures is {show(architectures)}, expected a ...ForCausalLM", "effllm runs text generators")
    refused = {key: default for key, default in {**REFUSED_UNLESS, **family.REFUSED_UNLESS}.items() if key not in family.KEYS_USED}
    for key, default in refused.items():
        if raw.get(key) is not None and raw[key] != default:
            why = REASONS.get(key, f"this family runs only {'without it' if default is None else f'with {key} = {show(default)}'}")
            raise ConfigError(f"config.json: {key} = {show(raw[key])} is not supported for {keys.text('model_type')} models", why)
    config = family.config(keys)
    unknown = sorted(raw.keys() - KEYS_USED - KEYS_HARMLESS - refused.keys() - family.KEYS_USED - family.KEYS_HARMLESS)
    unknown += [f"{name}.{key}" for name, key in _unknown_rope_keys(raw, config.rope.kind)]
    return replace(config, warnings=config.warnings + _judge_unknown(unknown, strict))


def _judge_unknown(unknown: list[str], strict: bool) -> tuple[str, ...]:
    if not unknown:
        return ()
    named = ", ".join(show(key) for key in unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    if strict:
        raise UsageError(f"config.json has keys that effllm does not know: {named}", "without --strict they are ignored with a warning")
    return (f"config.json has keys that effllm does not know and ignores: {named}",)


def decoder_config(keys: Keys, defaults: Defaults, **features: object) -> ModelConfig:
    """What every decoder family shares, from its keys. `features`: the fields a family decides; without `windows`, full attention."""
    hidden = keys.integer("hidden_size", high=2**20)
    layers = keys.integer("num_hidden_layers", high=2048)
    heads = keys.integer("num_attention_heads", high=4096)
    stated = None if keys.holds("num_key_value_heads") else defaults.num_key_value_heads
    kv_heads = keys.integer("num_key_value_heads", stated or heads, high=4096)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    stated = defaults.head_dim if not keys.holds("head_dim") else None
    head_dim = keys.integer("head_dim", stated, high=1024)
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(f"config.json: without head_dim, hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if head_dim % 2 or head_dim > 1024:
        raise ConfigError(f"config.json: a head dimension of {head_dim} is not supported",
                          "rotary positions need an even one, at most 1024")
    vocab = keys.integer("vocab_size", high=2**24)
    positions = keys.integer("max_position_embeddings", defaults.max_position_embeddings, high=MAX_POSITIONS)
    bos, eos, warnings = _special_tokens(keys, defaults, vocab)
    newer, older = keys.text("dtype", None), keys.text("torch_dtype", None)
    dtype = (newer or older or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        warnings += (f"config.json: dtype {show(dtype)} is not known; the weights' own types are used",)
    fields = {"windows": (None,) * layers, **features}
    return ModelConfig(
        family=keys.text("model_type"), vocab_size=vocab, hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", high=2**22), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=positions,
        norm_eps=keys.number("rms_norm_eps", defaults.norm_eps), hidden_act=keys.choice("hidden_act", ACTS, "silu"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False), rope=rope_config(keys, head_dim, positions, defaults.theta),
        bos_token_id=bos, eos_token_ids=eos, dtype=dtype, warnings=warnings, **fields)


def _special_tokens(keys: Keys, defaults: Defaults, vocab: int) -> tuple[int | None, tuple[int, ...], tuple[str, ...]]:
    """(bos, eos ids, warnings). An id outside the vocabulary can never occur: it is dropped, with a warning where the file states it."""
    warnings: list[str] = []
    found: dict[str, tuple[int, ...]] = {}
    for name, default in (("bos_token_id", () if defaults.bos is None else (defaults.bos,)), ("eos_token_id", defaults.eos)):
        ids = keys.token_ids(name, default)
        found[name] = tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))
        if len(found[name]) < len(set(ids)) and keys.raw.get(name) is not None:
            warnings.append(f"config.json: {name} {show(keys.raw[name])} is outside the vocabulary of {vocab} and is ignored")
    return (found["bos_token_id"] or (None,))[0], found["eos_token_id"], tuple(warnings)


def _rope_section(raw: Mapping[str, object]) -> str:
    """Which of the two dialects' sections holds; the older one wins where both are filled, as in transformers."""
    return "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"


def _rope_kind(section: Mapping[str, object]) -> object:
    return section.get("rope_type") or section.get("type") or "default"


def _unknown_rope_keys(raw: Mapping[str, object], kind: str) -> list[tuple[str, str]]:
    name = _rope_section(raw)
    known = ROPE_KEYS[kind] | ROPE_HARMLESS | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    return [(name, key) for key in sorted((raw.get(name) or {}).keys() - known)]


def rope_config(keys: Keys, head_dim: int, positions: int, theta: float = 10_000.0) -> RopeConfig:
    """Rotary settings from either dialect. A value inside the section wins over the one beside it; `theta` is the family's default."""
    outer_theta = keys.number("rope_theta", theta, above=1.0)
    older, newer = keys.section("rope_scaling"), keys.section("rope_parameters")
    name = _rope_section(keys.raw)
    inner = Keys(older or newer or {}, f"config.json: {name}")
    kind = _rope_kind(inner.raw)
    if any(isinstance(value, dict) for value in inner.raw.values()):
        raise ConfigError(f"config.json: {name} differs by layer type, which is not supported for this family")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(f"config.json: {name} of type {show(kind)} is not supported", f"known: {', '.join(ROPE_KEYS)}")
    if inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: {name}.partial_rotary_factor = {show(inner.raw['partial_rotary_factor'])} is not supported",
                          "this family rotates whole heads")
    original = keys.integer("original_max_position_embeddings", None, high=MAX_POSITIONS)
    original = original or inner.integer("original_max_position_embeddings", positions, high=MAX_POSITIONS)
    return RopeConfig(inner.number("rope_theta", outer_theta, above=1.0), kind, _rope_params(inner, kind, head_dim, positions, original))


def _rope_params(inner: Keys, kind: str, head_dim: int, positions: int, original: int) -> dict[str, object]:
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": inner.number("factor")}
    params: dict[str, object] = {"original_max_position_embeddings": original}
    params["factor"] = inner.number("factor", REQUIRED if kind == "llama3" else positions / original)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if low >= high:
            raise ConfigError(f"{inner.where}: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return params | {"low_freq_factor": low, "high_freq_factor": high}
    params["attention_factor"] = inner.number("attention_factor", None)
    if kind == "longrope":
        if original < 2:
            raise ConfigError(f"{inner.where}: original_max_position_embeddings is {original}, expected at least 2")
        return params | {name: inner.numbers(name, head_dim // 2) for name in ("short_factor", "long_factor")}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", None), ("mscale_all_dim", None)):
        # 0 stands for "not set" here, as in transformers
        params[name] = default if inner.raw.get(name) == 0 else inner.number(name, default)
    return params | {"truncate": inner.flag("truncate", True)}
