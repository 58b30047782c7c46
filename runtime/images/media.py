"""The pictures and sounds of the prompts of one model, and the tokens that stand for them. What is said of pictures holds for both.

A place of a picture is a token with an id of its own, beyond every vocabulary: a number made from a hash of the picture's points, its
columns where they count, and which of its rows stands there. So whatever compares tokens (what a cache holds, what was saved, what a draft
goes on from) tells pictures frame_interval and knows one again that is sent a second time, without knowing of pictures. Only the embedding
looks up what the ids stand for, and what counts words leaves them out.

Rows are kept as long as somebody holds the `MediaItem`: a conversation those of its messages, a request its own. Of those that nobody holds
the newest stay, up to KEPT bytes: programs send every picture again with each question.
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

KEPT = 256 << 20  # bytes of rows that are kept though their pictures are not held
BESIDE = 2048  # of a picture, beside its points or rows: without it the smallest would be kept without an end
LOOK_S = 0.1  # between two looks at how far the tower is


class Ops(Protocol):
    """A backend of layers."""

    def to_host(self, x: object) -> np.ndarray: ...
    def from_host(self, x: np.ndarray) -> object: ...


@dataclass(eq=False)
class MediaItem:
    """One picture, film or sound. `digest` is made from its points and its `size`: height and width, of a film the frames before them, or
    how many samples; `points` uint8 [height, width, 3], [frames, height, width, 3] or float32 [samples] until it is `seen`.
    `frame_interval`: seconds from what is seen as one frame of a film to the next."""

    digest: str
    size: tuple[int, ...]
    modality: Modality
    points: np.ndarray | None = field(repr=False)
    encoded: EncodedMedia | None = field(default=None, repr=False)
    frame_interval: float = 0.0

    @property
    def mark(self) -> str:
        """What stands for it in a text."""
        return media_marker(self.digest, self.modality is AUDIO_INPUT)

    @property
    def number(self) -> int:
        """By which its tokens are known."""
        return int(self.digest, 16) >> 4 * len(self.digest) - HASH_BITS

    @property
    def nbytes(self) -> int:
        kept = (self.points,) if self.encoded is None else (self.encoded.rows, self.encoded.deep)
        return sum(each.nbytes for each in kept if each is not None)

    def ids(self, before: int = 0, within: bytes = b"") -> list[int]:
        """The tokens that stand for it behind so many others, once it is seen: words of the vocabulary around its own. `within`: of several
        that see each other, a hash of the text from the first to the last. Their tokens state it, so that what was read among others is
        not taken for what is read among these."""
        row, ids, columns = 0, list(self.encoded.numbered(before) if self.encoded.numbered
                                    else ()), self.encoded.grid[1] if self.encoded.grid else 0
        placed = range(self.encoded.framed, len(self.encoded.rows) - self.encoded.framed)
        for token in self.encoded.tokens:
            if token == ROW_PLACEHOLDER:
                said = self.encoded.stated[row] if self.encoded.stated else columns if row in placed else 0
                if (later := self._later(row)) is not None:
                    said = FRAME_STEP + min(later, (1 << COLUMN_BITS) - 1 - FRAME_STEP)
                if within:
                    said = int.from_bytes(within[(at := 2 * row % len(within)) : at + 2]) & (1 << COLUMN_BITS) - 1
                token, row = media_token_id(self.number, said, row), row + 1
            ids.append(token)
        return ids

    def _later(self, row: int) -> int | None:
        """Of the first row of a film's frame how much later that is than the one before; None of any other row."""
        frame, rest = divmod(row, self.encoded.grid[0] * self.encoded.grid[1]) if len(self.size) == 3 and self.encoded.grid else (0, 1)
        if rest or not frame:
            return None
        step = None if self.encoded.pace is None else self.encoded.pace * self.frame_interval
        return 1 if step is None else int(frame * step) - int((frame - 1) * step)


