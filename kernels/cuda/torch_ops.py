"""Transformer block ops on torch tensors, for a GPU; the same code runs on CPU tensors, which is how it is tested everywhere.

Only this folder imports torch. Activations are float32 tensors `[T, N]`; the residual stream is updated in place, as on the CPU. Weights
stay in their stored type: products with 16-bit weights widen a tile of rows to float32 first, because rounding activations to 16 bits would
make the two backends differ by more than they may. The price is memory traffic in decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..device_memory import MAX_WIDENED
from ..latent_shape import LatentShape
from ..layout import MIN_ABSMAX, STORED_TYPES, PageLayout
from ..reference import CURVE_EDGE, CURVE_SLOPE
from ..reference_moe import Routed, Routing, visits
from ..registry import Call, Candidate, Registry
from ..tiles import SCHEMES
from . import compressed, head_widths, lora, moe_branches, ngrams, stream_mixing, streams
from .device import CudaDevice, Device, SimulatedDevice, within_memory
from .graph_replay import GraphCache
from .kernel_choice import KernelChoice
from .matmul import Matmul, ResidualAndFactor, tiled
from .packed_pages import TorchPackedPages
from .pages import TorchLayerPages
from .routing import routed
from .stages import Stages, activated
from .states import TorchSlots, state_layer

if TYPE_CHECKING:  # records of the layer above; this backend reads their fields and never creates one
    from ...quant.weight import Bundles, Expert, Linear, LowRank, Norm, PerLayerInput, SharedExpert, Weight, XieluParams
    from ...runtime.rope import RopeTable
    from ..state_shape import StateShape

UPLOADS = 4  # cached index arrays: those of one step, and a spare
NATIVE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def default_registry() -> Registry:
    """One implementation per stored type."""
    stored = lambda kinds: lambda call: "" if call.stored in kinds else f"no product with {call.stored}"  # noqa: E731
    return Registry([Candidate("matrix", "torch", stored(("f32",)), Matmul.plain, "torch's own product"),
                     Candidate("matrix", "widened to float32", stored(tuple(STORED_TYPES)), Matmul.widened, "the same numbers"),
                     Candidate("matrix", "codes opened to float32", stored(tuple(SCHEMES)), Matmul.of_codes,
                               "in the matmul kernel if Triton compiles one for the GPU, else before the product")])


class TorchOps(lora.AdapterScales):
    """See the module. `device` is a Device, or its name: cuda, or cpu for a simulated one; one instance serves every block placed on it."""

    name = "torch"

    def __init__(self, device: str | Device, registry: Registry | None = None, one_scale: bool = False) -> None:
        super().__init__()
        self.one_scale = one_scale  # see `Dims`
        if isinstance(device, str):
            device = SimulatedDevice() if device == "cpu" else CudaDevice(device)
        self.on, self.device = device, device.torch
        self.registry = registry or default_registry()
        self._angles: dict[int, tuple[object, object, torch.Tensor, torch.Tensor]] = {}
        self._uploads: dict[tuple[tuple[int, ...], str, bytes], torch.Tensor] = {}
        self.repeats, self.kernel_choice = GraphCache(device), KernelChoice(device)
        self.products, self.stages = Matmul(self.kernel_choice), Stages(self.kernel_choice)
        # Weights with which the streams gathered last receive a branch (`stream_mixing.py`).
        self.write_weights: tuple[torch.Tensor, ...] = ()

    def announcements(self) -> list[str]:
        """Notices about slower code paths on this device, each reported once."""
        return self.repeats.announcements() + self.kernel_choice.announcements()

    def close(self) -> None:
        """Release what is cached between steps."""
        self._angles.clear()
        self._uploads.clear()
        self.write_weights = ()
        self.repeats.forget()
        self.on.release()

    def within_memory(self, message: str) -> AbstractContextManager[None]:
        """Context manager: raises DoesNotFit with `message` if memory, on the device or pinned, runs out inside."""
        return within_memory(message)

    # -- the ops ---------------------------------------------------------------------------------------------------------------

    def embed(self, ids: np.ndarray, table: Weight, scale: float = 1.0, places: np.ndarray | None = None,
              learned: Weight | None = None) -> torch.Tensor:
        """Rows of the embedding table as the residual stream x[T, D], plus rows `places` of a table of `learned` positions."""
        x = self._rows(table, ids) * scale
        return x if learned is None else x + self._rows(learned, places)

    def norm_linear(self, x: torch.Tensor, norm: Norm, linears: Sequence[Linear]) -> list[torch.Tensor]:
        """[norm(x) @ W.T + b for each]."""
        n = x if norm is None else self.stages.normalise(x, norm)
        return [self._linear(n, matrix) for matrix in linears]

    def linear_add(self, x: torch.Tensor, matrix: Linear, residual: torch.Tensor, post_norm: Norm | None = None,
                   factor: float = 1.0) -> torch.Tensor:
        """See `BlockOps`."""
        if post_norm is None:
            return self._linear(x, matrix, (residual, factor))
        return residual.add_(self.stages.normalise(self._linear(x, matrix), post_norm), alpha=factor)

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str,
                  observer: Callable[[torch.Tensor], None] | None = None, post_norm: Norm | None = None, factor: float = 1.0,
                  sub_norm: Norm | None = None) -> torch.Tensor:
        """x + down(sub_norm(act(gate(n)) * up(n))) with n = norm(x), in place; the branch is added as in `linear_add`. `observer` is
        called with the input of `down`. Raises ValueError for an unknown activation."""
        n = self.stages.normalise(x, norm)
        hidden = self.stages.gated(self._linear(n, gate), self._linear(n, up), act)
        return self._down(hidden if sub_norm is None else self.stages.normalise(hidden, sub_norm), down, x, observer, post_norm, factor)

    def mlp(self, x: torch.Tensor, norm: Norm, up: Linear, down: Linear, act: str, observer: Callable[[torch.Tensor], None] | None = None,
            post_norm: Norm | None = None, factor: float = 1.0, xielu: XieluParams | None = None) -> torch.Tensor:
        """`gated_mlp` without a gate: x + down(act(up(n))), where xIELU may replace `act`."""
        hidden = self._linear(self.stages.normalise(x, norm), up)
        return self._down(activated(hidden, act) if xielu is None else _curved(hidden, xielu), down, x, observer, post_norm, factor)

    def mlp_branch(self, y: torch.Tensor, up: Linear, down: Linear, act: str, residual: torch.Tensor,
                   observer: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """residual + down(act(up(y))), in place."""
        return self._down(activated(self._linear(y, up), act), down, residual, observer, None, 1.0)

    def bundled_mlp(self, x: torch.Tensor, norm: Norm, gate: Linear, bundles: Bundles, act: str,
                    observer: Callable[[torch.Tensor], None] | None = None, post_norm: Norm | None = None,
                    factor: float = 1.0) -> torch.Tensor:
        """`gated_mlp` with `up` and `down` neuron by neuron, [F, values of a bundle] in `bundles.source`; `mlp` where they hold no `up`."""
        n = self.stages.normalise(x, norm)
        hidden, width = activated(self._linear(n, gate), act), bundles.width
        if bundles.thresholds is not None:
            hidden = hidden.masked_fill_(hidden.abs() < bundles.thresholds, 0.0)
        if bundles.has_up:
            hidden.mul_(tiled(n, bundles.source[:, :width], bundles.up_bias))
        if observer is not None:
            observer(hidden)
        columns, branch = bundles.source[:, bundles.has_up * width :][:, :width], torch.zeros_like(x)
        rows = max(1, MAX_WIDENED // width)
        for begin in range(0, len(columns), rows):
            branch.addmm_(hidden[:, begin : begin + rows], columns[begin : begin + rows].float())
        if bundles.down_bias is not None:
            branch += bundles.down_bias
        return x.add_(branch if post_norm is None else self.stages.normalise(branch, post_norm), alpha=factor)

    def moe(self, x: torch.Tensor, norm: Norm, router: Linear, experts: Sequence[Expert], routing: Routing, act: str,
            observer: Callable[[Routed], None] | None = None, correction: torch.Tensor | None = None,
            shared: SharedExpert | None = None) -> torch.Tensor:
        """x + sum over a token's experts of weight * down(act(gate(n)) * up(n)) with n = norm(x), and the `shared` one, in place; `act` and
        experts without gates as in `reference_moe.py`. `observer` receives the visits. Raises ValueError for an unknown activation."""
        n = self.stages.normalise(x, norm)
        shared_input = None if shared is None else self.shared_hidden(n, shared, act)
        chosen, shares = routed(self._linear(n, router), routing, correction)
        self._visited(x, n, chosen, shares, experts, act, observer, shared_input, routing.weights_scale_inputs, routing.zero_experts)
        return x if shared_input is None else self.linear_add(shared_input, shared.down, x, None, shared.multiplier)

    def _visited(self, out: torch.Tensor, n: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Sequence[Expert], act: str,
                 observer: Callable[[Routed], None] | None, shared_input: torch.Tensor | None = None, weights_scale_inputs: bool = False,
                 zero_experts: int = 0) -> None:
        """Add to `out` the results of the selected experts for n, times their shares; with
        `weights_scale_inputs` the shares multiply n instead. The last `zero_experts` experts return n."""
        offsets, tokens, visit_of = visits(self.on.to_host(chosen), len(experts) + zero_experts)
        begin, offsets = offsets[len(experts)], offsets[: len(experts) + 1]
        rows, at = self.on.to_device(tokens), self.on.to_device(visit_of)
        hidden = torch.empty(len(tokens), experts[0].up.weight.shape[0], device=n.device)
        results = torch.empty(len(tokens), n.shape[1], device=n.device)
        if weights_scale_inputs:
            input_weights = torch.empty(len(tokens), 1, device=n.device)
            input_weights[at.reshape(-1), 0], shares = shares.reshape(-1), torch.ones_like(shares)
        for e in np.flatnonzero(np.diff(offsets)):
            expert, visits_of_expert = experts[e], slice(offsets[e], offsets[e + 1])
            inputs = n[rows[visits_of_expert]] * input_weights[visits_of_expert] if weights_scale_inputs else n[rows[visits_of_expert]]
            hidden[visits_of_expert] = self._inside(inputs, expert, act)
            results[visits_of_expert] = self._linear(hidden[visits_of_expert], expert.down)
        results[begin:] = n[rows[begin:]]
        if observer is not None:
            observer(Routed(offsets, tokens, hidden, shared_input))
        for j in range(shares.shape[1]):  # a token's experts in ascending order, so that results do not depend on other tokens
            out.addcmul_(shares[:, j, None], results[at[:, j]])

    def _inside(self, n: torch.Tensor, expert: Expert, act: str) -> torch.Tensor:
        """The input of an expert's `down`."""
        up = self._linear(n, expert.up)
        return activated(up, act) if expert.gate is None else self.stages.gated(self._linear(n, expert.gate), up, act)

    def shared_hidden(self, n: torch.Tensor, shared: SharedExpert, act: str) -> torch.Tensor:
        """The shared expert's `down` input, times its weight."""
        hidden = self._inside(n, shared, shared.act or act)
        return hidden if shared.shared_gate is None else hidden * self._linear(n, shared.shared_gate).sigmoid()

    mlp_and_experts, expert_branch, router_mlp = moe_branches.mlp_and_experts, moe_branches.expert_branch, moe_branches.router_mlp
    read_streams, write_streams, ngram_products = stream_mixing.read_streams, stream_mixing.write_streams, ngrams.ngram_products
    rope_tails, grouped_linear = compressed.rope_tails, compressed.grouped_linear
    compressed_keys, index_layer = compressed.compressed_keys, compressed.index_layer

    def add_per_layer_input(self, x: torch.Tensor, inputs: PerLayerInput, layer_input: torch.Tensor, act: str,
                            observer: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """See `BlockOps`."""
        hidden = self.stages.gated(self._linear(x, inputs.gate), layer_input, act)
        return self._down(hidden, inputs.projection, x, observer, inputs.post_norm, 1.0)

    altup_predict, altup_correct, altup_add_input = streams.altup_predict, streams.altup_correct, streams.altup_add_input
    low_rank_branch, add_scaled, cutoff_mlp = streams.low_rank_branch, streams.add_scaled, streams.cutoff_mlp
    first_stream, second_stream, put_stream = streams.first_stream, streams.second_stream, streams.put_stream
    add_to_first, add_low_rank, shared_block_mlp = streams.add_to_first, streams.add_low_rank, streams.shared_block_mlp

    pad_heads, unpad_heads, norm_stream = head_widths.pad_heads, head_widths.unpad_heads, head_widths.norm_stream
    pair_heads, dynamic_mask_heads, scaled_residual = head_widths.pair_heads, head_widths.dynamic_mask_heads, head_widths.scaled_residual

    def copy(self, y: torch.Tensor) -> torch.Tensor:
        """See `BlockOps`."""
        return y.clone()

    def scale_in_place(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """See `BlockOps`."""
        return x.mul_(factor)

    def norm_in_place(self, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `BlockOps`."""
        return y.copy_(self.stages.normalise(y, norm))

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `BlockOps`."""
        return self.stages.normalise(x, norm)

    def gate_rows(self, y: torch.Tensor, gates: LowRank) -> torch.Tensor:
        """See `BlockOps`."""
        inner = torch.nn.functional.silu(self._linear(y, gates.down))
        return y.mul_(torch.sigmoid(self._linear(inner, gates.up)))

    def norm_and_concat(self, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `BlockOps`."""
        out = torch.cat([self.stages.normalise(y, norm), y], 1)
        y.copy_(out[:, : y.shape[1]])
        return out

    def scale_queries(self, y: torch.Tensor, heads: int, head_dim: int, positions: np.ndarray, log_positions: RopeTable,
                      slopes_and_offsets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See `BlockOps`."""
        logs, _ = self._cos_sin(positions, log_positions)  # [T, 1, 1]
        return y.view(len(y), heads, head_dim).mul_((logs[..., 0] * slopes_and_offsets[0] + slopes_and_offsets[1])[..., None]).view_as(y)

    def clip(self, y: torch.Tensor, limit: float) -> torch.Tensor:
        """See `BlockOps`."""
        return y.clamp_(-limit, limit)

    def logits(self, x: torch.Tensor, norm: Norm, head: Linear, softcap: float | None = None, scale: float = 1.0) -> torch.Tensor:
        """Next-token logits, float32 [T, V]: scale * head(norm(x)), then softcapped."""
        out = self._linear(self.stages.normalise(x, norm), head) * scale
        return softcap * torch.tanh(out / softcap) if softcap else out

    def rope_heads(self, y: torch.Tensor, heads: int, head_dim: int, positions: np.ndarray, table: RopeTable | None,
                   norm: Norm | None) -> torch.Tensor:
        """See `BlockOps`."""
        if norm is not None:
            groups = y.view(len(y), -1, norm.weight.shape[-1])
            groups.copy_(self.stages.normalise(groups, norm))
        return y if table is None else self.stages.rotated(y, heads, head_dim, *self._cos_sin(positions, table), table.interleaved)

    def split_query_gates(self, y: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
        """See `BlockOps`."""
        return y.view(len(y), heads, 2, head_dim)[:, :, 0].flatten(1)

    def gate_heads(self, x: torch.Tensor, y: torch.Tensor, heads: int, head_dim: int, use_softplus: bool = False) -> torch.Tensor:
        """See `BlockOps`."""
        gates = y[:, :, None] if y.shape[1] == heads else y.view(len(y), heads, -1, head_dim)[:, :, -1]
        gates = torch.nn.functional.softplus(gates) if use_softplus else torch.sigmoid(gates)
        return x.view(len(x), heads, head_dim).mul_(gates).view_as(x)

    def latent_keys(self, y: torch.Tensor, shape: LatentShape, norm: Norm) -> torch.Tensor:
        """See `BlockOps`."""
        return torch.cat([y[:, shape.rank :], self.stages.normalise(y[:, : shape.rank].contiguous(), norm)], 1)

    def latent_queries(self, y: torch.Tensor, heads: int, shape: LatentShape, kv_b: Weight) -> torch.Tensor:
        """See `BlockOps`."""
        split, per_head = y.view(len(y), heads, shape.query), kv_b.parts["data"].view(heads, shape.kv_b_rows, shape.rank)
        absorbed = torch.bmm(split[..., : shape.nope].transpose(0, 1), per_head[:, : shape.nope].float())  # [heads, T, rank]
        return torch.cat([split[..., shape.nope :], absorbed.transpose(0, 1)], 2).view(len(y), -1)

    def latent_values(self, x: torch.Tensor, heads: int, shape: LatentShape, kv_b: Weight) -> torch.Tensor:
        """See `BlockOps`."""
        split, per_head = x.view(len(x), heads, shape.key)[..., shape.rope :], kv_b.parts["data"].view(heads, shape.kv_b_rows, shape.rank)
        return torch.bmm(split.transpose(0, 1), per_head[:, shape.nope :].float().mT).transpose(0, 1).flatten(1)

    def put(self, data: np.ndarray, scheme: str) -> torch.Tensor:
        """Copy a parameter in its stored type (16-bit types arrive as uint16 patterns, low-bit weights as their blob) to this device. The
        host's array remains independent. Raises DoesNotFit if the device has no room."""
        host = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        memory = self.on.take(len(host))
        memory.copy_(host)
        self.on.crossed.placed += len(host)
        return self.typed(memory, scheme).view(data.shape)

    def typed(self, memory: torch.Tensor, scheme: str) -> torch.Tensor:
        """Bytes on this device as values of a stored type, or unchanged if they are codes."""
        return memory.view(NATIVE.get(scheme, torch.uint8))

    def from_host(self, x: np.ndarray) -> torch.Tensor:
        """Activations from another backend; a copy, because the stream is updated in place."""
        self.on.crossed.sends += 1
        self.on.crossed.sent += x.nbytes
        return self.on.to_device(x)

    def to_host(self, x: torch.Tensor) -> np.ndarray:
        self.on.crossed.receives += 1
        self.on.crossed.received += x.nbytes
        return self.on.to_host(x)

    def repeat(self, x: np.ndarray, blocks: np.ndarray, positions: np.ndarray,
               layers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`layers` of the host's stream x, replayed as one graph where possible (`graph_replay.py`)."""
        self.on.crossed.sends += 1
        self.on.crossed.sent += x.nbytes
        return self.repeats.run(blocks, positions, x, layers)

    def kv_layer(self, layout: PageLayout, exact: np.ndarray, sealed: np.ndarray, scale: float, window: int | None,
                 softcap: float | None, codec: object | None = None) -> TorchLayerPages:
        """One layer's pages on this device, as large as the host memory that represents them."""
        memory = (self.on.take(host.nbytes) for host in (exact, sealed))
        if codec is not None and codec.is_packed:
            return TorchPackedPages(self.upload, layout, *memory, scale, window, softcap, codec, self.kernel_choice)
        return TorchLayerPages(self.upload, layout, *memory, scale, window, softcap, self.kernel_choice, self.places)

    def state_layer(self, shape: StateShape, memory: np.ndarray, pass_slots: np.ndarray) -> TorchSlots:
        """One layer's states on this device, in as much memory as the host memory that represents them."""
        return state_layer(shape, self.on.take(memory.nbytes), pass_slots, self._linear)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """An index array on this device. The last few are cached, since every layer of a step passes the same ones: by content, because the
        next step may use the same arrays, changed in place."""
        if (recorded := self.repeats.array(array)) is not None:
            return recorded
        key = array.shape, array.dtype.char, array.tobytes()
        if key not in self._uploads:
            if len(self._uploads) == UPLOADS:
                del self._uploads[next(iter(self._uploads))]
            self._uploads[key] = self.on.to_device(array)
        return self._uploads[key]

    def places(self, position: int, tokens: int) -> torch.Tensor:
        """Positions of queries, int64 [tokens] on this device."""
        positions_of_pass = np.arange(position, position + tokens)
        recorded = self.repeats.of_positions("positions", positions_of_pass, lambda positions: positions)
        return torch.arange(position, position + tokens, device=self.device) if recorded is None else recorded

    # -- beneath ---------------------------------------------------------------------------------------------------------------

    def _rows(self, table: Weight, ids: np.ndarray) -> torch.Tensor:
        return table.parts["data"][self.on.to_device(ids)].to(torch.float32, copy=True)

    def _down(self, hidden: torch.Tensor, down: Linear, x: torch.Tensor, observer: Callable[[torch.Tensor], None] | None,
              post_norm: Norm | None, factor: float) -> torch.Tensor:
        if observer is not None:
            observer(hidden)
        return self.linear_add(hidden, down, x, post_norm, factor)

    def _linear(self, x: torch.Tensor, matrix: Linear, residual_and_factor: ResidualAndFactor = (None, 1.0)) -> torch.Tensor:
        weight = matrix.weight
        run = self.registry.select(Call("matrix", weight.spec.scheme)).candidate.run
        if self.one_scale and weight.spec.scheme == "ternary":
            x = _by_one_scale(x)
        if matrix.has_dora and self.is_adapted:
            return self.apply_dora(x, matrix, run(self.products, x, weight, matrix.bias, (None, 1.0)), residual_and_factor)
        y = run(self.products, x, weight, matrix.bias, residual_and_factor)
        return y if matrix.lora is None else self.add_lora(x, matrix.lora, y, residual_and_factor[1])

    def _cos_sin(self, positions: np.ndarray, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, R/2] for these positions, computed once per step and table on the host, so that every backend rotates by the
        same angles."""
        recorded = [self.repeats.of_positions((id(table), which), positions, lambda at, of=which: _cos_or_sin(of, at, table))
                    for which in (0, 1)]
        if recorded[0] is not None:
            return recorded[0], recorded[1]
        cached = self._angles.get(id(table))
        if cached is None or cached[0] is not positions or cached[1] is not table:
            if len(self._angles) >= UPLOADS:
                self._angles.clear()
            uploaded = (self.on.to_device(_cos_or_sin(which, positions, table)) for which in (0, 1))
            cached = (positions, table, *uploaded)
            self._angles[id(table)] = cached
        return cached[2], cached[3]


def _curved(x: torch.Tensor, xielu: XieluParams) -> torch.Tensor:
    """`reference.curved` on tensors."""
    below = xielu.alpha_n * (torch.expm1(x.clamp(max=CURVE_EDGE)) - x)
    return CURVE_SLOPE * x + torch.where(x > 0, xielu.alpha_p * x.square(), below)


def _cos_or_sin(which: int, positions: np.ndarray, table: RopeTable) -> np.ndarray:
    """cos or sin float32 [T, 1, R/2] of positions."""
    return table.cos_sin(positions)[which][:, None]


def _by_one_scale(x: torch.Tensor) -> torch.Tensor:
    """Activations [T, K] rounded to eight bits with one scale per token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=MIN_ABSMAX) / 127
    return (x / scale).round() * scale
