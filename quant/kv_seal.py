"""Seals KV pages with the compiled kernel, as `kv_codec.encode` defines, for all layers of a cache at once and on all threads."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..kernels.cpu.kv import seal as kernel
from ..kernels.cpu.kv import seal_loops as loops
from ..kernels.kv_layout import GROUP_CHANNELS, MEAN_K, ROTATED_K, TAIL_OFFSET, WIDTHS, PackedLayout, pack_tail
from ..kernels.layout import PAGE, PageHeader, PageLayout
from ..kernels.workspace import address
from . import kv_grid
from .kv_basis import KVBasis
from .kv_codec import LONE_PAIR

if TYPE_CHECKING:
    from ..kernels.cpu.ops import CpuOps


class Sealer:
    """Seals pages of layers. `exact` are the layouts of their exact tokens, `bases` and `bits` (of each head: of K, of V) the layers', in
    order.

    `seal` notes a page, `flush` seals all that were noted as one job, outside a forward pass: its scratch is that of the ops.
    """

    def __init__(self, ops: CpuOps, exact: Sequence[PageLayout], bases: Sequence[KVBasis],
                 bits: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Raises ValueError for bits or a head size that no record has."""
        if 4 * kernel.seal_scratch(max(each.head_dim for each in exact)) > ops.scratch_stride:
            raise RuntimeError("the ops have been planned for smaller heads")
        self.ops, self.exact, self.bases = ops, list(exact), list(bases)
        self.layouts = [PackedLayout(own.head_dim, tuple(each)) for own, each in zip(self.exact, bits, strict=True)]
        self._tables = np.stack([_tables(kv_grid.OCTAVE_K, kv_grid.UNITS_K, -128, 127),
                                 _tables(kv_grid.OCTAVE_V, kv_grid.UNITS_V, kv_grid.LEAST_ZERO_V, kv_grid.MOST_ZERO_V)])
        self._held: list[np.ndarray] = []
        self._blocks = [self._block(*each) for each in zip(self.bases, self.layouts, self.exact, strict=True)]
        self._noted: list[tuple[int, int, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]] = []

    def seal(self, layer: int, exact: np.ndarray, out: np.ndarray, first_token: int,
             rotary: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """Note exact layer-page `exact` to be written to `out`, both contiguous uint8 and left alone until `flush`. `rotary`: cos and sin
        float32 [PAGE, D / 2] of its positions, for a basis that has K's mean."""
        if self.bases[layer].k_mean is not None:
            if rotary is None:
                raise ValueError("a basis with K's mean needs the page's cos and sin")
            rotary = tuple(np.ascontiguousarray(side, np.float32) for side in rotary)
        self._noted.append((layer, first_token, exact, out, rotary))

    def flush(self) -> None:
        """Seal what was noted. Raises ValueError naming layer, head and tokens where K or V is not finite."""
        every, self._noted = self._noted, []
        for heads in dict.fromkeys(self.exact[layer].kv_heads for layer, *_ in every):
            self._flush([note for note in every if self.exact[note[0]].kv_heads == heads], heads)

    def _flush(self, noted: Sequence[tuple], heads: int) -> None:
        """`flush` for pages of as many heads: what a job counts is pages times heads."""
        notes, status = np.zeros((len(noted), kernel.NOTE_SLOTS), np.int64), np.zeros((len(noted), heads), np.int64)
        for note, (layer, _, exact, out, rotary) in zip(notes, noted):
            turn = (0, 0) if self.bases[layer].k_mean is None else map(address, rotary)
            note[:] = address(exact), address(out), address(self._blocks[layer]), *turn
        block = np.zeros(kernel.SLOTS, np.int64)
        block[:] = address(notes), len(noted), heads, address(status), self.ops.scratch, self.ops.scratch_stride
        self.ops.pool.run(kernel.seal_records, address(block))
        if status.any():
            note, head = (int(found[0]) for found in np.nonzero(status))
            side, (layer, first, *_) = "K" if status[note, head] & kernel.KEYS_ODD else "V", noted[note]
            raise ValueError(f"{side} of layer {layer}, head {head}, tokens {first} to {first + PAGE - 1}: not finite, or beyond 2^60")
        for layer, first, _, out, _ in noted:
            self._write_headers(layer, first, memoryview(out))

    def _write_headers(self, layer: int, first: int, out: memoryview) -> None:
        layout, basis = self.layouts[layer], self.bases[layer]
        for head, (record, start) in enumerate(zip(layout.records, layout.head_offsets)):
            check = zlib.crc32(out[start + TAIL_OFFSET : start + record.end])  # as `kv_codec.checksum`
            header = PageHeader(layer, head, first, PAGE, record.bits_k, record.bits_v, profile=basis.profile, crc32=check)
            out[start : start + TAIL_OFFSET] = header.pack()[:TAIL_OFFSET]

    def _block(self, basis: KVBasis, layout: PackedLayout, exact: PageLayout) -> np.ndarray:
        """A layer's block of the kernel; what it points to is held."""
        heads, size = len(layout.records), layout.head_dim
        matrix = np.zeros((heads, size, kernel.broad_of(size)), np.float32)
        matrix[..., :size] = basis.k_matrix.swapaxes(1, 2)
        widths = np.zeros((heads, 3, size // GROUP_CHANNELS), np.uint8)
        tails = np.zeros((heads, 2, layout.records[0].header_nbytes - TAIL_OFFSET), np.uint8)
        records = np.zeros((heads, kernel.RECORD_SLOTS), np.int64)
        mean = (basis.k_mean is not None) * MEAN_K
        for head, (record, start) in enumerate(zip(layout.records, layout.head_offsets)):
            turned_k, turned_v = (side[head] for side in basis.widths(record.bits_k, record.bits_v))
            widths[head] = turned_k, np.full_like(turned_k, record.bits_k), turned_v
            for turned in (0, 1):
                tail = pack_tail(0, turned * ROTATED_K + mean, widths[head, 0 if turned else 1].tolist(), widths[head, 2].tolist())
                tails[head, turned] = np.frombuffer(tail, np.uint8)
            records[head] = start, *record.offsets, record.end, record.record_nbytes
        flat = lambda x: np.ascontiguousarray(x, np.float32)  # noqa: E731
        k_mean = np.zeros(0, np.float32) if basis.k_mean is None else flat(basis.k_mean)
        held = [flat(1 / basis.k_scale), matrix, flat(basis.v_matrix), k_mean, widths, tails, records]
        reciprocals, k_matrix, v_matrix, mean_at, widths_at, tails_at, records_at = map(address, held)
        block = np.zeros(kernel.LAYER_SLOTS, np.int64)
        block[:] = (size, exact.stored, exact.record_nbytes, exact.side_nbytes, exact.rows, exact.part_nbytes,
                    reciprocals, k_matrix, matrix.shape[2], v_matrix, mean_at if k_mean.size else 0, widths_at, tails_at,
                    address(self._tables), records_at, 0)
        block.view(np.float64)[kernel.DOMINANT_PAIR_RATIO] = LONE_PAIR
        self._held += held
        return block


class DeferredCodec:
    """One layer's handle on a `Sealer`, with a codec's interface: pages are written when the sealer is flushed."""

    def __init__(self, sealer: Sealer, layer: int) -> None:
        self._sealer, self._layer = sealer, layer

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None:
        """Note a page, as `PackedCodec.seal` would write it."""
        self._sealer.seal(self._layer, exact, out, first_token)


def _tables(octave: int, units: int, least_zero: int, most_zero: int) -> np.ndarray:
    """int32 [MOST_BITS + 1, TABLE_SLOTS] by bits: `kv_grid`'s search as the kernel's loops read it."""
    table = np.zeros((kernel.MAX_BITS + 1, loops.TABLE_SLOTS), np.int32)
    for bits in WIDTHS:
        tried = kv_grid.tried(bits, octave)
        table[bits, [loops.ABOVE, loops.TRIES, loops.ASIDE, loops.COARSE]] = -tried[0], len(tried), kv_grid.ZEROS[bits], 8 // octave // 2
        table[bits, loops.BEHIND] = max(0, bits - 8)
        width, most = 1 << bits, (1 << bits) - 1
        reals = {loops.HALF: kv_grid.half(bits), loops.MOST: most, loops.UNIT: width / units, loops.PER_UNIT: units / width,
                 loops.LEAST_ZERO: least_zero, loops.MOST_ZERO: most_zero, loops.LEVELS: most}
        table[bits].view(np.float32)[list(reals)] = list(reals.values())
    return table
