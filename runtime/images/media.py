"""The media of one model's prompts, and the token ids that represent them. "Image" stands for all media here.

A row of an image is a token with an id beyond every vocabulary: a number made from a hash of its pixels, its column count where that
matters, and the row index. So everything that compares tokens (KV cache reuse, saved sessions, drafts) distinguishes images, and recognizes
one that is sent again, without knowing about images. Only the embedding lookup resolves such ids, and text statistics skip them.

Encoded rows live as long as a `MediaItem` is referenced: by the messages of a conversation, or by a request. Of unreferenced items the
newest are retained, up to MAX_RETAINED_NBYTES, because API clients resend every image with each request.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from ... import EffllmError, UsageError
from ...offload.safetensors_header import is_gguf
from ..events import Notice, Progress
from . import ROW_PLACEHOLDER, EncodedMedia, EncodingCancelled, EncodingJob, MediaEncoder, encoders_of, modalities_of, raw_config
from .canvas import canvas_markers
from .media_embeddings import MediaEmbeddings, stacked_deepstack
from .media_markers import MediaGone, media_marker
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality, modality_of
from .mrope import COLUMN_BITS, FIRST_MEDIA_ID, FRAME_STEP, HASH_BITS, ROW_BITS, media_token_id, mrope_axes, split_media_token

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .video_file import Frame

MAX_RETAINED_NBYTES = 256 << 20  # bytes of rows kept for unreferenced items
ITEM_OVERHEAD_NBYTES = 2048  # bytes of overhead counted per item: otherwise tiny ones would be kept without limit
PROGRESS_S = 0.1  # seconds between progress updates


@dataclass(eq=False)
class MediaItem:
    """One image, video or audio clip."""

    digest: str  # a hash of its data and size
    size: tuple[int, ...]  # (height, width), (frames, height, width) or (samples,)
    modality: Modality
    # uint8 [height, width, 3] or [frames, height, width, 3], or float32 [samples]; None once it is encoded.
    data: np.ndarray | None = field(repr=False)
    encoded: EncodedMedia | None = field(default=None, repr=False)
    frame_interval: float = 0.0  # seconds between the frames of a video

    @property
    def marker(self) -> str:
        """The marker that stands for it in a text."""
        return media_marker(self.digest, self.modality is AUDIO_INPUT)

    @property
    def number(self) -> int:
        """The part of the hash that its token ids carry."""
        return int(self.digest, 16) >> 4 * len(self.digest) - HASH_BITS

    @property
    def nbytes(self) -> int:
        arrays = (self.data,) if self.encoded is None else (self.encoded.rows, self.encoded.deepstack_rows)
        return sum(array.nbytes for array in arrays if array is not None)

    def ids(self, before: int = 0, within: bytes = b"") -> list[int]:
        """Token ids of an encoded item that follows `before` others, vocabulary tokens around it included.

        `within`: a hash of the text that images with mutual attention span. The ids carry it, so that a cache entry computed among other
        images is not reused.
        """
        encoded = self.encoded
        ids = list(encoded.prefix_tokens(before)) if encoded.prefix_tokens else []
        row = 0
        for token in encoded.tokens:
            if token == ROW_PLACEHOLDER:
                ids.append(media_token_id(self.number, self._row_tag(row, within), row))
                row += 1
            else:
                ids.append(token)
        return ids

    def _row_tag(self, row: int, within: bytes) -> int:
        """What a row's token id carries beside hash and row index: usually its image's number of columns (`mrope.py`)."""
        encoded, tag_mask = self.encoded, (1 << COLUMN_BITS) - 1
        if within:
            start = 2 * row % len(within)
            return int.from_bytes(within[start : start + 2]) & tag_mask
        if (step := self._frame_step(row)) is not None:
            return FRAME_STEP + min(step, tag_mask - FRAME_STEP)
        if encoded.layout_tags:
            return encoded.layout_tags[row]
        is_border = not encoded.num_border_rows <= row < len(encoded.rows) - encoded.num_border_rows
        return 0 if is_border or not encoded.grid else encoded.grid[1]

    def _frame_step(self, row: int) -> int | None:
        """For the first row of a video frame, how many positions it is after the previous frame; None for any other row."""
        if len(self.size) != 3 or not self.encoded.grid:
            return None
        frame, row_in_frame = divmod(row, self.encoded.grid[0] * self.encoded.grid[1])
        if row_in_frame or not frame:
            return None
        if self.encoded.positions_per_second is None:
            return 1
        step = self.encoded.positions_per_second * self.frame_interval
        return int(frame * step) - int((frame - 1) * step)


class MediaCache:
    """The media of one model with their encodings. Items may be added from any thread; the thread that generates encodes them.

    `encoders`: by modality.
    `refused`: modalities of the model that cannot be used here, with the error.
    `axes`: as in `mrope_axes`.
    `markers`: as in `canvas_markers`.
    `bidirectional`: an encoded image has tokens that attend to each other.
    """

    def __init__(self, modalities: Mapping[Modality, MediaEncoder | EffllmError], axes: np.ndarray | None = None,
                 markers: tuple[int, ...] = ()) -> None:
        self.refused = {modality: encoder for modality, encoder in modalities.items() if isinstance(encoder, EffllmError)}
        self.encoders: dict[Modality, MediaEncoder] = {modality: encoder for modality,
                                                       encoder in modalities.items() if modality not in self.refused}
        self.axes, self.markers, self.bidirectional = axes, markers, False
        self._lock = threading.Lock()
        self._by_digest: WeakValueDictionary[str, MediaItem] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, MediaItem] = WeakValueDictionary()  # by `MediaItem.number`
        self._retained: OrderedDict[str, tuple[MediaItem, int]] = OrderedDict()  # newest last, with the bytes counted for each
        self._retained_nbytes = 0
        self._encode_lock = threading.Lock()  # one encoding at a time, since the plan budgets memory for one

    def add_video(self, frames: Sequence[Frame]) -> list[tuple[str, MediaItem]]:
        """Add a video: (caption, item) for each image or clip that it becomes."""
        inputs = self.encoders[IMAGE_INPUT].video_inputs(frames)
        return [(caption, self.add(data, frame_interval)) for caption, data, frame_interval in inputs]

    def add(self, data: np.ndarray, frame_interval: float = 0.0) -> MediaItem:
        """The item for pixels uint8 [height, width, 3], a video [frames, height, width, 3] with `frame_interval` seconds between frames, or
        audio float32 [n]. The same data gives the same item."""
        size = data.shape if data.ndim == 1 else data.shape[:-1]
        header = (*size, frame_interval) if frame_interval else size
        digest = hashlib.sha256(f"{' '.join(map(str, header))} ".encode() + np.ascontiguousarray(data).data.cast("B")).hexdigest()[:32]
        with self._lock:
            item = self._by_digest.get(digest)
            if item is None:
                item = MediaItem(digest, size, modality_of(data), data, frame_interval=frame_interval)
                if item.number in self._by_number:
                    raise UsageError(f"two {item.modality.plural} have colliding hashes",
                                     "change a pixel or a sample of one")
                self._by_digest[digest] = self._by_number[item.number] = item
            self._retain(item)
        return item

    def pending_nbytes(self) -> int:
        """Bytes of media that were not encoded yet."""
        with self._lock:
            return sum(item.nbytes for item in self._by_digest.values() if item.encoded is None)

    def find(self, digest: str) -> MediaItem:
        """The item of a digest. Raises MediaGone."""
        item = self._by_digest.get(digest)
        if item is None:
            raise self._gone_error(digest[:8])
        return item

    def encode(self, items: Sequence[MediaItem], cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress | Notice]:
        """Encode those that are not yet, until `cancelled` returns true. Concurrent answers encode an image once."""
        new = [item for item in dict.fromkeys(items) if item.encoded is None]
        totals, counts = Counter(item.modality for item in new), Counter[Modality]()
        for item in new:
            modality = item.modality
            counts[modality] += 1
            which = f"the {modality.noun}" if totals[modality] == 1 else f"{modality.noun} {counts[modality]} of {totals[modality]}"
            phase = f"encoding {which}"
            while not self._encode_lock.acquire(blocking=False):
                if cancelled():
                    return
                yield Progress(phase, 0, 0, "layers")
            try:
                encoded = item.encoded or (yield from self._encode_item(item, phase, cancelled))
            finally:
                self._encode_lock.release()
            if encoded is None:
                return
            yield self._add_encoding(item, encoded)

    def _add_encoding(self, item: MediaItem, encoded: EncodedMedia) -> Notice:
        """Attach an encoding to its item, in place of the pixels or samples. Raises UsageError for one that token ids cannot express."""
        self.bidirectional = self.bidirectional or encoded.bidirectional
        description, num_rows = item.modality.called(item.size), encoded.tokens.count(ROW_PLACEHOLDER)
        is_mismatched = encoded.placeholder_id is None and num_rows != len(encoded.rows)
        is_too_wide = encoded.grid is not None and encoded.grid[1] >= 1 << COLUMN_BITS
        if is_mismatched or is_too_wide or num_rows > 1 << ROW_BITS:
            raise UsageError(f"this {description} takes {num_rows} tokens, which is not supported", f"use a smaller {item.modality.noun}")
        with self._lock:
            item.encoded, item.data = encoded, None
            self._retain(item)
        num_tokens = len(item.ids())
        cross_attended = "" if encoded.placeholder_id is None else f", and {len(encoded.rows)} rows that some layers attend to"
        return Notice(f"{description}: {num_tokens} token{'' if num_tokens == 1 else 's'}{cross_attended}")

    def _encode_item(self, item: MediaItem, phase: str, cancelled: Callable[[], bool]) -> Generator[Progress, None, EncodedMedia | None]:
        """The encoding of an item; None if it was cancelled."""
        job = EncodingJob()
        with ThreadPoolExecutor(1, "sight") as executor:
            encoding = executor.submit(self.encoders[item.modality].encode, item.data, job)
            try:
                while True:  # at least one event, even if encoding is immediate
                    job.is_cancelled = job.is_cancelled or cancelled()
                    yield Progress(phase, min(job.done, job.total), job.total, "layers")
                    if wait([encoding], PROGRESS_S).done:
                        return encoding.result()
            except EncodingCancelled:
                return None
            finally:
                job.is_cancelled = True

    def ids(self, digest: str, before: int = 0, within: bytes = b"") -> list[int]:
        """Token ids of an item that follows `before` others, as `MediaItem.ids`. One that was left unencoded gets as many placeholder ids,
        which are only counted. Raises MediaGone."""
        item = self.find(digest)
        if item.encoded:
            return item.ids(before, within)
        return [media_token_id(item.number, 0, row) for row in range(self.token_count(digest))]

    def pending(self, digest: str) -> list[MediaItem]:
        """The item, if it is present and not encoded yet."""
        item = self._by_digest.get(digest)
        return [item] if item is not None and item.encoded is None else []

    def token_count(self, digest: str) -> int:
        """Number of tokens of an item, encoded or not."""
        item = self.find(digest)
        return self.encoders[item.modality].token_count(*item.size) if item.encoded is None else len(item.ids())

    def embeddings(self, ids: Sequence[int]) -> tuple[list[int], MediaEmbeddings | None]:
        """Ids within the vocabulary, with stand-ins for media ids, and the rows to put there. Raises MediaGone."""
        media_positions = [position for position, token in enumerate(ids) if token >= FIRST_MEDIA_ID]
        if not media_positions:
            return list(ids), None
        text_ids, lookahead = list(ids), np.zeros(len(ids), np.int64)
        positions: list[int] = []
        rows: list[np.ndarray] = []
        deepstack_rows: list[np.ndarray | None] = []
        joint_positions: list[int] = []  # of images that all attend to each other
        sliding_window_only, deepstack_layers = False, None
        for position in media_positions:
            number, _, row = split_media_token(ids[position])
            item = self._by_number.get(number)
            if item is None or item.encoded is None or row >= len(item.encoded.rows):
                raise self._gone_error()
            encoded = item.encoded
            if encoded.placeholder_id is not None:
                text_ids[position] = encoded.placeholder_id
                continue
            text_ids[position] = 0
            positions.append(position)
            rows.append(encoded.rows[row])
            deepstack_rows.append(None if encoded.deepstack_rows is None else encoded.deepstack_rows[:, row])
            deepstack_layers = encoded.deepstack_layers or deepstack_layers
            if encoded.bidirectional:
                lookahead[position], sliding_window_only = len(encoded.rows) - 1 - row, encoded.sliding_window_only
            if encoded.joint_attention:
                joint_positions.append(position)
        if not positions:
            return text_ids, None
        attention_groups = None
        if joint_positions:  # text between images is attended to causally
            attention_groups = np.zeros(len(ids), np.int64)
            attention_groups[joint_positions] = 1
            lookahead[joint_positions] = joint_positions[-1] - np.array(joint_positions)
        return text_ids, MediaEmbeddings(
            np.array(positions, np.int64), np.stack(rows).astype(np.float32, copy=False), stacked_deepstack(deepstack_rows),
            lookahead if lookahead.any() else None, sliding_window_only, deepstack_layers, attention_groups)

    def rows_of(self, number: int) -> np.ndarray:
        """Rows of the item with this number, for cross-attention. Raises MediaGone."""
        item = self._by_number.get(number)
        if item is None or item.encoded is None:
            raise self._gone_error()
        return item.encoded.rows

    def is_causal(self, token: int) -> bool:
        """Whether a media token belongs to an item without bidirectional attention, such as audio."""
        item = self._by_number.get(split_media_token(token)[0])
        return item is not None and item.encoded is not None and not item.encoded.bidirectional

    def needs_adapter(self, ids: Sequence[int]) -> Modality | None:
        """The modality of an item among the ids that needs the model's LoRA adapter; None for none."""
        items = (self._by_number.get(split_media_token(token)[0]) for token in ids if token >= FIRST_MEDIA_ID)
        return next((item.modality for item in items if item is not None and item.encoded is not None and item.encoded.needs_adapter), None)

    def _gone_error(self, which: str = "") -> MediaGone:
        """Names every modality of the model, since it is unknown which one the missing item had."""
        modalities = [*self.encoders] or [IMAGE_INPUT]
        nouns = " or ".join(f"{modality.noun} {which}" if which else f"an {modality.noun}" for modality in modalities)
        ways = " or ".join(f"--{modality.part} FILE, /{modality.part} FILE in a chat" for modality in modalities)
        return MediaGone(f"{nouns} of this conversation is needed again but no longer in memory",
                           f"attach it again ({ways}), or start over (/clear)")

    def _retain(self, item: MediaItem) -> None:
        """Mark as newest, and evict the oldest beyond MAX_RETAINED_NBYTES. Call with the lock held."""
        _, before = self._retained.pop(item.digest, (None, 0))
        self._retained[item.digest] = item, (nbytes := ITEM_OVERHEAD_NBYTES + item.nbytes)
        self._retained_nbytes += nbytes - before
        while self._retained_nbytes > MAX_RETAINED_NBYTES and len(self._retained) > 1:
            self._retained_nbytes -= self._retained.popitem(last=False)[1][1]


