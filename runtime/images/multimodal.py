"""Multimodal part of the engine: embeds media in a pass, positions them, and keeps passes from splitting an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ...offload.direct_io import Interrupted
from ...quant.kv import codec
from ..kv.cross_attention_cache import CrossAttentionCache, ImageSpan, VisibleImages
from .media_markers import MediaGone
from .mrope import FIRST_MEDIA_ID, MropePositions, split_media_token, track_positions

if TYPE_CHECKING:
    from ...offload.placement import Placement
    from ..cache import KVCache
    from ..config import ModelConfig
    from ..model import Model
    from ..prepare import EngineOptions
    from .media import MediaCache


class MultimodalInputs:
    """Mixin of the engine. `media`: None for a text-only model."""

    tokens: list[int]
    pending_prompt: list[int]
    cancelled: Callable[[], bool]
    cache: KVCache
    config: ModelConfig
    options: EngineOptions
    placement: Placement
    media: MediaCache | None = None
    model: Model
    adapter_scales: tuple[float, ...]
    _followed: MropePositions | None = None
    _watched: VisibleImages | None = None

    def seen(self, ids: Sequence[int]) -> tuple[np.ndarray, dict[str, object]]:
        """Vocabulary ids int64 [T] of tokens to append, and keyword arguments of their forward pass. Raises MediaGone, and Interrupted for
        an image that was not encoded because its client is gone."""
        if self.media is None:
            return np.array(ids, np.int64), {}
        try:
            plain, shown = self.media.embeddings(ids)
            looks = self._looks(ids)
        except MediaGone:
            if self.cancelled():
                raise Interrupted from None
            raise
        if shown is not None and shown.reach is not None:
            self._demand_both_ways()
        if shown is not None and self.reads_bidirectionally(self.pending_prompt):
            shown = replace(shown, reach=np.arange(len(ids))[::-1])
        if shown is not None and not self.options.lora and (modality := self.media.needs_adapter(ids)) is not None:
            raise UsageError(f"this model needs its published LoRA adapter for {modality.plural}",
                             "use --lora FOLDER, the published model folder, which holds adapter_config.json")
        return np.array(plain, np.int64), {"media": shown, "rope_positions": self.turned(ids), "image_spans": looks}

    def turned(self, ids: Sequence[int]) -> np.ndarray | None:
        """Rotary positions of tokens to append, as `MropePositions.behind`."""
        if self.media is None or self.media.axes is None:
            return None
        if self._followed is None or self._followed.tokens is not self.tokens:
            self._followed = track_positions(self.tokens, self.media.axes, self.media.markers)
        return self._followed.behind(ids, self.media.axes)

    def reads_bidirectionally(self, ids: Sequence[int]) -> bool:
        """Whether a prompt is processed in one bidirectional pass (prefix LM): a cached prefix was computed with another ending."""
        return self.config.prefix_lm and any(token >= FIRST_MEDIA_ID for token in ids)

    def watched(self) -> VisibleImages | None:
        """The images that tokens to append cross-attend to, in models with cross-attention layers."""
        if self.media is None or not self.config.cross_attention_layers:
            return None
        if self._watched is None or self._watched.tokens is not self.tokens:
            self._watched = VisibleImages(self.tokens)
        return self._watched.caught_up()

    def _looks(self, ids: Sequence[int]) -> list[ImageSpan]:
        """Which images each of the tokens to append cross-attends to, once their keys are cached. Raises MediaGone and UsageError."""
        if (watched := self.watched()) is None:
            return []
        there = replace(watched)
        seen = [there.after(token) for token in ids]
        looks = [ImageSpan(slice(places[0], places[-1] + 1), tuple((number, self.adapter_scales) for number in pictures))
                 for pictures, group in groupby(range(len(ids)), seen.__getitem__) if pictures and (places := list(group))]
        self.admit(looks)
        return looks

    def admit(self, looks: Sequence[ImageSpan]) -> None:
        """Cache keys and values of the images that a pass cross-attends to. Raises MediaGone and UsageError."""
        if not looks:
            return
        if "cuda" in self.placement.devices:
            raise UsageError("this model cross-attends to images, which is not supported on a GPU yet", "use --device cpu")
        if self.model.cross_attention is None:
            kv = codec(self.options.kv)
            self.model.cross_attention = CrossAttentionCache(self.model.backends["cpu"], self.config, kv, self.options.parallel)
        self.model.cross_attention.admit(looks, self.media.rows_of)

    def split_at_images(self, pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Lengths of passes over the rest of the prompt, each with how many tokens of its chunk remain, split where tokens begin to
        cross-attend to other images, so that no pass needs the keys of all images of a conversation."""
        for piece, left in pieces:
            watched = self.watched()
            seen = [] if watched is None else list(map(replace(watched).after,
                                                             self.pending_prompt[len(self.tokens) : len(self.tokens) + piece]))
            lengths = [len(list(group)) for _, group in groupby(seen)] or [piece]
            for length in lengths:
                piece -= length
                yield length, left + piece

    @property
    def bidirectional(self) -> bool:
        """Whether there are images whose tokens attend to each other."""
        return self.media is not None and self.media.bidirectional

    def keep_images_whole(self, passes: Iterable[int]) -> Iterator[int]:
        """Lengths of passes over the rest of the prompt, none of which ends inside an image with bidirectional attention, or between images
        that attend to each other. Raises UsageError for an image longer than a pass."""
        if not self.bidirectional:
            yield from passes
            return
        at, ends, spans = len(self.tokens), list(passes), list(_spans(self.pending_prompt, self.media.is_causal))
        together = len(spans) > 1 and any(encoder.together for encoder in self.media.encoders.values())
        if together:
            spans = [(spans[0][0], spans[-1][1])]
        if self.reads_bidirectionally(self.pending_prompt):
            spans = [(0, len(self.pending_prompt))]
        ends = [at + end for end in accumulate(ends)]
        while at < ends[-1]:
            stop = next(end for end in ends if end > at)
            for begin, end in spans:
                if begin < stop < end:
                    stop = begin if begin > at else end
            if stop - at > self.cache.shape.chunk:
                what = "the prompt takes" if self.reads_bidirectionally(self.pending_prompt) else \
                    "the images, with the text between them, take" if together else "an image takes"
                raise UsageError(f"{what} {stop - at} tokens that attend to each other, and one batch holds {self.cache.shape.chunk}",
                                 "use a larger context (-c)")
            yield stop - at
            at = stop

    def _demand_both_ways(self) -> None:
        """Raises UsageError where the attention backend is causal only."""
        what, way = "", ""
        if codec(self.options.kv).is_packed:
            what, way = f"--kv {self.options.kv}", "use --kv 16bit"
        elif "cuda" in self.placement.devices:
            what, way = "a GPU", "use --device cpu"
        elif self.placement.kv_pages is not None:
            what, way = "a KV cache on disk", "use a smaller context (-c), or raise --kv-ram"
        if what:
            raise UsageError(f"this model needs bidirectional attention for images, which {what} does not support yet", way)


