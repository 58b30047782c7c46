"""`MoEConfig`: the mixture of experts of a `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.reference_moe import Routing


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts. How experts are scored and selected is explained in `Routing`, whose fields are among these."""

    num_experts: int
    experts_per_token: int
    expert_dim: int  # intermediate size of an expert
    renormalise: bool
    layers: frozenset[int]  # those with experts
    sigmoid: bool = False
    routed_scale: float = 1.0
    correction_bias: bool = False  # experts are selected by corrected scores
    shared_expert_dim: int | None = None  # intermediate size of the expert that every token visits; None: there is none
    shared_expert_gate: bool = False  # a sigmoid weights the shared expert
    num_groups: int = 1
    top_groups: int = 1  # groups that a token's experts come from
    parallel_to_mlp: bool = False  # experts run beside a dense MLP (`quant.weight.ParallelExperts`)
    gated: bool = True  # experts have a gate
    weights_scale_inputs: bool = False
    sparsemixer_margin: float | None = None
    correction_on_logits: bool = False
    sqrt_softplus: bool = False
    hash_routed_layers: frozenset[int] = frozenset()  # layers in which a table of token ids selects the experts
    zero_experts: int = 0  # further candidates without matrices, which return their input
    zero_experts_drop: bool = False  # ... or nothing
    latent_dim: int = 0  # width to which the experts' input is projected, and their output from; 0: the model's own
    vision_expert_dim: int | None = None  # intermediate size of a second set of experts, for image rows; None: there is none
    vision_token_ids: frozenset[int] = frozenset()  # tokens of the vocabulary that visit those too

    @property
    def widest_expert(self) -> int:
        """Intermediate size of the widest expert."""
        return max(self.expert_dim, self.vision_expert_dim or 0)

    @property
    def visit_rate(self) -> float:
        """Fraction of tokens that visit an expert, if all are visited equally."""
        return self.experts_per_token / (self.num_experts + self.zero_experts)

    @cached_property
    def routing(self) -> Routing:
        """How the ops select and weight experts."""
        from ..kernels.reference_moe import Routing

        return Routing(self.experts_per_token, self.renormalise, self.sigmoid, self.routed_scale, self.num_groups, self.top_groups,
                       self.weights_scale_inputs,
                       self.sparsemixer_margin, self.correction_on_logits, self.sqrt_softplus, self.zero_experts)
