"""KV profile: how sensitive a model is to quantizing its keys and values, per layer and head.

Recorded by `kv_recording.py`, stored beside the weights by `kv_profile_file.py`, and used to allocate bits.

The directions in which noise in K and V costs most define each layer's `KVBasis`; the cost of each side of each head at 1 to 10 bits lets
`Profile.bits` distribute a mean number of bits among layers, heads and sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from ...quant.kv_basis import KVBasis
from ...quant.kv_bits import RULE, SIDES, share, with_doubt
from ...quant.kv_sink_split import SINK_SPLITS

FLIPS_PER_ROOT_KLD = 0.6  # changed top tokens per square root of the KL divergence, measured on several models and formats

Bits = list[list[tuple[int, int]]]  # per layer, per KV head: of K, of V


@dataclass(frozen=True)
class Profile:
    """The KV profile of one model."""

    layers: tuple[KVBasis, ...]
    # Per layer: the cost of K and of V of its heads at each of `quant.kv_bits.SIDES`, float32 [H, sides]; None for layers that the
    # recording did not reach.
    costs: tuple[tuple[np.ndarray, np.ndarray] | None, ...]
    weights: str  # identity of the weights
    tokens: int  # of the recording
    checks: tuple[tuple[float, float, float], ...] = ()  # of validated settings: (cost, KL divergence, share of changed top tokens)
    auto: int | None = None  # the fewest bits with few enough changed top tokens; None: no setting, or not validated
    ends: tuple[int, int] = SINK_SPLITS[0]  # default sink and window tokens that stay exact

    @property
    def hash(self) -> int:
        """64 bits that identify the profile and its bit allocation, stored in the header of every page."""
        digest = hashlib.sha256(f"{self.weights} {RULE}".encode())
        for basis in self.layers:
            for side in (basis.k_scale, basis.k_matrix, basis.v_matrix):
                digest.update(np.ascontiguousarray(side, "<f4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little") or 1

    def bits(self, mean_k: float, mean_v: float | None = None) -> Bits:
        """Bits of every head's K and V: `mean_k` on average over both, or over K alone if `mean_v` is given for V.

        Bits are distributed among heads of equal size, so that the mean over heads is also the mean over bytes.
        """
        bits = [np.empty((len(basis.k_scale), 2), int) for basis in self.layers]
        for sides, mean in (((0, 1), mean_k),) if mean_v is None else (((0,), mean_k), ((1,), mean_v)):
            for layer in bits:
                layer[:, sides] = int(mean)
            for size in dict.fromkeys(basis.k_scale.shape[1] for basis in self.layers):
                reached = [layer for layer, cost in enumerate(self.costs)
                           if cost is not None and self.layers[layer].k_scale.shape[1] == size]
                if not reached:
                    continue
                k, v = (np.concatenate(side) for side in zip(*(self.costs[layer] for layer in reached), strict=True))  # [heads, bits]
                allocated = share(with_doubt(k, v, mean)[..., sides, :].reshape(-1, len(SIDES)).tolist(), mean)
                allocated, index = np.reshape(allocated, (-1, len(sides))), 0
                for layer in reached:
                    bits[layer][:, sides] = allocated[index : (index := index + len(bits[layer]))]
        return [[(int(k), int(v)) for k, v in layer] for layer in bits]

    def bits_for(self, bits_k: int, bits_v: int) -> Bits:
        """The allocation for `--kv`: one mean for both sides, or one each."""
        return self.bits(bits_k) if bits_k == bits_v else self.bits(bits_k, bits_v)

    def bases(self, bits: Bits) -> list[KVBasis]:
        """The bases for those bits, with the profile's hash."""
        profile_hash = self.hash
        return [replace(basis.spread(*zip(*layer_bits, strict=True)), profile=profile_hash)
                for basis, layer_bits in zip(self.layers, bits, strict=True)]

    def cost(self, bits: Bits) -> float:
        """The cost of those bits, in units of `quant.kv_price`; only comparable within one model."""
        reached = [(cost, layer) for cost, layer in zip(self.costs, bits, strict=True) if cost is not None]
        return sum(float(cost[side][head][SIDES.index(pair[side])]) for cost, layer in reached for head, pair in enumerate(layer)
                   for side in range(2))

    def flips(self, bits: Bits) -> float | None:
        """The expected share of changed top tokens, extrapolated from the check nearest in cost: flips grow as the square root of the
        divergence, and that linearly with the cost. None without checks."""
        if not self.checks:
            return None
        cost = max(self.cost(bits), 1e-30)
        nearest_cost, kld, flips = min(self.checks, key=lambda check: abs(np.log(max(check[0], 1e-30) / cost)))
        return min(1.0, flips_of(kld, flips) * float(np.sqrt(cost / max(nearest_cost, 1e-30))))


def flips_of(kld: float, flips: float) -> float:
    """The expected share of changed top tokens given `flips` on a short text: at least what the divergence implies."""
    return max(flips, FLIPS_PER_ROOT_KLD * kld**0.5)
