"""RWKV 7, Goose (0.1B to 13.3B): a recurrent model without attention and positions. Both halves of a layer use token shift (interpolation
with the previous token); time mixing keeps a matrix-valued state per head, channel mixing is an ungated MLP.

Every layer mixes the first layer's values into its own, so these travel in a second residual stream (`ModelConfig.residual_streams`).
ModelConfig requires attention heads; no layer has any, so they get the smallest valid values.
"""

from __future__ import annotations

from ...kernels.rwkv7_shape import Rwkv7Shape
from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer
from . import TensorRule
from .deepseek_v3 import check_auto_map

# Training and runtime settings, and attention, which no layer has.
KEYS_HARMLESS = frozenset({
    "attn_mode", "clip_epsilon", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "l2warp_weight",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "use_l2warp"})
REFUSED_UNLESS = {"attn": None, "norm_first": True, "sliding_window": None}
CODE = r"(configuration|modeling)_rwkv7\.RWKV7\w+|fla\.models\.rwkv7\.\w+\.RWKV7\w+"  # auto_map of published checkpoints
PLACEHOLDER_SIZES = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of attention, which no layer has
ACT = "relu2"
ACTS = ("sqrelu", ACT)  # aliases
SIZES = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 24}
STREAMS = 2  # the residual stream, and the first layer's values
# Of token-shift mixes, as in the paper: receptance, decay, key, value, in-context learning rate, gate.
MIX_LETTERS = ("r", "w", "k", "v", "a", "g")
MATRIX_TAPS = {"receptance_in": 0, "key_in": 2, "value_in": 3}  # tap -> the mix that its matrix reads
MAX_RANK = 2**16
# Key -> the default rank, and the factor of sqrt(hidden_size) that gives the rank if the key is null.
LOW_RANKS = {"decay_low_rank_dim": (64, 2.5), "a_low_rank_dim": (64, 2.5), "v_low_rank_dim": (16, 1.7), "gate_low_rank_dim": (128, 5)}


