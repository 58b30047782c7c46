"""Mixture of experts on the CPU: the router's product, routing, every visited expert's products, and the weighted sum.

For few tokens all of it is enqueued in advance and runs without returning to Python: a kernel selects the experts and writes the argument
blocks of their products, which then run as one job (`moe_loops.py`). Only selected experts are read. For more tokens Python reads the
routing and enqueues the products expert by expert, each expert's weights being read once for all of its tokens. Experts that are only
partly in memory go through `moe_paged.py`, with the same kernels. A shared expert is two matrix stages like any MLP: the first is enqueued
before the experts are added to its input, the second adds to the sum. Where experts are a branch parallel to an MLP, their sum is computed
separately, normed, and joins the MLP's before both are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_moe
from ..compile import Kernel
from ..expert_pages import MAX_LOOKAHEAD_LAYERS
from ..layout import NORMS, activation_number
from ..reference_moe import Routed, Routing
from ..registry import Call
from ..workspace import Dims, address
from . import fp8_loops, linear, low_bit, lut, packed
from . import moe_loops as kernels
from .row_ops import SHARE_FROM, norm_rows
from .stages import FEW, MatrixStages

if TYPE_CHECKING:
    from ...quant.weight import Expert, Linear, Norm, ParallelExperts, SharedExpert
    from ..expert_pages import ExpertPages
    from .ops import CpuOps

MOST_STAGES = 1024
See = Callable[[Routed], None]
Asked = tuple[Routing, str]  # and the activation


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of a mixture's buffers, none without one."""
    if not dims.experts:
        return {}
    visits, jobs = chunk * dims.top_k, _most_jobs(dims.experts, packed.MOST_COLUMNS * dims.top_k)
    ahead = {f"routes_ahead_{distance}": dims.experts for distance in range(1, MAX_LOOKAHEAD_LAYERS + 1)}
    return {"routes": chunk * dims.experts, **ahead, "shares": visits, "visits": 2 * (3 * visits + dims.experts + 1),
            "rows": visits * dims.hidden, "hidden": visits * dims.expert_ffn, "products": 2 * jobs, "scales": chunk,
            **dict.fromkeys(("branch", "sum"), chunk * dims.hidden * dims.parallel_experts),
            **({"normed": chunk * dims.hidden} if dims.low_rank_experts else {})}


def _most_jobs(experts: int, visits: int) -> int:
    """int64 of the lists, argument blocks and counters of two products per visited expert."""
    return 2 + 2 * min(experts, visits) * (3 + kernels.BLOCK + kernels.COUNTS) + kernels.COUNTS


@dataclass(frozen=True)
class Table:
    """A layer's experts as records for `group_visits`; `columns`: most tokens it may prepare, 0 if Python has to. `width`: of the inputs of
    `down`. `has_gate`: whether experts are gated."""

    experts: Sequence[Expert]
    gated: np.ndarray
    down: np.ndarray
    columns: int
    width: int
    has_gate: bool


@dataclass(frozen=True)
class Stage:
    """A prepared stage of few tokens, reused when the same objects are passed again. `kept` is what its jobs read, `chosen` int64 [T k]
    their first output, `lists` the addresses of argument blocks and counters of the products (`moe_paged.py`)."""

    x: np.ndarray
    norm: Norm
    router: Linear
    asked: Asked
    correction: np.ndarray | None
    apart: ParallelExperts | None
    jobs: tuple[tuple[Kernel, int, bool], ...]
    kept: tuple[np.ndarray, ...]
    routed: Routed
    table: Table
    chosen: np.ndarray
    lists: tuple[int, int]


class Prepared:
    """Expert stages and tables cached by a model's ops, keyed by the identity of a layer's experts."""

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.stages: dict[tuple[int, int], Stage] = {}


def moe(self: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: tuple[Expert, ...] | ExpertPages, routing: Routing, act: str,
        see: See | None = None, correction: np.ndarray | None = None, shared: SharedExpert | None = None) -> np.ndarray:
    """x + sum over a token's experts of weight * down(act(gate(n)) * up(n)) with n = norm(x), in place, plus the `shared` expert of all
    tokens; without gates, of down(act(up(n))). Experts not given as a tuple are loaded when needed.

    `see` is called with the visits; its arrays may be read once the collected jobs have run.
    """
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    return run(self, x, norm, router, experts, (routing, act), see, correction, shared, None)


