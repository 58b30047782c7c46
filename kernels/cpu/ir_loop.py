"""A counted loop as LLVM instructions."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .intrinsics import I64

BEGIN = I64(0)


class Loop:
    """The head of a loop whose counter `index` runs from `start` by `step` up to `count`, exclusive; the body runs at least once.

    `values` are loop-carried. The constructor takes their initial values; `end`, called at the end of the body, takes the next ones and
    returns the final ones."""

    def __init__(self, builder: ir.IRBuilder, count: ir.Value, values: Sequence[ir.Value], name: str, start: ir.Value = BEGIN,
                 step: int = 1) -> None:
        self.builder, self.count, self.step = builder, count, step
        entry = builder.basic_block
        self.body, self.done = builder.append_basic_block(name), builder.append_basic_block(f"{name}.done")
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.index, *self.values = phis = [builder.phi(value.type) for value in (start, *values)]
        for phi, first in zip(phis, (start, *values), strict=True):
            phi.add_incoming(first, entry)

    def end(self, values: Sequence[ir.Value]) -> Sequence[ir.Value]:
        builder, last = self.builder, self.builder.basic_block
        following = builder.add(self.index, I64(self.step))
        for phi, value in zip((self.index, *self.values), (following, *values), strict=True):
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", following, self.count), self.body, self.done)
        builder.position_at_end(self.done)
        return values
