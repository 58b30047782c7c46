"""Ovis 2: AIMv2 on the fewest tiles that cover an image, and a thumbnail; merged patches become probabilities over a visual vocabulary, and
a row is the expected embedding. Five more entries are begin, end and tile separators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .internvl import FittedTiles
from .preprocessor import resized, tiles_of
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names, run_blocks
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Norm, WorkerPool, matmul, merge_tile_patches, patches_of, to_float32
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows

BEGIN, GRID, COLUMN, ROW, END = range(5)  # of the words that are no parts of a picture, in the order of the vocabulary
LAYER = LayerNames(("rms_norm1", "rms_norm2"), qkv_names("attention.{}_proj"), "attention.out_proj",
                   qkv_names("ffn.{}_proj", ("up", "down", "gate")))
COVERED = 0.9  # of a picture, by parts that are not made smaller
NORM_EPS = 1e-5
WORDS, FEW = 4096, 16  # words that are widened at a time, and rows whose shares of all words are in hand at a time
USUAL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8, "image_size": 224,
         "patch_size": 14, "rms_norm_eps": 1e-5, "qkv_bias": False, "mlp_bias": False, "hidden_act": "silu", "vocab_size": 16_384,
         "hidden_stride": 1, "num_visual_indicator_tokens": 5, "tokenize_function": "softmax"}


@dataclass(frozen=True)
class Vocabulary:
    """Words for pictures. `head` [words, D]: how much a row is each of them, behind which there is a `norm`; `table` [words, hidden]: what
    each means. Both as they are stored, and some words of them widened at a time."""

    head: np.ndarray
    norm: Norm
    table: np.ndarray

    def means(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of rows float32 [n, D] -> [n, hidden]."""
        shares, some = np.empty((len(x), len(self.head)), np.float32), [slice(at, at + WORDS) for at in range(0, len(self.head), WORDS)]
        out = np.zeros((len(x), self.table.shape[1]), np.float32)

        def judge(words: slice) -> None:
            shares[:, words] = x @ to_float32(self.head[words]).T

        def share(rows: slice) -> None:
            for at in range(rows.start, rows.stop, FEW):
                own = self.norm(shares[at : min(at + FEW, rows.stop)])
                own -= own.max(-1, keepdims=True)
                np.exp(own, out=own)
                shares[at : at + len(own)] = own / own.sum(-1, keepdims=True)

        pool.all([lambda words=words: judge(words) for words in some])
        pool.each(share, len(x))
        for words in some:
            meant = to_float32(self.table[words])

            def add(rows: slice, words: slice = words, meant: np.ndarray = meant) -> None:
                out[rows] += shares[rows, words] @ meant

            pool.each(add, len(x))
        return out


