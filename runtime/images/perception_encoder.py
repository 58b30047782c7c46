"""Meta's Perception Encoder in timm's form: learned position embeddings and 2D rotary embeddings with adjacent pairs. The architecture
follows from its timm name and overrides in the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import Keys
from .tower_layers import FUSED_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import BATCH_PATCHES, Block, Matrix, Norm, Rope, WorkerPool, gelu, inverse_frequencies, matmul, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH

EPS, THETA = 1e-5, 10_000.0
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0, "patch_size": 14, "img_size": 336, "class_token": True,
         "ref_feat_shape": 24, "use_post_transformer_norm": True}
GIGANTIC = {**LARGE, "embed_dim": 1536, "depth": 50, "mlp_ratio": 8960 / 1536, "img_size": 448, "ref_feat_shape": 32, "class_token": False}
LANGUAGE = {"img_size": 448, "ref_feat_shape": 32, "use_post_transformer_norm": False, "init_values": 0.1}
# Towers by their names in timm -> what their configs say by saying nothing, and what they count places from.
ARCHITECTURES: Mapping[str, tuple[Mapping[str, object], int]] = {
    "vit_pe_core_large_patch14_336": (LARGE, 1), "vit_pe_core_gigantic_patch14_448": (GIGANTIC, 0),
    "vit_pe_lang_large_patch14_448": ({**LARGE, **LANGUAGE, "depth": 23}, 1),
    "vit_pe_lang_gigantic_patch14_448": ({**GIGANTIC, **LANGUAGE, "depth": 47}, 0)}
ARGUMENTS = (*LARGE, "global_pool", "init_values")  # of those that are read


def side_of(says: Keys, name: str, high: int) -> int:
    """One number, which some write for height and width."""
    stated = says.raw.get(name)
    if isinstance(stated, list | tuple) and len(stated) == 2 and stated[0] == stated[1]:
        stated = stated[0]
    return says.with_values(**{name: stated}).integer(name, high=high)


@dataclass(frozen=True)
class PerceptionEncoder:
    """`front`: what stands before a tile's patches, float32 [0 or 1, D]; `rope`: of both. `after`: of what the last
    layer made, or None."""

    patches: Matrix
    front: np.ndarray
    places: np.ndarray
    before: Norm
    blocks: Sequence[Block]
    after: Norm | None
    rope: Rope
    patch: int

    @property
    def most(self) -> int:
        """Tiles that go through the layers at once."""
        return max(1, BATCH_PATCHES // len(self.places))

    def seen(self, tiles: Sequence[np.ndarray], pool: WorkerPool) -> np.ndarray:
        """Tiles float32 [side, side, 3], `most` at most -> [tiles * patches, D]."""
        count, width = len(tiles), self.places.shape[1]
        x = matmul(np.concatenate([patches_of(each, self.patch) for each in tiles]), self.patches, pool).reshape(count, -1, width)
        x = np.concatenate([np.broadcast_to(self.front, (count, *self.front.shape)), x], axis=1) + self.places
        x, length = self.before(x.reshape(-1, width)), len(self.places)
        x = run_blocks(self.blocks, x, pool, self.rope.times(count), [(begin, begin + length) for begin in range(0, len(x), length)])
        x = x if self.after is None else self.after(x)
        return x.reshape(count, length, width)[:, len(self.front) :].reshape(-1, width)


def load_encoder(weights: Weights, name: str, says: Keys, first: int) -> PerceptionEncoder:
    """The tower whose tensors begin with `name`; places count from `first`."""
    width, heads, patch = (says.integer(key, high=high) for key, high in (("embed_dim", MAX_WIDTH), ("num_heads", 1024),
                                                                          ("patch_size", 1 << 10)))
    across, lead = side_of(says, "img_size", 1 << 14) // patch, int(says.flag("class_token"))
    inner, head = int(width * says.number("mlp_ratio")), width // heads
    scaled = says.raw.get("init_values") is not None

    def more(own: str) -> dict[str, object]:
        return {"scales": tuple(weights.numbers(f"{own}gamma_{which}", width) for which in (1, 2)) if scaled else None}

    return PerceptionEncoder(
        weights.matrix(f"{name}patch_embed.proj", width, 3 * patch**2, bias=False),
        weights.numbers(f"{name}cls_token", 1, 1, width)[0] if lead else np.empty((0, width), np.float32),
        weights.numbers(f"{name}pos_embed", 1, across**2 + lead, width)[0], weights.layer_norm(f"{name}norm_pre", width, EPS),
        load_blocks(weights, f"{name}blocks.", says.integer("depth", high=MAX_LAYERS), FUSED_QKV,
                    LayerShape(width, inner, heads, gelu, EPS, bias=(True, None), interleaved=True), more=more),
        weights.layer_norm(f"{name}norm", width, EPS) if says.flag("use_post_transformer_norm") else None,
        rope_of(across, side_of(says, "ref_feat_shape", 1 << 14), first, lead, head), patch)


def rope_of(across: int, reference: int, first: int, lead: int, head: int) -> Rope:
    """Of patches, so many in a row of which takes `reference` places, and of `lead` rows before them, which are not turned."""
    steps = inverse_frequencies(THETA, head // 4)
    at = (np.arange(across, dtype=np.float32) + np.float32(first)) / np.float32(across) * np.float32(reference)
    row, column = np.divmod(np.arange(across**2), across)
    half = np.concatenate([at[column][:, None] * steps, at[row][:, None] * steps], axis=1)
    return Rope.of(np.concatenate([np.zeros((lead, half.shape[1]), np.float32), half]))
