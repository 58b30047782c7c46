"""Row-column bundling of MLP neurons ("LLM in a flash"): a neuron's row of `up` and column of `down` as one record, read on its own.

Direct reads fetch whole disk blocks, so a record is a whole number of blocks, or a power of two of records fills a block. There is no
other padding: longer reads would not be faster while the program waits for the disk, and neighbours of a needed neuron are hardly ever
needed with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .weight import RAW_NUMPY

BLOCK = 4096
WIDTH_MULTIPLE, FFN_MULTIPLE = 16, 64  # what the lanes of the widest kernels ask for: a folder runs on every machine


@dataclass(frozen=True)
class BundleLayout:
    """`width`: values of a row of `up` (where `has_up`) and of a column of `down`. Figures are of one neuron unless said."""

    scheme: str
    width: int
    has_up: bool

    @property
    def item(self) -> int:
        return RAW_NUMPY[self.scheme].itemsize

    @property
    def used(self) -> int:
        """Bytes of weights in a record."""
        return (1 + self.has_up) * self.width * self.item

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return 1 << (self.used - 1).bit_length() if self.used < BLOCK else -(-self.used // BLOCK) * BLOCK

    @property
    def together(self) -> int:
        """Records fetched by one read of whole blocks."""
        return max(1, BLOCK // self.stride)

    def shape(self, ffn: int) -> tuple[int, int]:
        """Stored shape of a layer's bundles."""
        return ffn, self.stride // self.item

    def pack(self, up: np.ndarray | None, down: np.ndarray) -> np.ndarray:
        """Rows of `up` [n, width] and columns of `down` [width, n], as stored -> bundles [n, stride / item]."""
        out = np.zeros(self.shape(down.shape[1]), RAW_NUMPY[self.scheme])
        if self.has_up:
            out[:, : self.width] = up
        out[:, self.has_up * self.width : (1 + self.has_up) * self.width] = down.T
        return out

    def unpack(self, bundles: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """What `pack` was given."""
        up = bundles[:, : self.width] if self.has_up else None
        return up, bundles[:, self.has_up * self.width : (1 + self.has_up) * self.width].T


def bundle_name(down: str) -> str:
    """Name of the bundle tensor that replaces the matrix `down`."""
    return f"{down.removesuffix('.weight')}.bundles"
