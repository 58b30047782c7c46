"""A mixture whose experts are only partly in memory: routing first, then products in the order in which experts arrive.

Kernels and summation order are those of `moe.py`: an expert's products see its own visits alone, and results are added at the end, so
results do not depend on the order in which experts arrive. The processor multiplies experts in memory while the disk reads the others.
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
    MAX_STAGES,
    PreparedStage,
    Table,
    add_shared,
    fields,
    max_columns,
    products_norm,
    products_of,
    routed_stage,
    shared_hidden,
    write_records,
)

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm, ParallelExperts, SharedExpert
    from ..expert_pages import ExpertPages
    from .moe import RoutingAndAct, VisitObserver
    from .ops import CpuOps

BIAS = 3  # index among a matrix's fields, raw or low-bit


@dataclass(frozen=True)
class PagedTable(Table):
    """`moe.Table` over slots. `moved`: per expert, which fields of its two records point into the slot; `slot_address`: their current
    offset from the first slot, in bytes."""

    moved: Sequence[tuple[np.ndarray, np.ndarray]]
    slot_address: list[int]

    def place(self, expert: int, slot: int) -> None:
        """Point an expert's records at a slot."""
        by = slot * self.experts.slot_nbytes - self.slot_address[expert]
        if by:
            self.gated[expert] += by * self.moved[expert][0]
            self.down[expert] += by * self.moved[expert][1]
            self.slot_address[expert] += by


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


def run(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, pages: ExpertPages, routing_and_act: RoutingAndAct,
        observer: VisitObserver | None,
        correction: np.ndarray | None, shared: SharedExpert | None, parallel: ParallelExperts | None,
        router_input: np.ndarray | None = None) -> np.ndarray:
    """`moe.run` for experts in slots. For few tokens, the shared expert is multiplied while the disk is asked for the others."""
    stage = routed_stage(ops, x, norm, router, pages, routing_and_act, correction, parallel, _table, router_input)
    before = [job for job in stage.jobs if job[0] is kernels.route_tokens]
    grouping = [job for job in stage.jobs if job[0] is kernels.group_visits or job[0] is kernels.gather_rows]
    for job in before:
        ops.run(*job)
    with ops.deferring() as routing:
        ahead = _note_next(ops, x, pages, routing_and_act[0].zero_experts) if len(x) == 1 else []
        shared_input = shared_hidden(ops, x, norm, shared, routing_and_act[1])
    if len(x) <= stage.table.columns:
        ops.host_step(partial(_few, ops, stage, pages, grouping, routing, ahead))
    else:
        ops.enqueue(routing)
        for job in grouping:
            ops.run(*job)
        ops.flush()  # the routing is now known; all jobs enqueued by earlier layers have run
        _many(ops, products_norm(norm, routing_and_act), pages, stage, routing_and_act[1])
        pages.look_ahead(ahead)
    ops.run(kernels.combine_visits, address(stage.arrays[0]), len(x) > 1)
    return add_shared(ops, x, stage, shared_input, shared, observer)


def _note_next(ops: CpuOps, x: np.ndarray, pages: ExpertPages, handed: int) -> list[np.ndarray]:
    """Enqueue the routers of the next layers over this layer's state (prefetch hints); `handed` experts of a layer have no matrices."""
    ahead = []
    for distance, (norm, router) in enumerate(pages.next_routers(), 1):
        out = ops.workspace.take(f"routes_ahead_{distance}", 1, len(pages) + handed)
        if ops._run_cached(x, norm, (router,), linear.PLAIN, "none") is None:
            ops._run_stage(x, norm, [router], [out], linear.PLAIN, "none")
        ahead.append(out[0])
    return ahead