class Ovis2(FittedTiles):
    KINDS = {"ovis2_vision": USUAL, "ovis2": USUAL}
    PROCESSORS = ("Ovis2ImageProcessor",)
    CROPS = False
    placeholder = "<image>"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.joined = self.tower_config.integer("hidden_stride", high=16)
        self.demand_squares()
        self.lines = self.across // self.joined
        self.covers = self.processor.flag("use_covering_area_grid", True)
        self.tower_config.choice("tokenize_function", {"softmax": "softmax"}, "softmax")
        if self.tower_config.integer("num_visual_indicator_tokens") != END + 1:
            raise self.tower_config.fail("num_visual_indicator_tokens", str(END + 1))
        counted = self.around.integer("image_seq_length", self.lines**2)
        if counted != self.lines**2:
            raise ConfigError(f"{self.around.where}: image_seq_length is {counted}, but a tile becomes {self.lines**2} rows")

    def workspace_floats(self) -> int:
        """And the shares of all words of the rows that are in the tower at once, some of them in hand, and words that are widened."""
        words, rows = self.tower_config.integer("vocab_size"), max(1, BATCH_PATCHES // self.across**2) * self.lines**2
        pieces = (4 * FEW * words + WORDS * self.width * self.joined**2) * self.workers
        return super().workspace_floats() + rows * words + pieces + WORDS * self.config.hidden_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: the fewest parts of a picture that are seen without being made smaller, but for a tenth of its points.
        What counts as rows there are columns here, as its processor has it."""
        if self.most == 1 or not self.covers:
            return super().grid(height, width)
        shapes = sorted(((one, other) for one in range(1, self.most + 1) for other in range(1, self.most // one + 1)),
                        key=lambda shape: shape[0] * shape[1])
        seen = [(shape, sum(_covered(*part, self.side) for part in _parts(height, width, shape)) / (height * width)) for shape in shapes]
        enough = [each for each in seen if each[1] > COVERED]
        best = min(enough, key=lambda each: (each[0][0] * each[0][1], -each[1])) if enough else \
            min(seen, key=lambda each: (-each[1], each[0][0] * each[0][1]))
        columns, rows = best[0]
        return rows, columns

    def parts(self, height: int, width: int) -> list[int]:
        """What a picture's tokens are in order: PLACE for all rows of a tile, and numbers of the words between."""
        rows, columns = self.grid(height, width)
        tiles: list[int] = []
        if rows * columns > 1:
            for row in range(rows):
                for column in range(columns):
                    tiles += [ROW_PLACEHOLDER, COLUMN] if column < columns - 1 else [ROW_PLACEHOLDER]
                tiles += [ROW] if row < rows - 1 else []
        return [BEGIN, ROW_PLACEHOLDER, GRID, *tiles, END]

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        parts = self.parts(height, width)
        tiles = parts.count(ROW_PLACEHOLDER)
        return (ROW_PLACEHOLDER,) * (tiles * self.lines**2 + len(parts) - tiles)

    def values(self, picture: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        """Tiles, the whole first, and what stands between."""
        rows, columns = self.grid(*picture.shape[:2])
        tiles = tiles_of(resized(picture, rows * self.side, columns * self.side, self.resample), self.side, self.side)
        if len(tiles) > 1:
            tiles.insert(0, resized(picture, self.side, self.side, self.resample))
        return [self.scale(each) for each in tiles], self.parts(*picture.shape[:2])

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.tower_config, self.width, self.config.hidden_size
        inner, eps, name = keys.integer("intermediate_size"), keys.number("rms_norm_eps"), "vision_tower.transformer."
        curve = keys.choice("hidden_act", ACTIVATIONS, "silu")
        words, count = keys.integer("vocab_size"), END + 1
        if words <= count:
            raise keys.fail("vocab_size", f"more than the {count} words that are not parts of an image")

        embedding = weights.matrix(f"{name}embeddings.patch_embedding", width, 3 * self.patch**2, bias=True)
        places = weights.numbers(f"{name}embeddings.position_embedding.weight", self.across**2, width)
        before, after = weights.rms_norm(f"{name}embeddings.rms_norm", width, eps), weights.rms_norm(f"{name}rms_norm", width, eps)
        blocks = load_blocks(weights, f"{name}encoder.layers.", keys.integer("num_hidden_layers", high=MAX_LAYERS), LAYER,
                             LayerShape(width, inner, self.heads, curve, eps, False, (keys.flag("qkv_bias"), keys.flag("mlp_bias"))))
        table = weights.stored("visual_embeddings_table.weight", words, hidden)
        vocabulary = Vocabulary(weights.stored("vision_tower.head_linear.weight", words - count, width * self.joined**2),
                                weights.layer_norm("vision_tower.head_norm", words - count, NORM_EPS), table[:-count])
        between = to_float32(table[-count:])

        def rows(values: tuple[list[np.ndarray], list[int]], pool: WorkerPool) -> np.ndarray:
            tiles, parts = values
            found = iter(np.concatenate([seen(each, pool) for each in pool.groups(tiles, BATCH_PATCHES // self.across**2, len(blocks))]))
            return np.concatenate([next(found) if part == ROW_PLACEHOLDER else between[part : part + 1] for part in parts])

        def seen(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            length = self.across**2
            x = np.concatenate([before(matmul(patches_of(tile, self.patch), embedding, pool)) + places for tile in tiles])
            x = run_blocks(blocks, x, pool, spans=[(begin, begin + length) for begin in range(0, len(x), length)])
            made = merge_tile_patches(after(x).reshape(len(tiles), length, width), self.joined)
            return vocabulary.means(made.reshape(-1, made.shape[-1]), pool).reshape(len(tiles), -1, hidden)

        return rows


def _parts(height: int, width: int, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Height and width of each part of a picture, so many down and so many across; the last of each has what is left."""
    highs, wides = ([size // count] * (count - 1) + [size - size // count * (count - 1)] for size, count in zip((height, width), shape))
    return [(high, wide) for high in highs for wide in wides]


def _covered(height: int, width: int, side: int) -> float:
    """Points of a part that are left where its longer side is made no longer than a tile's."""
    long, short = max(height, width), min(height, width)
    return long * short if long <= side else side * (short / long * side)


encoder = Ovis2