@dataclass(frozen=True)
class MediaEmbeddings:
    """Of a pass: the `places` int64 [n] at which `rows` float32 [n, hidden] stand in place of embeddings, and what is added there behind
    each of the first layers, or of those that `behind` lists: float32 [layers, n, hidden] or None. `reach`: how many tokens behind itself
    each of the pass sees, int64 [T]; None for none. `in_windows`: it does in layers with a window alone; `among`: which of the pass those
    before them see, int64 [T]; None for all."""

    places: np.ndarray
    rows: np.ndarray
    deep: np.ndarray | None = None
    reach: np.ndarray | None = None
    in_windows: bool = False
    behind: tuple[int, ...] | None = None
    among: np.ndarray | None = None

    def ends(self, first: int) -> tuple[np.ndarray, bool] | None:
        """The last position that each token sees, of a pass whose first is at `first`, and `in_windows`; None where it is its own. Raises
        RuntimeError for a pass that ends inside of what is to be seen."""
        if self.reach is None:
            return None
        seen = np.arange(len(self.reach)) + self.reach
        if seen.max() >= len(seen):
            raise RuntimeError("a pass ends inside a picture whose tokens see each other")
        return first + seen, self.in_windows

    def put(self, x: np.ndarray) -> None:
        """The rows into embeddings x[T, D], in place."""
        x[self.places] = self.rows

    def deepened(self, ops: Ops, x: object, layer: int) -> object:
        """The states x[T, D] behind a layer with what is added there."""
        layers = range(len(self.deep)) if self.deep is not None and self.behind is None else self.behind or ()
        if self.deep is None or layer not in layers:
            return x
        states = ops.to_host(x)
        states[self.places] += self.deep[layers.index(layer)]
        return ops.from_host(states)


