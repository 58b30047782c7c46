"""`Weight`, a quantized or raw matrix as a frozen record, not a tensor type: its spec, shape and named parts. Ops read `weight.spec`.
The layer parameters built from weights follow.

Shapes are `[N, K]` (out, in) as checkpoints store them. 16-bit parts travel as uint16 on the CPU, because NumPy has no bfloat16 and
Numba no half; a torch backend holds native tensors in `parts` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..kernels.layout import STORED_TYPES
from ..kernels.tiles import ROWS, SCHEME_SHIFT, SCHEMES, TILE, block_nbytes, row_nbytes
from .spec import QuantSpec

if TYPE_CHECKING:
    from .lora_layout import LoraPair

SECTIONS = ("codes", "scales", "zeros", "row_scales", "tables")  # of a low-bit weight without outliers, as uint8
RAW_NUMPY = {"f32": np.dtype(np.float32), "f16": np.dtype(np.uint16), "bf16": np.dtype(np.uint16)}


@dataclass(frozen=True)
class Weight:
    """A matrix or table `[N, K]`: raw values, or a low-bit weight.

    In memory, `parts["data"]` holds the raw values, or the blob of a low-bit weight as uint8; a low-bit weight may have the sections of its
    blob (SECTIONS) as separate parts instead. A weight that is not in memory has no parts: a matrix has `row_parts`, a table `fetch_rows`.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    parts: Mapping[str, object]
    in_lut_layout: bool = False  # its codes have been rearranged for table-lookup kernels (`kernels/cpu/lut_layout.py`)
    row_parts: tuple[RowPart, ...] = ()  # of a streamed matrix: all its rows, in order
    # Of a table on disk: ids [T] -> (index of the first id, positions of the next ids among the rows of a weight, that weight), in batches.
    # A batch's weight is valid until the next one is requested.
    fetch_rows: Callable[[np.ndarray], Iterator[tuple[int, np.ndarray, Weight]]] | None = None

    @cached_property
    def address(self) -> int:
        """Address of the first byte, for CPU kernels."""
        return self.parts["data" if "data" in self.parts else "codes"].ctypes.data

    @classmethod
    def raw(cls, scheme: str, shape: tuple[int, ...], data: np.ndarray) -> Weight:
        """Wrap raw bytes (or an array of the stored type) without copying. Raises ValueError when the size is not the shape's."""
        spec = QuantSpec.raw(scheme)
        if data.nbytes != spec.nbytes(shape):
            raise ValueError(f"{data.nbytes} bytes for shape {shape} in {scheme}, expected {spec.nbytes(shape)}")
        return cls(spec, shape, {"data": data.view(RAW_NUMPY[scheme]).reshape(shape)})

    @classmethod
    def low_bit(cls, spec: QuantSpec, shape: tuple[int, int], blob: np.ndarray) -> Weight:
        """Wrap the blob of a low-bit weight without copying. Raises ValueError when its size is not the shape's."""
        if blob.nbytes != spec.nbytes(shape):
            raise ValueError(f"{blob.nbytes} bytes for shape {shape} in {spec}, expected {spec.nbytes(shape)}")
        return cls(spec, shape, {"data": blob})

    @cached_property
    def low_bit_kernel_args(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Arguments of the low-bit CPU kernels, in the order of `kernels/cpu/packed.py`.

        (address, bits and scheme, rows), then (tiles per row, log2 of tiles per group or -1 for half a tile, addresses of scales, zeros,
        row scales, tables and outliers, number of outliers). The address of a section that the format lacks is 0.
        """
        spec, base, sections = self.spec, self.address, self.spec.sections(self.shape)
        if "data" in self.parts:
            offsets = sections.scales, sections.zeros, sections.row_scales, sections.tables, sections.sparse
            addresses = [base + offset if offset >= 0 else 0 for offset in offsets]
        else:
            addresses = [self.parts[name].ctypes.data if name in self.parts else 0 for name in SECTIONS[1:]] + [0]
        shift = (spec.group // TILE).bit_length() - 1  # -1: half a tile
        matrix = base, spec.bits << SCHEME_SHIFT | SCHEMES[spec.scheme], self.shape[0]
        return matrix, (sections.depth // TILE, shift, *addresses, sections.sparse_count)

    def to_f32(self) -> np.ndarray:
        """Dequantize to float32 `[N, K]`: a copy."""
        if self.spec.is_raw:
            return to_f32(self.parts["data"], self.spec.scheme)
        from .codes import dequantize
        from .pack import unpack

        blob = self.parts["data"] if "data" in self.parts else self._assembled()
        if self.in_lut_layout:
            from ..kernels.cpu.lut_layout import canonical_blob

            blob = canonical_blob(blob, self.spec, self.shape)
        return dequantize(unpack(blob, self.spec, self.shape), self.spec)

    def _assembled(self) -> np.ndarray:
        """The blob, copied together from separate sections."""
        sections = self.spec.sections(self.shape)
        blob = np.zeros(sections.nbytes, np.uint8)
        for name, part in self.parts.items():
            begin = getattr(sections, name)
            blob[begin : begin + part.nbytes] = part
        return blob


def first_rows(weight: Weight, rows: int) -> Weight:
    """The first rows of a matrix in memory, rounded up to row blocks, without copying; the whole matrix where it cannot be sliced."""
    return weight if rows >= weight.shape[0] or not can_slice_rows(weight) else slice_rows(weight, 0, rows)


def can_slice_rows(weight: Weight) -> bool:
    """Whether rows can be sliced without copying: in memory, without outliers (one list for all rows) and not in lookup layout."""
    return "data" in weight.parts and not weight.in_lut_layout and not weight.spec.outliers


def slice_rows(weight: Weight, begin: int, end: int) -> Weight:
    """Rows [begin, end) of a matrix, without copying; `begin` on a row block, `end` on one or at the end."""
    spec, rows = weight.spec, end - begin
    shape = rows, weight.shape[1]
    if spec.is_raw:
        return Weight(spec, shape, {"data": weight.parts["data"][begin:end]})
    blob, sections = weight.parts["data"], spec.sections(weight.shape)
    first_block, end_block = begin // ROWS, -(-end // ROWS)
    parts = {}
    for name, nbytes in block_nbytes(sections.depth, spec.bits, spec.scheme, spec.group).items():
        parts[name] = blob[getattr(sections, name) :][first_block * nbytes : end_block * nbytes]
    scale_nbytes = row_nbytes(spec.scheme)
    parts["row_scales"] = blob[sections.row_scales :][scale_nbytes * begin : scale_nbytes * end_block * ROWS]
    if sections.tables >= 0:
        parts["tables"] = blob[sections.tables :]
    return Weight(spec, shape, parts)


class Lease(Protocol):
    """Keeps streamed rows in memory while it is entered; entering waits for them."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def join(self) -> bool:
        """Enter without waiting, in addition to leases already held. Returns False if that would wait, or would leave no room to read
        ahead."""


@dataclass(frozen=True)
class RowPart:
    """Consecutive rows of a matrix."""

    first_row: int
    weight: Weight
    part_index: int  # of the part of the model that holds these rows, perhaps with rows of other matrices
    lease: Lease | None  # while entered, the part is in memory; None: it always is


def to_f32(data: np.ndarray, scheme: str) -> np.ndarray:
    """Raw values in their stored type -> float32 (a copy for 16-bit types)."""
    if scheme == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view(np.float16).astype(np.float32) if scheme == "f16" else data.view(np.float32)


def from_f32(data: np.ndarray, scheme: str) -> np.ndarray:
    """float32 -> stored type, nearest with ties to even."""
    if scheme == "bf16":
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)
    return data.astype(np.float16).view(np.uint16) if scheme == "f16" else np.ascontiguousarray(data, np.float32)


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias, plus the output of LoRA adapters."""

    weight: Weight
    bias: np.ndarray | None = None  # float32 [N]
    lora: Lora | None = None

    @cached_property
    def without_lora(self) -> Linear:
        """The same layer without its adapters."""
        return replace(self, lora=None)

    @property
    def has_dora(self) -> bool:
        """Whether an adapter also rescales the rows of the matrix itself (DoRA)."""
        return self.lora is not None and self.lora.dora_gains is not None

    @cached_property
    def kernel_args(self) -> tuple[int, int, int, int]:
        """Arguments of CPU kernels: address, stored type, rows, address of the bias (0: none). Raises ValueError if there are adapters,
        which such a kernel would ignore."""
        if self.lora is not None:
            raise ValueError("this kernel does not support a matrix with a LoRA adapter")
        weight, bias = self.weight, self.bias
        return weight.address, STORED_TYPES[weight.spec.scheme], weight.shape[0], 0 if bias is None else bias.ctypes.data

    @cached_property
    def part_linears(self) -> tuple[tuple[RowPart, Linear], ...]:
        """Each row part of a streamed weight, with the layer that computes those rows. Raises ValueError if there are adapters, which
        apply to all rows."""
        if self.lora is not None:
            raise ValueError("a matrix with a LoRA adapter cannot be split into parts")
        return tuple((part, replace(self, weight=part.weight, bias=self._bias_of(part))) for part in self.weight.row_parts)

    def _bias_of(self, part: RowPart) -> np.ndarray | None:
        return None if self.bias is None else self.bias[part.first_row : part.first_row + part.weight.shape[0]]


@dataclass(frozen=True)
class Lora:
    """LoRA adapters of a matrix: each adds s * B(A(x)) to its output, where s is the scale that a text gives the adapter."""

    pairs: tuple[LoraPair, ...]  # by adapter number, with alpha folded in
    dora_gains: object | None = None  # float32 [adapters, N], relative change of the matrix's own output (without bias) at scale 1; None
    # without a DoRA adapter


@dataclass(frozen=True)
class MlaWeights:
    """Multi-head latent attention (`kernels/latent_shape.py`), with matrices named as in DeepSeek's checkpoints."""

    q_a: Linear | None  # None: q_b reads the layer's input
    q_a_norm: Norm | None
    q_b: Linear
    kv_a: Linear | None  # None in a layer that attends to another layer's latents
    kv_a_norm: Norm | None
    kv_b: Weight  # [heads * (nope + value), rank], always raw


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention (`kernels/indexer_shape.py`); its queries are made of the input of the layer's queries."""

    q: Linear
    q_norm: Norm | None
    k: Linear | None  # None: keys are made of several tokens, by a `Compressor`
    k_norm: Norm | None
    weights: Linear | None  # of heads, per token; None: every head selects for itself
    input_norm: Norm | None = None  # of the input of the queries
    query_scaling: tuple[object, object] | None = None  # scales and offsets [heads] of queries by their position
    pool_bias: object | None = None  # [tokens_per_key * width], added to pooling logits by a token's place in its pool


