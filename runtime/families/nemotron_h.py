"""Nemotron H (Nano 9B v2 and its like): layers that are one thing each, state spaces, attention without positions or an MLP without gate.

What checkpoints count as a layer is half of one here: a state space or attention with the MLP behind it, if one follows. transformers
keeps steps of prompts above time_step_min, those of answers not; kernels that serve these models limit neither, nor are they here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from . import LayerWeights, TensorRule, llama
from .granitemoehybrid import check_steps, mamba_tensors
from .llama import attention, state_layer

if TYPE_CHECKING:
    import numpy as np

    from ..block_ops import BlockOps
    from ..cache import LayerCache
    from ..rope import RopeTable
    from ..states import LayerStates

KEYS_USED = frozenset({"attention_head_dim", "auto_map", "conv_kernel", "hybrid_override_pattern", "layer_norm_epsilon",
                       "layers_block_type", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "mlp_hidden_act", "n_groups",
                       "ssm_state_size", "time_step_limit", "use_conv_bias"})
# Of training, of mixtures, which these are not, of other names' features, and of speed.
KEYS_HARMLESS = frozenset({
    "chunk_size", "expand", "hidden_act", "mamba_ssm_cache_dtype", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_eps", "norm_topk_prob", "num_experts_per_tok", "num_logits_to_keep",
    "original_max_position_embeddings", "output_router_logits", "rescale_prenorm_residual", "residual_in_fp32",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor", "time_step_floor", "time_step_max",
    "time_step_min", "time_step_rank", "topk_group", "use_mamba_kernels"})
REFUSED_UNLESS: Mapping[str, object] = {"attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "num_nextn_predict_layers": 0,
                                        "sliding_window": None, "use_bias": False}
STATE, FULL, MLP = "M", "*", "-"
KINDS = {"linear_attention": STATE, "mamba": STATE, "full_attention": FULL, "attention": FULL, "mlp": MLP, "moe": "E"}
SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32}
USUAL = Defaults(max_position_embeddings=4096, num_key_value_heads=8, head_dim=128, bos=1, eos=(2,), eps_key="layer_norm_epsilon",
                 norm_eps=1e-5, act=("mlp_hidden_act", "relu2"), sizes=SIZES, rotary=False)


def config(keys: Keys) -> ModelConfig:
    for task, name in (keys.section("auto_map") or {}).items():  # what became part of transformers
        if task != "AutoTokenizer" and not re.fullmatch(r"(configuration|modeling)_nemotron_h\.NemotronH\w+", str(name)):
            raise ConfigError(f"config.json: auto_map names {show(name)}, which is not Nemotron H",
                              "the checkpoint brings its own code, which is never run")
    halves = pattern(keys)
    layers = halves.replace(f"{STATE}{MLP}", "m").replace(f"{FULL}{MLP}", "f")
    stated = Keys({**keys.raw, "num_hidden_layers": len(layers)}, keys.where)
    stated.asked = keys.asked
    own = {"heads": ("mamba_num_heads", 128, 4096), "head_dim": ("mamba_head_dim", 64, 4096), "groups": ("n_groups", 8, 4096),
           "depth": ("ssm_state_size", 128, 4096), "taps": ("conv_kernel", 4, 64)}
    shape = Mamba2Shape(**{field: keys.integer(name, default, high=high) for field, (name, default, high) in own.items()},
                        biased=keys.flag("use_conv_bias", True))
    if shape.heads % shape.groups:
        raise ConfigError(f"config.json: mamba_num_heads {shape.heads} is not a multiple of n_groups {shape.groups}")
    check_steps(keys)
    if (act := keys.text("mamba_hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"config.json: mamba_hidden_act = {show(act)} is not supported", "known: silu")
    states = tuple(layer for layer, kind in enumerate(layers) if kind in "Mm")
    made = decoder_config(stated, USUAL, state=shape if states else None, state_layers=states,
                          without_mlp=tuple(layer for layer, kind in enumerate(layers) if kind in (STATE, FULL)))
    if (own := keys.integer("attention_head_dim", made.head_dim, high=1024)) != made.head_dim:
        raise ConfigError(f"config.json: attention_head_dim is {own} and head_dim {made.head_dim}, which should be the same",
                          "published models of this family have heads of 128")
    return made


def pattern(keys: Keys) -> str:
    """What each layer of the checkpoint is, a letter each. Raises ConfigError."""
    text, kinds = keys.text("hybrid_override_pattern", None), keys.raw.get("layers_block_type") if keys.holds("layers_block_type") else None
    if kinds is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
            raise ConfigError(f"config.json: layers_block_type is {show(kinds)}, expected a list", f"known: {', '.join(KINDS)}")
        text = "".join(KINDS[kind] for kind in kinds)
    if text is None:
        raise ConfigError("config.json: hybrid_override_pattern is missing")
    if "E" in text:
        raise ConfigError("config.json: hybrid_override_pattern or layers_block_type has mixtures of experts, which are not supported for "
                          "nemotron_h models", "those without run: Nemotron Nano 9B v2")
    if not 0 < len(text) <= MAX_LAYERS or set(text) - {STATE, FULL, MLP}:
        raise ConfigError(f"config.json: hybrid_override_pattern is {show(text)}, expected a letter a layer",
                          f"known: {STATE}, {FULL}, {MLP}")
    if text[0] == MLP or MLP * 2 in text or FULL not in text:
        raise ConfigError(f"config.json: hybrid_override_pattern {show(text)} is not supported",
                          f"every {MLP} stands behind {STATE} or {FULL}, and there is one {FULL}")
    if (count := keys.integer("num_hidden_layers", None, high=MAX_LAYERS)) not in (None, len(text)):
        raise ConfigError(f"config.json: num_hidden_layers is {count} and hybrid_override_pattern of {len(text)} layers")
    return text


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    first = 2 * layer - sum(each < layer for each in config.without_mlp)  # as checkpoints count
    rules = llama.layer_tensors(config, layer)
    found = {"input_norm": TensorRule(f"model.layers.{first}.norm.weight", (config.hidden_size,))}
    if layer in config.state_layers:
        found |= mamba_tensors(config, f"model.layers.{first}.mixer.")
    else:
        found |= {role: TensorRule(f"model.layers.{first}.mixer.{role}_proj.weight", rules[role].shape) for role in ("q", "k", "v", "o")}
    if layer not in config.without_mlp:
        found |= {"post_norm": TensorRule(f"model.layers.{first + 1}.norm.weight", (config.hidden_size,))}
        found |= {role: TensorRule(f"model.layers.{first + 1}.mixer.{role}_proj.weight", rules[role].shape) for role in ("up", "down")}
    return found


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table = (config.vocab_size, config.hidden_size)
    rules = {"embed": TensorRule("model.embeddings.weight", table), "norm": TensorRule("model.norm_f.weight", (config.hidden_size,))}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def block(ops: BlockOps, w: LayerWeights, x: object, kv: LayerCache | LayerStates, positions: np.ndarray, rope: RopeTable | None,
          config: ModelConfig, layer: int, tap: Callable[[str, int, object], None]) -> object:
    """x[T, D] -> x[T, D], with the taps of `llama.block`, those of an MLP where there is one."""
    if w.state is not None:
        x = state_layer(ops, w, x, kv, config, layer, tap)
    else:
        x = attention(ops, w, x, kv, positions, rope, config, layer, tap)
    if layer not in config.without_mlp:
        tap("mlp_in", layer, x)
        see = partial(tap, "mlp_hidden", layer)
        if w.bundles is not None:
            x = ops.bundled_mlp(x, w.post_norm, w.up, w.bundles, config.hidden_act, see)
        else:
            x = ops.mlp(x, w.post_norm, w.up, w.down, config.hidden_act, see)
    tap("block_out", layer, x)
    return x
