"""Rotary position tables: one frequency per channel pair and a scale of cos and sin, fixed when the engine starts.

Besides the plain table there are partial rotation and five kinds of context extension, as transformers defines them. Two of these (dynamic,
longrope) depend on the length: transformers recomputes them as the text grows, which would contradict keys already cached, so here the
context size decides once. Arithmetic is float32 in the order that checkpoints were trained with: at position 100,000 a "more exact"
frequency is a different angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .config_rope import QUERY_SCALING_BETA, ROTATED_SHARE, RopeConfig

if TYPE_CHECKING:
    from .config import ModelConfig

F32 = np.float32


@dataclass(frozen=True)
class RopeTable:
    """Channel i is rotated with channel i + rotary_dim/2 by `position * inv_freq[i]`; negative frequencies rotate the other way."""

    inv_freq: np.ndarray  # float32 [rotary_dim / 2]
    attention_scaling: float  # multiplies cos and sin
    rotary_dim: int
    growth: tuple[float, int] | None = None  # (beta, n): at position p cos and sin are also scaled by 1 + beta ln(1 + p // n)
    queries: RopeTable | None = None  # of queries, if it differs; with latent attention it is applied after this one
    # Channel 2i is rotated with 2i + 1, and the result is stored as i and i + rotary_dim/2, for queries and keys alike: dot products are
    # the same, and code that stores keys sees one order.
    interleaved: bool = False
    index: RopeTable | None = None  # of an indexer, which may pair other channels

    def scale(self, positions: np.ndarray) -> np.ndarray:
        """The factor of cos and sin: float32, one number or [T, 1]."""
        if self.growth is None:
            return F32(self.attention_scaling)
        beta, interval = self.growth
        growth = F32(1) + F32(beta) * np.log(F32(1) + np.floor(np.asarray(positions, np.float64) / interval).astype(F32))
        return (F32(self.attention_scaling) * growth).reshape(-1, 1)

    def cos_sin(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of each channel pair: float32 [T, rotary_dim / 2] each. `positions` [T], or one per pair."""
        angles = np.asarray(positions, F32).reshape(len(positions), -1) * self.inv_freq
        scale = self.scale(positions)
        return np.cos(angles) * scale, np.sin(angles) * scale


ALIBI_BASE = 64  # of the two digits of a key's position, which are exact in 16 bits


