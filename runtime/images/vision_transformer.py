"""ViT of CLIP, SigLIP and Idefics 3: learned position embeddings, pre-norm layers, and the hidden states of the layers a projector asks
for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError
from .tower_layers import SEPARATE_QKV, LayerShape, load_blocks
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Block, Matrix, Norm, WorkerPool, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, VisionTower

CLIP: Mapping[str, object] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "patch_size": 32,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP: Mapping[str, object] = {**CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
IDEFICS: Mapping[str, object] = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


@dataclass(frozen=True)
class VisionTransformer:
    """`first`: class embedding float32 [D], or None. `before`: norm of the input; `after`: of the output."""

    patches: Matrix
    places: np.ndarray
    first: np.ndarray | None
    before: Norm | None
    blocks: Sequence[Block]
    after: Norm | None
    patch: int

    def layers(self, tiles: Sequence[np.ndarray], wanted: Sequence[int], pool: WorkerPool, places: np.ndarray | None = None) -> np.ndarray:
        """Tiles float32 [side, side, 3], all of one size -> hidden states after the layers `wanted`, concatenated, [tiles, n, D * layers];
        layer 0 is the input. `places`: position embedding index of each patch, by default its own."""
        length = (tiles[0].shape[0] // self.patch) * (tiles[0].shape[1] // self.patch) + (self.first is not None)
        groups = pool.groups(tiles, BATCH_PATCHES // length, max(wanted))
        return np.concatenate([self._few(each, wanted, pool, places) for each in groups])

    def _few(self, tiles: Sequence[np.ndarray], wanted: Sequence[int], pool: WorkerPool, places: np.ndarray | None) -> np.ndarray:
        embed, at = self.patches.to_float32(), self.places if places is None else self.places[places]
        parts = []
        for tile in tiles:
            own = embed(patches_of(tile, self.patch))
            parts.append((own if self.first is None else np.concatenate([self.first[None], own])) + at)
        x = np.concatenate(parts)
        length = len(parts[0])
        if self.before is not None:
            x = self.before(x)
        spans = [(begin, begin + length) for begin in range(0, len(x), length)]
        made = {0: x.copy()} if 0 in wanted else {}
        for number, block in enumerate(self.blocks[: max(wanted)], start=1):
            block.run(x, spans, pool)
            if number in wanted:
                made[number] = x.copy() if number < max(wanted) else x
        if self.after is not None:
            last = len(self.blocks)
            made = {number: self.after(each) if number == last else each for number, each in made.items()}
        return np.concatenate([made[number] for number in wanted], axis=-1).reshape(len(tiles), length, -1)


def load_transformer(weights: Weights, encoder: VisionTower, name: str, finished: bool) -> VisionTransformer:
    """Load a tower whose tensor names begin with `name`. `finished`: with the norm after its last layer."""
    keys, width, patch = encoder.tower_config, encoder.width, encoder.patch
    clip = encoder.tower.startswith("clip")
    eps, inner = keys.number("layer_norm_eps"), keys.integer("intermediate_size")
    curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
    places = (encoder.side // patch) ** 2 + clip

    return VisionTransformer(
        patches=weights.matrix(f"{name}embeddings.patch_embedding", width, 3 * patch * patch),
        places=weights.numbers(f"{name}embeddings.position_embedding.weight", places, width),
        first=weights.numbers(f"{name}embeddings.class_embedding", width) if clip else None,
        before=weights.layer_norm(f"{name}pre_layrnorm", width, eps) if clip else None,  # so it is written
        blocks=load_blocks(weights, f"{name}encoder.layers.", layer_count(encoder), SEPARATE_QKV,
                           LayerShape(width, inner, encoder.heads, curve, eps)),
        after=weights.layer_norm(f"{name}post_layernorm", width, eps) if finished else None, patch=patch)


def layer_count(encoder: VisionTower) -> int:
    return encoder.tower_config.integer("num_hidden_layers", high=MAX_LAYERS)


def drops_first(encoder: VisionTower, usual: str) -> bool:
    """Whether the class token is dropped before projection."""
    return encoder.root_config.choice("vision_feature_select_strategy", {"default": True, "full": False}, usual)


def wanted_layers(encoder: VisionTower, default: int) -> list[int]:
    """Layers whose hidden states are projected, 0 being the input."""
    stated, count = encoder.root_config.raw.get("vision_feature_layer"), layer_count(encoder)
    numbers = [default] if stated is None else stated if isinstance(stated, list) else [stated]
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int) or not -count <= each + 1 <= count + 1 for each in numbers):
        raise ConfigError(f"config.json: vision_feature_layer is {stated!r}, of a tower with {count} layers")
    return [each + count + 1 if each < 0 else each for each in numbers]
