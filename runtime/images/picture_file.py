"""Files of pictures as points. Any format that Pillow reads; what a camera says of which side is up is heeded, and what shines through is
on white. A file is a stranger's: no more points are made of it than MOST_POINTS, whatever it claims."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np

from ... import UsageError

MOST_BYTES = 64 << 20
MOST_POINTS = 64_000_000
ANOTHER = "give one as PNG, JPEG, WebP, GIF or BMP"


def read_picture(path: Path) -> np.ndarray:
    """The points of a file, uint8 [height, width, 3]. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "give the path of a picture") from error
    return decode_picture(data, str(path))


def decode_picture(data: bytes, source: str) -> np.ndarray:
    """The points of a picture in the bytes of a file, uint8 [height, width, 3]. Raises UsageError that begins with its `source`."""
    if len(data) > MOST_BYTES:
        raise UsageError(f"{source} has more than {MOST_BYTES >> 20} MiB, too much for a picture", "make it smaller")
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are odd in small things; a bomb is told from its size below
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > MOST_POINTS:
                    raise UsageError(f"{source} has {image.width} × {image.height} points, more than {MOST_POINTS:,}", "make it smaller")
                image.load()
                upright = ImageOps.exif_transpose(image)
                return np.array(_opaque(upright))
    except UsageError:
        raise
    except Image.DecompressionBombError as error:
        raise UsageError(f"{source} claims more than {MOST_POINTS:,} points", "make it smaller") from error
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is no picture that can be read", ANOTHER) from error


def _opaque(image: object) -> object:
    """In three colours, on white where it shines through."""
    from PIL import Image

    if "A" in image.getbands() or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    if image.mode.startswith("I") or image.mode == "F":  # gray of 16 bits or more, which converting would cut off at 255
        gray = np.asarray(image, np.float32)
        most = 65535.0 if gray.max(initial=0.0) > 255 else 255.0
        image = Image.fromarray((gray.clip(0, most) * (255 / most)).astype(np.uint8))
    return image.convert("RGB")
