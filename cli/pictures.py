"""Files of pictures that a person names: read before a model is loaded for them, and taken up by the conversation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from .attachment import Attachment, named_path

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.catalog import ModelRef
    from ..runtime.session import Session

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def read_pictures(files: Sequence[str], ref: ModelRef) -> list[tuple[str, np.ndarray]]:
    """The name and the points of each file. Raises what is wrong with one, or with giving any to this model, before weights are read."""
    if not files:
        return []
    from ..runtime.config import read_config
    from ..runtime.images.album import demand_sight
    from ..runtime.images.picture_file import read_picture

    demand_sight(ref.whole, read_config(ref.whole), ref.mmproj)
    return [(path.name, read_picture(path)) for path in map(named_path, files)]


def taken(named: Sequence[tuple[str, np.ndarray]], session: Session) -> list[Attachment]:
    """As what goes with the next message."""
    made = [(name, session.picture(points)) for name, points in named]
    return [Attachment(name, "", session.engine.album.places(each.digest), each) for name, each in made]


def dropped_picture(line: str) -> str | None:
    """The path in a line that is nothing but that of a picture, as a terminal writes it where a file is dropped on it."""
    try:
        words = shlex.split(line)
        is_picture = len(words) == 1 and Path(words[0]).suffix.lower() in ENDINGS and named_path(words[0]).is_file()
    except (ValueError, OSError, EffllmError):
        return None
    return words[0] if is_picture else None


def demand_words(raw: bool, files: Sequence[str]) -> None:
    """Raises UsageError for pictures in a text that goes on as it stands."""
    if raw and files:
        raise UsageError("--image has no place in --raw text", "drop one of them")
