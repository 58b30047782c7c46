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

    def put(self, made: torch.Tensor, first: int, norm: Norm, table: RopeTable) -> None:
        """Store keys [n, width] from number `first` on: normed, then rotated by the position of each one's first token."""
        if len(made):
            cos, sin = (self.to_device(each[:, None]) for each in table.turns((first + np.arange(len(made))) * self.shape.tokens_per_key))
            kept = turned_tails(normalise(made, norm)[:, None], cos, sin)[:, 0]
            self.rows[first : first + len(made)] = (kept if self.stored == F32 else saturated(kept)).to(self.rows.dtype)


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
        there = closed_keys(torch.arange(position, position + tokens, device=q.device), shape.tokens_per_key, 0, closed)
        seen, step = torch.zeros_like(there), max(1, MAX_SCORES // (shape.heads * closed))
        for begin in range(0, tokens, step):
            own = slice(begin, begin + step)
            worth = torch.bmm(weights[own, None], (split[own] @ keys.T).relu_())[:, 0].masked_fill_(~there[own], -torch.inf)
            best = worth.sort(dim=1, descending=True, stable=True).indices[:, : shape.top_k]  # of equal ones the earlier
            seen[own].scatter_(1, best, True)
        return seen.logical_and_(there)


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
               back: bool = False) -> torch.Tensor:
    """See `BlockOps`."""
    cos, sin = ops._cos_sin(positions, table)
    turned_tails(y.view(len(y), heads, head_dim), cos, -sin if back else sin)
    return y


def grouped_linear(ops: TorchOps, x: torch.Tensor, linears: Sequence[Linear]) -> torch.Tensor:
    """See `BlockOps`."""
    parts = x.view(len(x), len(linears), -1)
    return torch.cat([ops._linear(parts[:, group].contiguous(), each) for group, each in enumerate(linears)], 1)


class TorchCompressed(TorchSlots):
    """Incomplete keys of a layer. See `runtime/kv/states.py`."""

    shape: CompressedShape

    def __init__(self, shape: CompressedShape, memory: torch.Tensor, pass_slots: np.ndarray, linear: Linears) -> None:
        super().__init__(shape, memory, pass_slots, linear)
        sizes = [MAX_DECODE_TOKENS * width for width in shape.pooled_products]
        self._kept = [series.view(MAX_DECODE_TOKENS, -1) for series in self.recent[: sum(sizes)].split(sizes)]
        self._last: tuple[Compressor, int] | None = None  # by what the last pass of few tokens was taken in, and where it began

    def compress(self, products: Sequence[torch.Tensor], w: Compressor, position: int, table: RopeTable, keys: TorchKeys,
                 index: TorchIndex | None) -> None:
        """As `kernels/cpu/compressed.py`."""
        (source, target, after, kept), tokens, at = self.pass_slots(), len(products[0]), 0
        if tokens <= MAX_DECODE_TOKENS:
            self._last = w, position
            for own, product in zip(self._kept, products, strict=True):
                own[:tokens] = product
        state = self._begun(source)
        for end, slot in ((after, kept), (tokens, target)):
            if end > at:
                first = (position + at) // self.shape.tokens_per_key
                made, state = self._taken([each[at:end] for each in products], w, position + at, state)
                keys.put(made[0], first, w.norm, table)
                if index is not None:
                    index.put(made[1], first, w.index_norm, table)
                self._put(slot, state)
                at = end

    def rebuild_slot(self, source: int, target: int, tokens: int) -> None:
        """As `kernels/cpu/states.py`."""
        self._put(target, self._taken([each[:tokens] for each in self._kept], *self._last, self._begun(source))[1])

    def _begun(self, source: int) -> torch.Tensor:
        own = self.state_in(max(source, 0))[: self.shape.own_floats]
        return torch.zeros_like(own) if source == NO_SLOT else own

    def _put(self, slot: int, state: torch.Tensor) -> None:
        self.state_in(slot)[: len(state)] = state

    def _taken(self, products: Sequence[torch.Tensor], w: Compressor, position: int,
               state: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Completed keys, and index keys, before their norms, and the state after these tokens."""
        shape, size = self.shape, 3 * self.shape.rows_per_token * self.shape.width
        made, behind = [], []
        for own, bias, pair in ((state[:size], w.bias, products[:2]), (state[size:], w.index_bias, products[2:])):
            if pair:
                keys, ways = compressed(*pair, bias.view(shape.tokens_per_key, -1), position, own.view(shape.rows_per_token, 3, -1))
                made.append(keys)
                behind.append(ways.flatten())
        return made, torch.cat(behind)


def compressed(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor, position: int,
               ways: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_compressed.compress` on tensors, all tokens of a key at once."""
    rate, parts, tokens, lead = len(bias), len(ways), len(rows), position % len(bias)
    groups, closed = -(-(lead + tokens) // rate), (lead + tokens) // rate
    room = (0, 0, lead, groups * rate - lead - tokens)  # before the first token of the first key, behind the last of the last
    weighed = functional.pad(weights + bias[torch.arange(lead, lead + tokens, device=rows.device) % rate], room, value=-torch.inf)
    weighed, rows = (each.view(groups, rate, parts, -1) for each in (weighed, functional.pad(rows, room)))
    most = weighed.amax(1)
    powers = torch.exp(weighed - most[:, None])
    own = torch.stack([most, powers.sum(1), (powers * rows).sum(1)], 2)  # [groups, parts, 3, width]
    # What each key begins with: the state, or where keys overlap what the tokens of the key before it give.
    if parts == 1:
        begun = torch.cat([ways, ways.new_zeros(groups, *ways.shape[1:])])
    else:
        begun = torch.cat([ways[:1], _merged(ways[1:], own[:1, 0]), own[1:, 0]])
    made = _merged(begun[:groups], own[:, -1])
    behind = torch.cat([made[closed:], begun[groups:], torch.zeros_like(ways)])[:parts]
    return made[:closed, 2] / made[:closed, 1], behind


def _merged(begun: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Accumulators [n, 3, width] merged with `own`, which are never empty."""
    before = torch.where(begun[:, 1] > 0, begun[:, 0], -torch.inf)
    most = torch.maximum(before, own[:, 0])
    kept, new = torch.exp(before - most)[:, None], torch.exp(own[:, 0] - most)[:, None]
    return torch.cat([most[:, None], kept * begun[:, 1:] + new * own[:, 1:]], 1)