def open_media(model: Path, config: ModelConfig, mmproj: str | None = None, threads: int | None = None) -> MediaCache | None:
    """The media cache for a model folder, or for a GGUF file with its mmproj file (`mmproj`, or one next to it); None for a text-only
    model. `threads` encode. Raises EffllmError where the named mmproj file does not belong to the model."""
    try:
        media = MediaCache(*_encoders(model, config, mmproj))
    except EffllmError as error:
        if mmproj is not None and not config.cross_attention_layers:  # cross-attention models have no mmproj, and text works without
            raise
        possible = (IMAGE_INPUT, AUDIO_INPUT) if is_gguf(model) else (IMAGE_INPUT,)  # a GGUF file alone does not name its modalities
        return MediaCache(dict.fromkeys(modalities_of(raw_config(model)) or possible, error))
    for encoder in media.encoders.values():
        encoder.threads = threads
    return media if media.encoders or media.refused else None


def _encoders(model: Path, config: ModelConfig,
              mmproj: str | None) -> tuple[dict[Modality, MediaEncoder | EffllmError], np.ndarray | None, tuple[int, ...]]:
    """The arguments of `MediaCache`: encoders, M-RoPE axes and canvas markers."""
    if mmproj is None and not is_gguf(model):
        encoders = encoders_of(model, config)
        return encoders, mrope_axes(model, config) if encoders else None, canvas_markers(raw_config(model)) if encoders else ()
    from .mmproj import mmproj_encoders

    return *mmproj_encoders(model, config, None if mmproj is None else Path(os.path.expanduser(mmproj))), ()