@dataclass(frozen=True)
class ResidualScale:
    """Learned residual mixing: x becomes scales * x + branch_scales * branch + offsets, [D] each."""

    scales: object
    branch_scales: object | None  # None: no branch is added
    offsets: object


@dataclass(frozen=True)
class RouterMlp:
    """MLP in front of a router (ZAYA1): `down` to width R, the norm, then `fc1` and `fc2`, each with an activation."""

    down: Linear
    previous_scale: object | None  # [R], share of the previous layer's `down` output that is added; None in the first layer
    norm: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class XieluParams:
    """Learned parameters of the xIELU activation (`reference.curved`), after their softplus."""

    alpha_p: float  # factor of the square, for positive inputs
    alpha_n: float  # factor of the exponential, for negative inputs


@dataclass(frozen=True)
class Expert:
    """One expert of a mixture, F wide."""

    gate: Linear | None  # [F, D]; None: down reads act(up)
    up: Linear  # [F, D]
    down: Linear  # [D, F]


@dataclass(frozen=True)
class SharedExpert(Expert):
    """The expert that every token visits."""

    shared_gate: Linear | None = None  # [1, D], a sigmoid gate of its output; None: no gate
    multiplier: float = 1.0  # of its output
    act: str | None = None  # None: the activation of the other experts


