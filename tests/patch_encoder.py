"""A vision encoder that is a product with fixed numbers, for tests of what happens to its rows: no model library has to be loaded for it.

Run as a program it is `effllm` for models whose folder has a file `patches`.
"""

import sys
from pathlib import Path

import numpy as np

from effllm.runtime.images import ROW_PLACEHOLDER, EncodedMedia, media
from effllm.runtime.images.modality import IMAGE_INPUT, Modality

IMAGE, SIDE, ROWS = "<image>", 8, 16


class PatchSight:
    """One row for each of 16 patches of an image, whatever its size. `seen` counts images."""

    modality = IMAGE_INPUT
    placeholder = placeholder_text = IMAGE
    joint_attention = shares_border = False

    def __init__(self, width: int) -> None:
        self.matrix = np.random.default_rng(3).normal(0, 0.2, (3 * SIDE * SIDE, width)).astype(np.float32)
        self.seen = 0

    def encode(self, picture: np.ndarray, work: object) -> EncodedMedia:
        self.seen += 1
        rows, columns = (np.linspace(0, size - 1, 4 * SIDE).astype(int) for size in picture.shape[:2])
        small = picture[rows][:, columns].astype(np.float32) / 127.5 - 1
        patches = small.reshape(4, SIDE, 4, SIDE, 3).swapaxes(1, 2).reshape(ROWS, -1)
        return EncodedMedia(patches @ self.matrix, (ROW_PLACEHOLDER,) * ROWS)

    def video_inputs(self, frames: list) -> list[tuple[str, np.ndarray, float]]:
        return [(f"<{each.second:.1f} seconds>", each.pixels, 0.0) for each in frames]

    def token_count(self, height: int, width: int) -> int:
        return ROWS

    def bytes_needed(self) -> int:
        return self.matrix.nbytes


def patch_sights_of(folder: Path, config: object) -> dict[Modality, PatchSight]:
    return {IMAGE_INPUT: PatchSight(config.hidden_size)} if (folder / "patches").exists() else {}


if __name__ == "__main__":
    from effllm.__main__ import main

    media.encoders_of = patch_sights_of
    sys.exit(main())
