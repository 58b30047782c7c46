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
    _mrope: MropePositions | None = None
    _visible_images: VisibleImages | None = None

    def forward_inputs(self, ids: Sequence[int]) -> tuple[np.ndarray, dict[str, object]]:
        """Vocabulary ids int64 [T] of tokens to append, and keyword arguments of their forward pass. Raises MediaGone, and Interrupted for
        an image that was not encoded because its client is gone."""
        if self.media is None:
            return np.array(ids, np.int64), {}
        try:
            text_ids, embeddings = self.media.embeddings(ids)
            image_spans = self._image_spans(ids)
        except MediaGone:
            if self.cancelled():
                raise Interrupted from None
            raise
        if embeddings is not None:
            if embeddings.lookahead is not None:
                self._require_bidirectional_attention()
            if self.reads_bidirectionally(self.pending_prompt):
                embeddings = replace(embeddings, lookahead=np.arange(len(ids))[::-1])
            if not self.options.lora and (modality := self.media.needs_adapter(ids)) is not None:
                raise UsageError(f"this model needs its published LoRA adapter for {modality.plural}",
                                 "use --lora FOLDER, the published model folder, which holds adapter_config.json")
        rope_positions = self.mrope_positions(ids)
        return np.array(text_ids, np.int64), {"media": embeddings, "rope_positions": rope_positions, "image_spans": image_spans}

    def mrope_positions(self, ids: Sequence[int]) -> np.ndarray | None:
        """Rotary positions of tokens to append, as `MropePositions.positions_after`."""
        if self.media is None or self.media.axes is None:
            return None
        if self._mrope is None or self._mrope.tokens is not self.tokens:
            self._mrope = track_positions(self.tokens, self.media.axes, self.media.markers)
        return self._mrope.positions_after(ids, self.media.axes)

    def reads_bidirectionally(self, ids: Sequence[int]) -> bool:
        """Whether a prompt is processed in one bidirectional pass (prefix LM): a cached prefix was computed with another ending."""
        return self.config.prefix_lm and any(token >= FIRST_MEDIA_ID for token in ids)

    def visible_images(self) -> VisibleImages | None:
        """The images that tokens to append cross-attend to; None for models without cross-attention layers."""
        if self.media is None or not self.config.cross_attention_layers:
            return None
        if self._visible_images is None or self._visible_images.tokens is not self.tokens:
            self._visible_images = VisibleImages(self.tokens)
        return self._visible_images.caught_up()

    def _image_spans(self, ids: Sequence[int]) -> list[ImageSpan]:
        """Which images each of the tokens to append cross-attends to, once their keys are cached. Raises MediaGone and UsageError."""
        if (visible := self.visible_images()) is None:
            return []
        tracker = replace(visible)
        images_of = [tracker.after(token) for token in ids]
        spans = []
        for images, group in groupby(range(len(ids)), images_of.__getitem__):
            positions = list(group)
            if images:
                spans.append(ImageSpan(slice(positions[0], positions[-1] + 1), tuple((number, self.adapter_scales) for number in images)))
        self.admit(spans)
        return spans

    def admit(self, image_spans: Sequence[ImageSpan]) -> None:
        """Cache keys and values of the images that a pass cross-attends to. Raises MediaGone and UsageError."""
        if not image_spans:
            return
        if "cuda" in self.placement.devices:
            raise UsageError("this model cross-attends to images, which is not supported on a GPU yet", "use --device cpu")
        if self.model.cross_attention is None:
            kv = codec(self.options.kv)
            self.model.cross_attention = CrossAttentionCache(self.model.backends["cpu"], self.config, kv, self.options.parallel)
        self.model.cross_attention.admit(image_spans, self.media.rows_of)

    def split_at_images(self, passes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Lengths of passes over the rest of the prompt, each with how many tokens of its chunk remain, split where tokens begin to
        cross-attend to other images, so that no pass needs the keys of all images of a conversation."""
        for length, left in passes:
            visible = self.visible_images()
            begin = len(self.tokens)
            images_of = [] if visible is None else list(map(replace(visible).after, self.pending_prompt[begin : begin + length]))
            for part in [len(list(group)) for _, group in groupby(images_of)] or [length]:
                length -= part
                yield part, left + length

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
        position, spans = len(self.tokens), list(_bidirectional_spans(self.pending_prompt, self.media.is_causal))
        joint_attention = len(spans) > 1 and any(encoder.joint_attention for encoder in self.media.encoders.values())
        if joint_attention:
            spans = [(spans[0][0], spans[-1][1])]
        if self.reads_bidirectionally(self.pending_prompt):
            spans = [(0, len(self.pending_prompt))]
        pass_ends = [position + length for length in accumulate(passes)]
        while position < pass_ends[-1]:
            stop = next(end for end in pass_ends if end > position)
            for begin, end in spans:
                if begin < stop < end:
                    stop = begin if begin > position else end
            if stop - position > self.cache.shape.chunk:
                what = "the prompt takes" if self.reads_bidirectionally(self.pending_prompt) else \
                    "the images, with the text between them, take" if joint_attention else "an image takes"
                raise UsageError(f"{what} {stop - position} tokens that attend to each other, and one batch holds {self.cache.shape.chunk}",
                                 "use a larger context (-c)")
            yield stop - position
            position = stop

    def _require_bidirectional_attention(self) -> None:
        """Raises UsageError where the attention backend is causal only."""
        what, hint = "", ""
        if codec(self.options.kv).is_packed:
            what, hint = f"--kv {self.options.kv}", "use --kv 16bit"
        elif "cuda" in self.placement.devices:
            what, hint = "a GPU", "use --device cpu"
        elif self.placement.kv_pages is not None:
            what, hint = "a KV cache on disk", "use a smaller context (-c), or raise --kv-ram"
        if what:
            raise UsageError(f"this model needs bidirectional attention for images, which {what} does not support yet", hint)


def _bidirectional_spans(ids: Sequence[int], is_causal: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """(begin, end) of images with bidirectional attention; a repeated image is two spans."""
    for is_image, group in groupby(range(len(ids)), lambda position: ids[position] >= FIRST_MEDIA_ID and not is_causal(ids[position])):
        if not is_image:
            continue
        positions = list(group)
        begins = [position for position in positions if position == positions[0] or split_media_token(ids[position])[2] == 0]
        yield from zip(begins, [*begins[1:], positions[-1] + 1], strict=True)


def batch_image_views(engines: Sequence[MultimodalInputs]) -> list[ImageSpan]:
    """Which images a token appended to each of several sequences cross-attends to, once cached. Raises MediaGone and UsageError."""
    spans = []
    for row, engine in enumerate(engines):
        visible = engine.visible_images()
        if visible is not None and visible.seen:
            spans.append(ImageSpan(slice(row, row + 1), tuple((number, engine.adapter_scales) for number in visible.seen), row))
    engines[0].admit(spans)
    return spans


def batch_positions(engines: Sequence[MultimodalInputs]) -> np.ndarray | None:
    """Rotary positions of a token appended to each of several sequences, int64 [T]; None where they equal the sequence lengths."""
    positions = [engine.mrope_positions([0]) for engine in engines]
    if all(position is None for position in positions):
        return None
    return np.array([len(engine.tokens) if position is None else position[0]
                     for engine, position in zip(engines, positions, strict=True)], np.int64)
