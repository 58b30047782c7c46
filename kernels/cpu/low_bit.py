"""Dispatch of low-bit weights on the CPU: argument blocks for `packed.py` (up to 16 columns), `gemm.py` (more) and single rows.

Matrices that read the same input are one job whatever their formats; only a gated pair must use the same way (`packed_matrix.seeds_way` and
`gemm.way_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import NORMS, ONE_SCALE, activation_number, is_activation
from ..registry import Call
from ..tiles import SCHEME_MASK, SCHEME_SHIFT, SCHEMES
from ..workspace import address
from . import fp8_loops, gemm, gemm_amx, linear, lut, lut_layout, packed, packed_embedding, packed_formats, packed_matrix, panel_products
from .amx import AMX
from .packed_matrix import FIELDS
from .panel_products import PanelProduct

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm, Weight
    from .ops import CpuOps

MAX_MATRICES = 16
FINE_COLUMNS = packed.MAX_COLUMNS // 2  # tokens that use two columns each
RAW, DOT, LOOKED_UP, FLOATS = range(4)  # kinds of weights, each a job of its own
# int64 slots of the longest argument block.
BLOCK_SIZE = max(linear.FIRST + MAX_MATRICES * FIELDS, gemm.FIRST + MAX_MATRICES * gemm.FIELDS, packed_embedding.BLOCK_SIZE)


def scratch_floats(chunk: int, wide: int) -> int:
    """Floats of scratch per worker."""
    return -(-max(lut.scratch_nbytes(wide), gemm.gemm_scratch(chunk, wide), gemm_amx.scratch_nbytes(chunk, wide) if AMX else 0) // 4)


def panel_floats(chunk: int, wide: int) -> int:
    """Floats of packed activations for products with many columns."""
    if AMX:
        return -(-gemm_amx.panels_nbytes(chunk, wide) // 4)
    return -(-max(gemm.panel_nbytes(chunk, wide, method) for method in (gemm.SCALED, gemm.GROUPED, gemm.NARROW_CODES, gemm.STEPPED)) // 4)


def kind_of(weight: Weight) -> int:
    """Which kind of job a weight belongs to."""
    if weight.spec.scheme == "float":
        return FLOATS
    return RAW if weight.spec.is_raw else LOOKED_UP if weight.in_lut_layout else DOT


def loops_at(weight: Weight) -> int:
    """The last of a matrix's fields in `packed_matrix.py`: the address of its format's loop table, which float formats lack."""
    (_, kind, _), (_, shift, *_) = weight.low_bit_kernel_args
    return 0 if kind_of(weight) == FLOATS else packed_formats.table_at(kind, shift)


def declines(call: Call) -> str:
    """Why no compiled low-bit kernel accepts a call."""
    return "" if call.stored in SCHEMES and is_activation(call.act) else f"not for {call.stored} weights"


def declines_integers(call: Call) -> str:
    """Why no int8 kernel accepts a call."""
    return declines(call) or ("fp8 weights have no int8 form" if call.stored == "float" else "")


def declines_floats(call: Call) -> str:
    """Why no fp8 kernel accepts a call."""
    return declines(call) or ("" if call.stored == "float" else "not fp8 weights")


def declines_lookup(call: Call) -> str:
    """Why no lookup kernel accepts a call; weights must be prepared for lookup."""
    return (declines(call) or lut_layout.declines(call.stored, call.bits)
            or ("" if call.looked_up else "the codes are in the dot-product layout"))


def _method_of(weight: Weight) -> int:
    spec = weight.spec
    return gemm_amx.method_of(spec.bits, spec.scheme, bool(spec.outliers)) if AMX else gemm.method_of(spec.bits, spec.scheme)


def can_share_job(linears: Sequence[Linear]) -> bool:
    """Can a gated pair be one job?"""
    return len({matrix.weight.spec.scheme if kind_of(matrix.weight) in (RAW, FLOATS) else
                (packed_matrix.seed_scaling(matrix.weight.spec.scheme, matrix.weight.spec.group), _method_of(matrix.weight))
                for matrix in linears}) == 1


def _norm_of(ops: CpuOps, norm: Norm | None, linears: Sequence[Linear]) -> int:
    """The norm kind as stored in a low-bit product's argument block, which also says how activations are rounded."""
    kind = 0 if norm is None else NORMS[norm.kind]
    return kind + ONE_SCALE if ops.dims.per_token_scale and all(matrix.weight.spec.scheme == "ternary" for matrix in linears) else kind


