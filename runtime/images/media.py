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
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import numpy as np

from ... import EffllmError, UsageError
from ...offload.safetensors_header import is_gguf
from ..events import Notice, Progress
from . import ROW_PLACEHOLDER, EncodedMedia, EncodingCancelled, EncodingJob, MediaEncoder, encoders_of, modalities_of, raw_config
from .canvas import canvas_markers
from .media_markers import MediaGone, media_marker
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality, modality_of
from .mrope import COLUMN_BITS, FIRST_MEDIA_ID, FRAME_STEP, HASH_BITS, ROW_BITS, media_token_id, mrope_axes, split_media_token

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .video_file import Frame

MAX_RETAINED_NBYTES = 256 << 20  # bytes of rows kept for unreferenced items
ITEM_OVERHEAD_NBYTES = 2048  # bytes of overhead counted per item: otherwise tiny ones would be kept without limit
PROGRESS_S = 0.1  # seconds between progress updates


class Ops(Protocol):
    """A backend that runs layers."""

    def to_host(self, x: object) -> np.ndarray: ...
    def from_host(self, x: np.ndarray) -> object: ...


@dataclass(eq=False)
class MediaItem:
    """One image, video or audio clip."""

    digest: str  # a hash of its data and size
    size: tuple[int, ...]  # (height, width), (frames, height, width) or (samples,)
    modality: Modality
    # uint8 [height, width, 3] or [frames, height, width, 3], or float32 [samples]; None once it is encoded.
    points: np.ndarray | None = field(repr=False)
    encoded: EncodedMedia | None = field(default=None, repr=False)
    frame_interval: float = 0.0  # seconds between the frames of a video

    @property
    def mark(self) -> str:
        """The marker that stands for it in a text."""
        return media_marker(self.digest, self.modality is AUDIO_INPUT)

    @property
    def number(self) -> int:
        """The part of the hash that its token ids carry."""
        return int(self.digest, 16) >> 4 * len(self.digest) - HASH_BITS

    @property
    def nbytes(self) -> int:
        kept = (self.points,) if self.encoded is None else (self.encoded.rows, self.encoded.deep)
        return sum(each.nbytes for each in kept if each is not None)

    def ids(self, before: int = 0, within: bytes = b"") -> list[int]:
        """Token ids of an encoded item that follows `before` others, vocabulary tokens around it included.

        `within`: a hash of the text that images with mutual attention span. The ids carry it, so that a cache entry computed among other
        images is not reused.
        """
        row, ids, columns = 0, list(self.encoded.numbered(before) if self.encoded.numbered
                                    else ()), self.encoded.grid[1] if self.encoded.grid else 0
        tagged_rows = range(self.encoded.framed, len(self.encoded.rows) - self.encoded.framed)
        for token in self.encoded.tokens:
            if token == ROW_PLACEHOLDER:
                tag = self.encoded.stated[row] if self.encoded.stated else columns if row in tagged_rows else 0
                if (offset := self._later(row)) is not None:
                    tag = FRAME_STEP + min(offset, (1 << COLUMN_BITS) - 1 - FRAME_STEP)
                if within:
                    tag = int.from_bytes(within[(at := 2 * row % len(within)) : at + 2]) & (1 << COLUMN_BITS) - 1
                token, row = media_token_id(self.number, tag, row), row + 1
            ids.append(token)
        return ids

    def _later(self, row: int) -> int | None:
        """For the first row of a video frame, how many positions it is after the previous frame; None for any other row."""
        frame, rest = divmod(row, self.encoded.grid[0] * self.encoded.grid[1]) if len(self.size) == 3 and self.encoded.grid else (0, 1)
        if rest or not frame:
            return None
        step = None if self.encoded.pace is None else self.encoded.pace * self.frame_interval
        return 1 if step is None else int(frame * step) - int((frame - 1) * step)


