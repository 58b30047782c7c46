"""A mixture whose experts are only partly in memory: routing first, then products in the order in which experts arrive.

Kernels and summation order are those of `moe.py`: an expert's products see its own visits alone, and results are added at the end, so
results do not depend on which expert arrived when. The processor multiplies what is there while the disk reads the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..workspace import address
from . import linear
from . import moe_loops as kernels
from .moe import (
    MOST_STAGES,
    Stage,
    Table,
    columns_of,
    fields,
    finished,
    of_products,
    products_of,
    routed_stage,
    shared_hidden,
    write_records,
)

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm, ParallelExperts, SharedExpert
    from ..expert_pages import ExpertPages
    from .moe import Asked, See
    from .ops import CpuOps

BIAS = 3  # of a matrix's fields, raw or low-bit


@dataclass(frozen=True)
class PagedTable(Table):
    """`moe.Table` over slots. `moved`: per expert, which fields of its two records point into the slot; `where`: their current offset from
    the first slot, in bytes."""

    moved: Sequence[tuple[np.ndarray, np.ndarray]]
    where: list[int]

    def place(self, expert: int, slot: int) -> None:
        """Point an expert's records at a slot."""
        by = slot * self.experts.slot_nbytes - self.where[expert]
        if by:
            self.gated[expert] += by * self.moved[expert][0]
            self.down[expert] += by * self.moved[expert][1]
            self.where[expert] += by


@dataclass(frozen=True)
class _Kind:
    """Shared by experts of one kind: records in the first slot, which of their fields point there, fields of a gate (0 without gates), and
    the result of `columns_of`."""

    gated: np.ndarray
    down: np.ndarray
    moved: tuple[np.ndarray, np.ndarray]
    gate_fields: int
    columns: int
    width: int


def run(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, pages: ExpertPages, asked: Asked, see: See | None,
        correction: np.ndarray | None, shared: SharedExpert | None, apart: ParallelExperts | None,
        said: np.ndarray | None = None) -> np.ndarray:
    """`moe.run` for experts in slots. For few tokens, the shared expert is multiplied while the disk is asked for the others."""
    stage = routed_stage(ops, x, norm, router, pages, asked, correction, apart, _table, said)
    before = [job for job in stage.jobs if job[0] is kernels.route_tokens]
    grouping = [job for job in stage.jobs if job[0] is kernels.group_visits or job[0] is kernels.gather_rows]
    for job in before:
        ops.run(*job)
    with ops.deferring() as routing:
        ahead = _note_next(ops, x, pages, asked[0].zero_experts) if len(x) == 1 else []
        beside = shared_hidden(ops, x, norm, shared, asked[1])
    if len(x) <= stage.table.columns:
        ops.host_step(partial(_few, ops, stage, pages, grouping, routing, ahead))
    else:
        ops.note(routing)
        for job in grouping:
            ops.run(*job)
        ops.flush()  # who goes where is known; everything that earlier layers noted has run
        _many(ops, of_products(norm, asked), pages, stage, asked[1])
        pages.look_ahead(ahead)
    ops.run(kernels.combine_visits, address(stage.kept[0]), len(x) > 1)
    return finished(ops, x, stage, beside, shared, see)


def _note_next(ops: CpuOps, x: np.ndarray, pages: ExpertPages, handed: int) -> list[np.ndarray]:
    """Enqueue the routers of the next layers over this layer's state (prefetch hints); `handed` experts of a layer have no matrices."""
    ahead = []
    for distance, (norm, router) in enumerate(pages.next_routers(), 1):
        out = ops.workspace.take(f"routes_ahead_{distance}", 1, len(pages) + handed)
        if ops._remembered(x, norm, (router,), linear.PLAIN, "none") is None:
            ops._matrix(x, norm, [router], [out], linear.PLAIN, "none")
        ahead.append(out[0])
    return ahead


def _few(ops: CpuOps, stage: Stage, pages: ExpertPages, grouping: Iterable[tuple], routing: Sequence[tuple[int, int, bool]],
         ahead: Sequence[np.ndarray]) -> None:
    """Products of few tokens, with argument blocks written by `group_visits`; routing is known. `routing` computes `ahead`, the scores of
    the next layers: meanwhile this thread requests experts, and those for later layers alongside the products, so that nothing waits for
    Python."""
    table, brought = stage.table, []
    if len(stage.x) == 1:
        needed, tokens = stage.chosen[stage.chosen < len(pages)].tolist(), None
    else:
        tokens = np.bincount(stage.chosen, minlength=len(pages))[: len(pages)]
        needed = np.flatnonzero(tokens).tolist()
    ops.note(routing)
    ops.flush(lambda: brought.append(pages.visit(needed, tokens)))
    (visit,) = brought
    for expert, slot in visit.slots.items():
        table.place(expert, slot)
    for job in grouping:
        ops.run(*job)
    if visit.coming:
        number = {expert: i for i, expert in enumerate(needed)}
        _note_products(ops, stage, visit.ready, number)
    else:
        for job in (each for each in stage.jobs if each[0] in (kernels.each_product, kernels.activate_inputs)):  # of all that are visited
            ops.run(*job)
    for expert in visit.coming:
        ops.flush()
        visit.wait(expert)
        _note_products(ops, stage, (expert,), number)
    ops.flush(lambda: pages.look_ahead(ahead))


