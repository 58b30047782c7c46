"""GPT-Neo (125M to 2.7B): GPT-2 with a sliding window in every second layer, matrices stored as output x input, no QKV biases, and
unscaled attention scores."""

from __future__ import annotations

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from . import TensorRule, gpt2
from .gpt2 import PREFIX
from .stablelm import bias_rule

LIKE = gpt2
# Of training and of classifiers; what other families call by these names, transformers passes over in this one.
KEYS_HARMLESS = frozenset({
    "embed_dropout", "gradient_checkpointing", "head_dim", "hidden_act", "num_key_value_heads", "original_max_position_embeddings",
    "resid_dropout", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj"})
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
KINDS = ("global", "local")
MATRICES = {**{role: f"attn.attention.{role}_proj" for role in "qkv"}, "o": "attn.attention.out_proj", "up": "mlp.c_fc", "down":
            "mlp.c_proj"}
NORMS = {"input_norm": "ln_1", "post_norm": "ln_2"}


def config(keys: Keys) -> ModelConfig:
    """Raises ConfigError. Sizes have names of their own, beside which the usual ones may stand."""
    layers = keys.integer("num_layers", keys.integer("num_hidden_layers", 24, high=MAX_LAYERS), high=MAX_LAYERS)
    heads = keys.integer("num_heads", keys.integer("num_attention_heads", 16, high=4096), high=4096)
    hidden, window = keys.integer("hidden_size", 2048, high=MAX_SIZES["hidden_size"]), keys.integer("window_size", 256)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, "intermediate_size": keys.integer(
        "intermediate_size", 4 * hidden, high=MAX_SIZES["intermediate_size"])}
    base = Defaults(max_position_embeddings=2048, bos=50_256, eos=(50_256,), tied=True, act=("activation_function", "gelu_new"),
                    rotary=False, grouped=False, eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 50_257})
    windows = tuple(window if kind == "local" else None for kind in _kinds(keys, layers))
    return decoder_config(keys.with_values(**sizes), base, windows=windows, o_bias=True, mlp_bias=True, norm_kind="layer",
                          position_offset=0, attn_scale=1.0)


def _kinds(keys: Keys, layers: int) -> tuple[str, ...]:
    """What each layer sees: some kinds one after the other, so and so often. Raises ConfigError."""
    keys.mark_known("attention_types")
    stated = keys.raw.get("attention_types") or [[list(KINDS), 12]]
    found: list[str] = []
    for each in stated if isinstance(stated, list) else [None]:
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], list) or not {*map(str, each[0])} <= {*KINDS} or (
                type(each[1]) is not int or not 0 < each[1] * len(each[0]) <= MAX_LAYERS):
            raise keys.fail("attention_types", "pairs of a list of global and local, and a repeat count")
        found += each[0] * each[1]
    if len(found) != layers:
        raise ConfigError(f"config.json: attention_types names {len(found)} layers, num_layers {layers}")
    if (beside := keys.strings("attention_layers", layers)) not in (None, tuple(found)):
        raise ConfigError(f"config.json: attention_layers = {show(list(beside))} is not what attention_types says")
    return tuple(found)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"{PREFIX}h.{layer}."
    shapes = {"up": (ffn, hidden), "down": (hidden, ffn)}
    rules = {role: TensorRule(f"{prefix}{name}.weight", shapes.get(role, (hidden, hidden))) for role, name in MATRICES.items()}
    rules |= {role: TensorRule(f"{prefix}{name}.weight", (hidden,)) for role, name in NORMS.items()}
    return rules | {f"{role}_bias": bias_rule(rules[role]) for role in ("o", "up", "down", *NORMS)}
