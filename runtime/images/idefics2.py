"""Idefics 2: SigLIP on an image in its own aspect ratio and on its four quarters, with position embeddings of a square; a perceiver
resampler makes a fixed number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import UsageError
from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import float32_fractions, nearest_indices
from .preprocessor import BILINEAR, HALF, resized, sides
from .tower_layers import run_blocks
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Activation, Matrix, Norm, WorkerPool, attend, matmul, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import IDEFICS, load_transformer

AROUND = "<fake_token_around_image>"
PERCEIVER = {"hidden_act": "silu", "hidden_size": 4096, "rms_norm_eps": 1e-6, "resampler_n_latents": 64, "resampler_depth": 3,
             "resampler_n_heads": 16, "resampler_head_dim": 96, "num_key_value_heads": 4}
WIDER = 4  # an FFN's inner layer, in the resampler


@dataclass(frozen=True)
class Ffn:
    gate: Matrix
    up: Matrix
    down: Matrix
    curve: Activation

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        gate, up, down = (each.to_float32() for each in (self.gate, self.up, self.down))
        out = np.empty((len(x), len(self.down.stored)), np.float32)

        def some(which: slice) -> None:
            out[which] = down(self.curve(gate(x[which])) * up(x[which]))

        pool.each(some, len(x))
        return out


@dataclass(frozen=True)
class Asking:
    """A layer in which rows see what they ask of and each other. `norms`: of rows, of what they ask of, and before the FFN."""

    norms: tuple[Norm, Norm, Norm]
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    ffn: Ffn
    heads: int

    def __call__(self, rows: np.ndarray, context: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Rows [n, D] as they are behind the layer."""
        own = self.norms[0](rows)
        seen = np.concatenate([self.norms[1](context), own])
        q, k, v = (matmul(x, matrix, pool).reshape(len(x), self.heads, -1).swapaxes(0, 1)
                   for x, matrix in ((own, self.queries), (seen, self.keys), (seen, self.values)))
        found = np.empty((len(rows), len(self.queries.stored)), np.float32)
        attend(q, k, v, found, [(0, len(rows))], pool, [(0, len(seen))])
        rows = rows + matmul(found, self.out, pool)
        return rows + self.ffn(self.norms[2](rows), pool)


