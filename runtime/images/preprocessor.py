"""Image preprocessing as preprocessor_config.json describes it: resize, crop, tile, normalize.

Resizing is Pillow's, on bytes; normalization is a lookup table per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ... import ModelNotFound, UsageError
from ..config_reader import Keys, read_json, show

FILE, FILMS, OUTER = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
NEAREST, LANCZOS, BILINEAR, BICUBIC = 0, 1, 2, 3  # as files and Pillow number them
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF, IMAGENET_MEAN, IMAGENET_STD = [0.5, 0.5, 0.5], [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MOST_SIDE = 1 << 14


def read_processor(folder: Path, known: Sequence[str]) -> tuple[Keys, Keys]:
    """The image processor's config and the config of the processor around it ({} without one). `known`: processor types of the family.
    Raises UsageError where there is none, or another type."""
    outer = _json(folder / OUTER)
    inside, where = _json(folder / FILE), FILE
    if inside is None:
        inside, where = (outer or {}).get("image_processor"), OUTER
    if not isinstance(inside, dict):
        raise UsageError(f"{folder} has no {FILE}, which describes the image preprocessing of this model",
                         "download that file from the model's repository into its folder")
    keys = Keys(inside, where)
    kind = keys.text("image_processor_type", None) or keys.text("feature_extractor_type", known[0])
    if kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor") not in known:
        raise UsageError(f"{where}: image preprocessor {show(kind)} is not supported for this model",
                         f"known: {', '.join(known)}; text-only works")
    return keys, Keys(outer or {}, OUTER)


def read_films(folder: Path) -> Keys:
    """The video processor's config; {} without one."""
    inside, where = _json(folder / FILMS), FILMS
    if inside is None:
        inside, where = (_json(folder / OUTER) or {}).get("video_processor"), OUTER
    return Keys(inside if isinstance(inside, dict) else {}, where)


def _json(path: Path) -> dict[str, object] | None:
    try:
        return read_json(path)
    except ModelNotFound:
        return None


def sides(keys: Keys, name: str, default: object) -> dict[str, int]:
    """A size: {"height", "width"}, {"shortest_edge"}, {"longest_edge"} and the like; a plain number means a square, for `size` the shortest
    edge."""
    value = keys.raw.get(name)
    value = default if value is None else value
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"shortest_edge": value} if name == "size" else {"height": value, "width": value}
    if not isinstance(value, dict) or not value:
        raise keys.fail(name, "a size")
    found = {key: side for key, side in value.items() if side is not None}
    if any(isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= 1 << 31 for side in found.values()):
        raise keys.fail(name, "a size")
    return found


def square(keys: Keys, name: str, default: object) -> tuple[int, int]:
    """(height, width) of a size that states both."""
    found = sides(keys, name, default)
    height, width = found.get("height", 0), found.get("width", 0)
    if not (1 <= height <= MOST_SIDE and 1 <= width <= MOST_SIDE):
        raise keys.fail(name, f"a height and a width of 1 to {MOST_SIDE}")
    return height, width


def filter_of(keys: Keys, default: int) -> int:
    found = keys.integer("resample", default, low=0)
    if found not in (NEAREST, LANCZOS, BILINEAR, BICUBIC, 4, 5):
        raise keys.fail("resample", "0 (nearest), 1 (Lanczos), 2 (bilinear) or 3 (bicubic)")
    return found


def resized(picture: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Resize an image uint8 [height, width, 3]."""
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((width, height), resample=Image.Resampling(resample)))


def resized_in_floats(picture: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Resize uint8 [height, width, 3] in float32, without clipping overshoot."""
    from PIL import Image

    made = [Image.fromarray(picture[..., channel].astype(np.float32)).resize((width, height), resample=Image.Resampling(resample))
            for channel in range(3)]
    return np.stack([np.asarray(each) for each in made], axis=-1)


def shorter_to(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width) with the shorter side scaled to `side`."""
    long = int(side * max(height, width) / min(height, width))
    return (side, long) if height <= width else (long, side)


def cropped(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Center crop; black beyond the borders."""
    high, wide = max(height, picture.shape[0]), max(width, picture.shape[1])
    if (high, wide) != picture.shape[:2]:
        top, left = (-(-(size - own) // 2) for size, own in zip((high, wide), picture.shape[:2], strict=True))
        whole = np.zeros((high, wide, 3), np.uint8)
        whole[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
        # the middle is that of the picture as it was: for odd borders the ceiling above is what makes them the same
        top, left = ((own - size) // 2 + before for own, size, before in
                     zip(picture.shape[:2], (height, width), (top, left), strict=True))
        return whole[max(0, top) : min(high, top + height), max(0, left) : min(wide, left + width)]
    top, left = (high - height) // 2, (wide - width) // 2
    return picture[top : top + height, left : left + width]


def tiles_of(picture: np.ndarray, high: int, wide: int) -> list[np.ndarray]:
    """Split an image into tiles of this height and width, row by row."""
    return [picture[row : row + high, column : column + wide] for row in range(0, picture.shape[0], high)
            for column in range(0, picture.shape[1], wide)]


def squared(picture: np.ndarray, colour: Sequence[int]) -> np.ndarray:
    """Pad an image to a square with a background colour."""
    height, width = picture.shape[:2]
    if height == width:
        return picture
    side = max(height, width)
    whole = np.empty((side, side, 3), np.uint8)
    whole[:] = np.array(colour, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    whole[top : top + height, left : left + width] = picture
    return whole


class Scale:
    """Normalization: bytes times `rescale_factor`, minus `image_mean`, divided by `image_std`."""

    def __init__(self, keys: Keys, mean: Sequence[float], std: Sequence[float]) -> None:
        factor = keys.number("rescale_factor", 1 / 255) if keys.flag("do_rescale", True) else 1.0
        values = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)[:, None].repeat(3, 1)
        self.mean, self.std = _colours(keys, "image_mean", mean), _colours(keys, "image_std", std)
        if keys.flag("do_normalize", True):
            values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        self.table = values

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        """uint8 [height, width, 3] -> float32."""
        return np.stack([self.table[:, channel][picture[..., channel]] for channel in range(3)], axis=-1)


def _colours(keys: Keys, name: str, default: Sequence[float]) -> tuple[float, ...]:
    if keys.raw.get(name) is None:
        return tuple(default)
    return keys.numbers(name, 3, or_zero=name == "image_mean")
