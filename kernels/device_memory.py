"""GPU workspace of the torch backend, beyond weights and KV cache, computed from the model's widths before torch is imported.

Torch ops allocate their results instead of writing to planned buffers, so this is an upper bound on what is alive at once in the widest
stage of a layer, not a sum. `tests/test_device_memory.py` checks it against torch's allocator.
"""

from __future__ import annotations

from .layout import PAGE, REPEATED, align
from .workspace import Dims

ALLOCATION = 512  # bytes that an allocation is rounded up to
SCORES = 1 << 25  # scores held at once: 128 MiB of float32
TILE = 1 << 24  # weights widened at once: 64 MiB of float32
OPENED = 1 << 22  # low-bit weights opened at once, each OPENED_NBYTES on the way: codes, their levels, scales spread over them
OPENED_NBYTES = 24
MOST_OPEN = 64  # packed pages opened at once
FLOAT = 4
SMALL = 8 << 20  # positions, block tables, angles


def allocation(nbytes: int) -> int:
    """Bytes of device memory that an allocation of this many bytes takes."""
    return align(nbytes, ALLOCATION)


def gpu_workspace(dims: Dims, widest: int, opened: int) -> int:
    """Upper bound in bytes. `widest`, `opened`: number of values in the largest matrix of a stored type and in the largest low-bit one."""
    if dims.other_heads:
        return max(gpu_workspace(own, widest, opened) for own in dims.alike)
    # A recorded pass (`cuda/graph_replay.py`) has memory of its own, which nothing else is given.
    recorded = 0 if dims.packed_kv or dims.experts or dims.state else _pass(dims, min(dims.chunk, REPEATED), widest, opened)
    return SMALL + _pass(dims, dims.chunk, widest, opened) + recorded


def head_workspace(tokens: int, hidden: int, vocabulary: int, values: int, is_raw: bool) -> int:
    """Upper bound in bytes for the logits of this many tokens and their computation, with an LM head of `values` weights."""
    product = FLOAT * min(values, TILE) if is_raw else OPENED_NBYTES * min(values, OPENED + 16 * hidden)
    return FLOAT * tokens * (4 * hidden + 4 * vocabulary) + product


def _pass(dims: Dims, tokens: int, widest: int, opened: int) -> int:
    heads, depth = dims.heads, dims.head_dim
    product = max(FLOAT * min(widest, TILE), OPENED_NBYTES * min(opened, OPENED + 16 * max(dims.hidden, dims.ffn, dims.attended)))
    queries, keys = tokens * heads * depth, tokens * dims.kv_heads * depth
    projected = FLOAT * (2 * tokens * dims.hidden + (6 if dims.gated_queries or dims.separate_gates else 3) * queries + 4 * keys)
    if dims.value_width:  # once more as they are made, and as they are attended to
        projected += FLOAT * (2 * queries + 2 * keys)
    if dims.grouped_width:  # what becomes keys is there still, and what goes through matrices of groups of heads
        projected += FLOAT * tokens * (sum(dims.state.products) + 2 * dims.grouped_width + queries // tokens) + _choice(dims, tokens)
    mlp = FLOAT * tokens * (3 * dims.hidden + 4 * dims.ffn)
    if dims.experts:
        visits = tokens * dims.top_k
        mlp += FLOAT * visits * (4 * dims.expert_ffn + 4 * dims.hidden) + FLOAT * tokens * dims.experts * 4
    stream = FLOAT * 2 * tokens * dims.hidden
    if dims.streams:  # twice, the one that a layer works on, and its branch in four steps
        stream += FLOAT * tokens * (3 * dims.streams * dims.hidden + 5 * dims.hidden + 2 * dims.low_rank)
    if dims.mixes_streams or dims.mix_rank:  # normed, gated, what each has of a branch; and what each token says
        stream += FLOAT * tokens * (4 * dims.streams * (dims.hidden + dims.streams) + 3 * dims.mix_rank)
    return stream + max(projected + _attention(dims, tokens), projected + product, mlp + product, _state(dims, tokens, product))


def _state(dims: Dims, tokens: int, product: int) -> int:
    """Of a layer with a recurrent state."""
    if dims.state is None:
        return 0
    of_words = 0 if dims.ngrams is None else tokens * dims.ngrams.rows + dims.ngrams.gpu_workspace_floats(tokens)
    return FLOAT * (2 * tokens * dims.hidden + max(of_words, dims.state.gpu_workspace_floats(tokens))) + product


def _attention(dims: Dims, tokens: int) -> int:
    heads, depth, own = dims.heads, dims.head_dim, dims.state if dims.grouped_width else None
    pages = -(-(dims.ctx if own is None else own.window + tokens) // PAGE) + 3
    page = PAGE * dims.kv_heads * depth
    most = min(pages, MOST_OPEN) if dims.packed_kv else pages if own is None else max(pages, own.keys(dims.ctx) // PAGE + 1)
    group = min(most, max(1, SCORES // (heads * tokens * PAGE)))
    # Keys and values side by side as they lie, one side twice while it is put together; then of a group as float32, masked, and packed
    # pages opened; scores with what exp and a cap make of them; an answer of every page.
    gathered = 3 * pages * page * FLOAT if not dims.packed_kv else 12 * min(pages, max(group, 1)) * page * FLOAT
    return gathered + FLOAT * (4 * group * page + 5 * group * heads * tokens * PAGE + 4 * group * heads * tokens * depth
                               + 8 * heads * tokens * depth)


def _choice(dims: Dims, tokens: int) -> int:
    """Selection among compressed keys: scores of some tokens, their order, and one byte per token and key."""
    if dims.index is None:
        return 0
    own, keys = dims.index, dims.index.keys(dims.ctx)
    scored = keys * min(tokens, max(1, SCORES // (own.heads * keys)))
    return FLOAT * (keys * own.width + 2 * own.heads * scored + 6 * scored) + 4 * tokens * keys