class MediaCache:
    """The pictures of one model, and its sounds, by what it has for each of its senses: `sights` see and hear; what it has and cannot use
    here is in `refused`, with what is said of each that comes. `axes`: as of `mrope_axes`, `markers` as of `canvas_markers`;
    `bidirectional`: tokens of a picture that was seen see each other. Pictures may come from any thread; they are seen in the one that
    answers."""

    def __init__(self, modalities: Mapping[Modality, MediaEncoder | EffllmError], axes: np.ndarray | None = None,
                 markers: tuple[int, ...] = ()) -> None:
        self.refused = {modality: found for modality, found in modalities.items() if isinstance(found, EffllmError)}
        self.encoders: dict[Modality, MediaEncoder] = {modality: found for modality,
                                                       found in modalities.items() if modality not in self.refused}
        self.axes, self.markers, self.bidirectional = axes, markers, False
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[str, MediaItem] = WeakValueDictionary()
        self._numbered: WeakValueDictionary[int, MediaItem] = WeakValueDictionary()
        self._kept: OrderedDict[str, tuple[MediaItem, int]] = OrderedDict()  # and what it was counted as
        self._kept_nbytes = 0
        self._looks = threading.Lock()

    def add_video(self, frames: Sequence[Frame]) -> list[tuple[str, MediaItem]]:
        """Moments of a video: what stands before each picture, or film, and that."""
        return [(caption, self.add(points, frame_interval)) for caption, points,
                frame_interval in self.encoders[IMAGE_INPUT].video_inputs(frames)]

    def add(self, points: np.ndarray, frame_interval: float = 0.0) -> MediaItem:
        """The picture of these points, uint8 [height, width, 3], the film [frames, height, width, 3] whose frames are so many seconds
        `frame_interval`, or the sound of samples float32 [n]: the same one for the same points."""
        size = points.shape if points.ndim == 1 else points.shape[:-1]
        said = (*size, frame_interval) if frame_interval else size
        digest = hashlib.sha256(f"{' '.join(map(str, said))} ".encode() + np.ascontiguousarray(points).data.cast("B")).hexdigest()[:32]
        with self._lock:
            found = self._known.get(digest)
            if found is None:
                found = MediaItem(digest, size, modality_of(points), points, frame_interval=frame_interval)
                if found.number in self._numbered:
                    raise UsageError(f"two {found.modality.noun}s have the same number here, by a rare chance",
                                     "change one of them in a point")
                self._known[digest] = self._numbered[found.number] = found
            self._keep(found)
        return found

    def pending_nbytes(self) -> int:
        """Of the points of pictures that were not looked at yet."""
        with self._lock:
            return sum(each.nbytes for each in self._known.values() if each.encoded is None)

    def find(self, digest: str) -> MediaItem:
        """Raises PictureGone."""
        found = self._known.get(digest)
        if found is None:
            raise self._gone(digest[:8])
        return found

    def encode(self, pictures: Sequence[MediaItem], left: Callable[[], bool] = lambda: False) -> Iterator[Progress | Notice]:
        """Look at those that were not seen yet, until `left` says that nobody waits any more: the others stay unseen. Where several
        answers do, each picture is looked at once, and one at a time: a plan has room for one."""
        new = [each for each in dict.fromkeys(pictures) if each.encoded is None]
        counts: Counter[Modality] = Counter()
        for picture in new:
            modality, alike = picture.modality, sum(each.modality is picture.modality for each in new)
            counts[modality] += 1
            phase = f"{modality.phase} {f'the {modality.noun}' if alike == 1 else f'{modality.noun} {counts[modality]} of {alike}'}"
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
                raise UsageError(f"a {picture.modality.called(picture.size)} takes {rows} tokens", f"a smaller {picture.modality.noun}")
            with self._lock:
                picture.encoded, picture.points = seen, None
                self._keep(picture)
            tokens = len(picture.ids())
            beside = "" if seen.placeholder_id is None else f", and {len(seen.rows)} rows that some layers attend to"
            yield Notice(f"{picture.modality.called(picture.size)}: {tokens} token{'' if tokens == 1 else 's'}{beside}")

    def _looked(self, picture: MediaItem, phase: str, left: Callable[[], bool]) -> Generator[Progress, None, EncodedMedia | None]:
        """What a picture is; None where nobody waits any more."""
        work = EncodingJob()
        with ThreadPoolExecutor(1, "sight") as beside:
            looking = beside.submit(self.encoders[picture.modality].encode, picture.points, work)
            try:
                while True:  # said once at least, of a picture that is seen at once too
                    work.is_cancelled = work.is_cancelled or left()
                    yield Progress(phase, min(work.done, work.total), work.total, "layers")
                    if wait([looking], LOOK_S).done:
                        return looking.result()
            except EncodingCancelled:
                return None
            finally:
                work.is_cancelled = True

    def ids(self, digest: str, before: int = 0, within: bytes = b"") -> list[int]:
        """The tokens that stand for a picture behind so many others, as of `MediaItem.ids`; of one that was left unseen as many, which
        nothing is read by. Raises PictureGone."""
        picture = self.find(digest)
        if picture.encoded:
            return picture.ids(before, within)
        return [media_token_id(picture.number, 0, row) for row in range(self.token_count(digest))]

    def pending(self, digest: str) -> list[MediaItem]:
        """The picture, where it is at hand and was not looked at."""
        picture = self._known.get(digest)
        return [picture] if picture is not None and picture.encoded is None else []

    def token_count(self, digest: str) -> int:
        """How many tokens a picture takes, seen or not."""
        picture = self.find(digest)
        return self.encoders[picture.modality].token_count(*picture.size) if picture.encoded is None else len(picture.ids())

    def embeddings(self, ids: Sequence[int]) -> tuple[list[int], MediaEmbeddings | None]:
        """Ids as the vocabulary has them, a word's in place of each picture's, and what stands there instead. Raises PictureGone."""
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
        if together:  # words between pictures are seen by what comes behind them alone
            among = np.zeros(len(ids), np.int64)
            among[together], reach[together] = 1, together[-1] - np.array(together)
        return plain, MediaEmbeddings(np.array(pictured, np.int64), np.stack(rows).astype(np.float32, copy=False), _joined(deep),
                            reach if reach.any() else None, narrow, behind, among)

    def rows_of(self, number: int) -> np.ndarray:
        """What layers attend to of the picture of this number. Raises PictureGone."""
        picture = self._numbered.get(number)
        if picture is None or picture.encoded is None:
            raise self._gone()
        return picture.encoded.rows

    def is_causal(self, token: int) -> bool:
        """Whether a token is known to stand for a row that sees none behind it, as those of a sound."""
        found = self._numbered.get(split_media_token(token)[0])
        return found is not None and found.encoded is not None and not found.encoded.bidirectional

    def needs_adapter(self, ids: Sequence[int]) -> Modality | None:
        """Of which sense any of the ids is whose rows are read by an adapter; None where there is none."""
        found = (self._numbered.get(split_media_token(token)[0]) for token in ids if token >= FIRST_MEDIA_ID)
        return next((each.modality for each in found if each is not None and each.encoded is not None and each.encoded.needs_adapter), None)

    def _gone(self, which: str = "") -> MediaGone:
        """Of what is not at hand it is not known whether it was seen or heard, where the model does both."""
        modalities = [*self.encoders] or [IMAGE_INPUT]
        nouns = " or ".join(f"{modality.noun} {which}" if which else f"a {modality.noun}" for modality in modalities)
        ways = " or ".join(f"--{modality.part} FILE, /{modality.part} FILE in a chat" for modality in modalities)
        return MediaGone(f"{nouns} of this conversation is needed again and is no longer at hand",
                           f"give it once more ({ways}), or begin anew (/clear)")

    def _keep(self, picture: MediaItem) -> None:
        """The newest of all; the oldest go where there are too many bytes. Under the lock."""
        _, before = self._kept.pop(picture.digest, (None, 0))
        self._kept[picture.digest] = picture, (nbytes := BESIDE + picture.nbytes)
        self._kept_nbytes += nbytes - before
        while self._kept_nbytes > KEPT and len(self._kept) > 1:
            self._kept_nbytes -= self._kept.popitem(last=False)[1][1]