def mlp_and_experts(self: CpuOps, x: np.ndarray, norm: Norm, gate: Linear | None, up: Linear | None, down: Linear | None, router: Linear,
                    experts: tuple[Expert, ...] | ExpertPages, apart: ParallelExperts, routing: Routing, act: str,
                    see: Callable[[np.ndarray], None] | None = None, see_visits: See | None = None,
                    after: Norm | None = None, correction: np.ndarray | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if down is not None:
        hidden = self.gated_hidden(x, norm, gate, up, act)
        if see is not None:
            see(hidden)
        branch = self.workspace.take("branch", *x.shape)
        if self._remembered(hidden, None, (down,), linear.PLAIN, "none") is None:
            self._matrix(hidden, None, [down], [branch], linear.PLAIN, "none")
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    total = run(self, x, apart.norm, router, experts, (routing, act), see_visits, correction, None, apart)
    if apart.after is not None:
        norm_rows(self, total, apart.after)
    if down is not None:
        self._add_with(self, branch, apart.mlp_after, total, 1.0)
    self._add_with(self, total, after, x, 1.0)
    return x


def expert_branch(self: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: tuple[Expert, ...] | ExpertPages,
                  apart: ParallelExperts, routing: Routing, act: str, see: See | None = None, correction: np.ndarray | None = None,
                  shared: SharedExpert | None = None, said: np.ndarray | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    return run(self, x, norm, router, experts, (routing, act), see, correction, shared, apart, said)


def run_reference(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], asked: Asked, see: See | None,
                  correction: np.ndarray | None, shared: SharedExpert | None, apart: ParallelExperts | None,
                  said: np.ndarray | None = None) -> np.ndarray:
    ops.flush()
    into = x if apart is None else ops.workspace.take("sum", *x.shape)
    into[:], routed = reference_moe.moe(x, norm, router, experts, *asked, correction, shared, apart, said)
    if see is not None:
        see(routed)
    return into


def run(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], asked: Asked, see: See | None,
        correction: np.ndarray | None, shared: SharedExpert | None, apart: ParallelExperts | None,
        said: np.ndarray | None = None) -> np.ndarray:
    beside = shared_hidden(ops, x, norm, shared, asked[1])
    stage = routed_stage(ops, x, norm, router, experts, asked, correction, apart, _table, said)
    for kernel, where, parallel in stage.jobs:
        ops.run(kernel, where, parallel)
    if len(x) > stage.table.columns:
        _products(ops, of_products(norm, asked), experts, stage, asked[1])
        ops.run(kernels.combine_visits, address(stage.kept[0]), True)
    return finished(ops, x, stage, beside, shared, see)


def shared_hidden(ops: CpuOps, x: np.ndarray, norm: Norm, shared: SharedExpert | None, act: str) -> np.ndarray | None:
    """Enqueue the first half of the shared expert: its `down` input, float32 [T, S], times its weight."""
    if shared is None:
        return None
    hidden = ops.gated_hidden(x, norm, shared.gate, shared.up, shared.act or act)
    if shared.scale is not None:
        scales = ops.workspace.take("scales", len(x), 1)
        if ops._remembered(x, norm, (shared.scale,), linear.PLAIN, "none") is None:
            ops._matrix(x, norm, [shared.scale], [scales], linear.PLAIN, "none")
        block = np.array([ops.at(hidden), *hidden.shape, ops.at(scales)], np.int64)
        ops.keep_alive(block)
        ops.run(kernels.scale_rows, address(block), len(x) > 1)
    return hidden


def finished(ops: CpuOps, x: np.ndarray, stage: Stage, beside: np.ndarray | None, shared: SharedExpert | None,
             see: See | None) -> np.ndarray:
    """The residual stream after adding the shared expert to the others; for parallel experts their sum alone."""
    into = x if stage.apart is None else ops.workspace.take("sum", *x.shape)
    if beside is not None:
        ops.linear_add(beside, shared.down, into, None, shared.factor)
    if see is not None:
        see(stage.routed if beside is None else replace(stage.routed, shared=beside))
    return into


def routed_stage(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], asked: Asked,
                 correction: np.ndarray | None, apart: ParallelExperts | None, table: Callable, said: np.ndarray | None = None) -> Stage:
    """Enqueue the router's product; returns the stage whose jobs come next. `table` builds or finds the experts' records; `said`: the
    router's input where that is not norm(x)."""
    before, reads = (None, said) if said is not None else (norm if apart is None else apart.router_norm, x)
    if ops._remembered(reads, before, (router,), linear.PLAIN, "none") is None:
        few = len(x) <= table(ops, experts, asked[1]).columns  # then all tokens of a stage are routed as one alone would be
        logits = ops.workspace.take("routes", len(x), len(experts) + asked[0].zero_experts)
        ops._matrix(reads, before, [router], [logits], linear.PLAIN, "none", int(few))
    stage = ops.mixtures.stages.get((id(experts), len(x)))
    known = stage is not None and stage.x is x and stage.norm is norm and stage.router is router and stage.correction is correction
    if not known or stage.asked != asked or stage.apart is not apart:
        stage = _prepared(ops, x, norm, router, experts, asked, correction, apart, table(ops, experts, asked[1]))
    for kept in stage.kept:
        ops.keep_alive(kept)
    return stage


