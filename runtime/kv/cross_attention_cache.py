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
    """The images that the next token of a sequence sees: the last image before it, with those adjacent to that one."""

    tokens: list[int]  # of the sequence; the list only grows
    num_processed: int = 0  # of the tokens
    seen: tuple[int, ...] = ()  # ids of the images
    ended: bool = True  # whether text follows the images

    def after(self, token: int) -> tuple[int, ...]:
        """Advance by one token; returns the ids of the images that it sees."""
        if token >= FIRST_MEDIA_ID:
            before = () if self.ended else self.seen
            self.seen = tuple(dict.fromkeys((*before, split_media_token(token)[0])))
        self.ended = token < FIRST_MEDIA_ID
        return self.seen

    def caught_up(self) -> VisibleImages:
        """Advance over all tokens."""
        for token in self.tokens[self.num_processed :]:
            self.after(token)
        self.num_processed = len(self.tokens)
        return self


@dataclass(frozen=True)
class ImageSpan:
    """Consecutive tokens of a pass that see the same images."""

    rows: slice  # of the pass
    images: tuple[Key, ...]
    text: int | None = None  # index of their sequence in a batched pass


@dataclass
class CachedImage:
    """The keys and values of one image."""

    slots: np.ndarray  # pages, int64
    tokens: int  # how many the slots hold
    rows: np.ndarray | None  # its encoded rows; None once all layers are done
    done: set[int] = field(default_factory=set)  # layers whose keys and values have been computed


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
        self._free, self._images = list(range(sequences * self.slots)), OrderedDict[Key, CachedImage]()
        self._tables: dict[tuple[Key, ...], tuple[np.ndarray, int]] = {}  # of the current pass, read by its jobs

    def admit(self, spans: Sequence[ImageSpan], rows_of: Rows) -> None:
        """Reserve slots for each image of a pass. Raises UsageError if there are too many, and whatever `rows_of` raises."""
        needed = dict.fromkeys(key for span in spans for key in span.images)
        for key in needed:
            if key in self._images:
                self._images.move_to_end(key)
        for key in needed:
            if key not in self._images:
                rows = rows_of(key[0])
                count = -(-len(rows) // PAGE)
                while len(self._free) < count and (oldest := next((other for other in self._images if other not in needed), None)):
                    self._free += self._images.pop(oldest).slots.tolist()
                if len(self._free) < count:
                    raise self._too_many(len(needed))
                self._images[key] = CachedImage(np.array([self._free.pop() for _ in range(count)], np.int64), len(rows), rows)
        for span in spans:
            if sum(len(self._images[key].slots) for key in span.images) > self.slots:
                raise self._too_many(len(span.images))

    def begin(self, spans: Sequence[ImageSpan]) -> None:
        """Begin a pass whose images have been admitted."""
        self._tables = {span.images: self._table(span.images) for span in spans}

    def _too_many(self, count: int) -> UsageError:
        if self.config.family == "whisper":  # which takes no text between them
            return UsageError(f"{count} audio inputs in a row are more than fit at once",
                              "send them separately, or joined into one: `effllm transcribe` takes up to an hour")
        return UsageError(f"{count} images in a row are more than fit at once",
                          "put text between them, or use fewer or smaller images")

    def _table(self, images: Sequence[Key]) -> tuple[np.ndarray, int]:
        """The concatenated blocks of these images, and their number of keys."""
        blocks, position = [], 0
        for image in map(self._images.__getitem__, images):
            for page, slot in enumerate(image.slots.tolist()):
                num_tokens = min(PAGE, image.tokens - PAGE * page)
                blocks.append((0, slot, position, num_tokens))
                position += num_tokens
        return np.array(blocks, np.int64), position

    def compute(self, layer: int, w: LayerWeights, images: Sequence[Key]) -> None:
        """Compute a layer's keys and values of these images if missing, using the query buffer as scratch."""
        for key in images:
            if layer not in (image := self._images[key]).done:
                self._compute(layer, image, w)

    def attend(self, layer: int, q: np.ndarray, images: tuple[Key, ...]) -> np.ndarray:
        """q [T, H * D] over all keys of these images -> [T, H * D]."""
        blocks, num_keys = self._tables[images]
        return self.layers[layer].attend(q, num_keys, blocks)

    def _compute(self, layer: int, image: CachedImage, w: LayerWeights) -> None:
        host, config, chunk = self.host, self.config, self.host.dims.chunk
        host.flush()
        for begin in range(0, image.tokens, chunk):
            rows = np.ascontiguousarray(image.rows[begin : begin + chunk])
            positions = np.arange(begin, begin + len(rows))
            k, v = host.norm_linear(rows, None, [w.k, w.v])
            k = host.rope_heads(k, config.num_key_value_heads, config.head_dim, positions, None, w.k_norm)
            self.layers[layer].write(k, v, image.slots[positions // PAGE], positions % PAGE)
            host.flush()
        image.done.add(layer)
        if len(image.done) == len(self.layers):
            image.rows = None

    def layer(self, index: int, spans: Sequence[ImageSpan], scales: np.ndarray | None) -> CrossAttentionLayer:
        """A block's view for the current pass; `scales` as in `Model.forward`."""
        return CrossAttentionLayer(self, index, spans, scales)


@dataclass(frozen=True)
class CrossAttentionLayer:
    """A block's view of the images; empty if the pass has no `spans`."""

    keys: CrossAttentionCache | None
    index: int = 0
    spans: Sequence[ImageSpan] = ()
    scales: np.ndarray | None = None

    @contextmanager
    def within(self, span: ImageSpan, w: LayerWeights) -> Iterator[None]:
        """A context for processing some tokens of the pass, once the keys they need exist; adapters apply as to the text these tokens
        belong to."""
        if span.text is None:
            self.keys.compute(self.index, w, span.images)
            yield
            return
        host = self.keys.host
        has_own_scales = self.scales is not None and len(self.scales) > 1
        if has_own_scales:
            host.flush()
            host.adapt(self.scales[span.text : span.text + 1])
        self.keys.compute(self.index, w, span.images)
        with host.for_row(span.text):
            yield
        if has_own_scales:
            host.flush()
            host.adapt(self.scales)

    def attend(self, q: np.ndarray, images: tuple[Key, ...]) -> np.ndarray:
        """As `CrossAttentionCache.attend`, for this layer."""
        return self.keys.attend(self.index, q, images)


NO_IMAGES = CrossAttentionLayer(None)  # for passes in which no token sees an image