def _note_products(ops: CpuOps, stage: Stage, experts: Iterable[int], number: Mapping[int, int]) -> None:
    """Enqueue both products of some visited experts as two jobs, with one in between if they have no gates; `number`: their places among
    the visited."""
    most = min(len(stage.table.experts) + stage.asked[0].zero_experts, len(stage.chosen))
    blocks, counters = stage.lists
    for which, records in enumerate((stage.table.gated, stage.table.down)):
        entries = [0]
        for expert in experts:
            at = which * most + number[expert]
            entries += (int(records[expert, 0]), blocks + 8 * kernels.BLOCK * at, counters + 8 * kernels.COUNTS * at)
        entries[0] = len(entries) // 3
        if entries[0]:
            job = np.array(entries, np.int64)
            ops.keep_alive(job)
            if which and not stage.table.has_gate:
                ops.run(kernels.activate_inputs, address(job), entries[0] > 1)
            ops.run(kernels.each_product, address(job), True)


def _many(ops: CpuOps, norm: Norm | None, pages: ExpertPages, stage: Stage, act: str) -> None:
    """Products of a chunk, each expert's over its own rows in the numerics of the whole chunk, as `moe._products`."""
    columns, offsets = len(stage.x), stage.routed.offsets
    visits, depth, width = len(stage.routed.tokens), stage.x.shape[1], stage.routed.hidden.shape[1]
    rows, hidden = ops.workspace.take("rows", visits, depth), ops.workspace.take("hidden", visits, width)
    tokens = np.diff(offsets)
    visit = pages.visit(np.flatnonzero(tokens).tolist(), tokens if columns > 1 else None)
    ready = len(visit.ready)
    for place, number in enumerate((*visit.ready, *visit.coming)):
        ops.flush()
        if place >= ready:
            visit.wait(number)
        begin, end, expert = offsets[number], offsets[number + 1], pages.expert(number, visit.slots[number])
        products_of(ops, rows[begin:end], norm, expert, hidden[begin:end], act, columns)


def _table(ops: CpuOps, pages: ExpertPages, act: str) -> PagedTable:
    """Records of a layer's experts as if in the first slot, built once."""
    known = ops.mixtures.tables.get(id(pages))
    if known is None:
        count, kinds = len(pages), {}
        gated, down = (np.zeros((count, width), np.int64) for width in (kernels.GATED_RECORD, kernels.DOWN_RECORD))
        own = []
        for e in range(count):
            key = pages.kind(e)
            if key not in kinds:
                kinds[key] = _kind(ops, pages, e, act)
            own.append(kinds[key])
            gated[e], down[e] = own[e].gated, own[e].down
            gate, up, last = map(address, pages.biases(e))
            if own[e].gate_fields:
                gated[e, 1 + BIAS] = gate
            gated[e, 1 + own[e].gate_fields + BIAS], down[e, 1 + BIAS] = up, last
        if len(ops.mixtures.tables) >= MOST_STAGES:
            ops.mixtures.tables.clear()
        known = ops.mixtures.tables[id(pages)] = PagedTable(pages, gated, down, min(each.columns for each in own), own[0].width,
                                                            own[0].gate_fields > 0, [each.moved for each in own], [0] * count)
    return known


def _kind(ops: CpuOps, pages: ExpertPages, number: int, act: str) -> _Kind:
    expert = pages.expert(number, 0)
    gated, down = np.zeros(kernels.GATED_RECORD, np.int64), np.zeros(kernels.DOWN_RECORD, np.int64)
    columns = columns_of(ops, (expert,), act)
    if columns:
        write_records(expert, gated, down)
    begin = pages.slots_begin
    moved = tuple((record >= begin) & (record < begin + pages.slot_nbytes) for record in (gated, down))
    return _Kind(gated, down, moved, len(fields(expert.gate)) if expert.gate else 0, columns, expert.up.weight.shape[0])
