"""GPU workspace of the torch backend, beyond weights and KV cache, computed from the model's widths before torch is imported.

Torch ops allocate their results instead of writing to planned buffers, so this is an upper bound on what is alive at once in the widest
stage of a layer, not a sum. `tests/test_device_memory.py` checks it against torch's allocator.
"""

from __future__ import annotations

from .layout import MAX_DECODE_TOKENS, PAGE, align
from .workspace import Dims

ALLOCATION_ALIGN = 512  # bytes that an allocation is rounded up to
MAX_SCORES = 1 << 25  # attention scores held at once: 128 MiB of float32
MAX_WIDENED = 1 << 24  # 16-bit weights widened at once: 64 MiB of float32
MAX_DEQUANTIZED = 1 << 22  # low-bit weights dequantized at once
DEQUANTIZE_NBYTES = 24  # temporary memory per weight: codes, their levels, broadcast scales
MAX_UNPACKED_PAGES = 64  # packed KV pages unpacked at once
F32_NBYTES = 4
SMALL_BUFFERS_NBYTES = 8 << 20  # positions, block tables, angles


def allocation(nbytes: int) -> int:
    """Bytes of device memory that an allocation of this many bytes takes."""
    return align(nbytes, ALLOCATION_ALIGN)


def gpu_workspace(dims: Dims, largest_raw: int, largest_low_bit: int) -> int:
    """Upper bound in bytes. `largest_raw`, `largest_low_bit`: number of weights in the largest matrix of each kind."""
    if dims.other_kv_heads:
        return max(gpu_workspace(kind, largest_raw, largest_low_bit) for kind in dims.by_layer_kind)
    recorded = 0
    if not (dims.packed_kv or dims.num_experts or dims.recurrent):  # a recorded graph (`cuda/graph_replay.py`) has a memory pool of its own
        recorded = _pass(dims, min(dims.chunk, MAX_DECODE_TOKENS), largest_raw, largest_low_bit)
    return SMALL_BUFFERS_NBYTES + _pass(dims, dims.chunk, largest_raw, largest_low_bit) + recorded


def head_workspace(tokens: int, hidden: int, vocabulary: int, values: int, is_raw: bool) -> int:
    """Upper bound in bytes for the logits of this many tokens and their computation, with an LM head of `values` weights."""
    product = F32_NBYTES * min(values, MAX_WIDENED) if is_raw else DEQUANTIZE_NBYTES * min(values, MAX_DEQUANTIZED + 16 * hidden)
    return F32_NBYTES * tokens * (4 * hidden + 4 * vocabulary) + product


def _pass(dims: Dims, tokens: int, largest_raw: int, largest_low_bit: int) -> int:
    heads, depth = dims.num_attention_heads, dims.head_dim
    row_block = 16 * max(dims.hidden_size, dims.intermediate_size, dims.attention_width)
    product = max(F32_NBYTES * min(largest_raw, MAX_WIDENED), DEQUANTIZE_NBYTES * min(largest_low_bit, MAX_DEQUANTIZED + row_block))
    queries, keys = tokens * heads * depth, tokens * dims.num_key_value_heads * depth
    projected = F32_NBYTES * (2 * tokens * dims.hidden_size + (6 if dims.output_gate_in_q or dims.output_gate else 3) * queries + 4 * keys)
    if dims.v_head_dim:  # also before padding
        projected += F32_NBYTES * (2 * queries + 2 * keys)
    if dims.output_group_width:  # also the inputs of compressed keys, and of the grouped output projections
        projected += F32_NBYTES * tokens * (sum(dims.recurrent.projection_widths) + 2 * dims.output_group_width + queries // tokens)
        projected += _choice(dims, tokens)
    mlp = F32_NBYTES * tokens * (3 * dims.hidden_size + 4 * dims.intermediate_size)
    if dims.num_experts:
        rows = tokens * dims.experts_per_token
        mlp += F32_NBYTES * rows * (4 * dims.expert_dim + 4 * dims.hidden_size) + F32_NBYTES * tokens * dims.num_experts * 4
    stream = F32_NBYTES * 2 * tokens * dims.hidden_size
    if dims.residual_streams:  # all streams twice, the stream that a layer reads, and four steps of its branch
        stream += F32_NBYTES * tokens * (3 * dims.residual_streams * dims.hidden_size + 5 * dims.hidden_size + 2 * dims.low_rank_dim)
    if dims.has_hyper_connections or dims.residual_gate_rank:
        # Normed and gated streams, each stream's share of a branch, mixing weights per token.
        mixed = 4 * dims.residual_streams * (dims.hidden_size + dims.residual_streams)
        stream += F32_NBYTES * tokens * (mixed + 3 * dims.residual_gate_rank)
    return stream + max(projected + _attention(dims, tokens), projected + product, mlp + product, _state(dims, tokens, product))


def _state(dims: Dims, tokens: int, product: int) -> int:
    """Workspace of a layer with a recurrent state."""
    if dims.recurrent is None:
        return 0
    ngrams = 0 if dims.ngrams is None else tokens * dims.ngrams.rows + dims.ngrams.gpu_workspace_floats(tokens)
    return F32_NBYTES * (2 * tokens * dims.hidden_size + max(ngrams, dims.recurrent.gpu_workspace_floats(tokens))) + product


def _attention(dims: Dims, tokens: int) -> int:
    heads, depth, state = dims.num_attention_heads, dims.head_dim, dims.recurrent if dims.output_group_width else None
    pages = -(-(dims.ctx if state is None else state.window + tokens) // PAGE) + 3
    page = PAGE * dims.num_key_value_heads * depth
    if dims.packed_kv:
        max_pages = min(pages, MAX_UNPACKED_PAGES)
    else:
        max_pages = pages if state is None else max(pages, state.keys(dims.ctx) // PAGE + 1)
    group = min(max_pages, max(1, MAX_SCORES // (heads * tokens * PAGE)))
    # Gathered keys and values in their stored type, one of them twice while it is concatenated; per group of pages: keys and values as
    # float32 and masked, unpacked pages, scores before and after cap and exp, and the partial result of each page.
    gathered = 3 * pages * page * F32_NBYTES if not dims.packed_kv else 12 * min(pages, max(group, 1)) * page * F32_NBYTES
    return gathered + F32_NBYTES * (4 * group * page + 5 * group * heads * tokens * PAGE + 4 * group * heads * tokens * depth
                               + 8 * heads * tokens * depth)


def _choice(dims: Dims, tokens: int) -> int:
    """Selection among compressed keys: scores of some tokens, their order, and one byte per token and key."""
    if dims.indexer is None:
        return 0
    indexer, keys = dims.indexer, dims.indexer.keys(dims.ctx)
    scored = keys * min(tokens, max(1, MAX_SCORES // (indexer.heads * keys)))
    return F32_NBYTES * (keys * indexer.width + 2 * indexer.heads * scored + 6 * scored) + 4 * tokens * keys
