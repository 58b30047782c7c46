"""A layer's lightning indexer on the CPU: its keys, token selection, and attention over the selected tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .. import reference
from .. import reference_indexer as meaning
from ..indexer_shape import IndexShape
from ..layout import F32, PAGE
from ..registry import Call
from ..workspace import Dims, address
from . import attention, attention_decode, indexer_pooling, latent, sparse_attention_loops, states
from . import indexer_loops as loops
from .rotary_angles import KeyAngles
from .row_ops import MIN_PARALLEL_SIZE
from .stages import FEW_TOKENS

if TYPE_CHECKING:
    from ...quant.weight import Norm
    from ...runtime.rope import RopeTable
    from .ops import CpuOps
    from .pages import LayerPages


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the indexer's buffers, none without one: scores in decode, and the selection of a whole pass."""
    shape = dims.indexer
    if shape is None:
        return {}
    # Products of an indexer, in addition to those of attention: keys and weights, or queries of heads that select separately and keys.
    others = states.plan_workspace(dims, chunk) | latent.plan_workspace(dims, chunk)
    own_heads = shape.per_head or shape.pooled
    widths = {"y3": shape.heads * shape.width, "y4": shape.width} if own_heads else {"y2": shape.width, "y3": shape.heads}
    if dims.mla is not None and shape.pooled:
        widths = {"y2": shape.pool_row, "y3": shape.heads}
    if dims.mla is not None and dims.mla.query_rank is None:  # their queries come from a normed row; some layers have no y1
        widths = {"normed": dims.hidden_size, "y1": shape.width, "y2": max(shape.width, shape.heads), "y3": shape.heads}
    return {"index scores": FEW_TOKENS * shape.groups * _row(shape, _keys(dims)), "chosen": chunk * shape.groups * shape.selected,
            **{name: max(chunk * width, others.get(name, 0)) for name, width in widths.items()}}


def _keys(dims: Dims) -> int:
    """Most keys a token selects from; a layer that drafts has room for draft tokens beyond the context."""
    return dims.indexer.keys(dims.ctx + (FEW_TOKENS if dims.mtp_input_width else 0))


def scratch_floats(dims: Dims) -> int:
    """Floats of scratch per worker."""
    shape = dims.indexer
    if shape is None:
        return 0
    return max(loops.scratch_floats(shape.heads, shape.width, shape.groups * _row(shape, _keys(dims))),
               indexer_pooling.SCRATCH_ROWS * shape.width,
               sparse_attention_loops.scratch_floats(dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim))


def partials_floats(dims: Dims) -> int:
    """Floats for a token's partials over its selection."""
    shape = dims.indexer
    if shape is None or shape.tokens_per_key > 1 and not shape.pooled:
        return 0
    return _tiles(shape) * dims.num_attention_heads * (dims.head_dim + 2)


