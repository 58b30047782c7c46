"""What a config says of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.reference_moe import Routing


@dataclass(frozen=True)
class MoEConfig:
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

    num_experts: int
    experts_per_token: int
    expert_dim: int
    renormalise: bool
    layers: frozenset[int]
    sigmoid: bool = False
    routed_scale: float = 1.0
    correction_bias: bool = False
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    num_groups: int = 1
    top_groups: int = 1
    parallel_to_mlp: bool = False
    gated: bool = True
    weights_scale_inputs: bool = False
    sparsemixer_margin: float | None = None
    correction_on_logits: bool = False
    sqrt_softplus: bool = False
    hash_routed_layers: frozenset[int] = frozenset()
    zero_experts: int = 0
    zero_experts_drop: bool = False
    latent_dim: int = 0
    vision_expert_dim: int | None = None
    vision_token_ids: frozenset[int] = frozenset()

    @property
    def widest_expert(self) -> int:
        """The width inside the widest expert of which a token visits some."""
        return max(self.expert_dim, self.vision_expert_dim or 0)

    @property
    def visit_rate(self) -> float:
        """The share of tokens that visit an expert, where all are visited alike."""
        return self.experts_per_token / (self.num_experts + self.zero_experts)

    @cached_property
    def routing(self) -> Routing:
        """What the ops are told of it."""
        from ..kernels.reference_moe import Routing

        return Routing(self.experts_per_token, self.renormalise, self.sigmoid, self.routed_scale, self.num_groups, self.top_groups,
                       self.weights_scale_inputs,
                       self.sparsemixer_margin, self.correction_on_logits, self.sqrt_softplus, self.zero_experts)