def encoder_nbytes(model: str | None, config: ModelConfig, mmproj: str | None = None, threads: int | None = None) -> dict[Modality, int]:
    """Bytes per modality that encoders need in a run of a model, as `open_media` finds them; empty for None and text-only models."""
    media = None if model is None else open_media(Path(model), config, mmproj, threads)
    return {} if media is None else {modality: encoder.bytes_needed() for modality, encoder in media.encoders.items()}


def require_media(media: MediaCache | None, modality: Modality = IMAGE_INPUT) -> MediaCache:
    """The media cache, if it supports this modality. Raises EffllmError otherwise."""
    if media is not None and modality in media.refused:
        raise media.refused[modality]
    if media is None or modality not in media.encoders:
        raise UsageError(*modality.refusal)
    return media


def check_modality(model: Path, config: ModelConfig, mmproj: str | None = None, modality: Modality | None = IMAGE_INPUT) -> None:
    """Raises EffllmError for a model that does not take this modality, or whose tower is not supported; with `modality` None only for an
    mmproj file that does not fit."""
    if modality is not None and not is_gguf(model) and modality not in (IMAGE_INPUT, *modalities_of(raw_config(model))):
        raise UsageError(*modality.refusal)
    media = MediaCache(*_encoders(model, config, mmproj))
    if modality is not None:
        require_media(media, modality)


def text_ids(ids: Sequence[int]) -> list[int]:
    """Ids without those of media."""
    return [token for token in ids if token < FIRST_MEDIA_ID]


def check_token_ids(ids: Sequence[int], vocabulary: int, media: MediaCache | None) -> None:
    """Raises UsageError for an id outside the vocabulary that is not a media id either."""
    if bad := [token for token in ids if not 0 <= token < vocabulary and (media is None or token < FIRST_MEDIA_ID)]:
        raise UsageError(f"token id {bad[0]} is outside the vocabulary of {vocabulary}",
                         "the tokenizer belongs to another model, or the text contains an image placeholder")
