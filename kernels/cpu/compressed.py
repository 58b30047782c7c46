"""Compressed attention on the CPU (keys built from several tokens): a layer's keys, the state of incomplete ones, attention over them, and
rotary embedding of the last channels of a head. Kernels are in `compressed_loops.py` and `compressed_attention.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_compressed as meaning
from .. import reference_indexer
from ..compressed_shape import CompressedShape
from ..layout import F32, MAX_DECODE_TOKENS, PAGE
from ..registry import Call
from ..state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from ..workspace import Dims, address
from . import attention, hyper_connections, ngrams
from . import compressed_attention as attending
from . import compressed_loops as loops
from .rotary_angles import Angles, KeyAngles, cached_angles
from .row_ops import MIN_PARALLEL_SIZE
from .states import Slots

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import Compressor
    from ...runtime.rope import RopeTable
    from .indexer import Chosen, LayerIndex
    from .ops import CpuOps
    from .pages import LayerPages


def wide_floats(dims: Dims) -> int:
    """Floats of scratch per worker for these layers and for mixing streams."""
    if not isinstance(dims.recurrent, CompressedShape):
        return hyper_connections.scratch_floats(dims)
    return max(loops.scratch_floats(dims.recurrent.width), attending.scratch_floats(dims.num_attention_heads, dims.head_dim),
               hyper_connections.scratch_floats(dims))


wide_workspace = hyper_connections.plan_workspace


def rope_tails(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable,
               inverse: bool = False) -> np.ndarray:
    """See `BlockOps`."""
    angles = cached_angles(ops, ops._angles, positions, table)
    ops.registry.select(Call("turn tails")).candidate.run(ops, y, heads, head_dim, angles, inverse)
    return y


class CompressedKeys:
    """The keys of one layer in uint8 `memory` (`shape.keys_nbytes`), in the type `stored`."""

    def __init__(self, shape: CompressedShape, memory: np.ndarray, stored: int) -> None:
        self.shape, self.memory, self.stored = shape, memory, stored

    @property
    def rows(self) -> np.ndarray:
        """[keys, width]."""
        return self.memory.view(np.float32 if self.stored == F32 else np.float16).reshape(-1, self.shape.width)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the keys of this many tokens."""
        return tokens * self.token_nbytes

    @property
    def token_nbytes(self) -> int:
        return self.shape.token_nbytes(self.stored)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Bytes of tokens [begin, end), a copy: each token has its share of a key, complete or not."""
        return self.memory[begin * self.token_nbytes : end * self.token_nbytes].copy()

    def write(self, begin: int, data: np.ndarray) -> None:
        """Write back what `read` returned, from `begin` on."""
        self.memory[begin * self.token_nbytes :][: len(data)] = data


def compressed_keys(ops: CpuOps, shape: CompressedShape, memory: np.ndarray, stored: int) -> CompressedKeys:
    """The keys of one layer in uint8 `memory` (`shape.keys_nbytes`), in the type `stored`."""
    return CompressedKeys(shape, memory, stored)


class CompressedStates(Slots):
    """Incomplete keys of a layer. See `runtime/kv/states.py`."""

    shape: CompressedShape

    def __init__(self, ops: CpuOps, shape: CompressedShape, memory: np.ndarray, pass_slots: np.ndarray) -> None:
        super().__init__(ops, shape, memory, pass_slots, "compress", loops.SLOTS)
        self.last: tuple[Compressor, CompressedKeys, LayerIndex | None] | None = None

    def compress(self, products: Sequence[np.ndarray], w: Compressor, position: int, table: RopeTable, keys: CompressedKeys,
                 index: LayerIndex | None) -> None:
        """Accumulate tokens from `position` on; keys that become complete go into `keys`, and the index keys into `index`. Products are
        `shape.series`."""
        self.last = w, keys, index
        self.run(self, products, w, position, table, keys, index)

    def rebuild_from_log(self, source: int, target: int, tokens: int) -> None:
        """Implements `rebuild_slot`, which has set the slots: recomputes from logged rows."""
        head = self.rollback_log[: loops.HEAD].view(np.int64)
        position, had, at, products = int(head[0]), int(head[1]), loops.HEAD, []
        for width in self.shape.pooled_projection_widths:
            products.append(self.rollback_log[at : at + had * width].reshape(had, width)[:tokens])
            at += had * width
        self.run(self, products, self.last[0], position, None, *self.last[1:])


def compress(states: CompressedStates, products: Sequence[np.ndarray], w: Compressor, position: int, table: RopeTable | None,
             keys: CompressedKeys, index: LayerIndex | None) -> None:
    """Run the kernel; without a `table` only the states are updated."""
    ops, shape, tokens = states.ops, states.shape, len(products[0])
    block = np.zeros(loops.SLOTS, np.int64)
    own = ((products[:2], w.bias, shape.width, w.norm, address(keys.memory)),
           (products[2:], w.index_bias, shape.index_dim, w.index_norm, 0 if index is None else address(index.memory)))
    for at, (pair, bias, width, norm, memory) in zip((0, loops.SERIES), own):
        if width:
            block[at : at + loops.SERIES] = *map(ops.address_of, pair), address(bias), width, address(norm.weight), memory
    angles = KeyAngles(table, shape.tokens_per_key, position, tokens)
    recent = address(states.rollback_log) if table is not None and tokens <= MAX_DECODE_TOKENS else 0
    block[loops.TOKENS :] = (tokens, position, shape.tokens_per_key, shape.rows_per_token, address(states._slots), 4 * shape.slot_floats,
                             address(states._pass_slots), *angles.at, shape.rope, keys.stored, recent, table is None, ops.scratch,
                             ops.scratch_stride, 0)
    block.view(np.float64)[loops.EPS] = w.norm.eps
    for array in (block, angles.cos, angles.sin):
        ops.keep_alive(array)
    ops.refresh(partial(_move, block, angles))
    ops.run(loops.compress, address(block), tokens * sum(shape.pooled_projection_widths) >= MIN_PARALLEL_SIZE)


def _move(block: np.ndarray, angles: KeyAngles, position: int) -> None:
    block[loops.POSITION] = position
    angles.move(position)


def attend(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, keys: CompressedKeys,
           chosen: Chosen | None, out: np.ndarray) -> None:
    """Attention of tokens from `position` on, over tokens within the window and over `keys`; `chosen`: the keys selected per token, None
    for all."""
    call = Call("attend compressed", "f32" if pages.layout.stored == F32 else "f16")
    pages.ops.registry.select(call).candidate.run(pages, q, position, blocks, sinks, keys, chosen, out)


def attend_compiled(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, keys: CompressedKeys,
                    chosen: Chosen | None, out: np.ndarray) -> None:
    ops, block = pages.ops, np.zeros(attending.COMPRESSED_SLOTS, np.int64)
    block[: attention.ATTEND_SLOTS] = pages._attend[: attention.ATTEND_SLOTS]
    block[: attention.HEADS + 1] = (ops.address_of(q), ops.address_of(out), len(q), position, len(blocks), address(blocks),
                                    q.shape[1] // pages.layout.head_dim)
    block[attention.SINKS] = address(sinks)
    sink_tokens = int(blocks[1, attention.FIRST]) if len(blocks) > 1 and blocks[1, attention.FIRST] != PAGE else 0
    units = (0, 0, 0) if chosen is None else (address(chosen.units), chosen.shape.top_k, chosen.first)
    at_once = attending.heads_per_job(q.shape[1] // pages.layout.head_dim, len(q), ops.pool.workers)
    block[attending.KEYS :] = address(keys.memory), keys.shape.tokens_per_key, *units, sink_tokens, at_once
    ops.keep_alive(block)
    if len(q) > MAX_DECODE_TOKENS:
        ops.discard_recording()
    ops.refresh(partial(block.__setitem__, attention.POSITION))
    ops.run(attending.attend_compressed, address(block))


class WideOps:
    """Ops of `CpuOps` used by these models only."""

    compressed_keys, rope_tails = compressed_keys, rope_tails
    read_streams, write_streams = hyper_connections.read_streams, hyper_connections.write_streams
    grouped_linear, picked_experts = hyper_connections.grouped_linear, hyper_connections.picked_experts
    ngram_rows, ngram_products = ngrams.ngram_rows, ngrams.ngram_products


# -- what they mean, by `reference_compressed.py` -----------------------------------------------------------------------------------------


def turn(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles, back: bool) -> None:
    ops.args[: loops.T_SLOTS] = ops.address_of(y), len(y), heads, head_dim, 2 * angles.cos.shape[1], *angles.at, back
    ops.run(loops.turn_tails, ops.args_address, y.size >= MIN_PARALLEL_SIZE, ops.args)


def turn_reference(ops: CpuOps, y: np.ndarray, heads: int, head_dim: int, angles: Angles, back: bool) -> None:
    ops.flush()
    split = y.reshape(len(y), heads, head_dim)
    split[:] = meaning.turned_tails(split, angles.cos, -angles.sin if back else angles.sin)


def compress_reference(states: CompressedStates, products: Sequence[np.ndarray], w: Compressor, position: int, table: RopeTable | None,
                       keys: CompressedKeys, index: LayerIndex | None) -> None:
    states.ops.flush()
    shape, pass_slots = states.shape, states._pass_slots
    parts, size, first = shape.rows_per_token, 3 * shape.rows_per_token * shape.width, position // shape.tokens_per_key
    if table is not None and len(products[0]) <= MAX_DECODE_TOKENS:
        states.rollback_log[: loops.HEAD].view(np.int64)[:] = position, len(products[0])
        log = np.concatenate([product.reshape(-1) for product in products])
        states.rollback_log[loops.HEAD :][: len(log)] = log
    source = np.zeros_like(states.state_in(0)) if pass_slots[FROM] == NO_SLOT else states.state_in(pass_slots[FROM]).copy()
    series = ((slice(0, size), products[:2], w.bias, w.norm, shape.width),
              (slice(size, shape.layer_state_floats), products[2:], w.index_bias, w.index_norm, shape.index_dim))
    for series_index, (part, pair, bias, norm, width) in enumerate(series):
        if not width:
            continue
        new_keys, accumulators, between = meaning.compress(*pair, bias, position, shape.tokens_per_key,
                                                           source[part].reshape(parts, 3, width),
                                                           int(pass_slots[AFTER]) or None)
        states.state_in(pass_slots[TO])[part] = accumulators.reshape(-1)
        if pass_slots[AFTER]:
            states.state_in(pass_slots[KEPT])[part] = between.reshape(-1)
        if table is None or not len(new_keys):
            continue
        angles = table.cos_sin((first + np.arange(len(new_keys))) * shape.tokens_per_key)
        new_keys = meaning.finished(new_keys, (norm.kind, norm.weight, None, norm.eps), *angles)
        if series_index == 0:
            keys.rows[first : first + len(new_keys)] = new_keys
        else:
            at, index_keys = first + np.arange(len(new_keys)), index.memory.view(keys.rows.dtype).reshape(-1, width, PAGE)
            index_keys[at // PAGE, :, at % PAGE] = new_keys


def attend_reference(pages: LayerPages, q: np.ndarray, position: int, blocks: np.ndarray, sinks: np.ndarray | None, keys: CompressedKeys,
                     chosen: Chosen | None, out: np.ndarray) -> None:
    pages.ops.flush()
    near, _, at = pages.gathered(blocks)
    closed, visible = keys.shape.keys(position + len(q)), None
    if chosen is not None:
        visible = np.ones((len(q), closed), bool)
        visible[chosen.first :] = reference_indexer.seen(chosen.units.reshape(len(q) - chosen.first, 1, -1), closed, 1, chosen.shape)[:, 0]
    split = q.reshape(len(q), -1, pages.layout.head_dim)
    out[:] = meaning.attend(split, near[:, 0], keys.rows[:closed], position, at, keys.shape.tokens_per_key, pages.scale, pages.window,
                            sinks,
                            visible).reshape(out.shape)
