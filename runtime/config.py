"""`ModelConfig`: what a checkpoint's `config.json` says, checked and in one dialect.

Each family lists the keys it uses, those that change nothing at inference, and those it can only take at their default: a feature
that is not supported is refused by name instead of giving a wrong answer. A key on no list is a warning (an error with `strict`),
because new keys appear every month and most are bookkeeping. Both dialects are read: `rope_theta` + `rope_scaling` + `torch_dtype`,
and the newer `rope_parameters` + `dtype`. Where transformers has a default for an absent key, it is ours too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import UsageError
from ..kernels.layout import capped_silu
from ..offload.header import is_gguf
from .config_keys import KEYS_HARMLESS, KEYS_USED, REASONS, REFUSED_UNLESS
from .config_reader import REQUIRED, ConfigError, Keys, read_json, show, special_tokens
from .config_rope import MAX_POSITIONS, RopeConfig, rope_config, unknown_rope_keys
from .indexed import Indexed
from .mixture import Mixture
from .sounds import HEARING
from .stores.composite import text_alone, unknown_outside

if TYPE_CHECKING:
    from ..kernels.latent_shape import LatentShape
    from ..kernels.state_shape import StateShape

ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
        "relu2": "relu2"}
MAX_LAYERS = 2048
MAX_EXPERTS = 2**16  # of all layers: each takes memory before a tensor is looked for
MOST = {"hidden_size": 2**20,
        **dict.fromkeys(("intermediate_size", "block_ff_dim", "ffn_dim", "shared_intermediate_size", "moe_intermediate_size"), 2**22),
        "num_hidden_layers": MAX_LAYERS, "num_attention_heads": 4096, "vocab_size": 2**24}
DTYPES = ("float32", "float16", "bfloat16")
GENERATOR, SEVERAL = "ForCausalLM", "ForConditionalGeneration"  # endings of architectures: text alone, and with images
BARE = "Model"  # of those that make vectors and have no head
# Families whose tokens see both ways where is_causal says so, and what configs of such models say beside: code that comes with them does
# just that, for programs that did not know the key.
BOTH_WAYS, ALSO = ("llama", "ministral3", "mistral", "qwen2", "qwen3"), frozenset({"is_causal", "auto_map", "pooling", "temperature"})
OLDER = "LMHeadModel"  # as GPT-2's of the former
SPEAKING = "OmniModel"  # and what the first model that speaks was called


@dataclass(frozen=True)
class ModelConfig:
    """Names as in config.json. Per layer: `ropes` (None: no rotary positions) and `windows` (None is full attention, else a query at p
    sees keys later than p - window).

    `qk_norm`: q and k are normed head by head, with `qk_norm_whole` all heads together, with `qk_norm_each` by weights of each head's own.
    `attn_scale` multiplies scores, None is head_dim ** -0.5. `experts_stored`: the low-bit format in which the checkpoint holds its
    experts, None for that of all else. `position_offset`: the row of the learned positions' table that position 0 has, None for no such
    table. `mtp_layers`: layers behind the last, for multi-token prediction, of which drafts need one. `state`: what `state_layers` remember
    a text in, in the place of keys and values. `gated_queries`: in each head of q a gate of what it attends to stands behind the query.
    `latent`: the widths of latent attention; num_key_value_heads and head_dim are then those of what is cached. `layer_heads`: by layer how
    many key-value heads there are and of which size, where layers differ; `layer_queries`: how many query heads. `kv_sources`: by layer
    whose keys and values it attends to, where some have none of their own. `layer_ffn`: by layer the width inside its MLP, where layers
    differ. `values_normed`: values are normed head by head, without a weight; `keys_as_values`: layers in which they are what keys are made
    of too. `input_width`: of what every layer is given of a token beside the stream, 0 for nothing, of which there is a table of
    `input_vocab` rows, times `input_multiplier`. `layers_scaled`: what leaves a layer is multiplied by a number of the layer's.
    `without_mlp`: layers that have none. `states_beside`: layers with a state have attention too, both of one input. `factors`: what a
    tensor's values, or what a matrix gives, is multiplied by, as pairs of a role and a number. `curves`: by layer the numbers of its
    activation as checkpoints have them, where no tensors hold them. `most_tokens`: of a text, beyond which the model computes what is not
    run here. `qk_norm_unit`: q and k are normed head by head without a weight, in layers that turn, with `qk_norm_still` in the others
    too. `gates_apart`: gates of what is
    attended to are made by a matrix of their own; `gates_softplus`: they are the softplus of what it makes, not the sigmoid; `gates_whole`:
    a head has one for all its channels. `branches_normed`: what a convolution, attention or an MLP gives is normed before it is added, of
    families with both kinds of blocks. `side_by_side`: of families with both kinds of blocks, attention and MLP read what comes into the
    layer. `norms_apart`: where they do, each reads a norm of its own. `norms_unit`: no norm has a weight. `clip_qkv`: beyond which q, k and
    v are cut off, before they are turned. `head_bias`: the head has one. `state_norm_eps`: of the norm behind a state, where it is not that
    of the others. `streams`: of how many a token has side by side each layer works on one, 0 for one as it is; `low_rank`: the width inside
    a branch of what a layer reads, 0 for none; `cuts`: by layer how many deviations beyond their mean the gates of its MLP have to be, None
    for all, where any have to. `one_scale`: ternary matrices read activations that are rounded by one scale a token, as they were trained
    (BitNet). `attends_beside`: the layers of those with a state that have attention too, where not all or none have; in front of the
    state they have one of `shared_blocks` blocks of attention and an MLP in turn, which read an embedding beside the stream, the second
    of two; with `attention_branches` what a layer adds to one is beside q, k and v too. `value_dim`: how wide a head's values are, where
    narrower than its keys, as wide as which they are cached. `slopes`: of each query head, by which a score grows with the place of its
    key (ALiBi); then heads are made as wide as `value_dim`, and head_dim is more. `indexed`: how tokens choose what they see. `both_ways`:
    they see what comes behind them too, with a window as far as before them. `embedding_normed`: an embedding goes through a norm without
    a weight; `last_norm`: the kind of the one before the head, and `behind_eps` the epsilon of those behind attention and MLP, where these
    are not the others'. `gate_bounds`: by layer how far gates of experts, and those of what every token visits, go, None for no bound.
    """

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
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norm_kind: str = "rms"
    attn_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    position_offset: int | None = None
    mtp_layers: int = 0
    mixture: Mixture | None = None
    experts_stored: str | None = None
    state: StateShape | None = None
    state_layers: tuple[int, ...] = ()
    gated_queries: bool = False
    latent: LatentShape | None = None
    layer_heads: tuple[tuple[int, int], ...] = ()
    layer_queries: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    layer_ffn: tuple[int, ...] = ()
    values_normed: bool = False
    keys_as_values: tuple[int, ...] = ()
    input_width: int = 0
    input_vocab: int = 0
    input_multiplier: float = 1.0
    layers_scaled: bool = False
    without_mlp: tuple[int, ...] = ()
    states_beside: bool = False
    factors: tuple[tuple[str, float], ...] = ()
    qk_norm_each: bool = False
    curves: tuple[tuple[float, float], ...] = ()
    most_tokens: int | None = None
    qk_norm_unit: bool = False
    gates_apart: bool = False
    gates_softplus: bool = False
    gates_whole: bool = False
    branches_normed: bool = False
    side_by_side: bool = False
    norms_apart: bool = False
    norms_unit: bool = False
    clip_qkv: float | None = None
    head_bias: bool = False
    state_norm_eps: float | None = None
    streams: int = 0
    low_rank: int = 0
    cuts: tuple[float | None, ...] = ()
    one_scale: bool = False
    attends_beside: tuple[int, ...] = ()
    shared_blocks: int = 0
    attention_branches: bool = False
    value_dim: int = 0
    slopes: tuple[float, ...] = ()
    indexed: Indexed | None = None
    both_ways: bool = False
    embedding_normed: bool = False
    last_norm: str | None = None
    behind_eps: float | None = None
    qk_norm_still: bool = False
    gate_bounds: tuple[tuple[float | None, float | None], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that have keys and values of their own."""
        return tuple(layer for layer in range(self.num_hidden_layers)
                     if self.attends(layer) and (not self.kv_sources or self.kv_sources[layer] == layer))

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return self.states_beside or layer not in self.state_layers or layer in self.attends_beside

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Key-value heads of a layer, and their size, which is that of its query heads."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_key_value_heads, self.head_dim)

    def queries_of(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.layer_queries[layer] if self.layer_queries else self.num_attention_heads

    def ffn_of(self, layer: int) -> int:
        """The width inside a layer's MLP."""
        return self.layer_ffn[layer] if self.layer_ffn else self.intermediate_size

    def act_of(self, layer: int, shared: bool = False) -> str:
        """The activation of a layer's experts, or of the one that every token visits."""
        bound = self.gate_bounds[layer][shared] if self.gate_bounds else None
        return self.hidden_act if bound is None else capped_silu(bound)

    def cut_of(self, layer: int) -> float | None:
        """How many deviations beyond their mean a layer's gates have to be."""
        return self.cuts[layer] if self.cuts else None

    def factor(self, role: str) -> float:
        """What of a role is multiplied by."""
        return dict(self.factors).get(role, 1.0)

    @property
    def made_dim(self) -> int:
        """How wide the head of a query or key is made."""
        return self.value_dim if self.slopes else self.head_dim

    @property
    def narrow(self) -> int:
        """How wide the head of a value is made where attention takes a wider one, else 0."""
        return self.value_dim

    @property
    def cache_heads(self) -> tuple[tuple[int, int], ...]:
        """`heads_of` the `attention_layers`."""
        return tuple(map(self.heads_of, self.attention_layers))

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary positions of the layers that see furthest."""
        return next((rope for rope, window in sorted(zip(self.ropes, self.windows), key=lambda each: each[1] is not None) if rope), None)

    @property
    def rotary_width(self) -> int:
        """The width of what rotary positions turn all or a share of: a head, or the part of one that latent attention sets apart."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def widest(self) -> int:
        """The width inside the widest MLP."""
        own = self.mixture
        return max(self.intermediate_size, own.width if own else 0, own.shared_width or 0 if own else 0, self.input_width, *self.layer_ffn)

    @property
    def context_length(self) -> int:
        """Tokens the model is said to handle: yarn's extension counts where max_position_embeddings was left as it was. One that is more
        than the original length says it itself, though yarn may reach beyond. At most `most_tokens`."""
        found = self.max_position_embeddings
        if self.rope is not None and self.rope.kind == "yarn" and found <= self.rope.params["original_max_position_embeddings"]:
            extended = self.rope.params["original_max_position_embeddings"] * self.rope.params["factor"]
            found = max(found, int(min(extended, MAX_POSITIONS)))
        return found if self.most_tokens is None else min(found, self.most_tokens)


@dataclass(frozen=True)
class Defaults:
    """What transformers takes for keys that a family's config leaves out."""

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    eps_key: str | None = "rms_norm_eps"  # None: the config states no epsilon of the norms, `norm_eps` is that of every model
    norm_eps: float = 1e-6
    tied: bool = False
    theta: float = 10_000.0
    act: tuple[str, str] = ("hidden_act", "silu")  # key, value
    sizes: Mapping[str, int] = field(default_factory=dict)
    rotary: bool = True  # False: neither rotary positions nor keys about them
    grouped: bool = True  # False: as many key-value heads as heads, which share the width, and no keys about them
    ffn_key: str = "intermediate_size"

    def size(self, keys: Keys, name: str) -> int:
        """A width or a count; required where the family has no default."""
        return keys.integer(name, self.sizes.get(name, REQUIRED), high=MOST[name])


def read_config(folder: Path, strict: bool = False) -> ModelConfig:
    """The config of a model folder or GGUF file.

    Raises ModelNotFound, ConfigError or CheckpointError, and with `strict` UsageError for keys that nobody knows.
    """
    if is_gguf(folder):
        from .gguf.store import read_gguf_config

        return read_gguf_config(folder, strict)
    return parse_config(read_json(folder / "config.json"), strict)


def parse_config(raw: Mapping[str, object], strict: bool = False) -> ModelConfig:
    """`read_config` for an object already in memory."""
    from . import families  # the families import this module
    from .encoders import refuse_writing

    refuse_writing(raw)
    families.check_type(raw.get("model_type"))
    architectures = raw.get("architectures") or []
    composite = str(raw.get("model_type")) in families.COMPOSITE
    suffix = SEVERAL if composite else GENERATOR
    made = families.of_its_family(raw)
    sees_both_ways = made.get("is_causal") is False and made.get("model_type") in BOTH_WAYS
    vectors = sees_both_ways or raw.get("use_bidirectional_attention") is True
    endings = (suffix, SPEAKING if composite else OLDER, *((BARE,) if vectors else ()))
    if not isinstance(architectures, list) or architectures and not any(str(name).endswith(endings) for name in architectures):
        raise ConfigError(f"config.json: architectures is {show(architectures)}, expected a ...{suffix}", "effllm runs text generators")
    if composite:
        return _text_part(raw, strict)
    raw = made
    keys = Keys(raw)
    family = families.get(keys.text("model_type"))
    own = family.KEYS_USED | family.KEYS_HARMLESS | (ALSO if sees_both_ways else frozenset())
    refused = {key: value for key, value in {**REFUSED_UNLESS, **family.REFUSED_UNLESS}.items() if key not in own}
    section = raw.get("quantization_config") if raw.get("quantization") is None else None  # MLX writes both
    if "quantization_config" not in own and isinstance(section, dict):
        from .stores.import_config import check_method

        check_method(section)
        refused["quantization_config"] = section
        refused["compression_config"] = raw.get("compression_config")  # some say it twice
    if _full_attention_alone(raw):
        refused["layer_types"] = raw["layer_types"]
    for key, default in refused.items():
        if raw.get(key) is not None and raw[key] != default:
            why = REASONS.get(key, f"this family runs only {'without it' if default is None else f'with {key} = {show(default)}'}")
            raise ConfigError(f"config.json: {key} = {show(raw[key])} is not supported for {keys.text('model_type')} models", why)
    config = family.config(keys)
    if isinstance(section, dict) and section.get("quant_method") == "bitnet":
        config = replace(config, one_scale=True)
    if sees_both_ways:
        if any(config.windows):
            raise ConfigError("config.json: is_causal = False with a sliding_window is not supported", "the window is of causal models")
        config = replace(config, both_ways=True, tie_word_embeddings=True)  # a head that is there is not asked
    unknown = sorted(raw.keys() - KEYS_USED - KEYS_HARMLESS - refused.keys() - own)
    unknown += unknown_rope_keys(raw, config.ropes)
    return replace(config, warnings=config.warnings + _judge_unknown(unknown, strict))


def _full_attention_alone(raw: Mapping[str, object]) -> bool:
    """Whether `layer_types` says of every layer what holds of a family without them: neither another kind nor a window."""
    windows = raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    return isinstance(kinds, list) and len(kinds) == layers and not windows and all(kind == "full_attention" for kind in kinds)


def _text_part(raw: Mapping[str, object], strict: bool) -> ModelConfig:
    """The text generator inside a model that takes more than text."""
    config = parse_config(text_alone(raw), strict)
    kind = raw["model_type"]
    said = f"{show(kind)} takes {'sounds' if kind in HEARING else 'images'} too: effllm reads its text part, {config.family}"
    return replace(config, warnings=(said, *config.warnings, *_judge_unknown(unknown_outside(raw, KEYS_HARMLESS), strict)))


def _judge_unknown(unknown: list[str], strict: bool) -> tuple[str, ...]:
    if not unknown:
        return ()
    named = ", ".join(show(key) for key in unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    if strict:
        raise UsageError(f"config.json has keys that effllm does not know: {named}", "without --strict they are ignored with a warning")
    return (f"config.json has keys that effllm does not know and ignores: {named}",)


Ropes = Callable[[Keys, int, int], "tuple[RopeConfig | None, ...]"]  # keys, head_dim, max_position_embeddings -> one a layer


def decoder_config(keys: Keys, defaults: Defaults, ropes: Ropes | None = None, **features: object) -> ModelConfig:
    """What every decoder family shares, from its keys. `ropes` reads rotary positions, by default the same for all layers; `features`:
    the fields a family decides; without `windows`, full attention."""
    hidden, layers, heads = (defaults.size(keys, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads, head_dim = _heads(keys, defaults, hidden, heads) if defaults.grouped else (heads, _divided(hidden, heads))
    if head_dim % 2 or head_dim > 1024:
        raise ConfigError(f"config.json: a head dimension of {head_dim} is not supported",
                          "rotary positions need an even one, at most 1024")
    vocab = defaults.size(keys, "vocab_size")
    positions = keys.integer("max_position_embeddings", defaults.max_position_embeddings, high=MAX_POSITIONS)
    bos, eos, warnings = special_tokens(keys, defaults.bos, defaults.eos, vocab)
    dtype = stored_dtype(keys)
    if dtype not in DTYPES:
        warnings += (f"config.json: dtype {show(dtype)} is not known; the weights' own types are used",)
    if ropes is not None:
        turned = ropes(keys, head_dim, positions)
    else:
        turned = (rope_config(keys, head_dim, positions, defaults.theta) if defaults.rotary else None,) * layers
    fields = {"windows": (None,) * layers, "ropes": turned, **features}
    mixture = features.get("mixture")
    if mixture is not None and layers * mixture.experts > MAX_EXPERTS:
        raise ConfigError(f"config.json: {layers} layers of {mixture.experts} experts are more than any model has")
    return ModelConfig(
        family=keys.text("model_type"), vocab_size=vocab, hidden_size=hidden, intermediate_size=defaults.size(keys, defaults.ffn_key),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=positions,
        norm_eps=defaults.norm_eps if defaults.eps_key is None else keys.number(defaults.eps_key, defaults.norm_eps),
        hidden_act=keys.choice(defaults.act[0], ACTS, defaults.act[1]),
        tie_word_embeddings=keys.flag("tie_word_embeddings", defaults.tied), bos_token_id=bos, eos_token_ids=eos, dtype=dtype,
        warnings=warnings, **fields)


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
    """The type that the checkpoint states."""
    newer, older = keys.text("dtype", None), keys.text("torch_dtype", None)
    return (newer or older or "float32").removeprefix("torch.")
