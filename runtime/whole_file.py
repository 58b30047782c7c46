"""Text files that appear whole or not at all: a conversation that is saved, one that is exported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .. import not_written


def write_whole(path: Path, text: str, hint: str) -> None:
    """Write `text` as UTF-8 under its name in one step; folders on the way are made. What was there before stays until then.

    Raises EffllmError with `hint` as the next step (no permission, a folder of that name), DiskFull with room or `hint` as that: in a chat
    nothing is run again.
    """
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        part = Path(name)
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.replace(part, path)
    except OSError as error:
        raise not_written(error, f"cannot write {path}", hint, f"make room there, or {hint}") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
