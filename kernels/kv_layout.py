"""Layout of a packed KV record (one layer, one KV head, 10 to 1 bits): shared by `quant/kv_record.py`, which packs, and the kernels, which
read and write. Pure arithmetic.

    64-byte header            the common one of `layout.py`; its last 16 bytes are `TAIL`: largest scale of V, flags, bits by group
    64 bytes more             only for heads of more than 16 groups: bits of the others, 16 groups at a time, 16 bytes apart as in the tail
    K codes                   per group of 16 channels, per plane [4 quads, tokens, 4 channels]; a score is a sum over channels
    K exponents, K zeros      int8 [4 groups of 32 tokens, D] each
    V codes                   per group of 16 channels, per plane [token quads, 16 channels, 4 tokens]; an output is a sum over tokens
    V scales and zeros        bytes [D / 16, 128 tokens]: the scale's step in the low four bits, the zero + 8 in the high four
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .layout import HEADER_NBYTES, PAGE, align

# Bits of each plane, high bits first. A group of 10 bits is one of 8 followed by one of 2, and kernels multiply it as such.
PLANES = {10: (4, 4, 2), 8: (4, 4), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
WIDTHS = tuple(sorted(PLANES))  # possible bits of a group; a record stores indices into this tuple
SUPPORTED_BITS = (10, 8, 6, 5, 4, 3, 2, 1)  # mean bits of K or V; only profiles use 10 and 1
GROUP_K, GROUP_V = 32, 16  # tokens per scale of K, channels per scale of V
GROUP_CHANNELS = 16  # channels that share a bit width, K and V
QUAD = 4
TAIL = struct.Struct("<hB12s")  # V's largest scale, flags, 3 bits per group of K, and from bit 48 on per group of V
TAIL_OFFSET = 48
TAIL_GROUPS = 16  # groups whose bit widths are stored together; those of the next 16 start 16 bytes later
MAX_GROUPS = 64
WIDTHS_IN_TAIL, WIDTHS_NBYTES = struct.calcsize("<hB"), 12
EXTRA_HEADER_NBYTES = 64  # after the header: bit widths of three times TAIL_GROUPS, padded to a cache line
ROTATED_K, MEAN_K = 1, 2  # flags
# 2^(i / 8) as bits of float32, rounded once. With an exponent this gives every scale of K, and every second one gives those of V. Writers,
# readers and kernels all use these values.
MANTISSA_BITS = tuple(int.from_bytes(struct.pack("<f", 2.0 ** (i / 8)), "little") for i in range(8))


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets in the record of one layer and one KV head. `head_dim` is a multiple of 16, at most 1,024."""

    head_dim: int
    bits_k: int
    bits_v: int

    def __post_init__(self) -> None:
        if self.head_dim % GROUP_CHANNELS or not 0 < self.head_dim <= GROUP_CHANNELS * MAX_GROUPS:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of {GROUP_CHANNELS} up to {GROUP_CHANNELS * MAX_GROUPS}")
        for bits in (self.bits_k, self.bits_v):
            if bits not in SUPPORTED_BITS:
                raise ValueError(f"a KV page of {bits} bits: there are {', '.join(map(str, SUPPORTED_BITS))}")

    @property
    def groups(self) -> int:
        return self.head_dim // GROUP_CHANNELS

    @property
    def header_nbytes(self) -> int:
        return HEADER_NBYTES + (EXTRA_HEADER_NBYTES if self.groups > TAIL_GROUPS else 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of K codes, K exponents, K zeros, V codes, V scales and zeros."""
        values = PAGE * self.head_dim
        return (values * self.bits_k // 8, values // GROUP_K, values // GROUP_K, values * self.bits_v // 8, values // GROUP_V)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start offset of each of `sizes`."""
        return tuple(self.header_nbytes + sum(self.sizes[:part]) for part in range(len(self.sizes)))

    @property
    def end(self) -> int:
        """End offset of the last one."""
        return self.header_nbytes + sum(self.sizes)

    @property
    def record_nbytes(self) -> int:
        return align(self.end)

    @property
    def packed_bits(self) -> float:
        """Bits per value of a record, including header and alignment."""
        return 8 * self.record_nbytes / (2 * PAGE * self.head_dim)

    def bits_per_value(self, tokens: int, exact: int, exact_bits: int = 16) -> float:
        """Bits per value of a cache of `tokens`, of which at least `exact` are in 16-bit slots and the rest in whole pages."""
        pages = max(0, tokens - exact) // PAGE
        return (pages * PAGE * self.packed_bits + (tokens - pages * PAGE) * exact_bits) / tokens


def pack_tail(top: int, flags: int, k: Sequence[int], v: Sequence[int]) -> bytes:
    """Bytes between `TAIL_OFFSET` and the codes: V's largest scale, flags, and bits per group of K and V."""
    out = bytearray(HEADER_NBYTES - TAIL_OFFSET + (EXTRA_HEADER_NBYTES if len(k) > TAIL_GROUPS else 0))
    TAIL.pack_into(out, 0, top, flags, pack_widths(k[:TAIL_GROUPS], v[:TAIL_GROUPS]))
    for group in range(TAIL_GROUPS, len(k), TAIL_GROUPS):
        groups, offset = slice(group, group + TAIL_GROUPS), WIDTHS_IN_TAIL + group
        out[offset : offset + WIDTHS_NBYTES] = pack_widths(k[groups], v[groups])
    return bytes(out)


def unpack_tail(record: bytes | memoryview, groups: int) -> tuple[int, int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Inverse of `pack_tail`: (V's largest scale, flags, bits per group of K and of V) of a record."""
    top, flags, _ = TAIL.unpack_from(record, TAIL_OFFSET)
    k: tuple[int, ...] = ()
    v: tuple[int, ...] = ()
    for group in range(0, groups, TAIL_GROUPS):
        offset = TAIL_OFFSET + WIDTHS_IN_TAIL + group
        widths = unpack_widths(bytes(record[offset : offset + WIDTHS_NBYTES]), min(TAIL_GROUPS, groups - group))
        k, v = k + widths[0], v + widths[1]
    return top, flags, (k, v)


def pack_widths(k: Sequence[int], v: Sequence[int]) -> bytes:
    """Bits of up to 16 groups of K and of V as the 12 bytes in `TAIL`."""
    fields = [WIDTHS.index(bits) << 3 * (side * TAIL_GROUPS + group) for side, row in enumerate((k, v)) for group, bits in enumerate(row)]
    return sum(fields).to_bytes(12, "little")


def unpack_widths(raw: bytes, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Inverse of `pack_widths`."""
    fields = int.from_bytes(raw, "little")
    k, v = (tuple(WIDTHS[fields >> 3 * (side * TAIL_GROUPS + group) & 7] for group in range(groups)) for side in range(2))
    return k, v


@dataclass(frozen=True)
class PackedLayout:
    """Offsets of the records of one layer's KV heads in a packed layer-page.

    Pages are not aligned to 4096 bytes as raw pages are: four heads of 64 at 4 bits would grow by a tenth. Reads from files are rounded
    outwards."""

    head_dim: int
    bits: tuple[tuple[int, int], ...]  # of K and V, per head

    @cached_property
    def records(self) -> tuple[RecordLayout, ...]:
        return tuple(RecordLayout(self.head_dim, *bits) for bits in self.bits)

    @cached_property
    def head_offsets(self) -> tuple[int, ...]:
        """Start of each head's record in a layer-page, and the end of the last."""
        return tuple(accumulate((record.record_nbytes for record in self.records), initial=0))

    @property
    def layer_page_nbytes(self) -> int:
        return self.head_offsets[-1]
