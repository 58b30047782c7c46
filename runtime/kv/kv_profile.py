"""What packing a model's keys and values costs, where: a profile that `kv_recording.py` records, kept beside the weights and read by runs.

In which directions noise in K and V costs most gives each layer its `KVBasis`, and what the sides of each head cost at 1 to 10 bits lets
`Profile.bits` share a mean number of bits among layers, heads and sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from ...quant.kv_basis import KVBasis
from ...quant.kv_bits import RULE, SIDES, share, with_doubt
from ...quant.kv_sink_split import SINK_SPLITS

FLIPS_A_ROOT = 0.6  # changed top tokens over the root of the KL divergence, as measured on several models and formats

Bits = list[list[tuple[int, int]]]  # per layer, per KV head: of K, of V


@dataclass(frozen=True)
class Profile:
    """One basis a layer, and what the sides of its heads cost at each of `quant.kv_bits.SIDES`, float32 [H, sides] (K, V); none for a
    layer that the recording did not reach. `weights` names the weights that it was recorded with. `checks`: (cost, KL divergence, share of
    changed top tokens) of settings that were tried; `auto`: the fewest bits that changed few enough. `ends`: first and newest tokens that
    stay exact, where nothing else is asked for."""

    layers: tuple[KVBasis, ...]
    costs: tuple[tuple[np.ndarray, np.ndarray] | None, ...]
    weights: str
    tokens: int
    checks: tuple[tuple[float, float, float], ...] = ()
    auto: int | None = None
    ends: tuple[int, int] = SINK_SPLITS[0]

    @property
    def hash(self) -> int:
        """64 bits that name the profile, and how its bits are given, in the header of every page."""
        digest = hashlib.sha256(f"{self.weights} {RULE}".encode())
        for basis in self.layers:
            for side in (basis.k_scale, basis.k_matrix, basis.v_matrix):
                digest.update(np.ascontiguousarray(side, "<f4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little") or 1

    def bits(self, mean_k: float, mean_v: float | None = None) -> Bits:
        """Bits of every head's K and V: `mean_k` on average over all sides, or over those of K where `mean_v` says what those of V have.
        Heads share with those of their size, so that the mean of sides is that of bytes too."""
        given = [np.empty((len(basis.k_scale), 2), int) for basis in self.layers]
        for sides, mean in (((0, 1), mean_k),) if mean_v is None else (((0,), mean_k), ((1,), mean_v)):
            for layer in given:
                layer[:, sides] = int(mean)
            for size in dict.fromkeys(basis.k_scale.shape[1] for basis in self.layers):
                reached = [layer for layer, cost in enumerate(self.costs)
                           if cost is not None and self.layers[layer].k_scale.shape[1] == size]
                if not reached:
                    continue
                k, v = (np.concatenate(side) for side in zip(*(self.costs[layer] for layer in reached), strict=True))  # [heads, bits]
                each = share(with_doubt(k, v, mean)[..., sides, :].reshape(-1, len(SIDES)).tolist(), mean)
                each, at = np.reshape(each, (-1, len(sides))), 0
                for layer in reached:
                    given[layer][:, sides] = each[at : (at := at + len(given[layer]))]
        return [[(int(k), int(v)) for k, v in layer] for layer in given]

    def bits_for(self, bits_k: int, bits_v: int) -> Bits:
        """What `--kv` asks for: one mean for both sides, or one each."""
        return self.bits(bits_k) if bits_k == bits_v else self.bits(bits_k, bits_v)

    def bases(self, bits: Bits) -> list[KVBasis]:
        """The bases for those bits, with the profile's hash."""
        own = self.hash
        return [replace(basis.spread(*zip(*each, strict=True)), profile=own) for basis, each in zip(self.layers, bits, strict=True)]

    def cost(self, bits: Bits) -> float:
        """What those bits cost, in the unit of `quant.kv_price`: for comparing settings of one model."""
        reached = [(cost, layer) for cost, layer in zip(self.costs, bits, strict=True) if cost is not None]
        return sum(float(cost[side][head][SIDES.index(pair[side])]) for cost, layer in reached for head, pair in enumerate(layer)
                   for side in range(2))

    def flips(self, bits: Bits) -> float | None:
        """The share of top tokens that those bits will change, from the check that is nearest in cost: flips grow as the root of the
        divergence, and that as the cost. None where nothing was checked."""
        if not self.checks:
            return None
        cost = max(self.cost(bits), 1e-30)
        near, kld, flips = min(self.checks, key=lambda check: abs(np.log(max(check[0], 1e-30) / cost)))
        return min(1.0, flips_of(kld, flips) * float(np.sqrt(cost / max(near, 1e-30))))


def flips_of(kld: float, flips: float) -> float:
    """The share of changed top tokens to expect where a short text showed `flips` of them: what the divergence lets expect, or more."""
    return max(flips, FLIPS_A_ROOT * kld**0.5)
