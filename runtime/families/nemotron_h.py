"""Nemotron H (Nano 9B v2, Nemotron 3 Nano and similar): each layer is one of Mamba 2, attention without positions, an ungated MLP, or a MoE
of such MLPs.

A checkpoint layer is half of a layer here: a layer is a state space or attention, with the MLP or experts that follow it, if any.
transformers clamps dt to time_step_min in prefill but not in decode; serving kernels clamp neither, and so it is here.
"""

from __future__ import annotations

import re
from itertools import product

from ...kernels.mamba2_shape import Mamba2Shape
from ..config import MAX_LAYERS, Defaults, ModelConfig, decoder_config
from ..config_reader import ConfigError, Keys, show
from ..layer import Layer
from ..moe_config import MoEConfig
from . import TensorRule, llama, opt
from .deepseek_v3 import with_expert_groups
from .granitemoehybrid import check_steps, mamba_tensors
from .llama import attention, decoder_block, feed_forward
from .mixtral import moe_config, moe_tensors

# Training, MTP layers, aliases, and runtime settings.
KEYS_HARMLESS = frozenset({
    "chunk_size", "expand", "hidden_act", "keep_mtp_spec_in_bf16", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern", "mtp_layers_block_type", "norm_eps", "num_logits_to_keep", "num_nextn_predict_layers",
    "original_max_position_embeddings", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "use_mamba_kernels"})
REFUSED_UNLESS = {"attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "sliding_window": None, "use_bias": False}
STATE, FULL, MLP, MOE = "M", "*", "-", "E"
KINDS = {"linear_attention": STATE, "mamba": STATE, "full_attention": FULL, "attention": FULL, "mlp": MLP, "moe": MOE}
# The letters of two stored layers -> the letter of the layer that they are here.
COMBINED = {"".join(halves): letter for halves, letter in zip(product((STATE, FULL), (MLP, MOE)), "mnfg", strict=True)}
RECURRENT, SPARSE, WITHOUT_MLP = (STATE, "m", "n"), ("n", "g"), (STATE, FULL)
NAMES = {"up": "up_proj", "down": "down_proj"}  # of an expert
MLP_ROLES = ("post_norm", "up", "down", "router", "correction", "experts_in", "experts_out")
SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32}
DEFAULTS = Defaults(max_position_embeddings=4096, num_key_value_heads=8, head_dim=128, bos=1, eos=(2,), eps_key="layer_norm_epsilon",
                    norm_eps=1e-5, act=("mlp_hidden_act", "relu2"), sizes=SIZES, rotary=False)


