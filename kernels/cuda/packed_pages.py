"""One layer's KV pages on a torch device with packed sealed pages: records byte-identical to the CPU's, dequantized on the device.

Queries are rotated into the records' basis and outputs back out of it; keys and values of packed pages are only ever codes times scales,
for a few pages at a time. Partials merge in page order, whether a page is packed or exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..device_memory import MAX_UNPACKED_PAGES
from ..kv_layout import (
    GROUP_CHANNELS,
    GROUP_K,
    MANTISSA_BITS,
    PLANES,
    QUAD,
    ROTATED_K,
    TAIL_OFFSET,
    PackedLayout,
    RecordLayout,
    unpack_tail,
)
from ..layout import PAGE, PageLayout
from .attention import Partial, block_partial, finish, fold, pages_at_once, rows_of
from .kernel_choice import KernelChoice
from .pages import COUNT, FIRST, INDEX, SEALED, TorchLayerPages, pages_of, runs, visible_span

Widths = tuple[tuple[int, ...], tuple[int, ...]]


class Basis(Protocol):
    """Rotations of queries and outputs (`quant/kv_basis.py`): [H, D, D] each, and K's channel scales [H, D]."""

    k_inverse: np.ndarray
    v_inverse: np.ndarray
    k_scale: np.ndarray


class Codec(Protocol):
    """Packs pages of this layer (`quant/kv.py`), on the host."""

    basis: Basis

    def layout(self, kv_heads: int, head_dim: int) -> PackedLayout: ...
    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None: ...