@dataclass(frozen=True)
class MediaEmbeddings:
    """What a forward pass needs of its media."""

    places: np.ndarray  # int64 [n]: positions in the pass where `rows` replace embeddings
    rows: np.ndarray  # float32 [n, hidden]
    # float32 [layers, n, hidden]: added there after each of the first layers, or after those in `behind`.
    deep: np.ndarray | None = None
    reach: np.ndarray | None = None  # int64 [T]: how many later tokens each token attends to; None for causal attention
    in_windows: bool = False  # `reach` applies only in sliding-window layers
    behind: tuple[int, ...] | None = None
    among: np.ndarray | None = None  # int64 [T]: which tokens earlier ones attend to; None for all

    def ends(self, first: int) -> tuple[np.ndarray, bool] | None:
        """The last position that each token attends to and `in_windows`, for a pass that begins at position `first`; None for causal
        attention. Raises RuntimeError for a pass that ends inside an image."""
        if self.reach is None:
            return None
        last = np.arange(len(self.reach)) + self.reach
        if last.max() >= len(last):
            raise RuntimeError("a pass ends inside an image whose tokens see each other")
        return first + last, self.in_windows

    def put(self, x: np.ndarray) -> None:
        """Write the rows into embeddings x [T, D], in place."""
        x[self.places] = self.rows

    def deepened(self, ops: Ops, x: object, layer: int) -> object:
        """Hidden states x [T, D] after a layer, with the rows that are added there."""
        layers = range(len(self.deep)) if self.deep is not None and self.behind is None else self.behind or ()
        if self.deep is None or layer not in layers:
            return x
        states = ops.to_host(x)
        states[self.places] += self.deep[layers.index(layer)]
        return ops.from_host(states)