def _few(ops: CpuOps, stage: PreparedStage, pages: ExpertPages, grouping: Iterable[tuple], routing: Sequence[tuple[int, int, bool]],
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
    ops.enqueue(routing)
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
        # of all visited experts
        for job in (prepared for prepared in stage.jobs if prepared[0] in (kernels.each_product, kernels.activate_inputs)):
            ops.run(*job)
    for expert in visit.coming:
        ops.flush()
        visit.wait(expert)
        _note_products(ops, stage, (expert,), number)
    ops.flush(lambda: pages.look_ahead(ahead))


def _note_products(ops: CpuOps, stage: PreparedStage, experts: Iterable[int], number: Mapping[int, int]) -> None:
    """Enqueue both products of some visited experts as two jobs, with one in between if they have no gates; `number`: their places among
    the visited."""
    max_experts = min(len(stage.table.experts) + stage.routing_and_act[0].zero_experts, len(stage.chosen))
    blocks, counters = stage.lists
    for which, records in enumerate((stage.table.gated, stage.table.down)):
        entries = [0]
        for expert in experts:
            at = which * max_experts + number[expert]
            entries += (int(records[expert, 0]), blocks + 8 * kernels.BLOCK * at, counters + 8 * kernels.COUNTS * at)
        entries[0] = len(entries) // 3
        if entries[0]:
            job = np.array(entries, np.int64)
            ops.keep_alive(job)
            if which and not stage.table.has_gate:
                ops.run(kernels.activate_inputs, address(job), entries[0] > 1)
            ops.run(kernels.each_product, address(job), True)


def _many(ops: CpuOps, norm: Norm | None, pages: ExpertPages, stage: PreparedStage, act: str) -> None:
    """Products of a chunk, each expert's over its own rows in the numerics of the whole chunk, as `moe._products`."""
    columns, offsets = len(stage.x), stage.routed.offsets
    visits, depth, width = len(stage.routed.tokens), stage.x.shape[1], stage.routed.hidden.shape[1]
    rows, hidden = ops.workspace.take("rows", visits, depth), ops.workspace.take("hidden", visits, width)
    tokens = np.diff(offsets)
    visit = pages.visit(np.flatnonzero(tokens).tolist(), tokens if columns > 1 else None)
    ready = len(visit.ready)
    for index, number in enumerate((*visit.ready, *visit.coming)):
        ops.flush()
        if index >= ready:
            visit.wait(number)
        begin, end, expert = offsets[number], offsets[number + 1], pages.expert(number, visit.slots[number])
        products_of(ops, rows[begin:end], norm, expert, hidden[begin:end], act, columns)


def _table(ops: CpuOps, pages: ExpertPages, act: str) -> PagedTable:
    """Records of a layer's experts as if in the first slot, built once."""
    cached = ops.mixtures.tables.get(id(pages))
    if cached is None:
        count, kinds = len(pages), {}
        gated, down = (np.zeros((count, width), np.int64) for width in (kernels.GATED_RECORD, kernels.DOWN_RECORD))
        tables = []
        for e in range(count):
            key = pages.kind(e)
            if key not in kinds:
                kinds[key] = _kind(ops, pages, e, act)
            tables.append(kinds[key])
            gated[e], down[e] = tables[e].gated, tables[e].down
            gate, up, last = map(address, pages.biases(e))
            if tables[e].gate_fields:
                gated[e, 1 + BIAS] = gate
            gated[e, 1 + tables[e].gate_fields + BIAS], down[e, 1 + BIAS] = up, last
        if len(ops.mixtures.tables) >= MAX_STAGES:
            ops.mixtures.tables.clear()
        cached = ops.mixtures.tables[id(pages)] = PagedTable(pages, gated, down, min(table.columns for table in tables), tables[0].width,
                                                             tables[0].gate_fields > 0, [table.moved for table in tables], [0] * count)
    return cached


def _kind(ops: CpuOps, pages: ExpertPages, number: int, act: str) -> _Kind:
    expert = pages.expert(number, 0)
    gated, down = np.zeros(kernels.GATED_RECORD, np.int64), np.zeros(kernels.DOWN_RECORD, np.int64)
    columns = max_columns(ops, (expert,), act)
    if columns:
        write_records(expert, gated, down)
    begin = pages.slots_begin
    moved = tuple((record >= begin) & (record < begin + pages.slot_nbytes) for record in (gated, down))
    return _Kind(gated, down, moved, len(fields(expert.gate)) if expert.gate else 0, columns, expert.up.weight.shape[0])
