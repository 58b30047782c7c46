"""KV page codecs: how the exact tokens of a full page become a sealed record. Pure functions of bytes.

The raw codecs keep 32- or 16-bit floats: sealing adds the header and the checksum and changes nothing else.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import numpy as np

from .. import UsageError
from ..kernels.layout import F16, F32, HEADER_NBYTES, PAGE, PageHeader, PageLayout


@dataclass(frozen=True)
class RawCodec:
    """`stored` is the type of both the exact tokens and the sealed pages."""

    stored: int

    @property
    def bits(self) -> int:
        return 32 if self.stored == F32 else 16

    def layout(self, kv_heads: int, head_dim: int) -> PageLayout:
        return PageLayout(kv_heads, head_dim, self.stored)

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None:
        """`exact` and `out` are layer-pages (uint8 `[layer_page_nbytes]`); writes every head's record, header and checksum included."""
        for head in range(layout.kv_heads):
            start = head * layout.record_nbytes
            body = slice(start + HEADER_NBYTES, start + HEADER_NBYTES + 2 * layout.side_nbytes)
            out[body] = exact[body]
            header = PageHeader(layer, head, first_token, PAGE, self.bits, self.bits, crc32=zlib.crc32(out[body]))
            out[start : start + HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)

    def check(self, page: np.ndarray, layout: PageLayout) -> None:
        """Verify a layer-page that came from a file. Raises ValueError naming the head whose bytes changed."""
        for head in range(layout.kv_heads):
            start = head * layout.record_nbytes
            header = PageHeader.unpack(page[start : start + HEADER_NBYTES].tobytes())
            body = page[start + HEADER_NBYTES : start + HEADER_NBYTES + 2 * layout.side_nbytes]
            if zlib.crc32(body) != header.crc32:
                raise ValueError(f"KV page of layer {header.layer}, head {head}, token {header.first_token}: checksum differs")


CODECS = {"32bit": RawCodec(F32), "16bit": RawCodec(F16)}
PACKED = re.compile(r"auto|[234568]bit|k[234568]v[234568]")
UNPACKED = "16bit"  # what stands in for a packed cache


def is_packed(name: str) -> bool:
    """Does a `--kv` value ask for packed pages, which have a format and no kernels yet?"""
    return PACKED.fullmatch(name) is not None


def codec(name: str) -> RawCodec:
    """The codec of a `--kv` value. Raises UsageError naming those that exist."""
    if name not in CODECS:
        raise UsageError(f"--kv {name} is not in this version", f"use --kv {' or '.join(CODECS)}")
    return CODECS[name]