class TorchPackedPages(TorchLayerPages):
    """`exact` holds raw slots of `layout`, `sealed` records in the codec's layout, both uint8 tensors on the device."""

    def __init__(self, upload: Callable[[np.ndarray], torch.Tensor], layout: PageLayout, exact: torch.Tensor, sealed: torch.Tensor,
                 scale: float, window: int | None, softcap: float | None, codec: Codec, kernel_choice: KernelChoice) -> None:
        super().__init__(upload, layout, exact, exact[:0], scale, window, softcap, kernel_choice)
        self.codec, self.packed = codec, codec.layout(layout.kv_heads, layout.head_dim)
        self.records = sealed.view(-1, self.packed.layer_page_nbytes)
        self._k_inverse, self._v_inverse, self._k_scale = (
            torch.from_numpy(np.array(basis, np.float32)).to(exact.device)
            for basis in (codec.basis.k_inverse, codec.basis.v_inverse.swapaxes(1, 2), codec.basis.k_scale))
        # per page and head, from the record's header: is K rotated, bits of the groups
        self._tails: dict[int, list[tuple[bool, Widths]]] = {}

    def seal(self, slot: int, page: int, layer: int, first_token: int, codec: object) -> None:
        """Pack exact slot `slot` as sealed page `page`; the bytes pass through the host."""
        record = np.zeros(self.packed.layer_page_nbytes, np.uint8)
        self.codec.seal(self.read_slot(slot), self.layout, layer, first_token, record)
        self.write_page(page, record)

    def write_page(self, page: int, data: np.ndarray) -> None:
        """Write the bytes of a sealed page to its place, and record what its headers say."""
        super().write_page(page, data)
        groups, begins = self.layout.head_dim // GROUP_CHANNELS, zip(self.packed.head_offsets, self.packed.records, strict=False)
        tails = [unpack_tail(np.array(data[at : at + record.header_nbytes]).tobytes(), groups) for at, record in begins]
        self._tails[page] = [(flags & ROTATED_K > 0, widths) for _, flags, widths in tails]

    def _sealed_page(self, page: int) -> torch.Tensor:
        return self.records[page]

    def attend(self, q: torch.Tensor, position: int, blocks: np.ndarray, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As for raw pages. The pages of a run, packed or exact, are processed in groups whose size depends on the shape alone."""
        span = visible_span(blocks, position, len(q), self.window)
        table, positions = self.upload(blocks)[span], torch.arange(position, position + len(q), device=q.device)
        blocks, depth, kv_heads = blocks[span], self.layout.head_dim, self.layout.kv_heads
        rows = rows_of(q.unflatten(1, (-1, depth)), kv_heads)
        rotated, scaled = rows @ self._k_inverse, rows * self._k_scale[:, None]
        step, merged = pages_at_once(q.shape[1] // depth, len(q)), None
        for run in runs(blocks[:, SEALED]):
            is_sealed = bool(blocks[run.start, SEALED])
            max_pages = min(step, MAX_UNPACKED_PAGES) if is_sealed else step
            for begin in range(run.start, run.stop, max_pages):
                part = slice(begin, min(begin + max_pages, run.stop))
                where = table[part, FIRST], table[part, COUNT], positions, self.scale, self.window, self.softcap
                if is_sealed:
                    merged = fold(merged, self._packed_partial(blocks[part, INDEX].tolist(), rotated, scaled, where))
                else:
                    sides = (pages_of(side, table[part, INDEX], self.layout) for side in self._exact_sides)
                    merged = fold(merged, block_partial(rows, *sides, *where))
        return finish(merged, len(q), kv_heads, sinks)

    def _packed_partial(self, pages: list[int], rotated: torch.Tensor, scaled: torch.Tensor, where: tuple) -> Partial:
        """For rotated queries and, for unrotated K, scaled ones: [KVH, R, D] each."""
        is_turned = torch.tensor([[flag for flag, _ in self._tails[page]] for page in pages])
        rows = rotated
        if not is_turned.all():
            rows = torch.where(is_turned[..., None, None].to(rotated.device), rotated, scaled)
        o, m, l = block_partial(rows, *self._open(pages), *where)
        return o @ self._v_inverse, m, l

    def _open(self, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of packed pages according to their codes, float32 [n, KVH, PAGE, D]. Heads with records of the same format are
        dequantized together."""
        alike: dict[tuple[RecordLayout, Widths, tuple[int, ...]], list[int]] = defaultdict(list)
        for head, record in enumerate(self.packed.records):
            indices_by_widths = defaultdict(list)
            for index, page in enumerate(pages):
                indices_by_widths[self._tails[page][head][1]].append(index)
            for widths, indices in indices_by_widths.items():
                alike[record, widths, tuple(indices)].append(head)
        shape = (len(pages), self.layout.kv_heads, PAGE, self.layout.head_dim)
        k, v = (torch.empty(shape, device=self.records.device) for _ in range(2))
        for (record, widths, indices_by_widths), heads in alike.items():
            rows = self.records[[pages[index] for index in indices_by_widths]]
            begins = [self.packed.head_offsets[head] for head in heads]
            records = torch.stack([rows[:, begin : begin + record.record_nbytes] for begin in begins], 1).flatten(0, 1)
            which = torch.tensor(indices_by_widths)[:, None], torch.tensor(heads)
            for side, opened in zip((k, v), open_records(records, record, widths)):
                side[which] = opened.unflatten(0, (len(indices_by_widths), len(heads)))
        return k, v


def open_records(records: torch.Tensor, layout: RecordLayout, widths: Widths) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, record_nbytes] with groups of these bits -> dequantized K and V [n, PAGE, D], float32, bit-identical to `quant/kv_grid.py`.
    """
    at_k, at_v = layout.offsets[0], layout.offsets[3]
    part = lambda group_offset: records[:, layout.offsets[group_offset] : layout.offsets[group_offset] + layout.sizes[group_offset]]  # noqa: E731
    k = torch.empty((len(records), PAGE // GROUP_K, GROUP_K, layout.groups, GROUP_CHANNELS), device=records.device)
    exponents, zeros = (part(group_offset).view(torch.int8).unflatten(1, (-1, 1, layout.groups, GROUP_CHANNELS)) for group_offset in (1, 2))
    for bits, groups in _by_width(widths[0]):
        codes = _codes(records, at_k, widths[0], groups, bits).permute(0, 3, 1, 2, 4)
        codes = codes.reshape(len(records), -1, GROUP_K, len(groups), GROUP_CHANNELS)
        k[:, :, :, groups] = _values(codes, exponents[:, :, :, groups].int(), zeros[:, :, :, groups], bits, 64)

    v = torch.empty((len(records), PAGE, layout.groups, GROUP_CHANNELS), device=records.device)
    top = records[:, TAIL_OFFSET].int() | records[:, TAIL_OFFSET + 1].view(torch.int8).int() << 8
    scales = part(4).unflatten(1, (layout.groups, PAGE)).swapaxes(1, 2)[..., None]
    eighths, zeros = (top[:, None, None, None] - (scales & 15).int()) * 2, (scales >> 4).int() - 8
    for bits, groups in _by_width(widths[1]):
        codes = _codes(records, at_v, widths[1], groups, bits, of_keys=False).swapaxes(1, 2)
        v[:, :, groups] = _values(codes, eighths[:, :, groups], zeros[:, :, groups], bits, 32)
    return k.view(len(records), PAGE, -1), v.view(len(records), PAGE, -1)


def _codes(records: torch.Tensor, at: int, widths: Sequence[int], groups: list[int], bits: int, of_keys: bool = True) -> torch.Tensor:
    """The codes of some groups of `bits`: of K int16 [n, groups, 4 quads, PAGE, 4], of V [n, groups, PAGE, 16]."""
    starts = np.cumsum((0, *widths)) * (PAGE * GROUP_CHANNELS // 8) + at
    packed = torch.stack([records[:, starts[group] : starts[group + 1]] for group in groups], 1)
    codes, begin = None, 0
    for width in PLANES[bits]:
        end = begin + PAGE * GROUP_CHANNELS // 8 * width
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=records.device)
        plane = packed[..., begin:end].unflatten(2, (QUAD, 1, -1, QUAD) if of_keys else (-1, 1, GROUP_CHANNELS, QUAD))
        plane = plane >> shifts[:, None, None] & ((1 << width) - 1)  # bit fields precede the tokens of K and follow the units of V
        plane = plane.flatten(3, 4) if of_keys else plane.transpose(-1, -2).flatten(2, 4)
        codes, begin = plane.short() if codes is None else codes << width | plane, end
    return codes


def _values(codes: torch.Tensor, eighths: torch.Tensor, zeros: torch.Tensor, bits: int, units: int) -> torch.Tensor:
    """2^(eighths / 8) · (code - half + zero · width / units), each step rounded as in `quant/kv_grid.py`."""
    mantissas = torch.tensor(MANTISSA_BITS, dtype=torch.int32, device=codes.device)
    scale = (mantissas[(eighths & 7).long()] + ((eighths >> 3) << 23)).view(torch.float32)
    return scale * (codes.float() + (zeros.float() * ((1 << bits) / units) - ((1 << bits) - 1) / 2))


def _by_width(widths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Every bit width in use, with the groups that have it."""
    return [(bits, [group for group, group_bits in enumerate(widths) if group_bits == bits]) for bits in sorted(set(widths))]
