"""What a config says of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.reference_moe import Routing


@dataclass(frozen=True)
class Mixture:
    """The experts of a mixture: how many, how many a token visits, the width inside one, whether a token's shares add up to 1, and which
    layers have them; `sigmoid` and `factor` as in `Routing`. `shared_width`: of the expert that every token visits beside them, None where
    there is none; `shared_scaled`: it has a share of its own. `corrected`: the choice is by corrected scores. Experts lie in `groups`, of
    which a token's are in `kept_groups`. `apart`: the experts are a branch beside an MLP, as a `quant.weight.Apart` says. `gated`:
    experts have gates. `of_inputs`: shares multiply what goes into an expert, not what it gives. `near`, `of_logits` and `roots` as in
    `Routing`. `picked`: layers in which a table says of each word of the vocabulary which experts its token visits. `handed`: so many more
    are chosen among that have no matrices and hand on what they are given, or with `idle` nothing. `latent`: experts read
    so many numbers, which a matrix makes of a token, and give as many, which another widens; 0 where they read the token itself.
    `seen_width`: inside one of as many experts that rows of pictures, and `seen_words` of the vocabulary, visit in the place of the others;
    None where there are none."""

    experts: int
    per_token: int
    width: int
    renormalise: bool
    layers: frozenset[int]
    sigmoid: bool = False
    factor: float = 1.0
    corrected: bool = False
    shared_width: int | None = None
    shared_scaled: bool = False
    groups: int = 1
    kept_groups: int = 1
    apart: bool = False
    gated: bool = True
    of_inputs: bool = False
    near: float | None = None
    of_logits: bool = False
    roots: bool = False
    picked: frozenset[int] = frozenset()
    handed: int = 0
    idle: bool = False
    latent: int = 0
    seen_width: int | None = None
    seen_words: frozenset[int] = frozenset()

    @property
    def widest(self) -> int:
        """The width inside the widest expert of which a token visits some."""
        return max(self.width, self.seen_width or 0)

    @property
    def visited(self) -> float:
        """The share of tokens that visit an expert, where all are visited alike."""
        return self.per_token / (self.experts + self.handed)

    @cached_property
    def routing(self) -> Routing:
        """What the ops are told of it."""
        from ..kernels.reference_moe import Routing

        return Routing(self.per_token, self.renormalise, self.sigmoid, self.factor, self.groups, self.kept_groups, self.of_inputs,
                       self.near, self.of_logits, self.roots, self.handed)