class MediaCache:
    """The media of one model with their encodings. Items may be added from any thread; the thread that generates encodes them.

    `encoders`: by modality; `refused`: modalities of the model that cannot be used here, with the error.
    `axes` as in `mrope_axes`, `markers` as in `canvas_markers`.
    `bidirectional`: an encoded image has tokens that attend to each other.
    """

    def __init__(self, modalities: Mapping[Modality, MediaEncoder | EffllmError], axes: np.ndarray | None = None,
                 markers: tuple[int, ...] = ()) -> None:
        self.refused = {modality: encoder for modality, encoder in modalities.items() if isinstance(encoder, EffllmError)}
        self.encoders: dict[Modality, MediaEncoder] = {modality: encoder for modality,
                                                       encoder in modalities.items() if modality not in self.refused}
        self.axes, self.markers, self.bidirectional = axes, markers, False
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, MediaItem] = WeakValueDictionary()
        self._numbered: WeakValueDictionary[int, MediaItem] = WeakValueDictionary()
        self._kept: OrderedDict[str, tuple[MediaItem, int]] = OrderedDict()  # newest last, with the bytes counted for each
        self._kept_nbytes = 0
        self._looks = threading.Lock()

    def add_video(self, frames: Sequence[Frame]) -> list[tuple[str, MediaItem]]:
        """Add a video: (caption, item) for each image or clip that it becomes."""
        inputs = self.encoders[IMAGE_INPUT].video_inputs(frames)
        return [(caption, self.add(points, frame_interval)) for caption, points, frame_interval in inputs]

    def add(self, points: np.ndarray, frame_interval: float = 0.0) -> MediaItem:
        """The item for pixels uint8 [height, width, 3], a video [frames, height, width, 3] with `frame_interval` seconds between frames, or
        audio float32 [n]. The same data gives the same item."""
        size = points.shape if points.ndim == 1 else points.shape[:-1]
        said = (*size, frame_interval) if frame_interval else size
        digest = hashlib.sha256(f"{' '.join(map(str, said))} ".encode() + np.ascontiguousarray(points).data.cast("B")).hexdigest()[:32]
        with self._lock:
            found = self._known.get(digest)
            if found is None:
                found = MediaItem(digest, size, modality_of(points), points, frame_interval=frame_interval)
                if found.number in self._numbered:
                    raise UsageError(f"two {found.modality.plural} have colliding hashes",
                                     "change a pixel or a sample of one")
                self._known[digest] = self._numbered[found.number] = found
            self._keep(found)
        return found

    def pending_nbytes(self) -> int:
        """Bytes of media that were not encoded yet."""
        with self._lock:
            return sum(each.nbytes for each in self._known.values() if each.encoded is None)

    def find(self, digest: str) -> MediaItem:
        """The item of a digest. Raises MediaGone."""
        found = self._known.get(digest)
        if found is None:
            raise self._gone(digest[:8])
        return found

    def encode(self, pictures: Sequence[MediaItem], left: Callable[[], bool] = lambda: False) -> Iterator[Progress | Notice]:
        """Encode those that are not yet, until `left` says that the client is gone. Concurrent answers encode an image once, and one at a
        time, since the plan budgets memory for one."""
        new = [each for each in dict.fromkeys(pictures) if each.encoded is None]
        counts: Counter[Modality] = Counter()
        for picture in new:
            modality, alike = picture.modality, sum(each.modality is picture.modality for each in new)
            counts[modality] += 1
            phase = f"encoding {f'the {modality.noun}' if alike == 1 else f'{modality.noun} {counts[modality]} of {alike}'}"
            while not self._looks.acquire(blocking=False):
                if left():
                    return
                yield Progress(phase, 0, 0, "layers")
            try:
                seen = picture.encoded or (yield from self._looked(picture, phase, left))
            finally:
                self._looks.release()
            if seen is None:
                return
            self.bidirectional = self.bidirectional or seen.bidirectional
            rows = seen.tokens.count(ROW_PLACEHOLDER)
            too_wide = seen.grid and seen.grid[1] >= 1 << COLUMN_BITS
            if seen.placeholder_id is None and rows != len(seen.rows) or rows > 1 << ROW_BITS or too_wide:
                raise UsageError(f"this {picture.modality.called(picture.size)} takes {rows} tokens, which is not supported",
                                 f"use a smaller {picture.modality.noun}")
            with self._lock:
                picture.encoded, picture.points = seen, None
                self._keep(picture)
            tokens = len(picture.ids())
            beside = "" if seen.placeholder_id is None else f", and {len(seen.rows)} rows that some layers attend to"
            yield Notice(f"{picture.modality.called(picture.size)}: {tokens} token{'' if tokens == 1 else 's'}{beside}")

    def _looked(self, picture: MediaItem, phase: str, left: Callable[[], bool]) -> Generator[Progress, None, EncodedMedia | None]:
        """The encoding of an item; None where it was cancelled."""
        work = EncodingJob()
        with ThreadPoolExecutor(1, "sight") as beside:
            looking = beside.submit(self.encoders[picture.modality].encode, picture.points, work)
            try:
                while True:  # at least one event, even if encoding is immediate
                    work.is_cancelled = work.is_cancelled or left()
                    yield Progress(phase, min(work.done, work.total), work.total, "layers")
                    if wait([looking], PROGRESS_S).done:
                        return looking.result()
            except EncodingCancelled:
                return None
            finally:
                work.is_cancelled = True

    def ids(self, digest: str, before: int = 0, within: bytes = b"") -> list[int]:
        """Token ids of an item that follows `before` others, as `MediaItem.ids`. One that was left unencoded gets as many placeholder ids,
        which are only counted. Raises MediaGone."""
        picture = self.find(digest)
        if picture.encoded:
            return picture.ids(before, within)
        return [media_token_id(picture.number, 0, row) for row in range(self.token_count(digest))]

    def pending(self, digest: str) -> list[MediaItem]:
        """The item, if it is present and not encoded yet."""
        picture = self._known.get(digest)
        return [picture] if picture is not None and picture.encoded is None else []

    def token_count(self, digest: str) -> int:
        """Number of tokens of an item, encoded or not."""
        picture = self.find(digest)
        return self.encoders[picture.modality].token_count(*picture.size) if picture.encoded is None else len(picture.ids())

    def embeddings(self, ids: Sequence[int]) -> tuple[list[int], MediaEmbeddings | None]:
        """Ids within the vocabulary, with stand-ins for media ids, and the rows to put there. Raises MediaGone."""
        places = [place for place, token in enumerate(ids) if token >= FIRST_MEDIA_ID]
        if not places:
            return list(ids), None
        rows, deep, pictured, plain, reach, narrow, behind = [], [], [], list(ids), np.zeros(len(ids), np.int64), False, None
        together: list[int] = []
        for place in places:
            number, _, row = split_media_token(ids[place])
            picture = self._numbered.get(number)
            if picture is None or picture.encoded is None or row >= len(picture.encoded.rows):
                raise self._gone()
            if picture.encoded.placeholder_id is not None:
                plain[place] = picture.encoded.placeholder_id
                continue
            pictured.append(place)
            rows.append(picture.encoded.rows[row])
            deep.append(None if picture.encoded.deep is None else picture.encoded.deep[:, row])
            if picture.encoded.bidirectional:
                reach[place], narrow = len(picture.encoded.rows) - 1 - row, picture.encoded.in_windows
            if picture.encoded.together:
                together.append(place)
            behind, plain[place] = picture.encoded.behind or behind, 0
        if not pictured:
            return plain, None
        among = None
        if together:  # text between images is attended to causally
            among = np.zeros(len(ids), np.int64)
            among[together], reach[together] = 1, together[-1] - np.array(together)
        return plain, MediaEmbeddings(np.array(pictured, np.int64), np.stack(rows).astype(np.float32, copy=False), _joined(deep),
                            reach if reach.any() else None, narrow, behind, among)

    def rows_of(self, number: int) -> np.ndarray:
        """Rows of the item with this number, for cross-attention. Raises MediaGone."""
        picture = self._numbered.get(number)
        if picture is None or picture.encoded is None:
            raise self._gone()
        return picture.encoded.rows

    def is_causal(self, token: int) -> bool:
        """Whether a media token belongs to an item without bidirectional attention, such as audio."""
        found = self._numbered.get(split_media_token(token)[0])
        return found is not None and found.encoded is not None and not found.encoded.bidirectional

    def needs_adapter(self, ids: Sequence[int]) -> Modality | None:
        """The modality of an item among the ids that needs the model's LoRA adapter; None for none."""
        found = (self._numbered.get(split_media_token(token)[0]) for token in ids if token >= FIRST_MEDIA_ID)
        return next((each.modality for each in found if each is not None and each.encoded is not None and each.encoded.needs_adapter), None)

    def _gone(self, which: str = "") -> MediaGone:
        """Names every modality of the model, since it is unknown which one the missing item had."""
        modalities = [*self.encoders] or [IMAGE_INPUT]
        nouns = " or ".join(f"{modality.noun} {which}" if which else f"an {modality.noun}" for modality in modalities)
        ways = " or ".join(f"--{modality.part} FILE, /{modality.part} FILE in a chat" for modality in modalities)
        return MediaGone(f"{nouns} of this conversation is needed again but no longer in memory",
                           f"attach it again ({ways}), or start over (/clear)")

    def _keep(self, picture: MediaItem) -> None:
        """Mark as newest and evict the oldest beyond KEPT bytes. Call with the lock held."""
        _, before = self._kept.pop(picture.digest, (None, 0))
        self._kept[picture.digest] = picture, (nbytes := ITEM_OVERHEAD_NBYTES + picture.nbytes)
        self._kept_nbytes += nbytes - before
        while self._kept_nbytes > MAX_RETAINED_NBYTES and len(self._kept) > 1:
            self._kept_nbytes -= self._kept.popitem(last=False)[1][1]


