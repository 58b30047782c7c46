"""Tensors read straight from the store, whether or not the model is loaded: for layer-by-layer passes, embedding projections and NaN
checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...kernels import reference_gated_residuals, reference_hyper_connections
from ...kernels.reference import normalise
from ...kernels.reference_streams import enter_streams, leave_streams
from ...offload.memory import anonymous
from ...quant.weight import Norm, Weight, to_f32
from ..ngrams import held, role_of
from ..tensors import ModelTensor, as_float32, typed
from . import residual_weights
from .compressed_weights import FINAL_MIX, HASH_TABLE, hash_routing, routing_correction

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..config import ModelConfig
    from ..layer import LayerWeights
    from .weight_records import PreHead, WeightRecords


class StoreReads:
    """A mix-in of `Model`: methods that read tensors from the store. The fields are those of the model."""

    config: ModelConfig
    store: TensorStore
    tensors: Mapping[int | str, Mapping[str, ModelTensor]]
    records: WeightRecords
    backends: Mapping[str, object]

    def read_layer(self, layer: int) -> LayerWeights:
        """A layer's weights, on the host."""
        raw = {tensor.name: anonymous(tensor.nbytes) for tensor in self.tensors[layer].values()}
        for tensor in self.tensors[layer].values():
            self.store.read_into(tensor.info, raw[tensor.name])
        return self.records.layer(layer, raw, self.backends["cpu"])

    def read_before_head(self) -> PreHead | None:
        """The transform between the last norm and the head, if there is one."""
        tensors = [tensor for role, tensor in self.tensors["outer"].items() if role.startswith(("head_in", "head_norm"))]
        return self.records.before_head({tensor.name: self.store.read(tensor.info) for tensor in tensors})

    def read_norm(self) -> Norm:
        """The norm after the last layer."""
        tensors = [tensor for role, tensor in self.tensors["outer"].items() if role.startswith("norm")]
        return self.records.last_norm({tensor.name: self.store.read(tensor.info) for tensor in tensors})

    def read_vector(self) -> list[np.ndarray]:
        """The matrices float32 [N, K] that project a state to an embedding, applied in turn with a ReLU between them."""
        tensors = [self.tensors["outer"][role] for role in ("vector_in", "vector") if role in self.tensors["outer"]]
        return [as_float32(tensor, {tensor.name: self.store.read(tensor.info)}).reshape(tensor.shape) for tensor in tensors]

    def find_nan(self) -> str | None:
        """The name of a tensor that contains NaN or infinity, if there is one."""
        for roles in self.tensors.values():
            for tensor in held(roles).values():
                raw = {tensor.name: self.store.read(tensor.info)}
                if tensor.spec.is_raw:
                    values = as_float32(tensor, raw)
                else:
                    values = Weight.low_bit(tensor.spec, tensor.shape, raw[tensor.name]).to_f32()
                if not np.isfinite(values).all():
                    return tensor.name
        return None

    def read_states(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """The initial residual stream of windows of text, from an unquantized store: float32 [tokens, D], or [tokens, S * D] for several
        streams."""
        states = self._read_embeddings(windows)
        others = [states @ matrix.T for matrix in self._read_streams("enter")]
        if self.config.residual_streams and not others:
            return np.tile(states, self.config.residual_streams)
        return enter_streams(states, np.stack(others)).astype(np.float32).reshape(len(states), -1) if others else states

    def read_left(self, states: np.ndarray) -> np.ndarray:
        """The input of the last norm, from final states [tokens, S * D]: float32 [tokens, D]."""
        if self.config.residual_gate_rank:
            return self._read_gated(states.reshape(len(states), self.config.residual_streams, -1))
        if self.config.sinkhorn_iterations:
            return states.reshape(len(states), self.config.residual_streams, -1).mean(1)
        if FINAL_MIX in self.tensors["outer"]:
            matrix, base, scale = (self._read_whole(FINAL_MIX + suffix) for suffix in ("", "_base", "_scale"))
            split = states.reshape(len(states), self.config.residual_streams, -1)
            say = reference_hyper_connections.said(split, matrix, self.config.norm_eps)
            return reference_hyper_connections.left(split, say, scale, base, self.config.sinkhorn[1]).astype(np.float32)
        first, *others = np.split(states, max(1, self.config.residual_streams), axis=1)
        made = [other @ matrix.T for other, matrix in zip(others, self._read_streams("leave"))]
        return leave_streams(first, np.stack(made)).astype(np.float32) if made else first

    def _read_gated(self, streams: np.ndarray) -> np.ndarray:
        """Streams [tokens, S, D] merged by per-channel gates."""
        norm, down, up = (self._read_whole(f"{residual_weights.FINAL_MIX}.{part}") for part in ("mix_norm", "mix_down", "mix_up"))
        normed = reference_gated_residuals.normed(streams, norm, self.config.norm_eps, residual_weights.NORM_KIND)
        opened = reference_gated_residuals.gates(normed.reshape(len(streams), -1) @ down.T, up, self.config.residual_streams)
        return reference_gated_residuals.read(normed, opened).astype(np.float32)

    def _read_streams(self, role: str) -> Iterator[np.ndarray]:
        """The matrices of the residual streams after the first."""
        for name in (f"streams.{stream}.{role}" for stream in range(1, self.config.residual_streams)):
            if name in self.tensors["outer"]:
                yield self._read_whole(name)

    def _read_whole(self, role: str) -> np.ndarray:
        tensor = self.tensors["outer"][role]
        return to_f32(typed(self.store.read(tensor.info), tensor.spec), tensor.spec.scheme).reshape(tensor.shape)

    def _read_embeddings(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        states = self._read_rows("embed", np.concatenate(windows)) * np.float32(self.config.embedding_multiplier)
        if self.config.position_offset is None:
            return states
        return states + self._read_rows("positions", np.concatenate([self.config.position_offset + np.arange(len(w)) for w in windows]))

    def read_inputs(self, layer: int, ids: np.ndarray) -> np.ndarray | None:
        """A layer's additional inputs for these tokens at the start of a text, from an unquantized store: per-layer embeddings float32 [T,
        P], hash-routing score corrections [T, E], or n-gram rows [T, E]; None for none."""
        config, roles = self.config, self.tensors["outer"]
        if config.ngrams is not None and layer in config.ngrams.layers:
            own, behind = config.ngrams, config.ngrams.shape.size
            every = np.concatenate([np.full(behind - 1, own.eos_token_id, np.int64), ids])
            numbers = own.row_ids(layer, np.lib.stride_tricks.sliding_window_view(every, behind))
            return self._read_rows(role_of(layer), numbers.reshape(-1)).reshape(len(ids), -1)
        width, role = config.per_layer_input_dim, f"{HASH_TABLE}{layer}"
        if role in roles:
            table = hash_routing(config, {layer: (roles[role], self._read_whole(role))})[layer]
            return routing_correction(table[ids], config.moe.num_experts)
        if not width:
            return None
        own = slice(layer * width, (layer + 1) * width)
        projection, weight = (to_f32(typed(self.store.read(roles[role].info, *span), roles[role].spec), roles[role].spec.scheme)
                              for role, span in (("layer_proj", (own.start, own.stop)), ("layer_norm", (0, width))))
        made = self._read_embeddings([ids]) @ projection.reshape(width, -1).T * np.float32(config.hidden_size**-0.5)
        made = normalise(made, "rms", weight, None, config.norm_eps).astype(np.float32)
        if "layer_embed" not in roles:
            return made
        rows = self._read_rows("layer_embed", clip_to_table(ids, config.per_layer_input_vocab))[:, own]
        rows = rows * np.float32(config.per_layer_input_multiplier)
        return (made + rows) * np.float32(0.5**0.5)

    def _read_rows(self, role: str, ids: np.ndarray) -> np.ndarray:
        tensor = self.tensors["outer"][role]
        distinct, places = np.unique(ids, return_inverse=True)
        rows = np.concatenate([self.store.read(tensor.info, int(row), int(row) + 1) for row in distinct])
        return to_f32(typed(rows, tensor.spec), tensor.spec.scheme).reshape(len(distinct), -1)[places]


def clip_to_table(ids: np.ndarray, rows: int) -> np.ndarray:
    """Ids, with those beyond the per-layer embedding table replaced by its first row."""
    return np.where(ids < rows, ids, 0)
