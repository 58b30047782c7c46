"""Image, video and audio files named by the user: decoded before a model is loaded, then attached to the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .. import EffllmError, UsageError
from .attachment import Attachment, expand_path
from .flags import flag
from .options import ANSWER, FlagGroup

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.catalog import ModelRef
    from ..runtime.images.modality import Modality
    from ..runtime.images.video_file import Frame
    from ..runtime.session import Session
    from .screen import Screen

EXTENSIONS = {"image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
           "video": (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"),
           "audio": (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a")}


@dataclass(frozen=True)
class MediaFile:
    """A decoded file."""

    name: str
    part: str  # image, video or audio
    values: np.ndarray | list[Frame]  # pixels uint8 [height, width, 3], samples float32 [n], or video frames


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
        """(kind, file) of each file, images first."""
        kinds = (("image", self.image), ("video", self.video), ("audio", self.audio))
        return [(part, file) for part, files in kinds for file in files or ()]


def read_media(flags: MediaFlags, ref: ModelRef, screen: Screen) -> list[MediaFile]:
    """Decode the files. Raises EffllmError for an invalid file, or for a model that does not take this kind, before weights are read."""
    if flags.frames is not None:
        from ..runtime.images.video_file import demand_count

        demand_count(flags.frames)
        if not flags.video and "frames" not in flags.from_settings:
            raise UsageError("--frames needs a video", "add one: --video FILE")
    if not flags.named:
        return []
    from ..runtime.config import read_config
    from ..runtime.images.media import check_modality

    for modality in dict.fromkeys(modality_of(part) for part, _ in flags.named):
        check_modality(ref.whole, read_config(ref.whole), ref.mmproj, modality)
    files = []
    for part, file in flags.named:
        with screen.waiting(f"reading {file}"):
            files.append(read_media_file(expand_path(file), part, flags.frames))
    return files


def modality_of(part: str) -> Modality:
    """The input modality of a kind of file; videos are images."""
    from ..runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT

    return AUDIO_INPUT if part == "audio" else IMAGE_INPUT


def read_media_file(path: Path, part: str, frames: int | None = None) -> MediaFile:
    """Decode a file of kind `part`; `frames`: the maximum for a video. Raises UsageError."""
    if part == "audio":
        from ..runtime.audio.audio_file import read_audio

        return MediaFile(path.name, part, read_audio(path))
    if part == "video":
        from ..runtime.images.video_file import FRAMES, read_video

        return MediaFile(path.name, part, read_video(path, frames or FRAMES))
    from ..runtime.images.image_file import read_image

    return MediaFile(path.name, part, read_image(path))


def as_media_items(files: Sequence[MediaFile], session: Session) -> list[Attachment]:
    """The files as attachments of the next message."""
    attachments = []
    for file in files:
        items = session.add_video(file.values) if isinstance(file.values, list) else [("", session.add_media(file.values))]
        tokens = sum((session.count(text) if text else 0) + session.engine.media.token_count(picture.digest) for text, picture in items)
        media = tuple(piece for pair in items for piece in pair if piece != "")
        attachments.append(Attachment(file.name, "", tokens, file.part, media))
    return attachments


def dropped_file(line: str, modalities: Iterable[Modality]) -> tuple[str, str] | None:
    """(path, kind) if a line is nothing but the path of a media file, as terminals insert it on drag and drop; None for other lines and
    for kinds that are not among `modalities`."""
    try:
        words = shlex.split(line)
        if len(words) != 1 or not expand_path(words[0]).is_file():
            return None
    except (ValueError, OSError, EffllmError):
        return None
    suffix, modalities = Path(words[0]).suffix.lower(), tuple(modalities)
    return next(((words[0], part) for part, endings in EXTENSIONS.items() if suffix in endings and modality_of(part) in modalities), None)


def refuse_raw_media(raw: bool, flags: MediaFlags) -> None:
    """Raises UsageError for media with --raw."""
    if raw and flags.named:
        raise UsageError(f"--{flags.named[0][0]} cannot be combined with --raw", "drop one of them")