class AlibiTable(RopeTable):
    """For ALiBi: a pair of key channels (1, 0) becomes the two digits of the position."""

    def cos_sin(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        high, low = np.divmod(np.asarray(positions).reshape(-1, 1), ALIBI_BASE)
        return high.astype(F32), low.astype(F32)


ALIBI = AlibiTable(np.ones(1, F32), 1.0, 2)


class LogPositions(RopeTable):
    """For per-head query scaling: the log of the number of visible tokens in place of cos."""

    def cos_sin(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logs = np.log(np.asarray(positions, F32).reshape(-1, 1) + F32(1))
        return logs, np.zeros_like(logs)


class QueryPowerScaling(RopeTable):
    """Without rotation, for queries of layers without rotary positions; `growth` is (e, n) of `ModelConfig.nope_query_scaling`."""

    def scale(self, positions: np.ndarray) -> np.ndarray:
        exponent, length = self.growth
        return np.exp(F32(exponent) * np.log1p((np.asarray(positions, F32) + F32(1)) / F32(length))).reshape(-1, 1)


LOG_POSITIONS = LogPositions(np.ones(1, F32), 1.0, 2)


def alibi_channels(slopes: Sequence[float], kv_heads: int, scale: float, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Extra channels of queries [heads, width] and keys [kv_heads, width] for ALiBi, of which the first two become the digits of a
    position: a score, times `scale`, grows by the head's slope for each position of its key. The others are zero."""
    queries, keys = np.zeros((len(slopes), width), F32), np.zeros((kv_heads, width), F32)
    queries[:, :2] = np.array(slopes, np.float64)[:, None] / scale * (ALIBI_BASE, 1)
    keys[:, 0] = 1
    return queries, keys


def rope_table(config: RopeConfig, head_dim: int, ctx: int, max_position_embeddings: int) -> RopeTable:
    """The table of a model for a context of `ctx` tokens. Raises KeyError for a kind that `config_rope.ROPE_KEYS` does not list."""
    dim = int(head_dim * config.partial_rotary_factor)
    theta, params = config.theta, config.params
    scaling = 1.0
    if config.kind == "default":
        inv_freq = _plain(theta, dim)
    elif config.kind == "linear":
        inv_freq = _plain(theta, dim) / F32(params["factor"])
    elif config.kind == "dynamic":
        inv_freq = _plain(_dynamic_theta(theta, params["factor"], dim, max(ctx, max_position_embeddings) / max_position_embeddings), dim)
    elif config.kind == "llama3":
        inv_freq = _llama3(_plain(theta, dim), params)
    elif config.kind == "yarn":
        inv_freq, scaling = _yarn(theta, dim, params), _yarn_scaling(params)
    elif config.kind == "proportional":
        pairs = int(params[ROTATED_SHARE] * dim // 2)
        inv_freq = np.concatenate([_plain(theta, dim)[:pairs], np.zeros(dim // 2 - pairs, F32)]) / F32(params["factor"])
    elif config.kind == "longrope":
        factors = params["long_factor" if ctx > params["original_max_position_embeddings"] else "short_factor"]
        inv_freq, scaling = F32(1.0) / (np.array(factors, F32) * _periods(theta, dim)), _longrope_scaling(params)
    else:
        raise KeyError(config.kind)
    table = RopeTable((-inv_freq if config.backwards else inv_freq).astype(F32), float(scaling), dim, interleaved=config.interleaved)
    if params.get(QUERY_SCALING_BETA):
        return replace(table, queries=replace(table, growth=(params[QUERY_SCALING_BETA], params["original_max_position_embeddings"])))
    return table


def _periods(theta: float, dim: int) -> np.ndarray:
    return F32(theta) ** (np.arange(0, dim, 2).astype(F32) / F32(dim))


def _plain(theta: float, dim: int) -> np.ndarray:
    return F32(1.0) / _periods(theta, dim)


def _dynamic_theta(theta: float, factor: float, dim: int, stretch: float) -> float:
    """NTK-aware scaling: a larger base, so that the slowest channel covers the context, `stretch` >= 1 times the trained one."""
    if dim <= 2:
        return theta  # a single pair has frequency 1 for every base
    return theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2))


def _llama3(inv_freq: np.ndarray, params: Mapping[str, object]) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    factor, original = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelength = F32(2 * math.pi) / inv_freq
    if low == high:
        return np.where(wavelength > original / low, inv_freq / F32(factor), inv_freq)
    smooth = (F32(original) / wavelength - F32(low)) / F32(high - low)
    blended = (F32(1) - smooth) * inv_freq / F32(factor) + smooth * inv_freq
    slowest = np.where(wavelength > original / low, inv_freq / F32(factor), blended)
    return np.where(wavelength < original / high, inv_freq, slowest)


def _yarn(theta: float, dim: int, params: Mapping[str, object]) -> np.ndarray:
    """Channels that turn more than `beta_fast` times within the trained context are kept, fewer than `beta_slow` times are
    interpolated, with a linear ramp over the channel index between (https://arxiv.org/abs/2309.00071)."""
    original = params["original_max_position_embeddings"]

    def channel_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_of(params["beta_fast"]), channel_of(params["beta_slow"])
    if params["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    kept = F32(1) - np.clip((np.arange(dim // 2).astype(F32) - F32(low)) / F32(high - low), F32(0), F32(1))
    periods = _periods(theta, dim)
    return F32(1) / (F32(params["factor"]) * periods) * (F32(1) - kept) + F32(1) / periods * kept


def _yarn_scaling(params: Mapping[str, object]) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params["attention_factor"] is not None:
        return params["attention_factor"]
    if params["mscale"] and params["mscale_all_dim"]:
        return magnitude(params["mscale"]) / magnitude(params["mscale_all_dim"])
    return magnitude(1.0)


def _longrope_scaling(params: Mapping[str, object]) -> float:
    """https://arxiv.org/abs/2402.13753"""
    if params["attention_factor"] is not None:
        return params["attention_factor"]
    factor = params["factor"]
    return math.sqrt(1 + math.log(factor) / math.log(params["original_max_position_embeddings"])) if factor > 1 else 1.0


def query_scaling_table(growth: tuple[float, int], width: int) -> RopeTable:
    """A table without rotation that scales the whole query: with latent attention RoPE rotates, and so would scale, a part of it only."""
    return RopeTable(np.zeros(width // 2, F32), 1.0, width, growth)


def nope_table(growth: tuple[float, int], head_dim: int) -> RopeTable:
    """A table that rotates nothing and scales queries [head_dim] by their position, see `QueryPowerScaling`."""
    still = np.zeros(head_dim // 2, F32)
    return RopeTable(still, 1.0, head_dim, queries=QueryPowerScaling(still, 1.0, head_dim, growth))


def rope_tables(config: ModelConfig, ctx: int) -> list[RopeTable | None]:
    """Each layer's rotary table for a context; layers of one kind share theirs."""
    tables: dict[tuple[int, int], RopeTable] = {}  # by identity of the RopeConfig, and head dimension
    if config.alibi_slopes:
        return [ALIBI] * config.num_hidden_layers
    nope = None if config.nope_query_scaling is None else nope_table(config.nope_query_scaling, config.rotary_head_dim)

    def of_layer(layer: int, rope: RopeConfig | None) -> RopeTable | None:
        size = config.kv_heads_of(layer)[1] if config.layer_kv_heads and config.mla is None else config.rotary_head_dim
        if rope is None:
            return nope
        if (id(rope), size) not in tables:
            table = rope_table(rope, size, ctx, config.max_position_embeddings)
            if config.mla is not None and table.queries is not None:
                table = replace(table, queries=query_scaling_table(table.queries.growth, config.mla.key))
            if config.indexer is not None:
                table = replace(table, index=config.indexer.rope_table(table))
            tables[id(rope), size] = table
        return tables[id(rope), size]

    return [of_layer(layer, rope) for layer, rope in enumerate(config.ropes)]


def with_learned_frequencies(tables: Sequence[RopeTable | None], alpha: np.ndarray) -> list[RopeTable | None]:
    """Tables whose frequencies are multiplied by the exponential of learned values; layers that share a table still do."""
    factors, scaled = np.exp(alpha), {}

    def scale(table: RopeTable) -> RopeTable:
        return replace(table, inv_freq=table.inv_freq * factors, index=None if table.index is None else scale(table.index))

    for table in tables:
        if table is not None and id(table) not in scaled:
            scaled[id(table)] = scale(table)
    return [None if table is None else scaled[id(table)] for table in tables]
