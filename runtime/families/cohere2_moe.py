"""Command A+ and North Mini (Cohere MoE): the block of Cohere 2 with experts on attention's input in all layers but the first; shared
and routed outputs may be averaged. Dense layers use RoPE although they have full attention."""

from __future__ import annotations

from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import Keys
from ..config_rope import GLOBAL, LOCAL
from . import TensorRule, cohere
from .glm4_moe_lite import sparse_layers
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen2 import layer_windows
from .qwen3_moe import NAMES

LIKE = cohere
KEYS_HARMLESS = cohere.KEYS_HARMLESS - {"rms_norm_eps"} | {"cache_implementation", "layer_switch"}
REFUSED_UNLESS = {
    **{key: value for key, value in cohere.REFUSED_UNLESS.items() if key not in ("layer_types", "sliding_window")},
    "order_of_interleaved_layers": "local_attn_first", "use_qk_norm": False}
CHOICES, SUMS = {"softmax": "softmax", "sigmoid": "sigmoid"}, {"average": "average", "sum": "sum"}
HALF = 0.5  # weight of routed and of shared experts, if they are averaged


def config(keys: Keys) -> ModelConfig:
    keys.mark_known("layer_norm_eps")
    rms = keys.number("rms_norm_eps", None) is not None
    base = Defaults(max_position_embeddings=8192, head_dim=128, bos=5, eos=(255_001,), eps_key="rms_norm_eps" if rms else "layer_norm_eps",
                    norm_eps=1e-5, tied=True, sizes=cohere.SIZES, rope={"interleaved": True})
    layers, width, bias = base.size(keys, "num_hidden_layers"), base.size(keys, "intermediate_size"), keys.flag("attention_bias", False)
    first = keys.integer("first_k_dense_replace", 0, low=0, high=layers)
    sparse = frozenset(range(first, layers) if keys.strings("mlp_layer_types", layers) is None else sparse_layers(keys, layers))
    dense_every, every = (keys.integer(name, usual) for name, usual in (("prefix_dense_sliding_window_pattern", 1),
                                                                        ("sliding_window_pattern", 4)))
    kinds = [*(GLOBAL if (i + 1) % dense_every == 0 else LOCAL for i in range(first)),
             *(GLOBAL if (i + 1) % every == 0 else LOCAL for i in range(layers - first))]
    windows = layer_windows(keys, keys.integer("sliding_window", None if keys.has("sliding_window") else 4096), kinds)

    shared = keys.integer("num_shared_experts", 0, low=0, high=MAX_EXPERTS)
    averaged = keys.choice("shared_expert_combination_strategy", SUMS, "average") == "average" and shared > 0
    sigmoid, renormalise = keys.choice("expert_selection_fn", CHOICES, "softmax") == "sigmoid", keys.flag("norm_topk_prob", True)
    moe = moe_config(keys, 8, 2, width, renormalise or not sigmoid, sparse, sigmoid=sigmoid, routed_scale=HALF if averaged else 1.0,
                     shared_expert_dim=width * shared or None)
    dense = keys.integer("prefix_dense_intermediate_size", width, high=2**22)
    rotary_layers = [window is not None or layer not in sparse and dense_every == 1 for layer, window in enumerate(windows)]
    return decoder_config(keys, base, windows=windows, rotary_layers=rotary_layers, qkv_bias=bias, o_bias=bias,
                          norm_kind="rms" if rms else "layer",
                          logits_scaling=1 / keys.number("logit_scale", cohere.LOGIT_SCALE), moe=moe,
                          layer_intermediate_sizes=tuple(width if layer in sparse else dense for layer in range(layers))
                          if len(sparse) < layers else (),
                          multipliers=(("shared.down", HALF),) if averaged else (),
                          mtp_layers=keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Tensors of one layer by role: one norm for both branches."""
    return {role: rule for role, rule in expert_tensors(config, layer, "mlp", NAMES).items() if role != "post_norm"}
