"""N-gram embedding states of a layer on the CPU, combined with its regular state; runs the kernels in `ngram_loops.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_ngrams as reference
from ..layout import MAX_DECODE_TOKENS
from ..ngram_shape import NgramShape, WithNgrams
from ..ngram_states import StatesWithNgrams
from ..state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from ..workspace import address
from . import linear
from . import ngram_loops as loops
from .conv_loops import BIAS, X
from .row_ops import MIN_PARALLEL_SIZE
from .states import LayerStates, Slots

if TYPE_CHECKING:
    from ...quant.recurrent_weights import NgramWeights
    from ...quant.weight import Weight
    from .ops import CpuOps


class NgramStates(Slots):
    """See the module and `runtime/kv/states.py`. Products are keys [T, S * D] and values [T, D]."""

    shape: NgramShape

    def __init__(self, ops: CpuOps, shape: NgramShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "n-grams", loops.SLOTS)
        self.block[loops.COUNT : loops.STEP + 1] = shape.count, shape.width, shape.size
        wide = MAX_DECODE_TOKENS * shape.channels
        self.raw = self.rollback_log[:wide].reshape(MAX_DECODE_TOKENS, -1)
        self._ids = self.rollback_log[wide:][:MAX_DECODE_TOKENS].view(np.int32)  # of the last pass of few tokens, and the words before it
        self._before = np.zeros(shape.size - 1, np.int64)

    def words(self, ids: np.ndarray, end: int) -> np.ndarray:
        """Windows of words int64 [T, size] ending with each of the `ids` of the pass; positions before the text are `end`. Stores the words
        that the next pass needs."""
        pass_slots, num_previous = self._pass_slots, self.shape.size - 1
        before = np.full(num_previous, end, np.int64) if pass_slots[FROM] == NO_SLOT else self._words_of(pass_slots[FROM]).astype(np.int64)
        all_words = np.concatenate([before, ids])
        self._words_of(pass_slots[TO])[:] = all_words[len(ids) :]
        if pass_slots[AFTER]:
            self._words_of(pass_slots[KEPT])[:] = all_words[pass_slots[AFTER] :][:num_previous]
        if len(ids) <= MAX_DECODE_TOKENS:
            self._ids[: len(ids)], self._before = ids, before
        return np.lib.stride_tricks.sliding_window_view(all_words, num_previous + 1)

    def add(self, x: np.ndarray, products: Sequence[np.ndarray], w: NgramWeights) -> np.ndarray:
        """x [T, S * D] plus the tokens' n-gram values, in place; advances the state."""
        self.run(self, x, *products, w)
        return x

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots."""
        self.inputs_of(target)[:] = self.last_inputs(source, self.raw[:tokens])
        self._words_of(target)[:] = np.concatenate([self._before, self._ids[:tokens]])[tokens:]

    def _words_of(self, slot: int) -> np.ndarray:
        return self.state_in(slot).view(np.int32)


class CpuStatesWithNgrams(StatesWithNgrams):
    """Also handles passes whose projections are in recorded buffers."""

    def __init__(self, ops: CpuOps, shape: WithNgrams, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        base: LayerStates = ops.state_layer(shape.base, memory[: shape.base.nbytes], pass_slots)
        super().__init__(base, NgramStates(ops, shape.ngrams, memory[shape.base.nbytes :], pass_slots))
        self.mixed = base.mixed


def ngram_products(ops: CpuOps, rows: np.ndarray, w: NgramWeights) -> list[np.ndarray]:
    """See `BlockOps`."""
    if (outs := ops._run_cached(rows, None, (w.key, w.value), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take(name, len(rows), matrix.weight.shape[0]) for name,
                matrix in (("ngram keys", w.key), ("side stream", w.value))]
        ops._run_stage(rows, None, [w.key, w.value], outs, linear.PLAIN, "none")
    return outs


def ngram_rows(ops: CpuOps, numbers: np.ndarray, table: Weight, place: int) -> np.ndarray:
    """The tokens' rows of an n-gram table, float32 [T, rows * width], by row numbers [T, rows]; in a separate buffer per `place`, where
    jobs of a recorded pass find the next pass's."""
    out = ops.workspace.take(f"ngram rows {place}", len(numbers), numbers.shape[1] * table.shape[1])
    rows = out.reshape(numbers.size, -1)
    for begin, rows_of_part, fetched in table.fetch_rows(numbers.reshape(-1)):
        ops._embed(rows_of_part, fetched, 1.0, rows[begin : begin + len(rows_of_part)])
        ops.flush()
    return out


# -- what runs them -----------------------------------------------------------------------------------------------------------------------


def run(states: NgramStates, x: np.ndarray, keys: np.ndarray, values: np.ndarray, w: NgramWeights) -> None:
    ops, block, shape, tokens = states.ops, states.block, states.shape, len(x)
    take = ops.workspace.take
    normed, mixed, gates = take("normed streams", *x.shape), take("stream gates", *x.shape), take("stream logits", tokens, shape.count)
    raw = address(states.raw) if tokens <= MAX_DECODE_TOKENS else 0
    block[X:BIAS] = ops.address_of(normed), tokens, ops.address_of(mixed), raw, address(w.conv)
    block[loops.STREAMS : loops.COUNT] = (ops.address_of(x), ops.address_of(keys), ops.address_of(values), ops.address_of(gates),
                                          *(address(norm.weight) for norm in (w.query_norm, w.key_norm, w.conv_norm)))
    block.view(np.float64)[loops.EPS] = w.conv_norm.eps
    ops.run(loops.gate_values, address(block), x.size >= MIN_PARALLEL_SIZE, block)
    ops.run(loops.add_values, address(block), x.size >= MIN_PARALLEL_SIZE, block)


def run_reference(states: NgramStates, x: np.ndarray, keys: np.ndarray, values: np.ndarray, w: NgramWeights) -> None:
    states.ops.flush()
    shape = states.shape
    streams = x.reshape(len(x), shape.count, -1)
    norms = [norm.weight for norm in (w.query_norm, w.key_norm, w.conv_norm)]
    values_added, convolved = reference.gated(streams, keys.reshape(streams.shape), values, norms, w.conv_norm.eps)
    convolved = convolved.reshape(x.shape).astype(np.float32)
    before = states.last_inputs(states.pass_slots()[FROM], convolved[:0])
    x[:] = x + values_added.reshape(x.shape) + reference.convolve(convolved, before, w.conv.reshape(shape.kernel, -1), shape.size)
    states.keep_inputs(convolved)
    if len(x) <= MAX_DECODE_TOKENS:
        states.raw[: len(x)] = convolved
