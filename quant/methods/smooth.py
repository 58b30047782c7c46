"""SmoothQuant+ (arXiv 2312.03788): scales large inputs down and the matching weight columns up before quantization.

Multiplying an input by 1/f and its weight column by f changes nothing, but important columns are rounded more finely. f is free where
the producer of the input can absorb it: a norm's weight (input_norm -> q, k, v and post_norm -> gate, up), or a projection's rows (v ->
o, one f per channel of a KV head and of all query heads that read it; up -> down, where a gate or nothing but ReLU lies between, which
commute with f). A norm that a family lacks, or applies after a projection, makes no pair. f_k = power_k**a / weight_k**b, power the root
mean square of the input and weight the largest in its column; each pair takes the exponents, of a few, with the least output error: b =
1 - a is SmoothQuant's choice, b = 0 that of AWQ (arXiv 2306.00978). Then `rtn` rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from ... import UsageError
from ...kernels.blas import one_thread
from ...kernels.layout import bounds_up
from ..codes import Codes, dequantize
from ..spec import QuantSpec
from ..stats import Stats
from ..weight import from_f32, to_f32
from . import Layout, checked, rtn

NEEDS = frozenset({"mean_square"})
# roles: who makes the input, who reads it
PAIRS = (("input_norm", ("q", "k", "v", "kv_a", "q_a", "attn_gate")), ("q_a_norm", ("q_b",)), ("v", ("o",)), ("post_norm", ("gate", "up")),
         ("mlp_norm", ("gate", "up")), ("up", ("down",)))
# Roles of what reads a norm too, and stays as it is, and of layers in which something lies between the two.
BESIDE = {"input_norm": frozenset({"state_in", "low_in", "index_k", "index_entered"}), "q_a_norm": frozenset({"index_q"})}
BETWEEN = {"v": frozenset({"attn_sub_norm", "lambda_q1", "dynamic_mask"}), "up": frozenset({"ffn_sub_norm"})}
EXPONENTS = ((0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.3, 0.0), (0.4, 0.0), (0.5, 0.0), (0.3, 0.7), (0.5, 0.5), (0.7, 0.3), (0.9, 0.1))  # a, b
MOST = 16.0  # f stays within 1/MOST and MOST of its geometric mean
SMALL = 1 << 30  # multiplications of a product that one thread makes: those of BLAS take longer to share it
ROWS = 1024  # rows of a matrix that judge an exponent


def check(spec: QuantSpec) -> None:
    """Raises UsageError for a spec with outliers."""
    if spec.outliers:
        raise UsageError(f"smooth cannot make {spec}: it stores no outliers", "--method spqr")


def quantize(rows: np.ndarray, spec: QuantSpec, stats: Stats | None = None, pool: object = None) -> Codes:
    """Rows that `equalise` has been over -> Codes, by `rtn`."""
    return rtn.quantize(rows, spec, None, pool)


def equalise(tensors: Mapping[str, np.ndarray], stats: Mapping[str, Stats], specs: Mapping[str, QuantSpec], layout: Layout,
             pool: object = None) -> dict[str, np.ndarray]:
    """The tensors of one layer that change, by role, float32; norms and biases hold what `layout.stored` holds exactly.

    `tensors` are all of the layer's by role, `q_bias` and the like included; `stats` and `specs` those of its matrices. The layer computes
    what it did, but for rounding. A pair whose readers are all kept raw, or whose norm is of a kind without weights, is left as it is.
    """
    changed = dict(tensors)
    for maker, all_readers in PAIRS:
        if maker == "input_norm" and not {"post_norm", "mlp_norm"} & tensors.keys():  # then an MLP reads it too
            all_readers = (*all_readers, "gate", "up")
        readers = [reader for reader in all_readers if reader in tensors]
        if maker not in tensors or all(specs[reader].is_raw for reader in readers):
            continue
        if BESIDE.get(maker, frozenset()) & tensors.keys():
            continue
        if maker == "post_norm" and "router" in tensors and "expert_norm" not in tensors:  # which a router and experts read too
            continue
        if maker == "v" and layout.values_normed or BETWEEN.get(maker, frozenset()) & tensors.keys():
            continue
        if maker == "up" and (bounds_up(layout.act) if "gate" in tensors else layout.act != "relu"):
            continue
        factors = best_factors(maker, [checked(changed[reader]) for reader in readers], [specs[reader] for reader in readers],
                               stats[readers[0]], layout, pool)
        fold(changed, maker, readers, factors, layout)
    return {role: array for role, array in changed.items() if array is not tensors[role]}


def equalise_s(shape: Sequence[int], weight_s: float, rate: float) -> float:
    """Seconds for a matrix: under each pair of exponents some rows are rounded and the error of their outputs is judged."""
    rows, depth = min(shape[0], ROWS), shape[1]
    return len(EXPONENTS) * rows * depth * (weight_s + 2 * depth / rate)


def best_factors(maker: str, readers: Sequence[np.ndarray], specs: Sequence[QuantSpec], stats: Stats, layout: Layout,
                 pool: object = None) -> np.ndarray:
    """f for each input of the readers, float32 [K]; the same for all that one channel of the maker feeds."""
    power = np.sqrt(np.maximum(shared(maker, stats.mean_square.astype(np.float64), layout, np.mean), 0))
    largest = shared(maker, np.max([np.abs(each).max(0) for each in readers], axis=0).astype(np.float64), layout, np.max)
    judges = [each[:: max(1, -(-len(each) // ROWS))] for each in readers]
    best, least = np.ones(len(power)), np.inf
    for of_power, of_weight in EXPONENTS:
        factors = tried(power, largest, of_power, of_weight)
        error = sum(output_error(each, spec, factors, stats, pool) * len(whole) / len(each)
                    for each, spec, whole in zip(judges, specs, readers) if not spec.is_raw)
        if error < least:
            best, least = factors, error
    return best.astype(np.float32)


def tried(power: np.ndarray, largest: np.ndarray, of_power: float, of_weight: float) -> np.ndarray:
    """f of one pair of exponents, around 1. Inputs that are always zero, or read with no weight, keep 1."""
    live = (power > 0) & (largest > 0)
    logs = of_power * np.log(power, out=np.zeros(len(power)), where=live)
    logs -= of_weight * np.log(largest, out=np.zeros(len(power)), where=live)
    logs[live] -= logs[live].mean() if live.any() else 0
    return np.exp(np.clip(logs, -np.log(MOST), np.log(MOST)))


def output_error(rows: np.ndarray, spec: QuantSpec, factors: np.ndarray, stats: Stats, pool: object) -> float:
    """Squared error of the outputs when `rows` times `factors` are rounded, summed over rows.

    All of it in float32, which is enough to tell exponents apart: in float64 the products took ten times as long beside other programs.
    """
    factors = factors.astype(np.float32)
    scaled = rows * factors
    errors = (scaled - dequantize(rtn.quantize(scaled, spec, None, pool), spec)) / factors
    if stats.hessian is None:
        return float((np.square(errors) @ stats.mean_square).sum(dtype=np.float64))
    with one_thread() if rows.size * rows.shape[1] < SMALL else nullcontext():
        outputs = errors @ stats.hessian
    return float(np.multiply(outputs, errors, out=outputs).sum(dtype=np.float64))


def shared(maker: str, values: np.ndarray, layout: Layout, join: object) -> np.ndarray:
    """Per-input values [K] made equal where inputs come from one channel: of `o`, what the query heads of a KV head read."""
    if maker != "v":
        return values
    heads = values.reshape(layout.kv_heads, layout.heads // layout.kv_heads, layout.head_dim)
    return np.repeat(join(heads, axis=1)[:, None], heads.shape[1], axis=1).reshape(-1)


def fold(changed: dict[str, np.ndarray], maker: str, readers: Sequence[str], factors: np.ndarray, layout: Layout) -> None:
    """Multiply the readers' columns by `factors` and divide what makes their inputs, in place of `changed`'s entries.

    A norm is rounded to its stored type first and the columns take what it then lacks, so that nothing is lost.
    """
    if maker.endswith("norm"):
        offset = np.float32(layout.norm_kind.endswith("+1"))
        before = changed[maker] + offset
        after = stored(before / factors - offset, layout.stored)
        live = (before != 0) & (after + offset != 0)
        factors = np.where(live, before / np.where(live, after + offset, 1), 1).astype(np.float32)
        changed[maker] = np.where(live, after, changed[maker])
        if f"{maker}_bias" in changed:
            changed[f"{maker}_bias"] = stored(changed[f"{maker}_bias"] / factors, layout.stored)
    else:
        per_row = factors
        if maker == "v":
            per_row = factors.reshape(layout.kv_heads, -1, layout.head_dim)[:, 0].reshape(-1)
        changed[maker] = changed[maker] / per_row[:, None]
        if f"{maker}_bias" in changed:
            changed[f"{maker}_bias"] = stored(changed[f"{maker}_bias"] / per_row, layout.stored)
    for reader in readers:
        changed[reader] = changed[reader] * factors


def stored(values: np.ndarray, scheme: str) -> np.ndarray:
    """float32 as a raw type holds it."""
    return to_f32(from_f32(values.astype(np.float32), scheme), scheme)