def config(keys: Keys) -> ModelConfig:
    """The state has the same size for any context: the maximum here is nominal. Raises ConfigError."""
    check_auto_map(keys, CODE)
    base = Defaults(max_position_embeddings=1 << 20, bos=1, eos=(2,), eps_key="norm_eps", norm_eps=1e-5, sizes=SIZES, rotary=False)
    hidden, layers = (base.size(keys, name) for name in ("hidden_size", "num_hidden_layers"))
    default_ffn = -(-int(hidden * keys.number("hidden_ratio", 4.0)) // 32) * 32
    ffn = keys.integer("intermediate_size", None, high=2**22) or default_ffn
    if keys.raw.get("hidden_act", ACTS[0]) not in ACTS:
        raise ConfigError(f"config.json: hidden_act = {show(keys.raw['hidden_act'])} is not supported for {keys.text('model_type')} models",
                          f"this family runs only with hidden_act = {ACTS[0]}")
    shape = _shape(keys, hidden, layers, keys.number("norm_eps", base.norm_eps))
    all_layers = tuple(range(layers))
    resolved = keys.with_values(**PLACEHOLDER_SIZES, head_dim=2, intermediate_size=ffn, hidden_act=ACT,
                           max_position_embeddings=base.max_position_embeddings)
    return decoder_config(resolved, base, recurrent=shape, recurrent_layers=all_layers, norm_kind="layer",
                          norm_bias=keys.flag("norm_bias", True), residual_streams=STREAMS, low_rank_dim=max(shape.ranks))


def _shape(keys: Keys, hidden: int, layers: int, eps: float) -> Rwkv7Shape:
    """The state of a layer. Raises ConfigError."""
    head_dim, heads = keys.integer("head_dim", None, high=1024), keys.integer("num_heads", None, high=4096)
    if head_dim is None:
        head_dim = 64 if heads is None else hidden // heads
    if hidden % head_dim or heads not in (None, hidden // head_dim):
        stated = "heads" if heads is None else f"num_heads {heads}"
        raise ConfigError(f"config.json: {stated} of head_dim {head_dim} do not make hidden_size {hidden}",
                          "the config was changed: use that of the published model")
    by_layer = isinstance(keys.raw.get("value_dim"), list)
    values = keys.numbers("value_dim", layers) if by_layer else (keys.integer("value_dim", hidden, high=2**20),)
    if {*values} != {hidden}:
        raise ConfigError(f"config.json: value_dim = {show(keys.raw['value_dim'])} is not supported for {keys.text('model_type')} models",
                          "published models of this family have values as wide as the model")
    ranks = [keys.integer(name, _default_rank(name, hidden, head_dim) if name in keys.raw else rank, high=MAX_RANK)
             for name, (rank, _) in LOW_RANKS.items()]
    return Rwkv7Shape(hidden // head_dim, head_dim, tuple(ranks), head_dim * eps)


def _default_rank(name: str, hidden: int, head_dim: int) -> int:
    """The low rank of a key that is null."""
    factor = 1.0 if name == "gate_low_rank_dim" else head_dim / 64
    return max(32, int(round(LOW_RANKS[name][1] * hidden**0.5 * factor / 32) * 32))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; the first has no value mix, but an entry norm."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}."
    rules = {role: TensorRule(f"{prefix}{name}.weight", tuple(shape)) for role, name, *shape in (
        ("input_norm", "attn_norm", hidden), ("post_norm", "ffn_norm", hidden), ("state_norm", "attn.g_norm", hidden),
        ("state_r", "attn.r_proj", hidden, hidden), ("state_k", "attn.k_proj", hidden, hidden), ("state_v", "attn.v_proj", hidden, hidden),
        ("state_out", "attn.o_proj", hidden, hidden), ("up", "ffn.key", ffn, hidden), ("down", "ffn.value", hidden, ffn))}
    if layer == 0:
        rules["entry_norm"] = TensorRule(f"{prefix}pre_norm.weight", (hidden,))
    for letter, rank in zip("wavg", config.recurrent.ranks, strict=True):
        if letter == "v" and layer == 0:
            continue
        lora = f"{prefix}attn.{letter}_lora.lora."
        rules |= {f"state_{letter}_in": TensorRule(f"{lora}0.weight", (rank, hidden)),
                  f"state_{letter}_out": TensorRule(f"{lora}2.weight", (hidden, rank))}
        if letter != "g":
            rules[f"state_{letter}_out_bias"] = TensorRule(f"{lora}2.bias", (hidden,))
    for part, letter in enumerate(MIX_LETTERS):
        rules[f"shift_{letter}"] = TensorRule(f"{prefix}attn.x_{letter}", (1, hidden), coefficients=True,
                                              part_of=(f"{prefix}attn.x_x", part, len(MIX_LETTERS)))
    rules |= {role: TensorRule(f"{prefix}{name}", (hidden,)) for role, name in (
        ("shift_up", "ffn.x_k"), ("state_direction", "attn.k_k"), ("state_remains", "attn.k_a"), ("state_bonus", "attn.r_k"))}
    return _with_biases(rules, ("state_norm", *(("input_norm", "post_norm", "entry_norm") if config.norm_bias else ())))


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table = (config.vocab_size, config.hidden_size)
    rules = {"embed": TensorRule("model.embeddings.weight", table), "norm": TensorRule("model.norm.weight", (config.hidden_size,))}
    rules = _with_biases(rules, ("norm",) if config.norm_bias else ())
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def _with_biases(rules: dict[str, TensorRule], roles: tuple[str, ...]) -> dict[str, TensorRule]:
    return rules | {f"{role}_bias": TensorRule(rules[role].name.removesuffix("weight") + "bias", rules[role].shape)
                    for role in roles if role in rules}


def block(x: object, at: Layer) -> object:
    """Streams x[T, 2 * D] -> x[T, 2 * D]. Taps see block_in and mlp_in before their norms, the token-shifted input of each matrix
    (`MATRIX_TAPS`, and shifted_in of the MLP), state_out and mlp_hidden before the output matrices."""
    ops, w, kv = at.ops, at.w, at.kv
    hidden = ops.first_stream(x, STREAMS)
    if w.entry_norm is not None:
        hidden = ops.norm_stream(hidden, w.entry_norm)
    at.tap("block_in", hidden)
    rows = kv.shifted(hidden, w.input_norm, w.recurrent.params.time_shift, 0)
    for name, index in MATRIX_TAPS.items():
        at.tap(name, rows[index])
    first_values = ops.second_stream(x, STREAMS) if at.number else None
    products = kv.products(rows, w.recurrent.projections, w.recurrent.params, first_values)  # [T, D] each
    if first_values is None:
        x = ops.put_stream(x, products[2], 1)
    mixed = kv.mix(products, w.recurrent.params)
    at.tap("state_out", mixed)
    hidden = ops.linear_add(mixed, w.recurrent.out_proj, hidden)
    at.tap("mlp_in", hidden)
    (row,) = kv.shifted(hidden, w.post_norm, w.recurrent.params.channel_shift, 1)
    at.tap("shifted_in", row)
    hidden = ops.mlp_branch(row, w.up, w.down, at.config.hidden_act, hidden, at.observer("mlp_hidden"))
    x = ops.put_stream(x, hidden, 0)
    at.tap("block_out", x)
    return x
