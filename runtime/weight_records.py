"""Raw bytes of a checkpoint as the records that blocks and ops take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..kernels.reference_moe import ranks
from ..offload.neurons import ResidentBundles
from ..quant.weight import Bundles, Expert, Linear, Norm, SharedExpert, Weight
from .bundles import ROLE as BUNDLES
from .bundles import THRESHOLDS, layout_of
from .families import SHARED, LayerWeights, expert_roles
from .latent_weights import latent_weights
from .state_weights import Source, state_weights
from .tensors import ModelTensor, as_float32, typed

if TYPE_CHECKING:
    from ..offload.checkpoint import TensorStore
    from .config import ModelConfig
    from .paged_experts import Paging
    from .streamed import StreamedWeights


@dataclass(frozen=True)
class OuterWeights:
    """What surrounds the layers, on the host. `positions`: the table of learned ones."""

    embed: Weight
    positions: Weight | None
    norm: Norm
    head: Linear


class WeightRecords:
    """Makes records of a model's tensors by role: `tensors`, layers by number and what surrounds them as "outer". `host`: the ops of the
    CPU, whose matrices may be `streamed` and whose experts `paging` reads, both None where all weights stay in memory."""

    def __init__(self, config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore, host: object,
                 pager: object, streamed: StreamedWeights | None, paging: Paging | None) -> None:
        self.config, self.tensors, self.store, self.host = config, tensors, store, host
        self.pager, self.streamed, self.paging = pager, streamed, paging

    def layer(self, key: int, raw: Mapping[str, np.ndarray], ops: object, place: Callable[[ModelTensor], object] | None = None,
              looked_up: Collection[str] = ()) -> LayerWeights:
        """What a block takes, of raw bytes by name; `place` says where a matrix lies that was brought to its backend otherwise, `looked_up`
        which lie in lookup order."""
        config, roles = self.config, self.tensors[key]

        def vector(role: str) -> object | None:
            return None if role not in roles else ops.put(as_float32(roles[role], raw), "f32")

        def linear(role: str) -> Linear | None:
            if role not in roles:
                return None
            tensor = roles[role]
            if self.streamed is not None and self.streamed.holds(tensor):
                return Linear(self.streamed.matrix(tensor, raw), vector(f"{role}_bias"))
            data = ops.put(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme) if place is None else place(tensor)
            shaped = data.reshape(tensor.shape) if tensor.spec.is_raw else data
            return Linear(Weight(tensor.spec, tensor.shape, {"data": shaped}, tensor.name in looked_up), vector(f"{role}_bias"))

        def norm(role: str) -> Norm | None:
            return None if role not in roles else Norm(config.norm_kind, vector(role), vector(f"{role}_bias"), config.norm_eps)

        router, post_norm, correction = linear("router"), norm("post_norm") or Norm("none"), vector("correction")
        if router is not None and self.paging is not None and ops is self.host:
            experts = self.paging.layer(key, roles, lambda role: vector(f"{role}_bias"), post_norm, router,
                                        lambda logits: ranks(logits, config.mixture.routing, correction))
        else:
            experts = tuple(Expert(*map(linear, expert_roles(e))) for e in range(config.mixture.experts)) if router else ()
        return LayerWeights(input_norm=norm("input_norm") or Norm("none"), q=linear("q"), k=linear("k"), v=linear("v"), o=linear("o"),
                            q_norm=norm("q_norm"), k_norm=norm("k_norm"), post_norm=post_norm, gate=linear("gate"), up=linear("up"),
                            down=linear("down"), o_norm=norm("o_norm"), down_norm=norm("down_norm"), sinks=vector("sinks"),
                            router=router, experts=experts, bundles=self._bundles(roles, raw, ops, vector),
                            correction=correction, shared=SharedExpert(*map(linear, SHARED)) if SHARED[0] in roles else None,
                            state=state_weights(Source(config, roles, raw, ops, linear, vector)),
                            latent=latent_weights(roles, linear, vector))

    def _bundles(self, roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], ops: object,
                 vector: Callable[[str], object | None]) -> Bundles | None:
        if BUNDLES not in roles:
            return None
        tensor = roles[BUNDLES]
        layout = layout_of(tensor, self.config, "gate" in roles)
        if ops is not self.host:
            holder = ops.put(typed(raw[tensor.name], tensor.spec), tensor.spec.scheme).reshape(tensor.shape)
        elif tensor.name in raw:
            holder = ResidentBundles(raw[tensor.name], layout.stride, tensor.shape[0])
        else:
            holder = self.pager.layers[next(key for key, own in self.tensors.items() if own is roles)]
        biases = vector("up_bias") if layout.has_up else None, vector("down_bias")
        return Bundles(layout.scheme, layout.width, layout.has_up, holder, *biases, vector(THRESHOLDS))

    def last_norm(self, raw: Mapping[str, np.ndarray]) -> Norm:
        """The norm before the head, on the host."""
        roles, host = self.tensors["outer"], self.host
        weight, bias = (host.put(as_float32(roles[role], raw), "f32") if role in roles else None for role in ("norm", "norm_bias"))
        return Norm(self.config.norm_kind, weight, bias, self.config.norm_eps)

    def outer(self, raw: Mapping[str, np.ndarray]) -> OuterWeights:
        """What surrounds the layers, of raw bytes by name."""
        roles = self.tensors["outer"]

        def weight(role: str) -> Weight | None:
            if role not in roles:
                return None
            tensor = roles[role]
            if self.streamed is not None and self.streamed.holds(tensor):
                return self.streamed.matrix(tensor, raw)
            make = Weight.raw if tensor.spec.is_raw else Weight.low_bit
            return make(tensor.spec.scheme if tensor.spec.is_raw else tensor.spec, tensor.shape, raw[tensor.name])

        fetched = self.streamed is not None and self.streamed.parts.table == roles["embed"].name
        embed = self.streamed.table(roles["embed"], self.store.place(roles["embed"].info), raw) if fetched else weight("embed")
        head = weight("head") or (weight("embed") if fetched else embed)
        return OuterWeights(embed, weight("positions"), self.last_norm(raw), Linear(head))