def fill_few(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int,
             act: str) -> None:
    """Fill in the argument block for up to 16 columns."""
    tokens, depth = x.shape
    kind = _norm_of(ops, norm, linears)
    block = [ops.address_of(x), tokens, depth, kind, 0 if norm is None else address(norm.weight),
             0 if norm is None else address(norm.bias), 0, ops.scratch, ops.scratch_stride, mode, activation_number(act), len(linears)]
    for i, matrix in enumerate(linears):
        out = outs[min(i, len(outs) - 1)]
        before, after = matrix.weight.low_bit_kernel_args
        block += [*before, address(matrix.bias), ops.address_of(out), out.strides[0] // 4, *after, loops_at(matrix.weight)]
    ops.args[: len(block)] = block
    if norm is not None:
        ops.reals[linear.EPS] = norm.eps


def run_few(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int, act: str) -> None:
    """Up to 16 columns."""
    fill_few(ops, x, norm, linears, outs, mode, act)
    kernel = lut.looked_up_columns if linears[0].weight.in_lut_layout else packed.packed_columns
    ops.run_and_cache(kernel, x, norm, linears, outs, mode, act)


def run_fine(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int,
             act: str) -> None:
    """Any number of columns of an LM head. Nothing after it averages out the rounding of its inputs: with 8 bits, the head causes a third
    of the loss of all activation rounding. So the rounding errors are multiplied in integers too, for at most eight tokens at once, reading
    the weights as often as for one."""
    if ops._select_kernel(linears[0], 1, act) is not run_few or linears[0].weight.in_lut_layout:
        ops._select_kernel(linears[0], len(x), act)(ops, x, norm, linears, outs, mode, act)
        return
    if len(x) <= FINE_COLUMNS:
        run_few(ops, x, norm, linears, outs, mode, act)  # the same view objects, so that the job is cached
        return
    for first in range(0, len(x), FINE_COLUMNS):
        rows = slice(first, first + FINE_COLUMNS)
        run_few(ops, x[rows], norm, linears, [out[rows] for out in outs], mode, act)


def run_floats(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int,
               act: str) -> None:
    """Up to 16 columns of fp8 weights."""
    fill_few(ops, x, norm, linears, outs, mode, act)
    ops.run_and_cache(fp8_loops.fp8_columns, x, norm, linears, outs, mode, act)


def run_many(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int,
             act: str) -> None:
    """More columns. Formats multiplied differently pack activations differently, so they are separate jobs."""
    pack, multiply = (gemm_amx.pack_tokens, gemm_amx.multiply) if AMX else (gemm.pack_tokens, gemm.multiply)
    methods = [_method_of(matrix.weight) for matrix in linears]
    for method in dict.fromkeys(methods):
        chosen = [i for i, other in enumerate(methods) if other == method]
        tokens, depth = x.shape
        rows = sum(linears[i].weight.shape[0] for i in chosen) // (2 if mode == linear.GATED else 1)
        panels = ops.workspace.take("low_panels", panel_floats(tokens, depth))
        kind = _norm_of(ops, norm, linears)
        at_once = gemm.stripes_at_once(rows, mode, ops.pool.workers)
        head = [tokens, depth, kind, 0 if norm is None else address(norm.weight), 0 if norm is None else address(norm.bias), 0,
                ops.scratch, ops.scratch_stride, mode, activation_number(act), method, at_once, len(chosen)]
        block = [ops.address_of(x), *head]
        for i in chosen:
            out = outs[min(i, len(outs) - 1)]
            block += [*gemm_fields(linears[i].weight, linears[i].bias), ops.address_of(out), out.strides[0] // 4]
        ops.args[: len(block)] = block
        if norm is not None:
            ops.reals[gemm.EPS] = norm.eps
        if ops.must_pack("low_panels", (method, kind)):
            ops.args[gemm.FIRST + gemm.OUT] = ops.address_of(panels)
            ops.run(pack, ops.args_address, True, ops.args)
        ops.args[: len(block)] = block
        ops.args[gemm.X] = ops.address_of(panels)
        ops.run(multiply, ops.args_address, True, ops.args)


def fill_codes(ops: CpuOps, panels: int, tokens: int, depth: int, mode: int, linears: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    """Fill in the argument block of a float product with low-bit weights, from panels at an address."""
    block = [panels, tokens, depth, 0, 0, 0, 0, ops.scratch, ops.scratch_stride, mode, 0, gemm.GROUPED, 0, len(linears)]
    for matrix, out in zip(linears, outs, strict=True):
        block += [*gemm_fields(matrix.weight, matrix.bias), ops.address_of(out), out.strides[0] // 4]
    ops.args[: len(block)] = block


# Any number of columns in float32: activations are not quantized, weights are exact.
run_exact = PanelProduct(panel_products.panel_floats, linear.pack_columns, gemm.multiply_exact, fill_codes)


def gemm_fields(weight: Weight, bias: np.ndarray | None = None) -> list[int]:
    """The fields of a matrix for the kernels for many columns, up to its output address, in the order of `gemm_formats.py`."""
    (base, kind, rows), (_, _, scales, zeros, row_scales, tables, sparse, _) = weight.low_bit_kernel_args
    return [base, scales, zeros, row_scales, tables, sparse, kind >> SCHEME_SHIFT, kind & SCHEME_MASK, weight.spec.group,
            weight.in_lut_layout, rows, address(bias)]


def embed(ops: CpuOps, ids: np.ndarray, table: Weight, scale: float, out: np.ndarray) -> None:
    """Rows of a low-bit embedding table -> float32 [T, K] at `out`."""
    before, after = table.low_bit_kernel_args
    factor = int(np.float32(scale).view(np.uint32))
    block = [ids.__array_interface__["data"][0], len(ids), table.shape[1], factor, *before, 0, ops.address_of(out), out.strides[0] // 4,
             *after, 0]
    ops.args[: len(block)] = block
    ops.run(packed_embedding.embed_rows, ops.args_address, len(ids) > 1, ops.args)
