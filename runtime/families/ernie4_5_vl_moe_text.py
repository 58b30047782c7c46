"""The text part of ERNIE 4.5 VL: the ERNIE MoE with two groups of experts per layer, one for text tokens, one for image rows and the tokens
around them, each with a router of its own; the shared expert serves both.

The kind of a token decides on its group, so a pass is split into runs of one kind, and each run is an ordinary MoE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..config import MAX_LAYERS, Defaults, ModelConfig
from ..config_reader import Keys
from ..layer import Layer, last_of, narrowing
from . import VISION_PREFIX, TensorRule, expert_role
from .ernie4_5 import ernie_config
from .glm4_moe_lite import DENSE, SPARSE, sparse_layers_of
from .llama import attention
from .mixtral import MAX_EXPERTS, expert_tensors, moe_config
from .qwen3_moe import NAMES

# Tokens around images and videos, which visit the vision experts.
VISION_TOKENS = {"image_start_token_id": 101_304, "image_end_token_id": 101_305, "video_start_token_id": 101_306,
                 "video_end_token_id": 101_307}
KEYS_HARMLESS = frozenset({"moe_capacity"})  # training only
# moe_norm_min has no effect at this value: no sum of scores is as small.
REFUSED_UNLESS = {"attention_bias": False, "layer_types": None, "mlp_bias": False, "moe_gate": "topk", "moe_norm_min": 1e-12,
                  "moe_use_aux_free": True, "sliding_window": None, "use_bias": False}
CORRECTIONS, ROUTERS = "moe_statics.e_score_correction_bias", ("gate.weight", "gate.weight_1")


def config(keys: Keys) -> ModelConfig:
    layers = keys.integer("num_hidden_layers", 28, high=MAX_LAYERS)
    keys.mark_known("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")
    sparse = sparse_layers_of(keys.strings("mlp_layer_types", layers) or _layer_types(keys, layers))
    width, seen = _pair(keys, "moe_intermediate_size", (1536, 512))
    experts, others = _pair(keys, "moe_num_experts", 64)
    if experts != others:
        raise keys.fail("moe_num_experts", "as many experts for images as for words")
    shared = keys.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    per_token = keys.integer("moe_k", 6, high=MAX_EXPERTS)
    around = frozenset(keys.integer(name, usual, low=0) for name, usual in VISION_TOKENS.items())
    moe = moe_config(keys.with_values(moe_num_experts=experts), 64, per_token, width, True, sparse, "moe_num_experts", correction_bias=True,
                     shared_expert_dim=width * shared if shared else None, vision_expert_dim=seen, vision_token_ids=around)
    sizes = {"vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28, "num_attention_heads": 20}
    base = Defaults(max_position_embeddings=131_072, num_key_value_heads=4, eos=(2,), norm_eps=1e-5, tied=True, sizes=sizes)
    return replace(ernie_config(keys, base), moe=moe)


def _pair(keys: Keys, name: str, usual: int | tuple[int, int], least: int = 1) -> tuple[int, int]:
    """A number for text experts and one for vision experts; the first published configs list both, others have one number."""
    keys.mark_known(name)
    stated = usual if keys.raw.get(name) is None else keys.raw[name]
    pair = [stated] * 2 if type(stated) is int else stated
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(type(each) is int and least <= each <= 2**22 for each in pair):
        raise keys.fail(name, f"a number of {least} or more for words and one for images")
    return pair[0], pair[1]


def _layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """Layer types by the keys of published configs: the range of layers with experts, and their interval."""
    every = keys.integer("moe_layer_interval", 1, high=MAX_LAYERS)
    first, last = min(_pair(keys, "moe_layer_start_index", 1, 0)), max(_pair(keys, "moe_layer_end_index", layers - 1, -1))
    last = layers - 1 if last == -1 else last
    return tuple(SPARSE if (layer + 1) % every == 0 and first <= layer <= last else DENSE for layer in range(layers))


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorRule]:
    """Vision experts are numbered after the text experts; the correction biases of both are rows of one tensor."""
    rules = expert_tensors(config, layer, "mlp", NAMES, correction=CORRECTIONS)
    moe, hidden, place = config.moe, config.hidden_size, f"model.layers.{layer}.mlp."
    if layer not in moe.layers:
        return rules
    for row, before in enumerate(("", VISION_PREFIX)):
        rules[f"{before}router"] = TensorRule(f"{place}routers.{row}.weight", (moe.num_experts, hidden))
        if moe.correction_bias:
            rules[f"{before}correction"] = TensorRule(f"{place}{CORRECTIONS}.{row}", (1, moe.num_experts),
                                                      part_of=(place + CORRECTIONS, row, 2))
    for expert in range(moe.num_experts):
        for role, name in NAMES.items():
            shape = (hidden, moe.vision_expert_dim) if role == "down" else (moe.vision_expert_dim, hidden)
            rules[VISION_PREFIX + expert_role(expert, role)] = TensorRule(f"{place}experts.{moe.num_experts + expert}.{name}.weight", shape)
    return rules


def transposed_columns(config: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """Routers are stored transposed."""
    place = f"model.layers.{layer}.mlp."
    return {f"{place}routers.{row}.weight": (place + name, 0) for row, name in enumerate(ROUTERS) if layer in config.moe.layers}


@narrowing
def block(x: object, at: Layer, seen: Sequence[bool] | None = None) -> object:
    """As `llama.block`. `seen`: of each token whether it visits the vision experts; None: no token does. Taps get visits of text experts
    only."""
    ops, w, config, layer = at.ops, at.w, at.config, at.number
    x = attention(x, at)
    at.tap("mlp_in", x)
    if w.router is None:
        x = ops.gated_mlp(x, w.post_norm, w.gate, w.up, w.down, config.hidden_act, at.observer("mlp_hidden"))
    elif seen is None:
        x = ops.moe(x, w.post_norm, w.router, w.experts, config.moe.routing, config.expert_act(layer), at.observer("visits"),
                    w.correction_bias, w.shared_expert)
    else:
        for begin, end, is_seen in _runs(last_of(seen, len(x))):
            router, experts, correction = w.vision_experts if is_seen else (w.router, w.experts, w.correction_bias)
            ops.moe(x[begin:end], w.post_norm, router, experts, config.moe.routing, config.expert_act(layer), None, correction,
                    w.shared_expert)
    at.tap("block_out", x)
    return x


def _runs(seen: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, is vision) of each run of tokens of one kind."""
    begin = 0
    for end in range(1, len(seen) + 1):
        if end == len(seen) or seen[end] != seen[begin]:
            yield begin, end, bool(seen[begin])
            begin = end
