"""Compressed attention keys (built from several tokens) on torch tensors: a layer's keys, their selection, and the state of incomplete
ones; the counterpart of `cpu/compressed.py` and `cpu/indexer.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from ..compressed_shape import CompressedShape
from ..device_memory import MAX_SCORES
from ..indexer_shape import IndexShape
from ..layout import F32, MAX_DECODE_TOKENS
from ..state_shape import NO_SLOT
from .attention import closed_keys
from .pages import saturated
from .stages import normalise
from .states import TorchSlots

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import Compressor
    from ...quant.weight import Linear, Norm
    from ...runtime.rope import RopeTable
    from .states import Linears
    from .torch_ops import TorchOps


class TorchKeys:
    """The keys of one layer row by row in uint8 `memory` on the device, in the type `stored`; `bring` copies an array to the device."""

    def __init__(self, shape: CompressedShape | IndexShape, memory: torch.Tensor, stored: int,
                 bring: Callable[[np.ndarray], torch.Tensor]) -> None:
        self.shape, self.memory, self.stored, self.to_device = shape, memory, stored, bring
        self.rows = memory.view(torch.float32 if stored == F32 else torch.float16).view(-1, shape.width)

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token's share of a key."""
        return self.shape.token_nbytes(self.stored)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the keys of this many tokens."""
        return tokens * self.token_nbytes

    def read(self, begin: int, end: int) -> np.ndarray:
        """As `CompressedKeys.read` of the CPU."""
        return self.memory[begin * self.token_nbytes : end * self.token_nbytes].cpu().numpy().copy()

    def write(self, begin: int, data: np.ndarray) -> None:
        """Write back what `read` returned, from `begin` on."""
        self.memory[begin * self.token_nbytes :][: len(data)].copy_(torch.from_numpy(np.array(data)))

    def put(self, keys: torch.Tensor, first: int, norm: Norm, table: RopeTable) -> None:
        """Store keys [n, width] from number `first` on: normed, then rotated by the position of each one's first token."""
        if len(keys):
            cos, sin = (self.to_device(angles[:, None])
                        for angles in table.cos_sin((first + np.arange(len(keys))) * self.shape.tokens_per_key))
            finished = turned_tails(normalise(keys, norm)[:, None], cos, sin)[:, 0]
            self.rows[first : first + len(keys)] = (finished if self.stored == F32 else saturated(finished)).to(self.rows.dtype)


class TorchIndex(TorchKeys):
    """Index keys for selecting compressed keys."""

    shape: IndexShape

    def choose(self, q: torch.Tensor, weights: torch.Tensor, position: int, out: None = None) -> torch.Tensor | None:
        """bool [T, keys]: which keys tokens from `position` on see, by q [T, heads * width] and weights [T, heads]; None if each sees
        everything before it. `out`: used on the CPU only."""
        shape, tokens, closed = self.shape, len(q), (position + len(q)) // self.shape.tokens_per_key
        if position + tokens <= shape.dense_tokens:
            return None
        keys, split = self.rows[:closed].float(), q.view(tokens, shape.heads, shape.width)
        is_closed = closed_keys(torch.arange(position, position + tokens, device=q.device), shape.tokens_per_key, 0, closed)
        visible, step = torch.zeros_like(is_closed), max(1, MAX_SCORES // (shape.heads * closed))
        for begin in range(0, tokens, step):
            span = slice(begin, begin + step)
            scores = torch.bmm(weights[span, None], (split[span] @ keys.T).relu_())[:, 0].masked_fill_(~is_closed[span], -torch.inf)
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.top_k]  # ties go to the earlier key
            visible[span].scatter_(1, best, True)
        return visible.logical_and_(is_closed)


def compressed_keys(ops: TorchOps, shape: CompressedShape, memory: np.ndarray, stored: int) -> TorchKeys:
    """The keys of one layer, in as much device memory as the host memory that represents them, in the type `stored`."""
    return TorchKeys(shape, ops.on.take(memory.nbytes), stored, ops.on.to_device)


def index_layer(ops: TorchOps, shape: IndexShape, memory: np.ndarray, stored: int) -> TorchIndex:
    """The index keys of one layer; as `compressed_keys`."""
    return TorchIndex(shape, ops.on.take(memory.nbytes), stored, ops.on.to_device)