def _spans(ids: Sequence[int], alone: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """(begin, end) of images with bidirectional attention, without those for which `alone` is true; a repeated image is two spans."""
    for is_picture, group in groupby(range(len(ids)), lambda place: ids[place] >= FIRST_MEDIA_ID and not alone(ids[place])):
        places = list(group) if is_picture else []
        begins = [place for place in places if place == places[0] or split_media_token(ids[place])[2] == 0]
        yield from zip(begins, [*begins[1:], places[-1] + 1] if places else [], strict=True)


def batch_image_views(engines: Sequence[MultimodalInputs]) -> list[ImageSpan]:
    """Which images a token appended to each of several sequences cross-attends to, once cached. Raises MediaGone and UsageError."""
    looks = [ImageSpan(slice(row, row + 1), tuple((number, engine.adapter_scales) for number in watched.seen), row)
             for row, engine in enumerate(engines) if (watched := engine.watched()) is not None and watched.seen]
    engines[0].admit(looks)
    return looks


def batch_positions(engines: Sequence[MultimodalInputs]) -> np.ndarray | None:
    """Rotary positions of a token appended to each of several sequences, int64 [T]; None where they equal the sequence lengths."""
    each = [engine.turned([0]) for engine in engines]
    if all(own is None for own in each):
        return None
    return np.array([len(engine.tokens) if own is None else own[0] for engine, own in zip(engines, each, strict=True)], np.int64)
