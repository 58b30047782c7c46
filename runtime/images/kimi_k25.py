"""Kimi K2.5 and K2.6: MoonViT at native resolution, scaled down above a patch limit and padded with black to whole squares. Bicubic
position embeddings; rotary pairs alternate between column and row. Patches are merged."""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import bicubic, row_major
from .preprocessor import BICUBIC, HALF, resized, sides
from .tower_layers import LayerNames, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, Rope, WorkerPool, gelu, inverse_frequencies, matmul, merge_patches, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows, VisionTower, check_aspect_ratio

USUAL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14,
         "hidden_act": "gelu_pytorch_tanh", "pos_emb_height": 64, "pos_emb_width": 64, "merge_kernel_size": [2, 2]}
# What published files call things: of the tower, and of how pictures are made ready, which is an object of its own there.
FIRST_NAMES = {"vt_hidden_size": "hidden_size", "vt_intermediate_size": "intermediate_size", "vt_num_hidden_layers": "num_hidden_layers",
               "vt_num_attention_heads": "num_attention_heads", "init_pos_emb_height": "pos_emb_height",
               "init_pos_emb_width": "pos_emb_width"}
READY, OF_READY = "media_proc_cfg", {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
ONE_SIDE = "patch_limit_on_one_side"
THETA, EPS = 10_000.0, 1e-5
LAYER = LayerNames(("norm0", "norm1"), ("wqkv",), "wo", ("mlp.fc0", "mlp.fc1"))


class KimiK25(VisionTower):
    KINDS = {"kimi_k25_vision": USUAL, "kimi_k25": USUAL}
    PROCESSORS = ("Kimi_K25ImageProcessor", "KimiK25VisionProcessor")
    LOOK = HALF, HALF, BICUBIC
    TURNED = 4
    PROJECTOR = "mm_projector.pre_norm", "mm_projector.proj.", ("0", "2")
    placeholder = "<|media_pad|>"
    placeholder_text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"

    def renamed(self, keys: Keys) -> Keys:
        stated = keys.section(READY)
        if stated is None:
            return keys
        found = {OF_READY.get(key, key): value for key, value in stated.items()}
        longest = found.pop(ONE_SIDE, 512)
        return Keys({**found, "size": {"max_height": longest, "max_width": longest}}, f"{keys.where}: {READY}")

    def configure(self, keys: Keys) -> None:
        stated = {FIRST_NAMES.get(key, key): value for key, value in self.tower_config.raw.items() if key in FIRST_NAMES}
        self.tower_config = Keys({**self.tower_config.raw, **stated}, self.tower_config.where)
        self.most, size = keys.integer("max_patches", 16_384, high=1 << 20), sides(keys, "size", {"max_height": 512, "max_width": 512})
        self.longest = size.get("max_height", 0)
        merged = self.tower_config.raw["merge_kernel_size"]
        self.joined = keys.integer("merge_size", 2, high=16)
        if list(merged) != [self.joined] * 2 or keys.integer("patch_size", self.patch) != self.patch:
            raise keys.fail("patch_size and merge_size", f"{self.patch} and {merged}, as in config.json")
        if not self.longest or size.get("max_width") != self.longest:
            raise keys.fail("size", "as many patches down as across")
        if keys.raw.get("fixed_output_tokens") is not None:
            raise keys.fail("fixed_output_tokens", "null")
        if self.tower_config.integer("pos_emb_height", high=4096) != self.tower_config.integer("pos_emb_width", high=4096):
            raise self.tower_config.fail("pos_emb_width", "as many places across as down")
        self.depth = self.width // self.heads
        self.most_patches = self.most + 2 * self.joined * self.longest

    @property
    def projector_eps(self) -> float:
        return self.root_config.number("projection_layer_norm_eps", self.tower_config.number("projector_ln_eps", EPS))

    def sized(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The size that a picture is given, and that of whole squares around it."""
        check_aspect_ratio(height, width)
        patch, longest, unit = self.patch, self.longest * self.patch, self.patch * self.joined
        count = max(1.0, height // patch) * max(1.0, width // patch)
        factor = min(1.0, math.sqrt(self.most / count), longest / height, longest / width)
        high, wide = (min(max(1, int(side * factor)), longest) for side in (height, width))
        return (high, wide), (-(-high // unit) * unit, -(-wide // unit) * unit)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        _, (high, wide) = self.sized(height, width)
        return (ROW_PLACEHOLDER,) * (high * wide // (self.patch * self.joined) ** 2)

    def values(self, picture: np.ndarray) -> np.ndarray:
        (high, wide), around = self.sized(*picture.shape[:2])
        whole = np.zeros((*around, 3), np.uint8)
        whole[:high, :wide] = resized(picture, high, wide, self.resample)
        return self.scale(whole)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, side, patch = self.tower_config, self.width, self.config.hidden_size, self.joined, self.patch
        inner, places = keys.integer("intermediate_size", high=MAX_WIDTH), keys.integer("pos_emb_height")
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
        name = "vision_tower.encoder."
        first = next((each for each in ("vision_tower.", name) if weights.has(f"{each}patch_embed.proj.weight")), "vision_tower.")
        embedding = weights.matrix(f"{first}patch_embed.proj", width, 3 * patch**2)
        learned = "vision_tower.patch_embed.pos_emb.weight"
        shape = (places, places, width) if weights.dimensions(learned) > 2 else (places**2, width)  # the second in files of Kimi-VL
        table = weights.numbers(learned, *shape).reshape(places, places, width)

        blocks = load_blocks(weights, f"{name}blocks.", keys.integer("num_hidden_layers", high=MAX_LAYERS), LAYER,
                             LayerShape(width, inner, self.heads, curve, EPS, interleaved=True))
        after = weights.layer_norm(f"{name}final_layernorm", width, EPS)
        before, behind, parts = self.PROJECTOR
        norm = weights.layer_norm(before, width, self.projector_eps)
        together = width * side**2
        project = weights.two_layers(behind, (together, together, hidden), gelu, parts=parts)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            at = row_major(lines, columns)
            x = matmul(patches_of(values, patch), embedding, pool) + bicubic(table, at)
            pool.job.total += len(blocks)
            x = norm(after(run_blocks(blocks, x, pool, self.rope(at))))
            return project(merge_patches(x, columns, side), pool)

        return rows

    def rope(self, places: np.ndarray) -> Rope:
        """Of patches at rows and columns int64 [n, 2]."""
        steps = inverse_frequencies(self.theta(THETA), self.depth // 4)
        return Rope.of((places[:, ::-1, None].astype(np.float32) * steps).swapaxes(1, 2).reshape(len(places), -1))


encoder = KimiK25
