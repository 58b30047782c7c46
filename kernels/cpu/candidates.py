"""The CPU's kernel candidates in order of preference: compiled kernels first, the NumPy reference of each op last.

A new kernel is one more `Candidate`, which states why it declines a call and why it is used where it is; `effllm doctor` prints both for
every op listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..layout import STORED_TYPES, is_activation
from ..registry import Call, Candidate, Registry
from . import (
    cca,
    compressed,
    delta,
    gated_residuals,
    head_widths,
    hyper_connections,
    indexer,
    kda,
    latent,
    lightning,
    linear_amx,
    linear_bf16,
    linear_fp8,
    low_bit,
    mamba1,
    mamba2,
    moe,
    ngrams,
    packed,
    residual_scaling,
    row_ops,
    rwkv7,
    short_conv,
    streams,
)
from .amx import AMX
from .bf16_pairs import rounds_activations
from .int8_ir import INSTRUCTION_SET
from .intrinsics import HAS_HALF
from .linear_amx import AMX_FLOATS
from .ops import CpuOps
from .panel_products import FLOAT32
from .stages import FEW_TOKENS, LOW_BIT

if TYPE_CHECKING:
    from .pages import LayerPages

READ_ONCE = "few tokens: memory-bound, weights are read once"
WIDENED_ONCE = "many tokens: each tile of weights is widened once for all of them"
PACKED_CODES = "few tokens: codes are multiplied in packed form"
LOOKUP_FASTER = "measured faster than dot products for these weights"
EXPANDED_ONCE = "many tokens: rows are expanded to int8 once for all of them"
AMX_INTEGERS = "many tokens: AMX multiplies rows expanded to one or two bytes per weight"
AMX_BF16_PARTS = "many tokens: AMX multiplies bf16 weights by activations split into three bf16 parts"
BF16_PAIRS = "many tokens: bf16 weights times activations rounded to bf16, two products per lane"
FP8_IN_REGISTERS = "few tokens: fp8 codes are read once and widened in registers"
FP8_PAIRS = "many tokens: fp8 codes, exact in bf16, times activations rounded to bf16, two products per lane"
FP8_TILES = "many tokens: each tile of fp8 weights is widened once for all of them"
EXACT_ACTIVATIONS = "--exact: activations are not quantized"
NO_HALF, NO_KERNEL = "this CPU has no half-precision conversion", "no compiled kernel supports it"
BY_SHIFTS, NUMPY = "half by shifts", "NumPy reference"
ROW_OPS = {"rotate": (row_ops.rotate, row_ops.rotate_reference, "native code for any head width"),
           "activate": (row_ops.gate, row_ops.gate_reference,
                        "native code, a row at a time, where the product did not apply the activation"),
           "add": (row_ops.add, row_ops.add_reference, "native code for branches with a scale or norm of their own"),
           "curve": (row_ops.curve, row_ops.curve_reference, "native code, a row at a time, with per-layer parameters"),
           "scale": (row_ops.scale, row_ops.scale_reference, "native code for copies and scaled streams"),
           "clip": (row_ops.clip_native, row_ops.clip_reference, "native code, row by row"),
           "part": (row_ops.part, row_ops.part_reference, "native code for queries interleaved with gates"),
           "resize heads": (head_widths.resize, head_widths.resize_reference, "native code, head by head"),
           "grow heads": (row_ops.grow, row_ops.grow_reference, "native code, head by head"),
           "mark heads": (head_widths.mark, head_widths.mark_reference, "native code, head by head"),
           "pair heads": (head_widths.pair, head_widths.pair_reference, "native code, head by head"),
           "gate heads": (row_ops.gate_attended, row_ops.gate_attended_reference, "native code, head by head"),
           "latent keys": (latent.keys, latent.keys_reference, "native code, the latent normed in place"),
           "latent queries": (latent.queries, latent.queries_reference, "native code, the matrices of all heads as one job"),
           "latent values": (latent.values, latent.values_reference, "native code, the matrices of all heads as one job"),
           "predict": (streams.predict, streams.predict_reference, "native code, a token's streams in the cache"),
           "correct": (streams.correct, streams.correct_reference, "native code, a token's streams in the cache"),
           "spread": (streams.spread, streams.spread_reference, "native code, row by row"),
           "enter streams": (streams.enter, streams.enter_reference, "native code, row by row"),
           "leave streams": (streams.leave, streams.leave_reference, "native code, row by row"),
           "take stream": (streams.take, streams.take_reference, "native code, row by row"),
           "put stream": (streams.put, streams.put_reference, "native code, row by row"),
           "cut": (streams.cut, streams.cut_reference, "native code, a token's gates in the cache"),
           "delta": (delta.run, delta.run_reference, "native code, rows of a state that stay in the cache for all tokens of a pass"),
           "channel delta": (delta.run, kda.run_reference, "native code, rows of a state that stay in the cache for all tokens of a pass"),
           "lightning attention": (lightning.run, lightning.run_reference,
                                   "native code, rows of a state that stay in the cache for all tokens of a pass"),
           "convolve heads": (cca.run, cca.run_reference, "native code, a token's heads of keys with their queries at a time"),
           "rescale": (residual_scaling.rescale, residual_scaling.rescale_reference, "native code, channel by channel"),
           "carry": (residual_scaling.carry, residual_scaling.carry_reference, "native code, carried over from the previous router"),
           "short convolution": (short_conv.run, short_conv.run_reference, "native code, a token with those before it at a time"),
           "channel state space": (mamba1.run, mamba1.run_reference,
                                   "native code, channels that stay in the cache for all tokens of a pass"),
           "time mix": (rwkv7.run, rwkv7.run_reference, "native code, rows of a state that stay in the cache for all tokens of a pass"),
           "shift tokens": (rwkv7.shift, rwkv7.shift_reference, "native code, a token and the one before it at a time"),
           "squash": (rwkv7.squash, rwkv7.squash_reference, "native code, row by row"),
           "blend values": (rwkv7.blend, rwkv7.blend_reference, "native code, row by row"),
           "gather streams": (hyper_connections.gather, hyper_connections.gather_reference,
                              "native code, a token's streams and their mixing weights"),
           "mix streams": (hyper_connections.mix, hyper_connections.mix_reference,
                           "native code, a token's streams some channels at a time"),
           "norm streams": (gated_residuals.norm_streams, gated_residuals.norm_streams_reference,
                            "native code, a token's streams one by one"),
           "read streams": (gated_residuals.read_streams, gated_residuals.read_streams_reference,
                            "native code, a token's streams and their gates"),
           "write streams": (gated_residuals.write_streams, gated_residuals.write_streams_reference,
                             "native code, a branch to a token's streams"),
           "n-grams": (ngrams.run, ngrams.run_reference, "native code, a token with those before it at a time"),
           "turn tails": (compressed.turn, compressed.turn_reference, "native code, head by head"),
           "compress": (compressed.compress, compressed.compress_reference, "native code, compressed keys distributed over threads"),
           "state space": (mamba2.run, mamba2.run_reference,
                           "native code, rows of a state that stay in the cache for all tokens of a pass")}


def _attend_compiled(pages: LayerPages, *step: object) -> None:
    pages.compiled(*step)


def _attend_reference(pages: LayerPages, *step: object) -> None:
    pages.reference(*step)


# Ops that read KV pages or index keys in their stored type, which may be half precision.
PAGE_OPS = {
    "attend": (_attend_compiled, _attend_reference, "native code, a page of K and V at a time"),
    "choose": (indexer.choose, indexer.choose_reference, "native code, scores of all heads as one product, exact selection"),
    "note means": (indexer.note_means, indexer.note_means_reference, "native code, the tokens of a key by one thread"),
    "note pools": (indexer.note_pools, indexer.note_pools_reference, "native code, the tokens of a key by one thread"),
    "attend chosen": (indexer.attend_compiled, indexer.attend_reference, "native code, tiles of selected tokens gathered from pages"),
    "attend compressed": (compressed.attend_compiled, compressed.attend_reference,
                          "native code, tiles of nearby tokens and of compressed keys")}


def _declines(call: Call) -> str:
    if call.stored not in STORED_TYPES:
        return f"no kernel for {call.stored}"
    if not is_activation(call.act):
        return f"no kernel for {call.act}"
    return ""


def _declines_without_half(call: Call) -> str:
    return _declines(call) or ("" if HAS_HALF or call.stored != "f16" else "no half-precision conversion in this CPU")


def _bf16_only(call: Call) -> str:
    return _declines(call) or ("" if call.stored == "bf16" else "not bf16 weights")


def _accepts_all(call: Call) -> str:
    return ""


def _up_to(accept: Callable[[Call], str], limit: int = FEW_TOKENS) -> Callable[[Call], str]:
    return lambda call: accept(call) or ("" if call.columns <= limit else f"more than {limit} columns")


def default_registry(only: str | None = None, exact: bool = False, by_neuron: bool = False) -> Registry:
    """All candidates of the CPU; `only="reference"` keeps the NumPy ones (to test the others against). `exact`: low-bit weights in float32.
    `by_neuron`: for models with neuron bundles, which must sum in the order of `linear.py` to be bit-identical."""
    few_low_bit = _up_to(low_bit.declines_integers, packed.MAX_COLUMNS), _up_to(low_bit.declines_lookup, packed.MAX_COLUMNS)
    candidates = [
        Candidate("matrix", "few columns", _up_to(_declines_without_half), CpuOps.few_columns, READ_ONCE),
        *([Candidate("matrix", "float tiles, amx", _bf16_only, linear_amx.run_many, AMX_BF16_PARTS)]
          if AMX_FLOATS and not by_neuron else []),
        *([Candidate("matrix", "bf16 pairs, avx512", _bf16_only, linear_bf16.run_many, BF16_PAIRS)]
          if rounds_activations("bf16", exact, by_neuron) else []),
        Candidate("matrix", "register tiles", _declines_without_half, FLOAT32, WIDENED_ONCE),
        Candidate("matrix", f"few columns, {BY_SHIFTS}", _up_to(_declines), CpuOps.few_columns, NO_HALF, fallback=True),
        Candidate("matrix", f"register tiles, {BY_SHIFTS}", _declines, FLOAT32, NO_HALF, fallback=True),
        Candidate("matrix", NUMPY, _accepts_all, CpuOps.by_reference, NO_KERNEL, fallback=True),
        *([Candidate(LOW_BIT, "float32 tiles", low_bit.declines, low_bit.run_exact, EXACT_ACTIVATIONS)] if exact else []),
        Candidate(LOW_BIT, f"table lookup, {INSTRUCTION_SET}", few_low_bit[1], low_bit.run_few, LOOKUP_FASTER),
        Candidate(LOW_BIT, f"dot products, {INSTRUCTION_SET}", few_low_bit[0], low_bit.run_few, PACKED_CODES),
        Candidate(LOW_BIT, "eight-bit floats, few columns", _up_to(low_bit.declines_floats, packed.MAX_COLUMNS), low_bit.run_floats,
                  FP8_IN_REGISTERS),
        *([Candidate(LOW_BIT, "int8 tiles, amx", low_bit.declines_integers, low_bit.run_many, AMX_INTEGERS)] if AMX else []),
        Candidate(LOW_BIT, f"int8 tiles, {INSTRUCTION_SET}", low_bit.declines_integers, low_bit.run_many, EXPANDED_ONCE),
        *([Candidate(LOW_BIT, "eight-bit floats, bf16 pairs, avx512", low_bit.declines_floats, linear_fp8.run_many, FP8_PAIRS)]
          if rounds_activations("bf16", exact, by_neuron) else []),
        Candidate(LOW_BIT, "eight-bit floats, register tiles", low_bit.declines_floats, low_bit.run_exact, FP8_TILES),
        Candidate(LOW_BIT, NUMPY, _accepts_all, CpuOps.by_reference, NO_KERNEL, fallback=True),
        Candidate("moe", "compiled", _declines, moe.run, "a token's experts are selected and run by one native job"),
        Candidate("moe", NUMPY, _accepts_all, moe.run_reference, NO_KERNEL, fallback=True),
        *(candidate for op, (fast, slow, why) in ROW_OPS.items()
          for candidate in (Candidate(op, "compiled", _declines, fast, why),
                            Candidate(op, NUMPY, _accepts_all, slow, NO_KERNEL, fallback=True))),
        *(candidate for op, (fast, slow, why) in PAGE_OPS.items() for candidate in (
            Candidate(op, "compiled", _declines_without_half, fast, why),
            Candidate(op, f"compiled, {BY_SHIFTS}", _declines, fast, NO_HALF, fallback=True),
            Candidate(op, NUMPY, _accepts_all, slow, NO_KERNEL, fallback=True))),
    ]
    return Registry([candidate for candidate in candidates if only is None or only in candidate.name])
