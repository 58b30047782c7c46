"""EXAONE 3, 3.5 and Deep: the Llama block under other names."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys
from . import TensorRule, llama
from .deepseek_v3 import check_auto_map

KEYS_HARMLESS = frozenset({"embed_dropout", "rotary"})
REFUSED_UNLESS = {"layer_types": None, "sliding_window": None}
# Published names of keys, which take precedence -> those that transformers writes.
KEY_NAMES = {"activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps", "num_layers": "num_hidden_layers"}
CODE = r"(configuration|modeling)_exaone\.Exaone\w+"
# Llama's names -> the family's.
NAMES = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.q_proj": "attn.attention.q_proj", "self_attn.k_proj":
         "attn.attention.k_proj", "self_attn.v_proj": "attn.attention.v_proj", "self_attn.o_proj": "attn.attention.out_proj",
         "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj"}
OUTER = {"embed": ("transformer.wte.weight",), "norm": ("transformer.ln_f.weight",)}


def config(keys: Keys) -> ModelConfig:
    check_auto_map(keys, CODE)
    layers, also = keys.integer("num_layers", None), keys.integer("num_hidden_layers", None)
    if layers is not None and also not in (None, layers):
        raise ConfigError(f"config.json: num_layers is {layers} and num_hidden_layers {also}, which should be the same")
    keys.mark_known(*KEY_NAMES)
    keys = keys.with_values(**{name: keys.raw[published] for published, name in KEY_NAMES.items() if keys.raw.get(published) is not None})
    base = Defaults(max_position_embeddings=4096, num_key_value_heads=8, bos=1, eos=(361,), norm_eps=1e-5, theta=500_000.0)
    bias = keys.flag("attention_bias", False)
    return decoder_config(keys, base, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias", False))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    def published(name: str) -> str:
        own, _, kind = name.removeprefix(f"model.layers.{layer}.").rpartition(".")
        return f"transformer.h.{layer}.{NAMES[own]}.{kind}"

    return {role: replace(rule, also=(published(rule.name),)) for role, rule in llama.layer_tensors(config, layer).items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return {role: replace(rule, also=OUTER.get(role, ())) for role, rule in llama.outer_tensors(config).items()}
