"""On which tier each tensor's bytes are during a run, counted once, as stored.

A plan counts memory (mappings, disk blocks, buffers); this counts tensors, so the tiers add up to exactly the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...offload.resident_pager import unshared
from ...offload.streaming_pager import same_parts
from ..families import expert_of
from ..ngrams import away_nbytes
from ..prepare import Prepared
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..tensors import ModelTensor, check_tensors
from .paged_experts import PagedExperts
from .stream_layout import fixed_part
from .streamed_weights import StreamingPlan

Tensors = Mapping[int | str, Mapping[str, ModelTensor]]


@dataclass(frozen=True)
class WeightTiers:
    """Bytes of tensors. In memory: `always` (norms, biases, small matrices, row scales; everything, if nothing is on disk) and `pinned`,
    which could have been on disk (parts of matrices, neurons in windows, experts in slots). On disk: `streamed` for every token,
    `on_demand` (rows of embeddings or n-grams, neurons, experts). `gpu`: the GPU's layers."""

    always: int = 0
    pinned: int = 0
    streamed: int = 0
    on_demand: int = 0
    gpu: int = 0

    @property
    def memory(self) -> int:
        return self.always + self.pinned

    @property
    def disk(self) -> int:
        return self.streamed + self.on_demand

    def to_json(self) -> dict[str, int]:
        return {"memory": self.memory, "disk": self.disk, "gpu": self.gpu}


def weight_tiers(prepared: Prepared, tensors: Tensors | None = None) -> WeightTiers:
    """A model's tensors under this plan."""
    tensors = tensors or check_tensors(prepared.config, prepared.store, prepared.container, prepared.speculation.mtp)
    devices = prepared.placement.devices
    gpu = _nbytes(tensor for key, roles in tensors.items() if key != "outer" and devices[key] == "cuda" for tensor in roles.values())
    streams, away = prepared.streaming, away_nbytes(tensors["outer"])
    if streams is None:
        held = _nbytes(tensor for key, roles in tensors.items() if key == "outer" or devices[key] == "cpu"
                       for tensor in roles.values() if not tensor.turn)
        return WeightTiers(always=held - away, on_demand=away, gpu=gpu)
    always = sum(info.nbytes for infos in unshared(streams.parts.always).values() for info in infos)
    table = _table(streams, tensors, prepared) + away
    if isinstance(streams, PagedExperts):
        experts = _nbytes(tensor for key, roles in tensors.items() for role, tensor in roles.items()
                          if expert_of(role) is not None and key in streams.parts.layers)
        held = experts * streams.slots // len(streams.parts.parts)
        return WeightTiers(always, held, 0, experts - held + table, gpu)
    parts, residency = streams.parts.parts, streams.residency
    same = same_parts(parts)
    pinned, streamed = (sum(own.nbytes for index in indices if same[index] == index for own in parts[index].ranges)
                        for indices in (residency.pinned, residency.streamed))
    neurons = window = 0
    if streams.windows is not None:
        neurons = _nbytes(roles[BUNDLES] for roles in tensors.values() if BUNDLES in roles)
        window = min(neurons, sum(own * place.unit for own, place in zip(streams.windows.slots, streams.windows.places, strict=True)))
    return WeightTiers(always, pinned + window, streamed, neurons - window + table, gpu)


def _table(streams: StreamingPlan | PagedExperts, tensors: Tensors, prepared: Prepared) -> int:
    """Bytes of tables that are read row by row, without their resident part; an embedding that is also the head does not count."""
    parts = streams.parts
    fetched = [tensor for tensor in tensors["outer"].values() if tensor.name in parts.tables and tensor.name not in parts.slices]
    return sum(tensor.nbytes - (0 if tensor.spec.is_raw else fixed_part(tensor, prepared.store).nbytes) for tensor in fetched)


def _nbytes(tensors: Iterable[ModelTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
