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
    """`parts["data"]` holds raw values `[N, K]`, or the blob of a low-bit weight as uint8. `address` is for CPU kernels.

    `looked_up`: the codes of the blob have been put in lookup order (`kernels/cpu/lut_layout.py`).
    A low-bit weight may have its sections (SECTIONS) as parts instead, each somewhere else. A weight that is not in memory has no parts:
    of a matrix `in_parts` lists its rows, of a table `fetch` brings some; it is called with ids [T] and yields (place of the first, ids
    among the rows of a weight, that weight), which holds until the next.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    parts: Mapping[str, object]
    looked_up: bool = False
    in_parts: tuple[RowPart, ...] = ()
    fetch: Callable[[np.ndarray], Iterator[tuple[int, np.ndarray, Weight]]] | None = None

    @cached_property
    def address(self) -> int:
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
    def low_bit_fields(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the CPU kernels of low-bit weights read of it: address, kind, rows; then tiles, shift, addresses of its sections, outliers.

        In the order of `kernels/cpu/packed.py`; 0 for a section that the format lacks.
        """
        spec, base, at = self.spec, self.address, self.spec.sections(self.shape)
        if "data" in self.parts:
            places = [base + offset if offset >= 0 else 0 for offset in (at.scales, at.zeros, at.row_scales, at.tables, at.sparse)]
        else:
            places = [self.parts[name].ctypes.data if name in self.parts else 0 for name in SECTIONS[1:]] + [0]
        shift = (spec.group // TILE).bit_length() - 1  # -1: half a tile
        return (base, spec.bits << SCHEME_SHIFT | SCHEMES[spec.scheme], self.shape[0]), (at.depth // TILE, shift, *places, at.sparse_count)

    def to_f32(self) -> np.ndarray:
        """Dequantize to float32 `[N, K]`: a copy."""
        if self.spec.is_raw:
            return to_f32(self.parts["data"], self.spec.scheme)
        from .codes import dequantize
        from .pack import unpack

        blob = self.parts["data"] if "data" in self.parts else self._assembled()
        if self.looked_up:
            from ..kernels.cpu.lut_layout import canonical_blob

            blob = canonical_blob(blob, self.spec, self.shape)
        return dequantize(unpack(blob, self.spec, self.shape), self.spec)

    def _assembled(self) -> np.ndarray:
        """One blob of sections that lie apart."""
        at = self.spec.sections(self.shape)
        blob = np.zeros(at.nbytes, np.uint8)
        for name, section in self.parts.items():
            begin = getattr(at, name)
            blob[begin : begin + section.nbytes] = section
        return blob


def first_rows(weight: Weight, rows: int) -> Weight:
    """The first rows of a matrix in memory, rounded up to row blocks, without copying; the whole matrix where it cannot be sliced."""
    return weight if rows >= weight.shape[0] or not can_slice_rows(weight) else slice_rows(weight, 0, rows)


def can_slice_rows(weight: Weight) -> bool:
    """Whether rows can be sliced without copying: it is in memory, has no outliers (one list for all rows) and is not in lookup order."""
    return "data" in weight.parts and not weight.looked_up and not weight.spec.outliers


def slice_rows(weight: Weight, begin: int, end: int) -> Weight:
    """Rows [begin, end) of a matrix, without copying; `begin` on a row block, `end` on one or at the end."""
    spec, rows = weight.spec, end - begin
    shape = rows, weight.shape[1]
    if spec.is_raw:
        return Weight(spec, shape, {"data": weight.parts["data"][begin:end]})
    blob, at = weight.parts["data"], spec.sections(weight.shape)
    found = {name: blob[getattr(at, name) :][begin // ROWS * each : -(-end // ROWS) * each]
             for name, each in block_nbytes(at.depth, spec.bits, spec.scheme, spec.group).items()}
    found |= {"row_scales": blob[at.row_scales :][row_nbytes(spec.scheme) * begin : row_nbytes(spec.scheme) * -(-end // ROWS) * ROWS],
              **({} if at.tables < 0 else {"tables": blob[at.tables :]})}
    return Weight(spec, shape, found)


class Lease(Protocol):
    """Context manager during which streamed rows are in memory; entering waits for them."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def join(self) -> bool:
        """Enter in addition to leases already held, if that needs no wait and leaves room for what comes next. Returns whether it was
        entered."""


@dataclass(frozen=True)
class RowPart:
    """Rows of a matrix from `first` on. Rows of several matrices may share one `part`, in memory during its `lease`; None: always in
    memory."""

    first: int
    weight: Weight
    part: int
    lease: Lease | None


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
    """y = x @ weight.T + bias; `bias` is float32 `[N]` or None. `lora`: adapters applied beside it."""

    weight: Weight
    bias: np.ndarray | None = None
    lora: Lora | None = None

    @cached_property
    def plain(self) -> Linear:
        """The same product without adapters."""
        return replace(self, lora=None)

    @property
    def is_lengthened(self) -> bool:
        """Whether an adapter rescales the rows of the matrix itself (DoRA)."""
        return self.lora is not None and self.lora.gains is not None

    @cached_property
    def fields(self) -> tuple[int, int, int, int]:
        """What a CPU kernel reads of it: address, stored type, rows, address of the bias (0: none). Raises ValueError for a product with an
        adapter, of which a kernel would leave out a part."""
        if self.lora is not None:
            raise ValueError("this kernel does not support a matrix with a LoRA adapter")
        weight, bias = self.weight, self.bias
        return weight.address, STORED_TYPES[weight.spec.scheme], weight.shape[0], 0 if bias is None else bias.ctypes.data

    @cached_property
    def parts(self) -> tuple[tuple[RowPart, Linear], ...]:
        """Of a weight in parts each one's rows and the product with them. Raises ValueError for one with an adapter, which has all rows."""
        if self.lora is not None:
            raise ValueError("a matrix with a LoRA adapter cannot be split into parts")
        return tuple((rows, replace(self, weight=rows.weight, bias=self._bias(rows))) for rows in self.weight.in_parts)

    def _bias(self, rows: RowPart) -> np.ndarray | None:
        return None if self.bias is None else self.bias[rows.first : rows.first + rows.weight.shape[0]]


@dataclass(frozen=True)
class Lora:
    """LoRA adapters beside a product: out(s * into(x)) for each of `pairs`, by adapter number, alpha folded in; s is the text's scale
    for it. `gains` float32 [adapters, N]: for DoRA adapters, the relative change of the matrix's own y (without bias) at scale 1; None
    without any."""

    pairs: tuple[LoraPair, ...]
    gains: object | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (`kernels/latent_shape.py`): queries from `q_down` and its norm, where present, then `q`; latents from
    `kv_down` and its norm, absent in a layer that attends to another's; `expand` [heads * (nope + value), rank] is a raw matrix."""

    q_down: Linear | None
    q_norm: Norm | None
    q: Linear
    kv_down: Linear | None
    kv_norm: Norm | None
    expand: Weight


@dataclass(frozen=True)
class Indexer:
    """An indexer's parameters (`kernels/indexer_shape.py`): queries of what the layer's are made of, keys and norms of both, of which that
    of queries may be absent, and weights of heads, absent where each chooses for itself. Keys of several tokens are made elsewhere.
    `entered`: the norm of what queries are made of, where they have one; `grows`: scales and offsets [heads] by which they grow with
    their place; `places` [rate * width]: what is added to what tokens of a pool say, by their place in it."""

    q: Linear
    q_norm: Norm | None
    k: Linear | None
    k_norm: Norm | None
    weights: Linear | None
    input_norm: Norm | None = None
    query_scaling: tuple[object, object] | None = None
    pool_bias: object | None = None


@dataclass(frozen=True)
class ResidualScale:
    """Learned residual mixing: x becomes scales * x + branch_scales * branch + offsets, [D] each; `branch_scales` None: without a
    branch."""

    scales: object
    branch_scales: object | None
    offsets: object


@dataclass(frozen=True)
class RouterMlp:
    """MLP in front of a router: `into` projects a token down, `share` [R] is how much of the previous layer's projection is added, None
    in the first layer; after a norm `first` and `second` follow, each with an activation."""

    into: Linear
    share: object | None
    norm: Norm
    first: Linear
    second: Linear


@dataclass(frozen=True)
class XieluParams:
    """Learned parameters of the xIELU activation (`reference.curved`): the factor of the square above zero, and of the exponential
    below."""

    above: float
    below: float


@dataclass(frozen=True)
class Expert:
    """One expert of a mixture: `gate` and `up` are [F, D], `down` is [D, F]. `gate` None: act(up) goes into `down`."""

    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True)
class SharedExpert(Expert):
    """The shared expert of a mixture; `scale` [1, D]: a sigmoid gate per token, None for 1. Its output is multiplied by `factor`. `act`:
    its activation, None for that of the other experts."""

    scale: Linear | None = None
    factor: float = 1.0
    act: str | None = None


@dataclass(frozen=True)
class ParallelExperts:
    """Extra weights of experts that run in parallel to a dense MLP: norms before the router, before and after the experts, and after the
    MLP, of which the last two may be absent; `scales` float32 [E]: factor of each expert's routing weight."""

    router_norm: Norm
    norm: Norm
    after: Norm | None
    mlp_after: Norm | None
    scales: object


@dataclass(frozen=True)
class PerLayerInput:
    """Per-layer input embeddings (Gemma 3n), P numbers per token: `gate` [P, D] and `out` [D, P], then a norm."""

    gate: Linear
    out: Linear
    after: Norm


@dataclass(frozen=True)
class LowRank:
    """A low-rank branch beside a layer's input: `into` [R, D], `out` [D, R], then a norm, None for none."""

    into: Linear
    out: Linear
    after: Norm | None = None


@dataclass(frozen=True)
class SharedBlock:
    """Attention and MLP weights shared by several layers (Zamba 2): inputs are normed, nothing is added to the residual stream."""

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
    """One layer's use of a shared block: its own low-rank branches for q, k and v, if any, and for gate and up, and the output
    projection."""

    block: SharedBlock
    attention: tuple[LowRank, ...]
    mlp: tuple[LowRank, ...]
    out: Linear


@dataclass(frozen=True)
class AltUp:
    """AltUp (Gemma 3n): a token has `count` streams, S, of which the layer processes the first (`kernels/reference_streams.py`): a norm
    and a `router` [S, D] give coefficients, by `predict` [S * S, S] before the layer and `correct` [S, S] after it; `scale` [D] of the
    first stream for per-layer inputs. All float32."""

    count: int
    norm: Norm
    router: object
    predict: object
    correct: object
    scale: object


@dataclass(frozen=True)
class Bundles:
    """`up` and `down` of an MLP neuron by neuron: the row of `up`, if `has_up`, `width` values, then the column of `down`, as many.

    `offset`: bytes from the beginning of a bundle to its column. `holder` brings them (`kernels/cpu/bundled_mlp.py`). Biases are float32,
    `up`'s one value a neuron. `thresholds`, float32, one a neuron: gates below it count as zero, which changes the result; None: none do.
    """

    scheme: str
    width: int
    has_up: bool
    holder: object
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    thresholds: np.ndarray | None = None

    @cached_property
    def offset(self) -> int:
        return self.width * RAW_NUMPY[self.scheme].itemsize if self.has_up else 0


@dataclass(frozen=True)
class Norm:
    """`kind` is rms, rms+1 (weights stored minus one), layer or none; `weight` and `bias` are float32 `[K]` or None."""

    kind: str
    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 1e-5
