"""nanochat (d20 to d34): weightless norms, a normed embedding, QK norms after a rotation in the negative direction, and an ungated MLP
with squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from ..config import Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..layer import Layer, narrowing
from . import TensorRule, llama
from .hunyuan_v1_dense import attention
from .opt import feed_forward

REFUSED_UNLESS = {"layer_types": None, "mlp_bias": False, "sliding_window": None}
SIZES = {"vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 6}
NAMES = {"up": "fc1", "down": "fc2"}


def config(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    base = Defaults(max_position_embeddings=2048, bos=0, eos=(1,), act=("hidden_act", "relu2"), sizes=SIZES)
    cap = keys.number("final_logit_softcapping", None if keys.has("final_logit_softcapping") else 15.0)
    config = decoder_config(keys, base, qkv_bias=bias, o_bias=bias, unweighted_norms=True, qk_norm_unweighted=True,
                            final_logit_softcapping=cap)
    return replace(config, ropes=tuple(replace(rope, backwards=True) for rope in config.ropes))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: no norms."""
    rules = {role: rule for role, rule in llama.layer_tensors(config, layer).items() if role not in ("input_norm", "post_norm", "gate")}
    return rules | {role: replace(rules[role], name=f"model.layers.{layer}.mlp.{name}.weight") for role, name in NAMES.items()}


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    return {role: rule for role, rule in llama.outer_tensors(config).items() if role != "norm"}


@narrowing
def block(x: object, at: Layer) -> object:
    """Hunyuan's attention and OPT's MLP. The embedding is normed in place before the first layer."""
    if at.number == 0:
        x = at.ops.rope_heads(x, 1, at.config.hidden_size, at.positions, None, at.w.input_norm)
    return feed_forward(attention(x, at), at)
