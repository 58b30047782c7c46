"""What a weight's numbers are: bits, group and scheme, and from that its exact size.

Raw schemes keep the type of the checkpoint. The planner trusts `nbytes`, so it is exact for every scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .. import UsageError

RAW_BITS = {"f32": 32, "f16": 16, "bf16": 16}


@dataclass(frozen=True)
class QuantSpec:
    """`bits` per stored value, `group` values that share a scale (0: none), `scheme` by name. Raises UsageError for an unknown mix."""

    bits: int
    group: int
    scheme: str

    def __post_init__(self) -> None:
        if RAW_BITS.get(self.scheme) != self.bits or self.group != 0:
            raise UsageError(f"no weight format {self.scheme!r} with {self.bits} bits in groups of {self.group}",
                             f"known: {', '.join(RAW_BITS)}")

    @classmethod
    def raw(cls, scheme: str) -> QuantSpec:
        """The spec of unquantized values: f32, f16 or bf16."""
        return cls(RAW_BITS.get(scheme, 0), 0, scheme)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Exact bytes of a tensor of this shape, padding between tensors not counted."""
        return prod(shape) * self.bits // 8
