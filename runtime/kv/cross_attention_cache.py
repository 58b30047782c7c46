"""Keys and values of cross-attention layers, computed from images.

They depend on the image and the layer alone, not on the text. So they are computed once, when a token first sees the image, and are shared
by all sequences, in pages of exact tokens. Which images a token sees follows from the tokens before it (`VisibleImages`), so none of this
is saved with a session: a resumed one needs its last images again.

Images that no token of a pass sees are evicted, least recently seen first, and recomputed from their rows if seen again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ...kernels.layout import PAGE, PageLayout
from ...offload.memory import anonymous
from ...quant.kv import PackedFormat, RawCodec
from ..images.mrope import FIRST_MEDIA_ID, split_media_token
from .cache_shape import index_type

if TYPE_CHECKING:
    from ...kernels.cpu.ops import CpuOps
    from ..config import ModelConfig
    from ..layer import LayerWeights
    from .cache_components import LayerPages

SLOTS = 104  # pages per sequence, about: for published models, two images of four tiles of 1,601 rows, or eight of one
WHISPER_SLOTS = 24  # for Whisper: two audio inputs of 1,500 rows
Key = tuple[int, tuple[float, ...]]  # an image's id, and the adapter scales that its keys were computed with
Rows = Callable[[int], np.ndarray]  # an image's id -> the rows that layers attend to, float32 [n, D]


def pages_per_sequence(config: ModelConfig) -> int:
    """Pages for a sequence; 0 for a model without cross-attention layers."""
    return (WHISPER_SLOTS if config.family == "whisper" else SLOTS) if config.cross_attention_layers else 0


def cross_attention_nbytes(config: ModelConfig, kv: RawCodec | PackedFormat, sequences: int) -> int:
    """Bytes over all layers for `sequences` sequences."""
    layout = PageLayout(config.num_key_value_heads, config.head_dim, index_type(kv))
    return len(config.cross_attention_layers) * sequences * pages_per_sequence(config) * layout.layer_page_nbytes


@dataclass
class VisibleImages:
    """Which images the next token of a sequence sees, after the first `known` of `tokens` (a list that only grows): the last image before
    it, or the adjacent ones there. `ended`: text follows them."""

    tokens: list[int]
    known: int = 0
    seen: tuple[int, ...] = ()
    ended: bool = True

    def after(self, token: int) -> tuple[int, ...]:
        """Advance by one token; returns the ids of the images that it sees."""
        if token >= FIRST_MEDIA_ID:
            before = () if self.ended else self.seen
            self.seen = tuple(dict.fromkeys((*before, split_media_token(token)[0])))
        self.ended = token < FIRST_MEDIA_ID
        return self.seen

    def caught_up(self) -> VisibleImages:
        """Advance over all tokens."""
        for token in self.tokens[self.known :]:
            self.after(token)
        self.known = len(self.tokens)
        return self


@dataclass(frozen=True)
class ImageSpan:
    """Consecutive tokens of a pass that see the same images. `text`: their sequence, in a batched pass."""

    rows: slice
    pictures: tuple[Key, ...]
    text: int | None = None


@dataclass
class CachedImage:
    """One image: its `slots`, how many `tokens` they hold, and the `rows` for layers whose keys are not `done` yet."""

    slots: np.ndarray
    tokens: int
    rows: np.ndarray | None
    done: set[int] = field(default_factory=set)


class CrossAttentionCache:
    """All cross-attention layers of one model, on the CPU, for `sequences` sequences."""

    def __init__(self, host: CpuOps, config: ModelConfig, kv: RawCodec | PackedFormat, sequences: int) -> None:
        self.host, self.config, self.layers = host, config, {}
        codec, self.slots = RawCodec(index_type(kv)), pages_per_sequence(config)
        layout = codec.layout(config.num_key_value_heads, config.head_dim)
        for layer in config.cross_attention_layers:  # backed by the system on first write
            exact = anonymous(sequences * self.slots * layout.layer_page_nbytes)
            scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
            self.layers[layer]: LayerPages = host.kv_layer(layout, exact, exact[:0], scale, None, None, codec)
        self._free, self._made = list(range(sequences * self.slots)), OrderedDict[Key, CachedImage]()
        self._tables: dict[tuple[Key, ...], tuple[np.ndarray, int]] = {}  # of the current pass, read by its jobs

    def admit(self, looks: Sequence[ImageSpan], rows_of: Rows) -> None:
        """Reserve slots for each image of a pass. Raises UsageError if there are too many, and whatever `rows_of` raises."""
        needed = dict.fromkeys(key for look in looks for key in look.pictures)
        for key in needed:
            if key in self._made:
                self._made.move_to_end(key)
        for key in needed:
            if key not in self._made:
                rows = rows_of(key[0])
                count = -(-len(rows) // PAGE)
                while len(self._free) < count and (oldest := next((each for each in self._made if each not in needed), None)):
                    self._free += self._made.pop(oldest).slots.tolist()
                if len(self._free) < count:
                    raise self._too_many(len(needed))
                self._made[key] = CachedImage(np.array([self._free.pop() for _ in range(count)], np.int64), len(rows), rows)
        for look in looks:
            if sum(len(self._made[key].slots) for key in look.pictures) > self.slots:
                raise self._too_many(len(look.pictures))

    def begin(self, looks: Sequence[ImageSpan]) -> None:
        """Begin a pass whose images have been admitted."""
        self._tables = {look.pictures: self._table(look.pictures) for look in looks}

    def _too_many(self, count: int) -> UsageError:
        if self.config.family == "whisper":  # which takes no text between them
            return UsageError(f"{count} audio inputs in a row are more than fit at once",
                              "send them separately, or joined into one: `effllm transcribe` takes up to an hour")
        return UsageError(f"{count} images in a row are more than fit at once",
                          "put text between them, or use fewer or smaller images")

    def _table(self, pictures: Sequence[Key]) -> tuple[np.ndarray, int]:
        """The concatenated blocks of these images, and their number of keys."""
        blocks, first = [], 0
        for made in map(self._made.__getitem__, pictures):
            for place, slot in enumerate(made.slots.tolist()):
                held = min(PAGE, made.tokens - PAGE * place)
                blocks.append((0, slot, first, held))
                first += held
        return np.array(blocks, np.int64), first

    def make(self, layer: int, w: LayerWeights, pictures: Sequence[Key]) -> None:
        """Compute a layer's keys and values of these images if missing, using the query buffer as scratch."""
        for key in pictures:
            if layer not in (made := self._made[key]).done:
                self._make(layer, made, w)

    def attend(self, layer: int, q: np.ndarray, pictures: tuple[Key, ...]) -> np.ndarray:
        """q [T, H * D] over all keys of these images -> [T, H * D]."""
        blocks, behind = self._tables[pictures]
        return self.layers[layer].attend(q, behind, blocks)

    def _make(self, layer: int, made: CachedImage, w: LayerWeights) -> None:
        host, config, most = self.host, self.config, self.host.dims.chunk
        host.flush()
        for begin in range(0, made.tokens, most):
            rows = np.ascontiguousarray(made.rows[begin : begin + most])
            places = np.arange(begin, begin + len(rows))
            k, v = host.norm_linear(rows, None, [w.k, w.v])
            k = host.rope_heads(k, config.num_key_value_heads, config.head_dim, places, None, w.k_norm)
            self.layers[layer].write(k, v, made.slots[places // PAGE], places % PAGE)
            host.flush()
        made.done.add(layer)
        if len(made.done) == len(self.layers):
            made.rows = None

    def layer(self, index: int, looks: Sequence[ImageSpan], scales: np.ndarray | None) -> CrossAttentionLayer:
        """A block's view for the current pass; `scales` as in `Model.forward`."""
        return CrossAttentionLayer(self, index, looks, scales)


@dataclass(frozen=True)
class CrossAttentionLayer:
    """A block's view of the images; empty if the pass has no `looks`."""

    keys: CrossAttentionCache | None
    index: int = 0
    looks: Sequence[ImageSpan] = ()
    scales: np.ndarray | None = None

    @contextmanager
    def within(self, look: ImageSpan, w: LayerWeights) -> Iterator[None]:
        """A context for processing some tokens of the pass, once the keys they need exist; adapters apply as to the text these tokens
        belong to."""
        if look.text is None:
            self.keys.make(self.index, w, look.pictures)
            yield
            return
        host = self.keys.host
        apart = self.scales is not None and len(self.scales) > 1
        if apart:
            host.flush()
            host.adapt(self.scales[look.text : look.text + 1])
        self.keys.make(self.index, w, look.pictures)
        with host.for_row(look.text):
            yield
        if apart:
            host.flush()
            host.adapt(self.scales)

    def attend(self, q: np.ndarray, pictures: tuple[Key, ...]) -> np.ndarray:
        """As `CrossAttentionCache.attend`, for this layer."""
        return self.keys.attend(self.index, q, pictures)


NO_IMAGES = CrossAttentionLayer(None)  # for passes in which no token sees an image