def config(keys: Keys) -> ModelConfig:
    for task, name in (keys.section("auto_map") or {}).items():  # code that is part of transformers now
        if task != "AutoTokenizer" and not re.fullmatch(r"(configuration|modeling)_nemotron_h\.NemotronH\w+", str(name)):
            raise ConfigError(f"config.json: auto_map names {show(name)}, which is not Nemotron H",
                              "the checkpoint brings its own code, which is never run")
    stored_pattern = layer_pattern(keys)
    layer_letters = re.sub("|".join(map(re.escape, COMBINED)), lambda found: COMBINED[found.group()], stored_pattern)
    resolved = keys.with_values(num_hidden_layers=len(layer_letters))
    shape_keys = {"heads": ("mamba_num_heads", 128, 4096), "head_dim": ("mamba_head_dim", 64, 4096), "groups": ("n_groups", 8, 4096),
                  "depth": ("ssm_state_size", 128, 4096), "taps": ("conv_kernel", 4, 64)}
    shape = Mamba2Shape(**{field: keys.integer(name, default, high=high) for field, (name, default, high) in shape_keys.items()},
                        biased=keys.flag("use_conv_bias", True))
    if shape.heads % shape.groups:
        raise ConfigError(f"config.json: mamba_num_heads {shape.heads} is not a multiple of n_groups {shape.groups}")
    check_steps(keys)
    if (act := keys.text("mamba_hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"config.json: mamba_hidden_act = {show(act)} is not supported", "known: silu")
    recurrent_layers, moe_layers, layers_without_mlp = (
        tuple(layer for layer, letter in enumerate(layer_letters) if letter in kinds) for kinds in (RECURRENT, SPARSE, WITHOUT_MLP))
    moe = _moe_config(keys, moe_layers)
    config = decoder_config(resolved, DEFAULTS, recurrent=shape if recurrent_layers else None, recurrent_layers=recurrent_layers,
                            layers_without_mlp=layers_without_mlp, moe=moe if moe_layers else None)
    if (attention_head_dim := keys.integer("attention_head_dim", config.head_dim, high=1024)) != config.head_dim:
        raise ConfigError(f"config.json: attention_head_dim is {attention_head_dim} and head_dim {config.head_dim}, which should be the "
                          "same",
                          "published models of this family have heads of 128")
    return config


def layer_pattern(keys: Keys) -> str:
    """A letter for each layer of the checkpoint: STATE, FULL, MLP or MOE. Raises ConfigError."""
    text, kinds = keys.text("hybrid_override_pattern", None), keys.raw.get("layers_block_type") if keys.has("layers_block_type") else None
    if kinds is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in KINDS for kind in kinds):
            raise ConfigError(f"config.json: layers_block_type is {show(kinds)}, expected a list", f"known: {', '.join(KINDS)}")
        text = "".join(KINDS[kind] for kind in kinds)
    if text is None:
        raise ConfigError("config.json: hybrid_override_pattern is missing")
    if not 0 < len(text) <= MAX_LAYERS or set(text) - {STATE, FULL, MLP, MOE}:
        raise ConfigError(f"config.json: hybrid_override_pattern is {show(text)}, expected one letter per layer",
                          f"known: {STATE}, {FULL}, {MLP}, {MOE}")
    if FULL not in text or re.search(f"(?:^|[{MLP}{MOE}])[{MLP}{MOE}]", text):
        raise ConfigError(f"config.json: hybrid_override_pattern {show(text)} is not supported",
                          f"every {MLP} or {MOE} must follow {STATE} or {FULL}, and there must be a {FULL}")
    if (count := keys.integer("num_hidden_layers", None, high=MAX_LAYERS)) not in (None, len(text)):
        raise ConfigError(f"config.json: num_hidden_layers is {count} and hybrid_override_pattern of {len(text)} layers")
    return text


def _moe_config(keys: Keys, layers: tuple[int, ...]) -> MoEConfig:
    """The experts of `layers`. Raises ConfigError."""
    shared_experts, latent_dim = keys.integer("n_shared_experts", 1, low=0, high=4096), keys.integer("moe_latent_size", None, high=2**22)
    if layers and shared_experts != 1:
        raise ConfigError(f"config.json: n_shared_experts is {shared_experts}, which is not supported for nemotron_h models",
                          "published models of this family have one")
    hidden = keys.integer("hidden_size", SIZES["hidden_size"], high=2**20)
    if layers and (latent_dim or 0) > hidden:
        raise ConfigError(f"config.json: moe_latent_size = {latent_dim} is more than hidden_size {hidden}",
                          "experts of published models read a narrower latent")
    moe = moe_config(keys, 8, 2, keys.integer("moe_intermediate_size", 7688, high=2**22), keys.flag("norm_topk_prob", True), layers,
                     "n_routed_experts", sigmoid=True, correction_bias=True, parallel_to_mlp=latent_dim is not None,
                     latent_dim=latent_dim or 0, routed_scale=keys.number("routed_scaling_factor", 1.0), gated=False,
                     shared_expert_dim=keys.integer("moe_shared_expert_intermediate_size", 7688, high=2**22))
    return with_expert_groups(keys, moe, 1, 1)


def stored_layer_of(config: ModelConfig, layer: int) -> int:
    """The checkpoint layer that is the first half of `layer`; the second half, if there is one, is the next."""
    return 2 * layer - sum(other < layer for other in config.layers_without_mlp)


def is_mlp_role(role: str) -> bool:
    """Whether a tensor belongs to the second half of a layer: MLP or experts."""
    return role in MLP_ROLES or role.startswith(("experts.", "shared."))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    stored_layer = stored_layer_of(config, layer)
    rules = llama.layer_tensors(config, layer)
    tensors = {"input_norm": TensorRule(f"model.layers.{stored_layer}.norm.weight", (config.hidden_size,))}
    if layer in config.recurrent_layers:
        tensors |= mamba_tensors(config, f"model.layers.{stored_layer}.mixer.")
    else:
        tensors |= {role: TensorRule(f"model.layers.{stored_layer}.mixer.{role}_proj.weight", rules[role].shape)
                    for role in ("q", "k", "v", "o")}
    if layer not in config.layers_without_mlp:
        tensors |= {"post_norm": TensorRule(f"model.layers.{stored_layer + 1}.norm.weight", (config.hidden_size,))}
    if config.moe is not None and layer in config.moe.layers:
        prefix = f"model.layers.{stored_layer + 1}.mixer."
        tensors |= moe_tensors(config, prefix, NAMES)
        if latent_dim := config.moe.latent_dim:
            tensors |= {"experts_in": TensorRule(f"{prefix}fc1_latent_proj.weight", (latent_dim, config.hidden_size)),
                        "experts_out": TensorRule(f"{prefix}fc2_latent_proj.weight", (config.hidden_size, latent_dim))}
    elif layer not in config.layers_without_mlp:
        tensors |= {role: TensorRule(f"model.layers.{stored_layer + 1}.mixer.{role}_proj.weight", rules[role].shape)
                    for role in ("up", "down")}
    return tensors


def outer_tensors(config: ModelConfig) -> dict[str, TensorRule]:
    table = (config.vocab_size, config.hidden_size)
    rules = {"embed": TensorRule("model.embeddings.weight", table), "norm": TensorRule("model.norm_f.weight", (config.hidden_size,))}
    return rules if config.tie_word_embeddings else rules | {"head": TensorRule("lm_head.weight", table)}


def _mlp_half(x: object, at: Layer) -> object:
    """Experts, an MLP, or nothing."""
    w = at.w
    if w.latent_projections is not None:
        return latent_experts(x, at)
    if w.experts:
        return feed_forward(x, at)
    if at.number not in at.config.layers_without_mlp:
        return opt.feed_forward(x, at)  # without a gate
    at.tap("block_out", x)
    return x


def latent_experts(x: object, at: Layer) -> object:
    """Experts that read a narrower latent, plus a shared expert; the router and the shared expert read the full width. Taps see
    experts_in and experts_out, the latent before and after the experts, and shared_hidden."""
    ops, w, config = at.ops, at.w, at.config
    at.tap("mlp_in", x)
    y, act = ops.norm(x, w.post_norm), config.hidden_act
    (latent,) = ops.norm_linear(y, None, [w.latent_projections.down])
    at.tap("experts_in", latent)
    latent = ops.expert_branch(latent, w.parallel_experts.pre_norm, w.router, w.experts, w.parallel_experts, config.moe.routing, act,
                               at.observer("visits"), w.correction_bias, None, y)
    at.tap("experts_out", latent)
    x = ops.mlp(x, w.post_norm, w.shared_expert.up, w.shared_expert.down, act, at.observer("shared_hidden"))
    x = ops.linear_add(latent, w.latent_projections.up, x)
    at.tap("block_out", x)
    return x


block = decoder_block(attention, _mlp_half)