def of_products(norm: Norm, asked: Asked) -> Norm | None:
    """The norm at the start of the experts' products; none if their inputs are normed while being gathered."""
    return None if asked[0].weights_scale_inputs else norm


def _products(ops: CpuOps, norm: Norm | None, experts: Sequence[Expert], stage: Stage, act: str) -> None:
    """Enqueue the products of every visited expert over its own rows. All use the numerics of `len(x)` tokens, so that a token's result
    does not depend on how many others visit the same expert."""
    ops.flush()
    columns, offsets = len(stage.x), stage.routed.offsets
    visits, depth, width = len(stage.routed.tokens), stage.x.shape[1], stage.routed.hidden.shape[1]
    rows, hidden = ops.workspace.take("rows", visits, depth), ops.workspace.take("hidden", visits, width)
    for e in np.flatnonzero(np.diff(offsets)):
        begin, end = offsets[e], offsets[e + 1]
        products_of(ops, rows[begin:end], norm, experts[e], hidden[begin:end], act, columns)


def products_of(ops: CpuOps, rows: np.ndarray, norm: Norm | None, expert: Expert, hidden: np.ndarray, act: str, columns: int) -> None:
    """Enqueue an expert's products over `rows`, in place; `columns` as in `CpuOps._matrix`."""
    if expert.gate is None:
        ops._matrix(rows, norm, [expert.up], [hidden], linear.PLAIN, "none", columns)
        ops.gate(hidden, None, act)
    else:
        ops._matrix(rows, norm, [expert.gate, expert.up], [hidden], linear.GATED, act, columns)
    ops._matrix(hidden, None, [expert.down], [rows], linear.PLAIN, "none", columns)


def _prepared(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], asked: Asked,
              correction: np.ndarray | None, apart: ParallelExperts | None, table: Table) -> Stage:
    """The jobs of a stage up to where Python is needed; cached for few tokens."""
    routing, act = asked
    if routing.weights_scale_inputs and (norm.kind != "rms" or apart is not None):
        raise ValueError("expert weights on inputs require an RMS norm")
    if routing.sparsemixer_margin is not None and (correction is not None or routing.top_groups < routing.num_groups):
        raise ValueError("expert weights by near logits require selection by logits")
    if routing.correction_on_logits and (not routing.sigmoid or routing.top_groups < routing.num_groups):
        raise ValueError("logit corrections require sigmoid scores and no groups")
    if routing.zero_experts and (norm.kind != "rms" or routing.weights_scale_inputs):
        raise ValueError("identity experts require an RMS norm and weights on outputs")
    gathered, norm = (norm, None) if routing.weights_scale_inputs else (None, norm)
    top_k = routing.experts_per_token
    (tokens, depth), made, width = x.shape, len(experts), table.width
    count = made + routing.zero_experts
    visits, few, take = tokens * top_k, tokens <= table.columns, ops.workspace.take
    numbers = take("visits", 2 * (3 * visits + count + 1)).view(np.int64)
    chosen, places, owners, offsets = np.split(numbers, [visits, 2 * visits, 3 * visits])
    rows, hidden, shares = take("rows", visits, depth), take("hidden", visits, width), take("shares", tokens, top_k)
    most, products = min(count, visits), ops.at(take("products", 2 * _most_jobs(count, visits))) if few else 0
    if table.has_gate:
        heads = np.array([_head(ops, depth, norm, linear.GATED, act, 2), _head(ops, width, None, linear.PLAIN, "none", 1)])
    else:  # what goes into the second product is activated as its head says
        heads = np.array([_head(ops, depth, norm, linear.PLAIN, "none", 1), _head(ops, width, None, linear.PLAIN, act, 1)])
    blocks = products + 8 * (2 + 6 * most)
    counters = (blocks + 16 * kernels.BLOCK * most + 63) // 64 * 64
    logits = take("routes", tokens, count)
    block = np.array([ops.at(x), tokens, depth, count, top_k, routing.renormalise, ops.at(logits), address(chosen), ops.at(shares),
                      address(offsets), address(places), address(owners), ops.at(rows), ops.at(hidden), width,
                      address(table.gated) * few, address(table.down), address(heads), products, blocks, counters,
                      kernels.ROOTS if routing.sqrt_softplus else kernels.OF_LOGITS if routing.correction_on_logits else routing.sigmoid,
                      address(correction), 0, routing.num_groups, routing.top_groups, 0 if apart is None else address(apart.scales),
                      0 if apart is None else ops.at(take("sum", tokens, depth)),
                      0 if gathered is None else address(gathered.weight), 0, 0,
                      0 if correction is None or correction.ndim == 1 else 4 * count, made,
                      address(norm.weight) if routing.zero_experts else 0, 0], np.int64)
    block.view(np.float64)[kernels.FACTOR] = routing.routed_scale
    block.view(np.float64)[kernels.EPS] = 0.0 if gathered is None else gathered.eps
    block.view(np.float64)[kernels.NEAR] = -1.0 if routing.sparsemixer_margin is None else routing.sparsemixer_margin
    block.view(np.float64)[kernels.HANDED_EPS] = norm.eps if routing.zero_experts else 0.0
    where = address(block)
    jobs = [(kernels.route_tokens, where, not few), (kernels.group_visits, where, False)]
    if tokens > 1 or not few or routing.weights_scale_inputs or routing.zero_experts:  # one token alone is read where it lies
        jobs.append((kernels.gather_rows, where, not few))
    if few:
        second = products + 8 * (1 + 3 * most)
        between = [] if table.has_gate else [(kernels.activate_inputs, second, visits * width >= SHARE_FROM)]
        jobs += [(kernels.each_product, products, True), *between, (kernels.each_product, second, True),
                 (kernels.combine_visits, where, tokens > 1)]
    stage = Stage(x, gathered or norm, router, asked, correction, apart, tuple(jobs), (block, heads),
                  Routed(offsets[: made + 1], owners, hidden), table, chosen, (blocks, counters))
    if few and ops.workspace.holds(x):
        if len(ops.mixtures.stages) >= MOST_STAGES:
            ops.mixtures.stages.clear()
        ops.mixtures.stages[id(experts), tokens] = stage
    return stage


