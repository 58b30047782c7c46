"""Files of pictures and sounds that a person names: read before a model is loaded for them, and taken up by the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from .attachment import Attachment, named_path

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.catalog import ModelRef
    from ..runtime.images.senses import Sense
    from ..runtime.session import Session

ENDINGS = {"image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
           "audio": (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus")}


def read_pictures(images: Sequence[str], sounds: Sequence[str], ref: ModelRef) -> list[tuple[str, np.ndarray]]:
    """The name of each file and its points, or its samples. Raises what is wrong with one, or with giving any to this model, before weights
    are read."""
    if not images and not sounds:
        return []
    from ..runtime.config import read_config
    from ..runtime.images.album import demand_sight
    from ..runtime.images.senses import PICTURES, SOUNDS

    found = []
    for files, sense in ((images, PICTURES), (sounds, SOUNDS)):
        if files:
            demand_sight(ref.whole, read_config(ref.whole), ref.mmproj, sense)
            found += [(path.name, read_file(path, sense)) for path in map(named_path, files)]
    return found


def read_file(path: Path, sense: Sense) -> np.ndarray:
    """A picture as points uint8 [height, width, 3], a sound as samples float32 [n]. Raises UsageError."""
    if sense.part == "audio":
        from ..runtime.sounds.sound_file import read_sound

        return read_sound(path)
    from ..runtime.images.picture_file import read_picture

    return read_picture(path)


def taken(named: Sequence[tuple[str, np.ndarray]], session: Session) -> list[Attachment]:
    """As what goes with the next message."""
    made = [(name, session.picture(points)) for name, points in named]
    return [Attachment(name, "", session.engine.album.places(each.digest), each) for name, each in made]


def dropped_file(line: str, senses: Iterable[Sense]) -> tuple[str, Sense] | None:
    """The path in a line that is nothing but that of a picture, or of a sound, where such are among the `senses`, as a terminal writes it
    where a file is dropped on it; and what it is."""
    try:
        words = shlex.split(line)
        if len(words) != 1 or not named_path(words[0]).is_file():
            return None
    except (ValueError, OSError, EffllmError):
        return None
    return next(((words[0], sense) for sense in senses if Path(words[0]).suffix.lower() in ENDINGS[sense.part]), None)


def demand_words(raw: bool, images: Sequence[str], sounds: Sequence[str]) -> None:
    """Raises UsageError for pictures or sounds in a text that goes on as it stands."""
    if raw and (images or sounds):
        raise UsageError(f"--{'image' if images else 'audio'} has no place in --raw text", "drop one of them")
