"""ModernBERT decoders (Ettin): a normed embedding (so the first layer has no attention norm), bias-free layer norms, sliding windows
with positions of their own in two of three layers, and a matrix, an activation and a norm before the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import ACTS, MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..config_rope import GLOBAL, LOCAL, RopeConfig, ropes_by_window
from . import TensorRule, llama
from .llama import with_entry_norm
from .qwen2 import layer_windows
from .stablelm import bias_rule

# Training, classifiers, and keys of other families that transformers ignores in this one.
KEYS_HARMLESS = frozenset({
    "classifier_pooling", "cls_token_id", "deterministic_flash_attn", "embedding_dropout", "gradient_checkpointing", "head_dim",
    "hidden_act", "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout", "num_key_value_heads", "original_max_position_embeddings",
    "position_embedding_type", "reference_compile", "repad_logits_with_grad", "rms_norm_eps", "rope_theta", "sparse_pred_ignore_index",
    "sparse_prediction"})
REFUSED_UNLESS = {"causal_mask": True}
SIZES = {"vocab_size": 50_368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
GLOBAL_ATTENTION_INTERVAL = 3  # the first layer of every 3 has full attention, without layer_types
THETAS = 160_000.0, 10_000.0  # of layers with full attention, and of those with a window
MATRICES = {**{role: f"attn.{role}_proj" for role in "qkv"}, "o": "attn.Wo", "down": "mlp.Wo"}
NORMS = {"input_norm": "attn_norm", "post_norm": "mlp_norm"}


def config(keys: Keys) -> ModelConfig:
    """A window is half of local_attention, which in the encoders spans both sides. Raises ConfigError."""
    layers, interval = (keys.integer(name, default, high=MAX_LAYERS) for name, default in (
        ("num_hidden_layers", SIZES["num_hidden_layers"]), ("global_attn_every_n_layers", GLOBAL_ATTENTION_INTERVAL)))
    window = keys.integer("local_attention", 128, low=2) // 2
    if (stated := keys.integer("sliding_window", window)) != window:
        raise ConfigError(f"config.json: sliding_window = {show(stated)} beside local_attention = {2 * window} is not supported",
                          "a window of this family is half of local_attention")
    windows = layer_windows(keys, window, [LOCAL if layer % interval else GLOBAL for layer in range(layers)])

    def ropes(keys: Keys, head_dim: int, positions: int) -> tuple[RopeConfig, ...]:
        thetas = (keys.number("global_rope_theta", THETAS[0], above=1.0), keys.number("local_rope_theta", THETAS[1], above=1.0))
        return ropes_by_window(keys, head_dim, positions, thetas, windows)

    base = Defaults(max_position_embeddings=8192, bos=50_281, eos=(50_282,), eps_key="norm_eps", norm_eps=1e-5, tied=True, grouped=False,
                    act=("hidden_activation", "gelu"), sizes=SIZES)
    bias, norm_bias = keys.flag("attention_bias", False), keys.flag("norm_bias", False)
    return decoder_config(
        keys, base, ropes, windows=windows, norm_kind="layer", norm_bias=norm_bias, qkv_bias=bias, o_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False), head_bias=keys.flag("decoder_bias", True),
        head_transform_act=keys.choice("classifier_activation", ACTS, "gelu"), head_transform_bias=keys.flag("classifier_bias", False))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role; gate and up are fused, and the first layer has the embedding norm as its entry norm."""
    rules, prefix, hidden = llama.layer_tensors(config, layer), f"model.layers.{layer}.", config.hidden_size
    rules |= {role: replace(rules[role], name=f"{prefix}{name}.weight") for role, name in (MATRICES | NORMS).items()}
    for part, role in enumerate(("gate", "up")):
        width = config.intermediate_size
        rules[role] = replace(rules[role], part_of=(f"{prefix}mlp.Wi.weight", part * width, 2 * width))
        if config.mlp_bias:
            rules[f"{role}_bias"] = replace(rules[f"{role}_bias"], part_of=(f"{prefix}mlp.Wi.bias", part * width, 2 * width))
    for role in MATRICES:
        if f"{role}_bias" in rules:
            rules[f"{role}_bias"] = bias_rule(rules[role])
    if layer == 0:
        del rules["input_norm"]
        rules["entry_norm"] = TensorRule("model.embeddings.norm.weight", (hidden,))
    return _with_norm_biases(config, rules)


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    transform = TensorRule("lm_head.dense.weight", (hidden, hidden))
    rules = _with_norm_biases(config, {
        "embed": TensorRule("model.embeddings.tok_embeddings.weight", table), "norm": TensorRule("model.final_norm.weight", (hidden,)),
        "head_in": transform, "head_norm": TensorRule("lm_head.norm.weight", (hidden,))})
    if config.head_transform_bias:
        rules["head_in_bias"] = bias_rule(transform)
    if config.head_bias:
        rules["head_bias"] = TensorRule("decoder.bias", (config.vocab_size,))
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("decoder.weight", table)}


def _with_norm_biases(config: ModelConfig, rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The tensors with biases of norms, if the config has them."""
    norms = [role for role in rules if role == "norm" or role.endswith("_norm")] if config.norm_bias else []
    return {**rules, **{f"{role}_bias": bias_rule(rules[role]) for role in norms}}


block = with_entry_norm(llama.block)
