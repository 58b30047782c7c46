"""Kimi K2.5 and K2.6: MoonViT over a picture of whatever shape it has, made smaller where it has too many patches and filled up with
black to whole squares of them. Places are learned for a square and weighed by a cubic; every other pair of a head turns by a patch's
column, those between by its row. Squares of patches become one row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import Keys
from . import PLACE
from .glm4v import weighed
from .preprocessor import BICUBIC, HALF, Scale, filter_of, resized, sides
from .tower_parts import CURVES, Block, Crew, Matrix, Rope, gelu, patches_of, product, two_layers
from .tower_sight import MOST_LAYERS, MOST_WIDTH, Rows, TowerSight, demand_shape
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

USUAL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14,
         "hidden_act": "gelu_pytorch_tanh", "pos_emb_height": 64, "pos_emb_width": 64, "merge_kernel_size": [2, 2]}
# What published files call things: of the tower, and of how pictures are made ready, which is an object of its own there.
FIRST_NAMES = {"vt_hidden_size": "hidden_size", "vt_intermediate_size": "intermediate_size", "vt_num_hidden_layers": "num_hidden_layers",
               "vt_num_attention_heads": "num_attention_heads", "init_pos_emb_height": "pos_emb_height",
               "init_pos_emb_width": "pos_emb_width"}
READY, OF_READY = "media_proc_cfg", {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
ONE_SIDE = "patch_limit_on_one_side"
THETA, EPS = 10_000.0, 1e-5


class KimiK25(TowerSight):
    VISION = {"kimi_k25_vision": USUAL, "kimi_k25": USUAL}
    PROCESSORS = ("Kimi_K25ImageProcessor", "KimiK25VisionProcessor")
    placeholder = "<|media_pad|>"
    written = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        stated = {FIRST_NAMES.get(key, key): value for key, value in self.vision.raw.items() if key in FIRST_NAMES}
        self.vision = Keys({**self.vision.raw, **stated}, self.vision.where)
        keys = _ready(self.processor)
        self.scale, self.resample = Scale(keys, HALF, HALF), filter_of(keys, BICUBIC)
        self.most, size = keys.integer("max_patches", 16_384, high=1 << 20), sides(keys, "size", {"max_height": 512, "max_width": 512})
        self.longest = size.get("max_height", 0)
        merged = self.vision.raw["merge_kernel_size"]
        self.joined = keys.integer("merge_size", 2, high=16)
        if list(merged) != [self.joined] * 2 or keys.integer("patch_size", self.patch) != self.patch:
            raise keys.fail("patch_size and merge_size", f"{self.patch} and {merged}, as config.json says of the tower")
        if not self.longest or size.get("max_width") != self.longest or not keys.flag("do_resize", True):
            raise keys.fail("size and do_resize", "as many patches down as across, and true")
        if keys.raw.get("fixed_output_tokens") is not None:
            raise keys.fail("fixed_output_tokens", "null")
        if self.width % (4 * self.heads):
            raise self.vision.fail("num_attention_heads", f"a part of {self.width} in which rows and columns have a place")
        if self.vision.integer("pos_emb_height", high=4096) != self.vision.integer("pos_emb_width", high=4096):
            raise self.vision.fail("pos_emb_width", "as many places across as down")

    @property
    def projector_eps(self) -> float:
        return self.outer.number("projection_layer_norm_eps", self.vision.number("projector_ln_eps", EPS))

    @property
    def most_patches(self) -> int:
        """With those that fill up squares."""
        return self.most + 2 * self.joined * self.longest

    def sized(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The size that a picture is given, and that of whole squares around it."""
        demand_shape(height, width)
        patch, longest, unit = self.patch, self.longest * self.patch, self.patch * self.joined
        count = max(1.0, height // patch) * max(1.0, width // patch)
        factor = min(1.0, math.sqrt(self.most / count), longest / height, longest / width)
        high, wide = (min(max(1, int(side * factor)), longest) for side in (height, width))
        return (high, wide), (-(-high // unit) * unit, -(-wide // unit) * unit)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        _, (high, wide) = self.sized(height, width)
        return (PLACE,) * (high * wide // (self.patch * self.joined) ** 2)

    def values(self, picture: np.ndarray) -> np.ndarray:
        (high, wide), around = self.sized(*picture.shape[:2])
        whole = np.zeros((*around, 3), np.uint8)
        whole[:high, :wide] = resized(picture, high, wide, self.resample)
        return self.scale(whole)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, side, patch = self.vision, self.width, self.config.hidden_size, self.joined, self.patch
        inner, places = keys.integer("intermediate_size", high=MOST_WIDTH), keys.integer("pos_emb_height")
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "gelu_pytorch_tanh")]
        name, depth = "vision_tower.encoder.", width // self.heads
        first = next((each for each in ("vision_tower.", name) if weights.has(f"{each}patch_embed.proj.weight")), "vision_tower.")
        embedding = weights.matrix(f"{first}patch_embed.proj", width, 3 * patch**2)
        table = weights.numbers("vision_tower.patch_embed.pos_emb.weight", places, places, width)

        def turned(matrix: Matrix) -> Matrix:
            """Of queries or keys: channels that lie beside one another turn together there, here a half's with the other half's."""
            order = np.arange(width).reshape(self.heads, depth // 2, 2).swapaxes(1, 2).reshape(-1)
            return Matrix(np.ascontiguousarray(matrix.stored[order]), None if matrix.bias is None else matrix.bias[order])

        def block(number: int) -> Block:
            own = f"{name}blocks.{number}."
            queries, keys_, values = weights.matrix(f"{own}wqkv", 3 * width, width).parts(3)
            return Block((weights.layer_norm(f"{own}norm0", width, EPS), weights.layer_norm(f"{own}norm1", width, EPS)), turned(queries),
                         turned(keys_), values, weights.matrix(f"{own}wo", width, width), weights.matrix(f"{own}mlp.fc0", inner, width),
                         weights.matrix(f"{own}mlp.fc1", width, inner), curve, self.heads)

        blocks = [block(number) for number in range(keys.integer("num_hidden_layers", high=MOST_LAYERS))]
        after = weights.layer_norm(f"{name}final_layernorm", width, EPS)
        norm = weights.layer_norm("mm_projector.pre_norm", width, self.projector_eps)
        one, two = (weights.matrix(f"mm_projector.proj.{number}", out, width * side**2) for number, out in ((0, width * side**2),
                                                                                                            (2, hidden)))

        def rows(values: np.ndarray, crew: Crew) -> np.ndarray:
            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            at = np.stack(np.divmod(np.arange(lines * columns), columns), axis=1)
            x = product(patches_of(values, patch), embedding, crew) + weighed(table, at)
            rope = self.rope(at)
            crew.work.total += len(blocks)
            for each in blocks:
                each.run(x, [(0, len(x))], crew, rope)
            squares = norm(after(x)).reshape(lines // side, side, columns // side, side, width).swapaxes(1, 2)
            return two_layers(squares.reshape(-1, width * side**2), one, two, gelu, crew)

        return rows

    def rope(self, places: np.ndarray) -> Rope:
        """Of patches at rows and columns int64 [n, 2]."""
        stated = Keys(self.vision.section("rope_parameters") or {}, "config.json: vision_config: rope_parameters")
        half = self.width // self.heads // 2
        steps = (1 / stated.number("rope_theta", THETA) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))).astype(np.float32)
        angles = (places[:, ::-1, None].astype(np.float32) * steps).swapaxes(1, 2).reshape(len(places), -1)
        angles = np.concatenate([angles, angles], axis=1)
        return Rope(np.cos(angles), np.sin(angles))


def _ready(keys: Keys) -> Keys:
    """How pictures are made ready, by the names of transformers."""
    stated = keys.section(READY)
    if stated is None:
        return keys
    found = {OF_READY.get(key, key): value for key, value in stated.items()}
    longest = found.pop(ONE_SIDE, 512)
    return Keys({**found, "size": {"max_height": longest, "max_width": longest}}, f"{keys.where}: {READY}")


def sight(source: TowerSource, config: ModelConfig) -> KimiK25:
    return KimiK25(source, config)
