"""GPT-2 and its many relatives: OPT's block, with learned positions from row 0 on. Matrices are stored transposed (input x output) and
QKV is fused; the store undoes both (`runtime/stores/tensor_views.py`), so that they have Llama's names here."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..config import MAX_LAYERS, MAX_SIZES, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, opt

LIKE = opt
# Of training and of classifiers; what rotary families call by these names, transformers passes over in this one.
KEYS_HARMLESS = frozenset({
    "attn_pdrop", "embd_pdrop", "gradient_checkpointing", "head_dim", "hidden_act", "n_ctx", "num_key_value_heads",
    "original_max_position_embeddings", "reorder_and_upcast_attn", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"})
REFUSED_UNLESS = {"layer_types": None, "scale_attn_by_inverse_layer_idx": False, "sliding_window": None}
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 1024}
PREFIX = "transformer."
# Role -> the matrix that holds it, and where in it its columns begin, in widths of the model.
FUSED = {"q": ("attn.c_attn", 0), "k": ("attn.c_attn", 1), "v": ("attn.c_attn", 2), "o": ("attn.c_proj", 0), "up": ("mlp.c_fc", 0),
         "down": ("mlp.c_proj", 0)}
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj", "down":
         "mlp.down_proj"}
NORMS = {"input_norm": ("input_layernorm", "ln_1"), "post_norm": ("post_attention_layernorm", "ln_2")}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=1024, bos=50_256, eos=(50_256,), tied=True, act=("activation_function", "gelu_new"),
                    rotary=False, grouped=False, eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 50_257})
    return decoder_config(with_gpt2_sizes(keys), base, qkv_bias=True, o_bias=True, mlp_bias=True, norm_kind="layer", position_offset=0,
                          attn_scale=None if keys.flag("scale_attn_weights", True) else 1.0)


def with_gpt2_sizes(keys: Keys, usual: Mapping[str, int] = SIZES) -> Keys:
    """The keys with sizes by their usual names: they have names of their own, beside which these may stand."""
    own = {"hidden_size": ("n_embd", MAX_SIZES["hidden_size"]), "num_hidden_layers": ("n_layer", MAX_LAYERS),
           "num_attention_heads": ("n_head", 4096), "max_position_embeddings": ("n_positions", 2**27)}
    sizes = {name: keys.integer(short, keys.integer(name, usual[name], high=most), high=most) for name, (short, most) in own.items()}
    return keys.with_values(**sizes, intermediate_size=keys.integer("n_inner", 4 * sizes["hidden_size"], high=2**22))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role, `[N, K]` as no folder has them."""
    hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}."
    rules = {}
    for role, (name, own) in NORMS.items():
        for end, kind in (("", "weight"), ("_bias", "bias")):
            rules[role + end] = TensorRule(f"{prefix}{name}.{kind}", (hidden,), also=(f"{PREFIX}h.{layer}.{own}.{kind}",))
    for role, name in NAMES.items():
        out, width = (ffn, hidden) if role == "up" else (hidden, ffn) if role == "down" else (hidden, hidden)
        rules[role], rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.weight", (out, width)), TensorRule(f"{prefix}{name}.bias", (out,))
    return rules


def transposed_columns(config: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """Name of a matrix -> that of the one that is stored, inputs before outputs, and the column where it begins there."""
    return {f"model.layers.{layer}.{NAMES[role]}.weight": (f"{PREFIX}h.{layer}.{whole}.weight", at * config.hidden_size)
            for role, (whole, at) in FUSED.items()}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a bias -> that of the one that it is stored in, and its numbers there."""
    width = {"up": config.intermediate_size}
    return {f"model.layers.{layer}.{NAMES[role]}.bias": (
        f"{PREFIX}h.{layer}.{whole}.bias", np.arange(width.get(role, config.hidden_size)) + at * config.hidden_size)
        for role, (whole, at) in FUSED.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    """Embedding, positions, last norm and, unless tied to the embedding, the head."""
    table, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    rules = {"embed": ("embed_tokens.weight", table, "wte.weight"), "norm": ("norm.weight", (hidden,), "ln_f.weight"), "norm_bias":
             ("norm.bias", (hidden,), "ln_f.bias"), "positions": ("embed_positions.weight", (config.max_position_embeddings, hidden),
                                                                  "wpe.weight")}
    found = {role: TensorRule(f"model.{name}", shape, also=(PREFIX + own,)) for role, (name, shape, own) in rules.items()}
    return found if config.tie_word_embeddings else found | {"head": TensorRule("lm_head.weight", table)}