@dataclass(frozen=True)
class ParallelExperts:
    """What a layer has besides its experts if they run in parallel to a dense MLP."""

    router_norm: Norm  # of the router's input
    pre_norm: Norm  # of the experts' input
    post_norm: Norm | None  # of the experts' output
    mlp_post_norm: Norm | None  # of the MLP's output
    expert_scales: object  # float32 [E], factors of the routing weights


@dataclass(frozen=True)
class PerLayerInput:
    """Takes in the per-layer input embedding (Gemma 3n), P values per token."""

    gate: Linear  # [P, D]
    projection: Linear  # [D, P]
    post_norm: Norm


@dataclass(frozen=True)
class LowRank:
    """A low-rank projection: `up(down(x))`, R wide in between."""

    down: Linear  # [R, D]
    up: Linear  # [D, R]
    post_norm: Norm | None = None


@dataclass(frozen=True)
class SharedBlock:
    """Attention and MLP shared by several layers (Zamba 2); its branches' inputs are normed, and it adds nothing to the residual stream."""

    input_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class SharedBlockUse:
    """A layer's use of a shared block, with weights of the layer's own."""

    block: SharedBlock
    qkv_lora: tuple[LowRank, ...]  # low-rank branches of q, k and v; empty: none
    gate_up_lora: tuple[LowRank, ...]  # ... and of gate and up
    out_proj: Linear  # of the block's output


@dataclass(frozen=True)
class AltUp:
    """AltUp (Gemma 3n; `kernels/reference_streams.py`): a token has S streams, of which the layer processes the first. All float32."""

    num_streams: int
    router_norm: Norm
    router: object  # [S, D]
    prediction_coefs: object  # [S * S, S], applied to the router's output before the layer
    correction_coefs: object  # [S, S], applied to it after the layer
    output_scale: object  # [D], of the first stream, from which per-layer inputs are gated


@dataclass(frozen=True)
class Bundles:
    """`up` and `down` of an MLP, stored neuron by neuron: the neuron's row of `up`, then its column of `down`."""

    scheme: str  # stored type of the values
    width: int  # values of a row, and of a column
    has_up: bool  # False: a bundle is only the column
    source: object  # provides the bundles (`kernels/cpu/bundled_mlp.py`); on a GPU an array of them
    up_bias: np.ndarray | None = None  # float32, by neuron
    down_bias: np.ndarray | None = None  # float32 [D]
    thresholds: np.ndarray | None = None  # float32, by neuron: gates below count as zero, which changes the result; None: no thresholds

    @cached_property
    def column_offset(self) -> int:
        """Bytes from the beginning of a bundle to its column."""
        return self.width * RAW_NUMPY[self.scheme].itemsize if self.has_up else 0


@dataclass(frozen=True)
class Norm:
    """A normalization over the last dimension, K."""

    kind: str  # rms, rms+1 (weights are stored minus one), layer or none
    weight: np.ndarray | None = None  # float32 [K]
    bias: np.ndarray | None = None  # float32 [K]
    eps: float = 1e-5
