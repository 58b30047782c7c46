"""Image, video and audio files named by the user: decoded before a model is loaded, then attached to the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .. import EffllmError, UsageError
from .attachment import Attachment, named_path
from .flags import flag
from .options import ANSWER, FlagGroup

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.catalog import ModelRef
    from ..runtime.images.modality import Modality
    from ..runtime.images.video_file import Frame
    from ..runtime.session import Session
    from .screen import Screen

ENDINGS = {"image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
           "video": (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"),
           "audio": (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a")}


@dataclass(frozen=True)
class MediaFile:
    """A decoded file: its `name`, its kind `part` (image, video or audio), and its pixels uint8 [height, width, 3], samples float32 [n], or
    video frames."""

    name: str
    part: str
    values: np.ndarray | list[Frame]


@dataclass(frozen=True)
class MediaFlags(FlagGroup):
    """The media flags of a prompt."""

    image: Annotated[list[str] | None, flag(ANSWER, "--image", "FILE", "an image to send with the prompt; may be repeated")] = None
    video: Annotated[list[str] | None, flag(ANSWER, "--video", "FILE",
                                            "a video to send with the prompt, as a series of frames; may be repeated")] = None
    frames: Annotated[int | None, flag(ANSWER, "--frames", "N", "maximum frames sampled from a video, at most one per second (16)")] = None
    audio: Annotated[list[str] | None, flag(ANSWER, "--audio", "FILE", "an audio clip to send with the prompt; may be repeated")] = None

    @property
    def named(self) -> list[tuple[str, str]]:
        """Each file with its kind, images first."""
        kinds = (("image", self.image), ("video", self.video), ("audio", self.audio))
        return [(part, file) for part, files in kinds for file in files or ()]


def read_media(asked: MediaFlags, ref: ModelRef, screen: Screen) -> list[MediaFile]:
    """Decode the files. Raises for an invalid file, or for a model that takes none, before weights are read."""
    if asked.frames is not None:
        from ..runtime.images.video_file import demand_count

        demand_count(asked.frames)
        if not asked.video and "frames" not in asked.settled:
            raise UsageError("--frames needs a video", "add one: --video FILE")
    if not asked.named:
        return []
    from ..runtime.config import read_config
    from ..runtime.images.media import check_modality

    for modality in dict.fromkeys(sense_of(part) for part, _ in asked.named):
        check_modality(ref.whole, read_config(ref.whole), ref.mmproj, modality)
    found = []
    for part, file in asked.named:
        with screen.waiting(f"reading {file}"):
            found.append(read_media_file(named_path(file), part, asked.frames))
    return found


def sense_of(part: str) -> Modality:
    from ..runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT

    return AUDIO_INPUT if part == "audio" else IMAGE_INPUT


def read_media_file(path: Path, part: str, frames: int | None = None) -> MediaFile:
    """Raises UsageError."""
    if part == "audio":
        from ..runtime.audio.audio_file import read_audio

        return MediaFile(path.name, part, read_audio(path))
    if part == "video":
        from ..runtime.images.video_file import FRAMES, read_video

        return MediaFile(path.name, part, read_video(path, frames or FRAMES))
    from ..runtime.images.image_file import read_image

    return MediaFile(path.name, part, read_image(path))


def as_media_items(given: Sequence[MediaFile], session: Session) -> list[Attachment]:
    """As attachments of the next message."""
    found = []
    for each in given:
        shown = session.film(each.values) if isinstance(each.values, list) else [("", session.picture(each.values))]
        tokens = sum((session.count(words) if words else 0) + session.engine.media.token_count(picture.digest) for words, picture in shown)
        flat = tuple(piece for pair in shown for piece in pair if piece != "")
        found.append(Attachment(each.name, "", tokens, each.part, flat))
    return found


def dropped_file(line: str, modalities: Iterable[Modality]) -> tuple[str, str] | None:
    """The path in a line that consists of nothing but the path of a media file, as terminals insert it on drag and drop, and its kind,
    which has to be among `senses`."""
    try:
        words = shlex.split(line)
        if len(words) != 1 or not named_path(words[0]).is_file():
            return None
    except (ValueError, OSError, EffllmError):
        return None
    suffix, modalities = Path(words[0]).suffix.lower(), tuple(modalities)
    return next(((words[0], part) for part, endings in ENDINGS.items() if suffix in endings and sense_of(part) in modalities), None)


def refuse_raw_media(raw: bool, asked: MediaFlags) -> None:
    """Raises UsageError for media with --raw."""
    if raw and asked.named:
        raise UsageError(f"--{asked.named[0][0]} cannot be combined with --raw", "drop one of them")
