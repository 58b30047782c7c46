"""Byte layouts: stored types, weight rows, KV page records. Pure arithmetic, no arrays.

A KV page record holds K and V of one layer and one KV head for up to `PAGE` tokens:

    offset 0   64-byte little-endian header (see `HEADER`)
    offset 64  K[head_dim, PAGE]   then   V[PAGE, head_dim]

K is stored channel-major, so that one query element times a vector of one channel over many tokens needs no horizontal sum.

The records of all KV heads of a layer are stored together, padded to 4096 bytes: a layer-page. A layer's pages follow one another in
position order, so a scan over the context is one sequential read.

Exact slots of a packed cache are never sealed as they are, so their layout may differ: they have two parts of 64 tokens, one after the
other, each with the records of all heads. A slot with few tokens, such as the attention sinks, needs memory for one part only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

F32, F16, BF16 = 0, 1, 2
STORED_BYTES = {F32: 4, F16: 2, BF16: 2}
STORED_TYPES = {"f32": F32, "f16": F16, "bf16": BF16}

SILU, GELU, GELU_TANH, RELU, IDENTITY, CLAMPED_SWISH, RELU2, CLAMPED_SILU = 0, 1, 2, 3, 4, 5, 6, 7
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU, "none": IDENTITY, "clamped_swish": CLAMPED_SWISH,
               "relu2": RELU2, "clamped_silu": CLAMPED_SILU}
# SiLU where its result and the `up` half are clamped to a bound of the model. For kernels the float32 bits of the bound are shifted left by
# CAP_SHIFT; in the activation's name the bound follows the prefix.
CAPPED_SILU, CAP_SHIFT = 8, 8
CAPPED_SILU_PREFIX = "silu up to "
SWISH_SLOPE, SWISH_LIMIT = 1.702, 7.0  # of CLAMPED_SWISH
SILU_LIMIT = 10.0  # of CLAMPED_SILU
NORM_NONE, NORM_RMS, NORM_RMS_PLUS_ONE, NORM_LAYER = 0, 1, 2, 3
NORMS = {"none": NORM_NONE, "rms": NORM_RMS, "rms+1": NORM_RMS_PLUS_ONE, "layer": NORM_LAYER}
# ONE_SCALE is added to a norm's kind where a low-bit product quantizes all activations of a token with one scale, as models with ternary
# weights were trained (BitNet). Their absolute maximum is clamped to at least MIN_ABSMAX.
ONE_SCALE, MIN_ABSMAX = 16, 1e-5

PAGE = 128  # tokens in a page
MAX_DECODE_TOKENS = 8  # of a decode step or a draft's verification; kernels treat more tokens as a prompt
LORA_BLOCK_RANKS, LORA_BLOCK_INPUTS, LORA_BLOCK_OUTPUTS = 16, 256, 64  # (`quant/lora_layout.py`)
ALIGN = 64  # a cache line: alignment of every tensor in memory
IO_ALIGN = 4096  # alignment of a layer-page, required by direct I/O

# magic, version, layer, head, first token, count, bits of K, bits of V, reserved, base position, profile hash, crc32 of the body
HEADER = struct.Struct("<4sHHHHqIBBHqQI")
BITS_OFFSET = struct.calcsize("<4sHHHHqI")  # of the two bytes that hold the bits of K and V
HEADER_NBYTES = 64
MAGIC, VERSION = b"EFKV", 1


def align(nbytes: int, to: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class PageHeader:
    """A record's self-description; `pack` and `unpack` are exact inverses."""

    layer: int
    head: int
    first_token: int
    count: int
    bits_k: int
    bits_v: int
    base_position: int = 0
    profile: int = 0
    crc32: int = 0

    def pack(self) -> bytes:
        body = HEADER.pack(MAGIC, VERSION, self.layer, self.head, 0, self.first_token, self.count, self.bits_k, self.bits_v, 0,
                           self.base_position, self.profile, self.crc32)
        return body.ljust(HEADER_NBYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes) -> PageHeader:
        """Raises ValueError for bytes that are not a page header of this version."""
        magic, version, layer, head, _, first, count, bits_k, bits_v, _, base, profile, crc = HEADER.unpack(raw[: HEADER.size])
        if magic != MAGIC:
            raise ValueError(f"not a KV page: magic {magic!r}")
        if version != VERSION:
            raise ValueError(f"KV page version {version}, this program reads {VERSION}")
        return cls(layer, head, first, count, bits_k, bits_v, base, profile, crc)


@dataclass(frozen=True)
class PageLayout:
    """Strides of raw (32- or 16-bit) KV pages of one layer, all in bytes."""

    kv_heads: int
    head_dim: int
    stored: int  # F32 or F16
    parts: int = 1  # 2 for slots in two parts

    @property
    def rows(self) -> int:
        """Tokens per part."""
        return PAGE // self.parts

    @property
    def token_nbytes(self) -> int:
        """K and V of one token, all heads."""
        return 2 * self.kv_heads * self.head_dim * STORED_BYTES[self.stored]

    @property
    def side_nbytes(self) -> int:
        """K, or V, of one head in a part."""
        return self.rows * self.head_dim * STORED_BYTES[self.stored]

    @property
    def record_nbytes(self) -> int:
        return align(HEADER_NBYTES + 2 * self.side_nbytes)

    @property
    def part_nbytes(self) -> int:
        return align(self.kv_heads * self.record_nbytes, IO_ALIGN if self.parts == 1 else ALIGN)

    @property
    def layer_page_nbytes(self) -> int:
        return self.parts * self.part_nbytes

    def parts_of(self, tokens: int) -> int:
        """Parts needed for this many tokens of a slot."""
        return -(-tokens // self.rows)


def capped_silu(bound: float) -> str:
    """The activation name of SiLU with a bound."""
    return f"{CAPPED_SILU_PREFIX}{float(bound)!r}"


def bound_of(act: str) -> float | None:
    """The bound encoded in an activation's name, None without one."""
    return float(act.removeprefix(CAPPED_SILU_PREFIX)) if act.startswith(CAPPED_SILU_PREFIX) else None


def bounds_up(act: str) -> bool:
    """Whether a gated MLP also clamps its `up` half, so that the result is not linear in it."""
    return act in ("clamped_swish", "clamped_silu") or bound_of(act) is not None


def is_activation(act: str) -> bool:
    return act in ACTIVATIONS or act.startswith(CAPPED_SILU_PREFIX)


def activation_number(act: str) -> int:
    """An activation's number for kernels; a bound is included as the bits of a float32."""
    bound = bound_of(act)
    return ACTIVATIONS[act] if bound is None else CAPPED_SILU | struct.unpack("<I", struct.pack("<f", bound))[0] << CAP_SHIFT