class Idefics2(VisionTower):
    KINDS = {"idefics2_vision": IDEFICS, "idefics2": IDEFICS}
    PROCESSORS = ("Idefics2ImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    shares_border = True

    def configure(self, keys: Keys) -> None:
        size = sides(keys, "size", {"shortest_edge": 378, "longest_edge": 980})
        self.least, self.longest = size.get("shortest_edge", 0), size.get("longest_edge", 0)
        if not self.patch <= self.least <= self.longest:
            raise keys.fail("size", f"a shortest_edge of {self.patch} or more, and a longest_edge that is no less")
        self.splits = keys.flag("do_image_splitting", False)
        stated = {key: value for key, value in (self.root_config.section("perceiver_config") or {}).items() if value is not None}
        self.perceiver = Keys({**PERCEIVER, **stated}, "config.json: perceiver_config")
        self.count = self.perceiver.integer("resampler_n_latents", high=1 << 14)
        if self.around.integer("image_seq_len", self.count) != self.count:
            raise self.around.fail("image_seq_len", f"{self.count}, as config.json says")
        self.part_patches = (self.longest // self.patch) ** 2
        self.most_patches = max(BATCH_PATCHES, self.part_patches)
        self.whole_patches = 5 * self.part_patches if self.splits else self.part_patches

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture, or a quarter of one, is given."""
        check_aspect_ratio(height, width)
        ratio = width / height
        if width >= height and width > self.longest:
            width = self.longest
            height = int(width / ratio)
        elif height > width and height > self.longest:
            height = self.longest
            width = int(height * ratio)
        return max(height, self.least), max(width, self.least)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        if self.splits and min(height, width) < 2:
            raise UsageError(f"an image of {width} × {height} is too small for this model", "each side needs at least two pixels")
        around = self.token_id(AROUND)
        return (around, *(*(ROW_PLACEHOLDER,) * self.count, around) * (5 if self.splits else 1))

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        """Quarters, and the whole; of each as many points as whole patches have."""
        down, across = (side // 2 for side in picture.shape[:2])
        quarters = [picture[:down, :across], picture[:down, across:], picture[down:, :across], picture[down:, across:]]
        made = (resized(part, *self.sized(*part.shape[:2]), self.resample) for part in [*(quarters if self.splits else ()), picture])
        return [self.scale(part[: len(part) // self.patch * self.patch, : part.shape[1] // self.patch * self.patch]) for part in made]

    def load(self, weights: Weights) -> Rows:
        tower, side, hidden = load_transformer(weights, self, "vision_model.", finished=True), self.side // self.patch, \
            self.config.hidden_size
        text = Keys(self.root_config.section("text_config") or {}, "config.json: text_config")
        spread = self.ffn(weights, "connector.modality_projection", (self.width, self.config.intermediate_size, hidden),
                          text.choice("hidden_act", ACTIVATIONS, "silu"))
        layers, latents, last = self.resampler(weights)

        def placed(patches: np.ndarray, lines: int, columns: int) -> np.ndarray:
            return patches + tower.places[nearest_indices(side, float32_fractions(lines), float32_fractions(columns))]

        def rows(parts: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            pool.job.total += len(tower.blocks) * len(parts)
            return np.concatenate([seen(part, pool) for part in parts])

        def seen(part: np.ndarray, pool: WorkerPool) -> np.ndarray:
            x = placed(matmul(patches_of(part, self.patch), tower.patches, pool), len(part) // self.patch, part.shape[1] // self.patch)
            context, asking = spread(tower.after(run_blocks(tower.blocks, x, pool)), pool), latents
            for layer in layers:
                asking = layer(asking, context, pool)
            return last(asking)

        return rows

    def ffn(self, weights: Weights, name: str, widths: tuple[int, int, int], curve: Activation) -> Ffn:
        """From one width by way of another to a third."""
        first, inner, out = widths
        return Ffn(*(weights.matrix(f"{name}.{each}_proj", inner, first, bias=False) for each in ("gate", "up")),
                   weights.matrix(f"{name}.down_proj", out, inner, bias=False), curve)

    def resampler(self, weights: Weights) -> tuple[list[Asking], np.ndarray, Norm]:
        """Layers, the rows that ask, and a norm of what became of them."""
        keys, hidden, name = self.perceiver, self.config.hidden_size, "connector.perceiver_resampler."
        heads, groups, depth = (keys.integer(each, high=1024) for each in ("resampler_n_heads", "num_key_value_heads",
                                                                           "resampler_head_dim"))
        if heads % groups:
            raise keys.fail("num_key_value_heads", f"a number that divides {heads}")
        # where a config leaves out how wide it is, what its norms add is the text part's
        eps = keys.number("rms_norm_eps") if keys.integer("hidden_size", high=MAX_WIDTH) == hidden else self.config.norm_eps
        curve = keys.choice("hidden_act", ACTIVATIONS, "silu")

        def layer(number: int) -> Asking:
            own = f"{name}layers.{number}."
            pair = [weights.matrix(f"{own}self_attn.{each}_proj", groups * depth, hidden, bias=False).shared(groups, heads)
                    for each in "kv"]
            return Asking(tuple(weights.rms_norm(f"{own}{each}", hidden, eps) for each in (
                "input_latents_norm", "input_context_norm", "post_attention_layernorm")),
                weights.matrix(f"{own}self_attn.q_proj", heads * depth, hidden, bias=False), *pair,
                weights.matrix(f"{own}self_attn.o_proj", hidden, heads * depth, bias=False),
                self.ffn(weights, f"{own}mlp", (hidden, WIDER * hidden, hidden), curve), heads)

        return ([layer(number) for number in range(keys.integer("resampler_depth", high=64))],
                weights.numbers(f"{name}latents", self.count, hidden), weights.rms_norm(f"{name}norm", hidden, eps))


encoder = Idefics2