def turned_tails(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """y [T, H, D] with rotary embedding on the last channels of every head, in adjacent pairs, by cos and sin [T, 1, R / 2], in place."""
    tail = y[..., y.shape[-1] - 2 * cos.shape[-1] :]
    low, high = tail[..., ::2].clone(), tail[..., 1::2].clone()
    tail[..., ::2] = low * cos - high * sin
    tail[..., 1::2] = high * cos + low * sin
    return y


def rope_tails(ops: TorchOps, y: torch.Tensor, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable,
               inverse: bool = False) -> torch.Tensor:
    """See `BlockOps`."""
    cos, sin = ops._cos_sin(positions, table)
    turned_tails(y.view(len(y), heads, head_dim), cos, -sin if inverse else sin)
    return y


def grouped_linear(ops: TorchOps, x: torch.Tensor, linears: Sequence[Linear]) -> torch.Tensor:
    """See `BlockOps`."""
    parts = x.view(len(x), len(linears), -1)
    return torch.cat([ops._linear(parts[:, group].contiguous(), matrix) for group, matrix in enumerate(linears)], 1)


class TorchCompressed(TorchSlots):
    """Incomplete keys of a layer. See `runtime/kv/states.py`."""

    shape: CompressedShape

    def __init__(self, shape: CompressedShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        sizes = [MAX_DECODE_TOKENS * width for width in shape.pooled_projection_widths]
        self._log = [series.view(MAX_DECODE_TOKENS, -1) for series in self.rollback_log[: sum(sizes)].split(sizes)]
        self._last_pass: tuple[Compressor, int] | None = None  # weights and first position of the last pass of few tokens

    def compress(self, products: Sequence[torch.Tensor], w: Compressor, position: int, table: RopeTable, keys: TorchKeys,
                 index: TorchIndex | None) -> None:
        """As `kernels/cpu/compressed.py`."""
        (source, target, after, kept), tokens, at = self.pass_slots(), len(products[0]), 0
        if tokens <= MAX_DECODE_TOKENS:
            self._last_pass = w, position
            for log, product in zip(self._log, products, strict=True):
                log[:tokens] = product
        state = self._initial_state(source)
        for end, slot in ((after, kept), (tokens, target)):
            if end > at:
                first = (position + at) // self.shape.tokens_per_key
                keys_of_series, state = self._accumulate([rows[at:end] for rows in products], w, position + at, state)
                keys.put(keys_of_series[0], first, w.norm, table)
                if index is not None:
                    index.put(keys_of_series[1], first, w.index_norm, table)
                self._put(slot, state)
                at = end

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self._put(target, self._accumulate([log[:tokens] for log in self._log], *self._last_pass, self._initial_state(source))[1])

    def _initial_state(self, source: int) -> torch.Tensor:
        state = self.state_in(max(source, 0))[: self.shape.layer_state_floats]
        return torch.zeros_like(state) if source == NO_SLOT else state

    def _put(self, slot: int, state: torch.Tensor) -> None:
        self.state_in(slot)[: len(state)] = state

    def _accumulate(self, products: Sequence[torch.Tensor], w: Compressor, position: int,
                    state: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Completed keys, and index keys, before their norms, and the state after these tokens."""
        shape, size = self.shape, 3 * self.shape.rows_per_token * self.shape.width
        completed, accumulators = [], []
        for part, bias, pair in ((state[:size], w.bias, products[:2]), (state[size:], w.index_bias, products[2:])):
            if pair:
                keys, next_parts = compressed(*pair, bias.view(shape.tokens_per_key, -1), position, part.view(shape.rows_per_token, 3, -1))
                completed.append(keys)
                accumulators.append(next_parts.flatten())
        return completed, torch.cat(accumulators)


def compressed(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor, position: int,
               initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_compressed.compress` on tensors, all tokens of a key at once."""
    rate, parts, tokens, begun_tokens = len(bias), len(initial), len(rows), position % len(bias)
    groups, closed = -(-(begun_tokens + tokens) // rate), (begun_tokens + tokens) // rate
    # padding before the first token of the first key and after the last token of the last
    padding = (0, 0, begun_tokens, groups * rate - begun_tokens - tokens)
    weighed = functional.pad(weights + bias[torch.arange(begun_tokens, begun_tokens + tokens, device=rows.device) % rate], padding,
                             value=-torch.inf)
    weighed, rows = (values.view(groups, rate, parts, -1) for values in (weighed, functional.pad(rows, padding)))
    maxima = weighed.amax(1)
    powers = torch.exp(weighed - maxima[:, None])
    per_key = torch.stack([maxima, powers.sum(1), (powers * rows).sum(1)], 2)  # [groups, parts, 3, width]
    # The initial accumulator of each key: the state or, with overlap, the contribution of the tokens before it.
    if parts == 1:
        starts = torch.cat([initial, initial.new_zeros(groups, *initial.shape[1:])])
    else:
        starts = torch.cat([initial[:1], _merged(initial[1:], per_key[:1, 0]), per_key[1:, 0]])
    merged = _merged(starts[:groups], per_key[:, -1])
    accumulators = torch.cat([merged[closed:], starts[groups:], torch.zeros_like(initial)])[:parts]
    return merged[:closed, 2] / merged[:closed, 1], accumulators


def _merged(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Accumulators [n, 3, width] merged with `second`, which are never empty."""
    before = torch.where(first[:, 1] > 0, first[:, 0], -torch.inf)
    maxima = torch.maximum(before, second[:, 0])
    first_factor, second_factor = torch.exp(before - maxima)[:, None], torch.exp(second[:, 0] - maxima)[:, None]
    return torch.cat([maxima[:, None], first_factor * first[:, 1:] + second_factor * second[:, 1:]], 1)