def _head(ops: CpuOps, depth: int, norm: Norm | None, mode: int, act: str, matrices: int) -> np.ndarray:
    """The start of an argument block; input and number of tokens are filled in by the kernel."""
    kind, weight, bias = (0, 0, 0) if norm is None else (NORMS[norm.kind], address(norm.weight), address(norm.bias))
    head = np.array([0, 0, depth, kind, weight, bias, 0, ops.scratch, ops.scratch_stride, mode, activation_number(act), matrices], np.int64)
    if norm is not None:
        head.view(np.float64)[linear.EPS] = norm.eps
    return head


def _table(ops: CpuOps, experts: Sequence[Expert], act: str) -> Table:
    """The records of a layer's experts, built once."""
    known = ops.mixtures.tables.get(id(experts))
    if known is None:
        columns = columns_of(ops, experts, act)
        gated = np.zeros((len(experts), kernels.GATED_RECORD), np.int64)
        down = np.zeros((len(experts), kernels.DOWN_RECORD), np.int64)
        for e, expert in enumerate(experts if columns else ()):
            write_records(expert, gated[e], down[e])
        if len(ops.mixtures.tables) >= MOST_STAGES:
            ops.mixtures.tables.clear()
        known = ops.mixtures.tables[id(experts)] = Table(experts, gated, down, columns, experts[0].up.weight.shape[0],
                                                          experts[0].gate is not None)
    return known


def write_records(expert: Expert, gated: np.ndarray, down: np.ndarray) -> None:
    """An expert's two records."""
    for record, linears in ((gated, first_of(expert)), (down, (expert.down,))):
        values = [_kernel(linears[0]).address]
        for each in linears:
            values += fields(each)
        record[: len(values)] = values


def first_of(expert: Expert) -> tuple[Linear, ...]:
    """The matrices of an expert's first product."""
    return (expert.up,) if expert.gate is None else (expert.gate, expert.up)


def columns_of(ops: CpuOps, experts: Sequence[Expert], act: str) -> int:
    """Up to how many tokens the products of all experts are single jobs of the kernels for few columns."""
    limit = packed.MOST_COLUMNS
    for expert in experts:
        pair = first_of(expert)
        if len({low_bit.kind_of(each.weight) for each in pair}) > 1 or not low_bit.one_way(pair):
            return 0
        for each, activation in ((pair[0], act if len(pair) > 1 else "none"), (expert.down, "none")):
            if each.weight.spec.is_raw:
                limit = FEW
            if ops._runner(each, 1, activation) not in (MatrixStages.few_columns, low_bit.run_few, low_bit.run_floats):
                return 0
    return limit


def _kernel(each: Linear) -> Kernel:
    """The kernel that `_few` and `run_few` would run."""
    if each.weight.spec.is_raw:
        return linear.few_columns
    if each.weight.spec.scheme == "float":
        return fp8_loops.fp8_columns
    return lut.looked_up_columns if each.weight.looked_up else packed.packed_columns


def fields(each: Linear) -> list[int]:
    """A matrix's fields in an argument block, without its output address."""
    if each.weight.spec.is_raw:
        return [*each.fields, 0, each.weight.shape[0]]
    before, after = each.weight.low_bit_fields
    return [*before, address(each.bias), 0, each.weight.shape[0], *after, low_bit.loops_at(each.weight)]