def _joined(deep: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """What early layers add to each row [layers, n, hidden]: nothing to those of a sound; None where they add to none."""
    like = next((each for each in deep if each is not None), None)
    return None if like is None else np.stack([np.zeros_like(like) if each is None else each for each in deep], axis=1)


def open_media(model: Path, config: ModelConfig, mmproj: str | None = None, threads: int | None = None) -> MediaCache | None:
    """For the model of a folder, or of a GGUF file, whose tower lies in a file of its own, `mmproj` or one beside it; None where it takes
    no pictures and no sounds. So many `threads` look at them. Raises EffllmError where the file that was named does not belong to the
    model."""
    try:
        media = MediaCache(*_senses(model, config, mmproj))
    except EffllmError as error:
        if mmproj is not None and not config.cross_layers:  # whose pictures no file of this kind brings, and whose texts need none
            raise
        either = (IMAGE_INPUT, AUDIO_INPUT) if is_gguf(model) else (IMAGE_INPUT,)  # of a file alone it is not known which it takes
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
    """Bytes that each sense takes in a run of a model, as of `open_media`; of None, and where no picture is read, there is none."""
    media = None if model is None else open_media(Path(model), config, mmproj, threads)
    return {} if media is None else {modality: encoder.bytes_needed() for modality, encoder in media.encoders.items()}


def require_media(media: MediaCache | None, modality: Modality = IMAGE_INPUT) -> MediaCache:
    """The album of a model whose pictures, or sounds, are read. Raises EffllmError for another."""
    if media is not None and modality in media.refused:
        raise media.refused[modality]
    if media is None or modality not in media.encoders:
        raise UsageError(*modality.refusal)
    return media


def check_modality(model: Path, config: ModelConfig, mmproj: str | None = None, modality: Modality | None = IMAGE_INPUT) -> None:
    """Raises EffllmError for a model, as of `open_media`, that takes no pictures, or no sounds, or whose are not read here; of no `sense`
    in particular for one that takes neither."""
    if modality is not None and not is_gguf(model) and modality not in (IMAGE_INPUT, *modalities_of(raw_config(model))):
        raise UsageError(*modality.refusal)
    media = MediaCache(*_senses(model, config, mmproj))
    if modality is not None:
        require_media(media, modality)


def text_ids(ids: Sequence[int]) -> list[int]:
    """Ids without those of pictures."""
    return [token for token in ids if token < FIRST_MEDIA_ID]


def check_token_ids(ids: Sequence[int], vocabulary: int, media: MediaCache | None) -> None:
    """Raises UsageError for a token that is neither a word of so many nor, where there are some, of a picture."""
    if bad := [token for token in ids if not 0 <= token < vocabulary and (media is None or token < FIRST_MEDIA_ID)]:
        raise UsageError(f"token id {bad[0]} is outside the vocabulary of {vocabulary}",
                         "the tokenizer is of another model, or the text has a word in it that stands for a picture")