def _joined(deep: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Rows that early layers add, [layers, n, hidden], zero for items that have none; None where no item has any."""
    like = next((each for each in deep if each is not None), None)
    return None if like is None else np.stack([np.zeros_like(like) if each is None else each for each in deep], axis=1)


def open_media(model: Path, config: ModelConfig, mmproj: str | None = None, threads: int | None = None) -> MediaCache | None:
    """The media cache for a model folder, or for a GGUF file with its mmproj file (`mmproj`, or one next to it); None for a text-only
    model. `threads` encode. Raises EffllmError where the named mmproj file does not belong to the model."""
    try:
        media = MediaCache(*_senses(model, config, mmproj))
    except EffllmError as error:
        if mmproj is not None and not config.cross_attention_layers:  # cross-attention models have no mmproj, and text works without
            raise
        either = (IMAGE_INPUT, AUDIO_INPUT) if is_gguf(model) else (IMAGE_INPUT,)  # a GGUF file alone does not say which modalities it has
        return MediaCache(dict.fromkeys(modalities_of(raw_config(model)) or either, error))
    for encoder in media.encoders.values():
        encoder.threads = threads
    return media if media.encoders or media.refused else None


def _senses(model: Path, config: ModelConfig,
            mmproj: str | None) -> tuple[dict[Modality, MediaEncoder | EffllmError], np.ndarray | None, tuple[int, ...]]:
    if mmproj is None and not is_gguf(model):
        found = encoders_of(model, config)
        return found, mrope_axes(model, config) if found else None, canvas_markers(raw_config(model)) if found else ()
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
    media = MediaCache(*_senses(model, config, mmproj))
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