def _tiles(shape: IndexShape) -> int:
    """Tiles needed for a selection's tokens."""
    return -(-shape.selected * shape.unit_tokens // PAGE)


def _row(shape: IndexShape, keys: int) -> int:
    """Floats of a token's scores for one selection among `keys` keys."""
    return -(-keys // PAGE) * PAGE if not shape.per_head else shape.units(keys) + 1


@dataclass(frozen=True)
class Chosen:
    """The selection of a pass's tokens: `units` int32 [T - first, groups, listed]; the `first` tokens see everything before them."""

    units: np.ndarray
    first: int
    shape: IndexShape

    def __len__(self) -> int:
        return self.first + len(self.units)

    def __getitem__(self, last: slice) -> Chosen:
        """The selection of the last tokens: `last` is slice(-n, None)."""
        return replace(self, units=self.units[last], first=max(0, self.first - len(self) - last.start))


class LayerIndex:
    """The index keys of one layer in uint8 `memory` (`shape.nbytes`), in the type `stored`."""

    def __init__(self, ops: CpuOps, shape: IndexShape, memory: np.ndarray, stored: int) -> None:
        keys = len(memory) // (1 + shape.tokens_per_key * shape.pooled * (1 + shape.weighted_pooling))
        self.ops, self.shape, self.memory, self.stored = ops, shape, memory[:keys], stored
        self.rows = memory[keys:].view(np.float32 if stored == F32 else np.float16).reshape(-1, shape.pool_row)  # contributions to means
        kind = "f32" if stored == F32 else "f16"
        self._choose = ops.registry.select(Call("choose", kind)).candidate.run
        self._note_means = ops.registry.select(Call("note pools" if shape.weighted_pooling else "note means", kind)).candidate.run

    def room(self, tokens: int) -> np.ndarray:
        """Buffer for the selection of this many tokens, int32 [T, groups * listed]."""
        return self.ops.workspace.take("chosen", tokens, self.shape.groups * self.shape.selected).view(np.int32)

    def note(self, k: np.ndarray, position: int, closing: tuple[Norm, RopeTable] | tuple[Norm, np.ndarray] | None = None) -> None:
        """Store keys [T, width] of the tokens from `position` on; for means their contributions [T, row], and the means that become
        complete, computed by `closing`."""
        if self.shape.pooled:
            self._note_means(self, k, position, closing)
            return
        ops, block = self.ops, np.zeros(loops.NOTE_SLOTS, np.int64)
        block[:] = ops.address_of(k), len(k), position, self.shape.width, self.stored, address(self.memory)
        ops.keep_alive(block)
        ops.refresh(partial(block.__setitem__, loops.N_POSITION))
        ops.run(loops.note_keys, address(block), k.size >= MIN_PARALLEL_SIZE)

    def choose(self, q: np.ndarray, weights: np.ndarray | None, position: int, out: np.ndarray | None = None) -> Chosen | None:
        """The selection of tokens from `position` on, by q [T, heads * width] and weights [T, heads], in `out` if given; None if each sees
        everything before it. Their own keys have been stored already."""
        ops, shape, first = self.ops, self.shape, max(0, self.shape.dense_tokens - position)
        if first and position + len(q) + PAGE > shape.dense_tokens:
            ops.discard_recording()  # the next pass may have to select
        if first >= len(q):
            return None
        chosen = (self.room(len(q)) if out is None else out)[first:]
        self._choose(self, q[first:], None if weights is None else weights[first:], position + first, chosen)
        return Chosen(chosen, first, shape)

    @property
    def token_nbytes(self) -> int:
        return self.shape.token_nbytes(self.stored)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the keys of this many tokens, in whole blocks, and of the rows means are built from."""
        blocks = -(-self.shape.keys(tokens) // PAGE)
        return blocks * self.shape.block_nbytes(self.stored) + self.unseen_nbytes(tokens)

    def unseen_nbytes(self, tokens: int) -> int:
        """Bytes of the rows that means of this many tokens are built from; later tokens do not read them once the keys are complete."""
        return self.shape.pooled * tokens * self.rows.itemsize * self.shape.pool_row

    def keys(self, count: int) -> np.ndarray:
        """The first keys as stored, [count, width]."""
        blocks = self.memory.view(np.float32 if self.stored == F32 else np.float16).reshape(-1, self.shape.width, PAGE)
        return np.concatenate([block.T for block in blocks[: -(-count // PAGE)]])[:count]

    def read(self, begin: int, end: int) -> np.ndarray:
        """Bytes of the keys of tokens [begin, end), token by token, a copy; each token has its share of a key of several tokens. They are
        followed by the rows that means are built from."""
        keys = self._read_keys(begin, end)
        return np.concatenate([keys, self.rows[begin:end].view(np.uint8).reshape(-1)]) if self.shape.pooled else keys

    def write(self, begin: int, data: np.ndarray) -> None:
        """Write back what `read` returned, from `begin` on."""
        tokens = len(data) // self.token_nbytes
        keys = tokens * self.shape.scored_nbytes(self.stored)
        self._write_keys(begin, data[:keys])
        if self.shape.pooled:
            self.rows[begin : begin + tokens].view(np.uint8).reshape(-1)[:] = data[keys:]

    def _read_keys(self, begin: int, end: int) -> np.ndarray:
        rate, nbytes = self.shape.tokens_per_key, self.shape.scored_nbytes(self.stored)
        first, last = begin // rate, -(-end // rate)
        rows = np.ascontiguousarray(self._rows(first, last)).view(np.uint8).reshape(-1)
        at = (begin - first * rate) * nbytes
        return rows[at : at + (end - begin) * nbytes]

    def _write_keys(self, begin: int, data: np.ndarray) -> None:
        blocks, rate, nbytes = self._blocks(), self.shape.tokens_per_key, self.shape.scored_nbytes(self.stored)
        first, last = begin // rate, -(-(begin + len(data) // nbytes) // rate)
        rows = np.ascontiguousarray(self._rows(first, last))
        at = (begin - first * rate) * nbytes
        rows.view(np.uint8).reshape(-1)[at : at + len(data)] = data
        numbers = np.arange(first, last)
        blocks[numbers // PAGE, :, numbers % PAGE] = rows

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Keys [first, last), row by row, as bits."""
        begin = first // PAGE * PAGE
        blocks = self._blocks()[begin // PAGE : -(-last // PAGE)]
        return blocks.swapaxes(1, 2).reshape(-1, self.shape.width)[first - begin : last - begin]

    def _blocks(self) -> np.ndarray:
        return self.memory.view(np.uint32 if self.stored == F32 else np.uint16).reshape(-1, self.shape.width, PAGE)


def index_layer(ops: CpuOps, shape: IndexShape, memory: np.ndarray, stored: int) -> LayerIndex:
    """The indexer of one layer; its keys in uint8 `memory` (`shape.nbytes`), in the type `stored`."""
    return LayerIndex(ops, shape, memory, stored)


def choose(index: LayerIndex, q: np.ndarray, weights: np.ndarray | None, position: int, out: np.ndarray) -> None:
    """Run the kernels: in decode blocks of keys are distributed over threads, in prefill the tokens."""
    ops, shape, block = index.ops, index.shape, np.zeros(loops.SLOTS, np.int64)
    row = _row(shape, len(index.memory) // shape.block_nbytes(index.stored) * PAGE)
    block[:] = (ops.address_of(q), 0 if weights is None else ops.address_of(weights), len(q), position, address(out), shape.heads,
                shape.width,
                shape.top_k, shape.block_size, shape.per_head, shape.local_blocks, address(index.memory), index.stored,
                address(ops.workspace.take("index scores", 1)), row, ops.scratch, ops.scratch_stride, shape.tokens_per_key, shape.selected)
    ops.keep_alive(block)
    if len(q) > FEW_TOKENS:
        ops.run(loops.select_prefill, address(block))
        return
    ops.refresh(partial(block.__setitem__, loops.POSITION))
    ops.run(loops.score_decode, address(block))
    ops.run(loops.select_decode, address(block), len(q) > 1)


def choose_reference(index: LayerIndex, q: np.ndarray, weights: np.ndarray | None, position: int, out: np.ndarray) -> None:
    index.ops.flush()
    scores = meaning.scores(q, index.keys((position + len(q)) // index.shape.tokens_per_key), weights, position, index.shape)
    out[:] = meaning.choose(scores, index.shape, position).reshape(out.shape)


def note_means(index: LayerIndex, k: np.ndarray, position: int, closing: tuple[Norm, RopeTable]) -> None:
    """Run the kernel: a key's tokens are one block of work. `closing`: norm and rotation of complete means."""
    ops, shape, (norm, table) = index.ops, index.shape, closing
    block, angles = np.zeros(loops.MEAN_SLOTS, np.int64), KeyAngles(table, shape.tokens_per_key, position, len(k))
    block[:] = (ops.address_of(k), len(k), position, shape.width, index.stored, address(index.memory), address(index.rows),
                shape.tokens_per_key,
                address(norm.weight), *angles.at, 2 * angles.cos.shape[1], ops.scratch, ops.scratch_stride, 0)
    block.view(np.float64)[loops.M_EPS] = norm.eps
    for array in (block, angles.cos, angles.sin):
        ops.keep_alive(array)

    def move(position: int) -> None:
        block[loops.M_POSITION] = position
        angles.move(position)

    ops.refresh(move)
    ops.run(loops.note_means, address(block), k.size >= MIN_PARALLEL_SIZE)


def note_means_reference(index: LayerIndex, k: np.ndarray, position: int, closing: tuple[Norm, RopeTable]) -> None:
    index.ops.flush()
    rate, (norm, table), first = index.shape.tokens_per_key, closing, position // index.shape.tokens_per_key
    index.rows[position : position + len(k)] = k
    last = (position + len(k)) // rate
    if last > first:
        positions = (first + np.arange(last - first)) * rate
        keys = meaning.means(index.rows[first * rate : last * rate], (norm.kind, norm.weight, None, norm.eps), rate,
                             *table.cos_sin(positions))
        at, blocks = first + np.arange(len(keys)), index.memory.view(index.rows.dtype).reshape(-1, index.shape.width, PAGE)
        blocks[at // PAGE, :, at % PAGE] = keys


def note_pools(index: LayerIndex, k: np.ndarray, position: int, closing: tuple[Norm, np.ndarray]) -> None:
    """Run the kernel: a key's tokens are one block of work. `closing`: the norm of a row's first half, and what is added to the second half
    at each place [rate, width] of a pool."""
    ops, shape, (norm, position_bias), loops = index.ops, index.shape, closing, indexer_pooling
    block = np.zeros(loops.POOL_SLOTS, np.int64)
    block[:] = (ops.address_of(k), len(k), position, shape.width, index.stored, address(index.memory), address(index.rows),
                shape.tokens_per_key,
                address(norm.weight), address(norm.bias), address(position_bias), ops.scratch, ops.scratch_stride, 0)
    block.view(np.float64)[loops.P_EPS] = norm.eps
    ops.keep_alive(block)
    ops.refresh(partial(block.__setitem__, loops.P_POSITION))
    ops.run(loops.note_pools, address(block), k.size >= MIN_PARALLEL_SIZE)


def note_pools_reference(index: LayerIndex, k: np.ndarray, position: int, closing: tuple[Norm, np.ndarray]) -> None:
    index.ops.flush()
    rate, width, (norm,
                  position_bias), first = index.shape.tokens_per_key, index.shape.width, closing, position // index.shape.tokens_per_key
    rows = index.rows[position : position + len(k)]
    rows[:, :width] = reference.normalise(k[:, :width].astype(np.float64), norm.kind, norm.weight, norm.bias, norm.eps)
    rows[:, width:] = k[:, width:] + position_bias.reshape(rate, width)[np.arange(position, position + len(k)) % rate]
    last = (position + len(k)) // rate
    at, blocks = np.arange(first, last), index.memory.view(index.rows.dtype).reshape(-1, width, PAGE)
    blocks[at // PAGE, :, at % PAGE] = meaning.pools(index.rows[first * rate : last * rate], rate)


def attend(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray,
           chosen: Chosen, same: bool) -> None:
    """Attention of tokens from `position` on over their selections; as `LayerPages.attend`. `same`: keys are values."""
    first, run = chosen.first, pages.choice.run
    if first:
        run(pages, q[:first], position, blocks, sinks, out[:first])
    call = Call("attend chosen", "f32" if pages.layout.stored == F32 else "f16")
    pages.ops.registry.select(call).candidate.run(pages, q[first:], position + first, blocks, sinks, out[first:], chosen, same)


def attend_compiled(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray,
                    chosen: Chosen, same: bool) -> None:
    """Run the kernels: in decode a token's tiles are distributed over threads, in prefill the tokens."""
    ops, shape, width = pages.ops, chosen.shape, q.shape[1]
    block = np.zeros(sparse_attention_loops.CHOSEN_SLOTS, np.int64)
    block[: attention.ATTEND_SLOTS] = pages._attend[: attention.ATTEND_SLOTS]
    block[: attention.HEADS + 1] = (ops.address_of(q), ops.address_of(out), len(q), position, _tiles(shape), address(blocks),
                                    width // pages.layout.head_dim)
    block[attention.SINKS] = address(sinks)
    sink_tokens = int(blocks[1, attention.FIRST]) if len(blocks) > 1 and blocks[1, attention.FIRST] != PAGE else 0
    block[sparse_attention_loops.UNITS :] = address(chosen.units), shape.selected, shape.groups, shape.unit_tokens, sink_tokens, same
    if len(q) > FEW_TOKENS:
        ops.discard_recording()
        ops.keep_alive(block)
        ops.run(sparse_attention_loops.attend_sparse_prefill, address(block))
        return
    for t in range(len(q)):
        call = block.copy()
        call[attention.Q], call[attention.OUT] = ops.address_of(q) + 4 * t * width, ops.address_of(out) + 4 * t * width
        call[attention.TOKENS], call[attention.POSITION] = 1, position + t
        call[sparse_attention_loops.UNITS] += 4 * t * shape.groups * shape.selected
        ops.keep_alive(call)
        ops.refresh(lambda position, call=call, t=t: call.__setitem__(attention.POSITION, position + t))
        ops.run(sparse_attention_loops.attend_sparse_decode, address(call))
        ops.run(attention_decode.merge_decode, address(call))


def attend_reference(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, out: np.ndarray,
                     chosen: Chosen, same: bool) -> None:
    """Plain softmax over the gathered selected keys and values."""
    pages.ops.flush()
    keys, values, at = pages.gathered(blocks)
    visible = meaning.seen(chosen.units.reshape(len(q), chosen.shape.groups, -1), len(at), pages.layout.kv_heads, chosen.shape)
    split = q.reshape(len(q), -1, pages.layout.head_dim)
    out[:] = reference.attend(split, keys, values, position, at, pages.scale, pages.window, pages.softcap, sinks,
                              seen=visible).reshape(out.shape)
