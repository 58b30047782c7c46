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
from .row_ops import MIN_PARALLEL_SIZE, norm_rows
from .stages import FEW_TOKENS, MatrixStages

if TYPE_CHECKING:
    from ...quant.weight import Expert, Linear, Norm, ParallelExperts, SharedExpert
    from ..expert_pages import ExpertPages
    from .ops import CpuOps

MAX_STAGES = 1024
VisitObserver = Callable[[Routed], None]
RoutingAndAct = tuple[Routing, str]  # with the activation


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of a mixture's buffers, none without one."""
    if not dims.num_experts:
        return {}
    visits, jobs = chunk * dims.experts_per_token, _jobs_size(dims.num_experts, packed.MAX_COLUMNS * dims.experts_per_token)
    ahead = {f"routes_ahead_{distance}": dims.num_experts for distance in range(1, MAX_LOOKAHEAD_LAYERS + 1)}
    return {"routes": chunk * dims.num_experts, **ahead, "shares": visits, "visits": 2 * (3 * visits + dims.num_experts + 1),
            "rows": visits * dims.hidden_size, "hidden": visits * dims.expert_dim, "products": 2 * jobs, "scales": chunk,
            **dict.fromkeys(("branch", "sum"), chunk * dims.hidden_size * dims.parallel_to_mlp),
            **({"normed": chunk * dims.hidden_size} if dims.latent_experts else {})}


def _jobs_size(experts: int, visits: int) -> int:
    """int64 of the lists, argument blocks and counters of two products per visited expert."""
    return 2 + 2 * min(experts, visits) * (3 + kernels.BLOCK + kernels.COUNTS) + kernels.COUNTS


@dataclass(frozen=True)
class Table:
    """A layer's experts as records for `group_visits`."""

    experts: Sequence[Expert]
    gated: np.ndarray  # records of gate and up, int64 [E, GATED_RECORD]
    down: np.ndarray  # records of down, int64 [E, DOWN_RECORD]
    columns: int  # maximum number of tokens whose products the kernel prepares; 0: always Python
    width: int  # input width of `down`
    has_gate: bool


@dataclass(frozen=True)
class PreparedStage:
    """A prepared stage of few tokens, reused when the same objects are passed again.

    `arrays` are read by its jobs. `chosen` int64 [T k] is their first output. `lists`: addresses of the argument blocks and of the counters
    of the products (`moe_paged.py`)."""

    x: np.ndarray
    norm: Norm
    router: Linear
    routing_and_act: RoutingAndAct
    correction: np.ndarray | None
    parallel: ParallelExperts | None
    jobs: tuple[tuple[Kernel, int, bool], ...]
    arrays: tuple[np.ndarray, ...]
    routed: Routed
    table: Table
    chosen: np.ndarray
    lists: tuple[int, int]


class MixtureCache:
    """Expert stages and tables cached by a model's ops, keyed by the identity of a layer's experts."""

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.stages: dict[tuple[int, int], PreparedStage] = {}


def moe(self: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: tuple[Expert, ...] | ExpertPages, routing: Routing, act: str,
        observer: VisitObserver | None = None, correction: np.ndarray | None = None, shared: SharedExpert | None = None) -> np.ndarray:
    """x + sum over a token's experts of weight * down(act(gate(n)) * up(n)) with n = norm(x), in place, plus the `shared` expert of all
    tokens; without gates, of down(act(up(n))). Experts not given as a tuple are loaded when needed.

    `observer` is called with the visits; its arrays may be read once the collected jobs have run.
    """
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    return run(self, x, norm, router, experts, (routing, act), observer, correction, shared, None)


