"""GPT-BigCode (StarCoder 1, SantaCoder, WizardCoder 15B): GPT-2 with multi-query attention, matrices stored as output x input, and fused
QKV."""

from __future__ import annotations

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from . import TensorRule, gpt2
from .gpt2 import PREFIX, with_gpt2_sizes

LIKE = gpt2
# How scores are computed, and what the program did that the models were published with.
KEYS_HARMLESS = gpt2.KEYS_HARMLESS - {"head_dim", "num_key_value_heads"} | {
    "attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache",
    "scale_attention_softmax_in_fp32", "validate_runner_input"}
REFUSED_UNLESS = {"layer_types": None, "multi_query": True, "sliding_window": None}


def config(keys: Keys) -> ModelConfig:
    base = Defaults(max_position_embeddings=1024, bos=50_256, eos=(50_256,), tied=True, act=("activation_function", "gelu_pytorch_tanh"),
                    rotary=False, eps_key="layer_norm_epsilon", norm_eps=1e-5, sizes={"vocab_size": 50_257})
    one = with_gpt2_sizes(keys).with_values(num_key_value_heads=1, head_dim=None)
    return decoder_config(one, base, qkv_bias=True, o_bias=True, mlp_bias=True, norm_kind="layer", position_offset=0,
                          attn_scale=None if keys.flag("scale_attn_weights", True) else 1.0)


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role."""
    hidden, ffn, kv, prefix = config.hidden_size, config.intermediate_size, config.head_dim, f"{PREFIX}h.{layer}."
    rules = {}
    for role, name, shape in (("input_norm", "ln_1", (hidden,)), ("post_norm", "ln_2", (hidden,)), ("o", "attn.c_proj", (hidden, hidden)),
                              ("up", "mlp.c_fc", (ffn, hidden)), ("down", "mlp.c_proj", (hidden, ffn))):
        rules[role] = TensorRule(f"{prefix}{name}.weight", shape)
        rules[f"{role}_bias"] = TensorRule(f"{prefix}{name}.bias", shape[:1])
    first = 0
    for role, rows in (("q", hidden), ("k", kv), ("v", kv)):
        for end, kind, shape in (("", "weight", (rows, hidden)), ("_bias", "bias", (rows,))):
            rules[role + end] = TensorRule(f"{prefix}attn.{role}_proj.{kind}", shape,
                                           part_of=(f"{prefix}attn.c_attn.{kind}", first, hidden + 2 * kv))
        first += rows
    return rules
