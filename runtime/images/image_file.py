"""Decoding of image files to pixels. EXIF orientation is applied and transparency is composited on white.

Files are untrusted: at most MOST_POINTS pixels are decoded, whatever the header claims, and only FORMATS are tried. Other formats of Pillow
hand the file to another program (EPS to Ghostscript) or contain images of other sizes than they claim (ICO, ICNS).
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numpy as np

from ... import UsageError
from ..files.prompt_files import read_prompt_file

MOST_BYTES = 64 << 20
MOST_POINTS = 64_000_000
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "PPM")
ANOTHER = "give one as PNG, JPEG, WebP, GIF or BMP"
# Unsupported formats by magic number, and how to convert them.
OTHERWISE = ((rb"%PDF", "make images of its pages: pdftoppm -r 150 -png FILE page"),
             (rb"....ftyp(?:hei|hev|mif|msf)", "make a JPEG of it: heif-convert FILE image.jpg"),
             (rb"\s*<(?:svg|\?xml)", "make a PNG of it: rsvg-convert FILE -o image.png"),
             (rb"\xff\x0a|\0\0\0\x0cJXL ", "make a PNG of it: djxl FILE image.png"))
ORIENTATION = 0x0112  # in EXIF: 1 as it is, 2 to 8 the turns and mirrors below
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}


def read_image(path: Path) -> np.ndarray:
    """Pixels of a file, uint8 [height, width, 3]. Raises UsageError."""
    return decode_image(read_prompt_file(path, MOST_BYTES, "an image"), str(path))


def decode_image(data: bytes, source: str) -> np.ndarray:
    """Pixels of an encoded image, uint8 [height, width, 3]. Raises UsageError with a message that begins with `source`."""
    if len(data) > MOST_BYTES:
        raise UsageError(f"{source} has more than {MOST_BYTES >> 20} MiB, the limit for images", "make it smaller")
    from PIL import Image

    Image.init()  # a build of Pillow may lack some
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # minor oddities; decompression bombs are caught by size below
            with Image.open(io.BytesIO(data), formats=[each for each in FORMATS if each in Image.OPEN]) as image:
                if image.width * image.height > MOST_POINTS:
                    raise UsageError(f"{source} has {image.width} × {image.height} pixels, more than {MOST_POINTS:,}", "make it smaller")
                image.load()
                return np.array(_opaque(_upright(image)))
    except UsageError:
        raise
    except Image.DecompressionBombError as error:
        raise UsageError(f"{source} claims more than {MOST_POINTS:,} pixels", "make it smaller") from error
    except Exception as error:  # its decoders raise whatever a broken file leads them to
        raise UsageError(f"{source} is not a readable image", _hint(data)) from error


def _hint(data: bytes) -> str:
    return next((hint for begins, hint in OTHERWISE if re.match(begins, data[:64], re.DOTALL)), ANOTHER)


def _upright(image: object) -> object:
    """As whoever took it saw it. Notes that cannot be read say nothing: they are beside the picture."""
    from PIL import Image

    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # as of the file itself
        return image
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _opaque(image: object) -> object:
    """In three colours, on white where it shines through."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return _of_deep_gray(image)
    if "A" in image.getbands() or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _of_deep_gray(image: object) -> object:
    """Grayscale of 16 bits or more, which conversion would clip at 255. White is known for 16 bits and guessed for formats that do not say:
    1 for fractions, else 255 or 65535."""
    from PIL import Image

    gray = np.asarray(image, np.float32)
    highest = gray.max(initial=0.0)
    if image.mode.startswith("I;16") or highest > 255:
        white = 65535.0
    else:
        white = 1.0 if image.mode == "F" and highest <= 1 else 255.0
    points = (np.nan_to_num(gray, nan=0.0).clip(0, white) * (255 / white)).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        points[gray == clear] = 255
    return Image.fromarray(points).convert("RGB")