def mlp_and_experts(self: CpuOps, x: np.ndarray, norm: Norm, gate: Linear | None, up: Linear | None, down: Linear | None, router: Linear,
                    experts: tuple[Expert, ...] | ExpertPages, parallel: ParallelExperts, routing: Routing, act: str,
                    observer: Callable[[np.ndarray], None] | None = None, visit_observer: VisitObserver | None = None,
                    post_norm: Norm | None = None, correction: np.ndarray | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if down is not None:
        hidden = self.gated_hidden(x, norm, gate, up, act)
        if observer is not None:
            observer(hidden)
        branch = self.workspace.take("branch", *x.shape)
        if self._run_cached(hidden, None, (down,), linear.PLAIN, "none") is None:
            self._run_stage(hidden, None, [down], [branch], linear.PLAIN, "none")
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    total = run(self, x, parallel.pre_norm, router, experts, (routing, act), visit_observer, correction, None, parallel)
    if parallel.post_norm is not None:
        norm_rows(self, total, parallel.post_norm)
    if down is not None:
        self._add_with(self, branch, parallel.mlp_post_norm, total, 1.0)
    self._add_with(self, total, post_norm, x, 1.0)
    return x


def expert_branch(self: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: tuple[Expert, ...] | ExpertPages,
                  parallel: ParallelExperts, routing: Routing, act: str, observer: VisitObserver | None = None,
                  correction: np.ndarray | None = None,
                  shared: SharedExpert | None = None, router_input: np.ndarray | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if isinstance(experts, tuple):
        run = self.registry.select(Call("moe", act=act)).candidate.run
    else:
        from .moe_paged import run
    return run(self, x, norm, router, experts, (routing, act), observer, correction, shared, parallel, router_input)


def run_reference(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing_and_act: RoutingAndAct,
                  observer: VisitObserver | None,
                  correction: np.ndarray | None, shared: SharedExpert | None, parallel: ParallelExperts | None,
                  router_input: np.ndarray | None = None) -> np.ndarray:
    ops.flush()
    out = x if parallel is None else ops.workspace.take("sum", *x.shape)
    out[:], routed = reference_moe.moe(x, norm, router, experts, *routing_and_act, correction, shared, parallel, router_input)
    if observer is not None:
        observer(routed)
    return out


def run(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing_and_act: RoutingAndAct,
        observer: VisitObserver | None,
        correction: np.ndarray | None, shared: SharedExpert | None, parallel: ParallelExperts | None,
        router_input: np.ndarray | None = None) -> np.ndarray:
    shared_input = shared_hidden(ops, x, norm, shared, routing_and_act[1])
    stage = routed_stage(ops, x, norm, router, experts, routing_and_act, correction, parallel, _table, router_input)
    for kernel, block, is_parallel in stage.jobs:
        ops.run(kernel, block, is_parallel)
    if len(x) > stage.table.columns:
        _products(ops, products_norm(norm, routing_and_act), experts, stage, routing_and_act[1])
        ops.run(kernels.combine_visits, address(stage.arrays[0]), True)
    return add_shared(ops, x, stage, shared_input, shared, observer)


def shared_hidden(ops: CpuOps, x: np.ndarray, norm: Norm, shared: SharedExpert | None, act: str) -> np.ndarray | None:
    """Enqueue the first half of the shared expert: its `down` input, float32 [T, S], times its weight."""
    if shared is None:
        return None
    hidden = ops.gated_hidden(x, norm, shared.gate, shared.up, shared.act or act)
    if shared.shared_gate is not None:
        scales = ops.workspace.take("scales", len(x), 1)
        if ops._run_cached(x, norm, (shared.shared_gate,), linear.PLAIN, "none") is None:
            ops._run_stage(x, norm, [shared.shared_gate], [scales], linear.PLAIN, "none")
        block = np.array([ops.address_of(hidden), *hidden.shape, ops.address_of(scales)], np.int64)
        ops.keep_alive(block)
        ops.run(kernels.scale_rows, address(block), len(x) > 1)
    return hidden


def add_shared(ops: CpuOps, x: np.ndarray, stage: PreparedStage, shared_input: np.ndarray | None, shared: SharedExpert | None,
               observer: VisitObserver | None) -> np.ndarray:
    """The residual stream after adding the shared expert to the others; for parallel experts their sum alone."""
    out = x if stage.parallel is None else ops.workspace.take("sum", *x.shape)
    if shared_input is not None:
        ops.linear_add(shared_input, shared.down, out, None, shared.multiplier)
    if observer is not None:
        observer(stage.routed if shared_input is None else replace(stage.routed, shared=shared_input))
    return out


def routed_stage(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing_and_act: RoutingAndAct,
                 correction: np.ndarray | None, parallel: ParallelExperts | None, table: Callable,
                 router_input: np.ndarray | None = None) -> PreparedStage:
    """Enqueue the router's product; returns the stage whose jobs come next. `table` builds or finds the experts' records; `router_input`:
    the router's input where that is not norm(x)."""
    router_norm, router_reads = (None, router_input) if router_input is not None else (norm if parallel is None else parallel.router_norm,
                                                                                       x)
    mode = linear.FINE if router.weight.spec.is_raw else linear.PLAIN  # a rounded input could select other experts
    if ops._run_cached(router_reads, router_norm, (router,), mode, "none") is None:
        is_few = len(x) <= table(ops, experts, routing_and_act[1]).columns  # then a token is routed with the numerics of a single one
        logits = ops.workspace.take("routes", len(x), len(experts) + routing_and_act[0].zero_experts)
        ops._run_stage(router_reads, router_norm, [router], [logits], mode, "none", int(is_few))
    stage = ops.mixtures.stages.get((id(experts), len(x)))
    is_cached = stage is not None and stage.x is x and stage.norm is norm and stage.router is router and stage.correction is correction
    if not is_cached or stage.routing_and_act != routing_and_act or stage.parallel is not parallel:
        stage = _prepare_stage(ops, x, norm, router, experts, routing_and_act, correction, parallel,
                               table(ops, experts, routing_and_act[1]))
    for array in stage.arrays:
        ops.keep_alive(array)
    return stage


def products_norm(norm: Norm, routing_and_act: RoutingAndAct) -> Norm | None:
    """The norm at the start of the experts' products; none if their inputs are normed while being gathered."""
    return None if routing_and_act[0].weights_scale_inputs else norm


def _products(ops: CpuOps, norm: Norm | None, experts: Sequence[Expert], stage: PreparedStage, act: str) -> None:
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
    """Enqueue an expert's products over `rows`, in place; `columns` as in `CpuOps._run_stage`."""
    if expert.gate is None:
        ops._run_stage(rows, norm, [expert.up], [hidden], linear.PLAIN, "none", columns)
        ops.gate(hidden, None, act)
    else:
        ops._run_stage(rows, norm, [expert.gate, expert.up], [hidden], linear.GATED, act, columns)
    ops._run_stage(hidden, None, [expert.down], [rows], linear.PLAIN, "none", columns)


def _prepare_stage(ops: CpuOps, x: np.ndarray, norm: Norm, router: Linear, experts: Sequence[Expert], routing_and_act: RoutingAndAct,
                   correction: np.ndarray | None, parallel: ParallelExperts | None, table: Table) -> PreparedStage:
    """The jobs of a stage up to where Python is needed; cached for few tokens."""
    routing, act = routing_and_act
    if routing.weights_scale_inputs and (norm.kind != "rms" or parallel is not None):
        raise ValueError("expert weights on inputs require an RMS norm")
    if routing.sparsemixer_margin is not None and (correction is not None or routing.top_groups < routing.num_groups):
        raise ValueError("expert weights by near logits require selection by logits")
    if routing.correction_on_logits and (not routing.sigmoid or routing.top_groups < routing.num_groups):
        raise ValueError("logit corrections require sigmoid scores and no groups")
    if routing.zero_experts and (norm.kind != "rms" or routing.weights_scale_inputs):
        raise ValueError("identity experts require an RMS norm and weights on outputs")
    input_norm, norm = (norm, None) if routing.weights_scale_inputs else (None, norm)
    top_k = routing.experts_per_token
    (tokens, depth), num_experts, width = x.shape, len(experts), table.width
    count = num_experts + routing.zero_experts
    visits, is_few, take = tokens * top_k, tokens <= table.columns, ops.workspace.take
    buffer = take("visits", 2 * (3 * visits + count + 1)).view(np.int64)
    chosen, visit_of, owners, offsets = np.split(buffer, [visits, 2 * visits, 3 * visits])
    rows, hidden, shares = take("rows", visits, depth), take("hidden", visits, width), take("shares", tokens, top_k)
    max_experts, products = min(count, visits), ops.address_of(take("products", 2 * _jobs_size(count, visits))) if is_few else 0
    if table.has_gate:
        headers = np.array([_block_header(ops, depth, norm, linear.GATED, act, 2),
                            _block_header(ops, width, None, linear.PLAIN, "none", 1)])
    else:  # the second product applies the activation to its input
        headers = np.array([_block_header(ops, depth, norm, linear.PLAIN, "none", 1),
                            _block_header(ops, width, None, linear.PLAIN, act, 1)])
    blocks = products + 8 * (2 + 6 * max_experts)
    counters = (blocks + 16 * kernels.BLOCK * max_experts + 63) // 64 * 64
    logits = take("routes", tokens, count)
    block = np.array([ops.address_of(x), tokens, depth, count, top_k, routing.renormalise, ops.address_of(logits), address(chosen),
                      ops.address_of(shares),
                      address(offsets), address(visit_of), address(owners), ops.address_of(rows), ops.address_of(hidden), width,
                      address(table.gated) * is_few, address(table.down), address(headers), products, blocks, counters,
                      kernels.ROOTS if routing.sqrt_softplus else kernels.LOGIT_CORRECTION if routing.correction_on_logits
                      else routing.sigmoid,
                      address(correction), 0, routing.num_groups, routing.top_groups,
                      0 if parallel is None else address(parallel.expert_scales),
                      0 if parallel is None else ops.address_of(take("sum", tokens, depth)),
                      0 if input_norm is None else address(input_norm.weight), 0, 0,
                      0 if correction is None or correction.ndim == 1 else 4 * count, num_experts,
                      address(norm.weight) if routing.zero_experts else 0, 0], np.int64)
    block.view(np.float64)[kernels.FACTOR] = routing.routed_scale
    block.view(np.float64)[kernels.EPS] = 0.0 if input_norm is None else input_norm.eps
    block.view(np.float64)[kernels.NEAR] = -1.0 if routing.sparsemixer_margin is None else routing.sparsemixer_margin
    block.view(np.float64)[kernels.HANDED_EPS] = norm.eps if routing.zero_experts else 0.0
    block_at = address(block)
    jobs = [(kernels.route_tokens, block_at, not is_few), (kernels.group_visits, block_at, False)]
    if tokens > 1 or not is_few or routing.weights_scale_inputs or routing.zero_experts:  # a single token is read in place
        jobs.append((kernels.gather_rows, block_at, not is_few))
    if is_few:
        second_list = products + 8 * (1 + 3 * max_experts)
        activation = [] if table.has_gate else [(kernels.activate_inputs, second_list, visits * width >= MIN_PARALLEL_SIZE)]
        jobs += [(kernels.each_product, products, True), *activation, (kernels.each_product, second_list, True),
                 (kernels.combine_visits, block_at, tokens > 1)]
    stage = PreparedStage(x, input_norm or norm, router, routing_and_act, correction, parallel, tuple(jobs), (block, headers),
                          Routed(offsets[: num_experts + 1], owners, hidden), table, chosen, (blocks, counters))
    if is_few and ops.workspace.holds(x):
        if len(ops.mixtures.stages) >= MAX_STAGES:
            ops.mixtures.stages.clear()
        ops.mixtures.stages[id(experts), tokens] = stage
    return stage


def _block_header(ops: CpuOps, depth: int, norm: Norm | None, mode: int, act: str, matrices: int) -> np.ndarray:
    """The start of an argument block; input and number of tokens are filled in by the kernel."""
    kind, weight, bias = (0, 0, 0) if norm is None else (NORMS[norm.kind], address(norm.weight), address(norm.bias))
    header = np.array([0, 0, depth, kind, weight, bias, 0, ops.scratch, ops.scratch_stride, mode, activation_number(act), matrices],
                      np.int64)
    if norm is not None:
        header.view(np.float64)[linear.EPS] = norm.eps
    return header


def _table(ops: CpuOps, experts: Sequence[Expert], act: str) -> Table:
    """The records of a layer's experts, built once."""
    cached = ops.mixtures.tables.get(id(experts))
    if cached is None:
        columns = max_columns(ops, experts, act)
        gated = np.zeros((len(experts), kernels.GATED_RECORD), np.int64)
        down = np.zeros((len(experts), kernels.DOWN_RECORD), np.int64)
        for e, expert in enumerate(experts if columns else ()):
            write_records(expert, gated[e], down[e])
        if len(ops.mixtures.tables) >= MAX_STAGES:
            ops.mixtures.tables.clear()
        cached = ops.mixtures.tables[id(experts)] = Table(experts, gated, down, columns, experts[0].up.weight.shape[0],
                                                          experts[0].gate is not None)
    return cached


def write_records(expert: Expert, gated: np.ndarray, down: np.ndarray) -> None:
    """An expert's two records."""
    for record, linears in ((gated, first_matrices(expert)), (down, (expert.down,))):
        values = [_kernel(linears[0]).address]
        for matrix in linears:
            values += fields(matrix)
        record[: len(values)] = values


def first_matrices(expert: Expert) -> tuple[Linear, ...]:
    """The matrices of an expert's first product."""
    return (expert.up,) if expert.gate is None else (expert.gate, expert.up)


def max_columns(ops: CpuOps, experts: Sequence[Expert], act: str) -> int:
    """Up to how many tokens the products of all experts are single jobs of the kernels for few columns."""
    limit = packed.MAX_COLUMNS
    for expert in experts:
        pair = first_matrices(expert)
        if len({low_bit.kind_of(matrix.weight) for matrix in pair}) > 1 or not low_bit.can_share_job(pair):
            return 0
        for matrix, activation in ((pair[0], act if len(pair) > 1 else "none"), (expert.down, "none")):
            if matrix.weight.spec.is_raw:
                limit = FEW_TOKENS
            if ops._select_kernel(matrix, 1, activation) not in (MatrixStages.few_columns, low_bit.run_few, low_bit.run_floats):
                return 0
    return limit


def _kernel(matrix: Linear) -> Kernel:
    """The kernel that `_few` and `run_few` would run."""
    if matrix.weight.spec.is_raw:
        return linear.few_columns
    if matrix.weight.spec.scheme == "float":
        return fp8_loops.fp8_columns
    return lut.looked_up_columns if matrix.weight.in_lut_layout else packed.packed_columns


def fields(matrix: Linear) -> list[int]:
    """A matrix's fields in an argument block, without its output address."""
    if matrix.weight.spec.is_raw:
        return [*matrix.kernel_args, 0, matrix.weight.shape[0]]
    before, after = matrix.weight.low_bit_kernel_args
    return [*before, address(matrix.bias), 0, matrix.weight.shape[0], *after, low_bit.loops_at(matrix.weight)]
