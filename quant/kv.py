"""KV page codecs: how a full page of exact tokens becomes a sealed record. Pure functions of bytes.

Raw codecs keep 32- or 16-bit floats: sealing only adds header and checksum. A packed format keeps its exact tokens in 16 bits and packs
full pages to the records of `kv_codec.py`, each layer in the basis that a profile gives it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import UsageError
from ..kernels import raw_pages
from ..kernels.kv_layout import GROUP_CHANNELS, MAX_GROUPS, PackedLayout
from ..kernels.layout import F16, F32, HEADER_NBYTES, PAGE, PageHeader, PageLayout
from . import kv_codec
from .kv_basis import KVBasis


@dataclass(frozen=True)
class RawCodec:
    """Pages of floats. `stored`: the type of both the exact tokens and the sealed pages, F32 or F16."""

    stored: int

    @property
    def bits(self) -> int:
        return 32 if self.stored == F32 else 16

    @property
    def is_packed(self) -> bool:
        return False

    @property
    def policy(self) -> str:
        return ""

    @property
    def better(self) -> None:
        return None

    def layout(self, kv_heads: int, head_dim: int) -> PageLayout:
        return PageLayout(kv_heads, head_dim, self.stored)

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None:
        """Write the records of all heads, with header and checksum. `exact`, `out`: layer-pages, uint8 `[layer_page_nbytes]`."""
        for head in range(layout.kv_heads):
            start = head * layout.record_nbytes
            body = slice(start + HEADER_NBYTES, start + HEADER_NBYTES + 2 * layout.side_nbytes)
            out[body] = exact[body]
            header = PageHeader(layer, head, first_token, PAGE, self.bits, self.bits, crc32=zlib.crc32(out[body]))
            out[start : start + HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)

    def check(self, page: np.ndarray, layout: PageLayout) -> None:
        """Verify a layer-page from a file. Raises ValueError naming the head whose bytes changed."""
        for head in range(layout.kv_heads):
            start = head * layout.record_nbytes
            header = PageHeader.unpack(page[start : start + HEADER_NBYTES].tobytes())
            body = page[start + HEADER_NBYTES : start + HEADER_NBYTES + 2 * layout.side_nbytes]
            if zlib.crc32(body) != header.crc32:
                raise ValueError(f"KV page of layer {header.layer}, head {head}, token {header.first_token}: checksum differs")


@dataclass(frozen=True)
class PackedCodec:
    """The packing of one layer."""

    bits: tuple[tuple[int, int], ...]  # of K and V, by KV head
    basis: KVBasis  # in which K and V are quantized
    better: PackedCodec | None = None  # the codec, in the same basis, of pages to which a policy gives more bits
    share: float = 0.0  # of such pages, at most

    @property
    def is_packed(self) -> bool:
        return True

    def layout(self, kv_heads: int, head_dim: int) -> PackedLayout:
        """Raises ValueError for another number of heads."""
        if kv_heads != len(self.bits):
            raise ValueError(f"a codec of {len(self.bits)} heads for a layer of {kv_heads}")
        return PackedLayout(head_dim, self.bits)

    def seal(self, exact: np.ndarray, layout: PageLayout, layer: int, first_token: int, out: np.ndarray) -> None:
        """Pack a raw layer-page `exact` (uint8, of `layout`) into records, uint8 `[layer_page_nbytes]` of this codec's own layout."""
        k, v = exact_sides(exact, layout)
        offsets = self.layout(layout.kv_heads, layout.head_dim).head_offsets
        for head, (bits_k, bits_v) in enumerate(self.bits):
            one = slice(head, head + 1)
            out[offsets[head] : offsets[head + 1]] = kv_codec.encode(k[one], v[one], bits_k, bits_v, self.basis.head(head), layer=layer,
                                                                     first_head=head, first_token=first_token)[0]

    def open(self, page: np.ndarray, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V, float32 [H, PAGE, D], of a layer-page. Raises ValueError as `kv_codec.decode` does."""
        offsets = self.layout(kv_heads, head_dim).head_offsets
        sides = [kv_codec.decode(page[None, offsets[head] : offsets[head + 1]], head_dim, self.basis.head(head))
                 for head in range(kv_heads)]
        return np.concatenate([k for k, _ in sides]), np.concatenate([v for _, v in sides])


@dataclass(frozen=True)
class PackedFormat:
    """A `--kv` of 8 to 2 bits, before the model is known."""

    bits_k: int  # with a policy, the average
    bits_v: int
    policy: str = ""  # the name of the policy that decides which pages get more bits than others

    @property
    def mixed(self) -> tuple[PackedFormat, PackedFormat, float]:
        """With a policy: the formats of pages with more bits and of those with fewer, and the share of the first. Raises UsageError for
        an average that no two widths give."""
        if self.bits_k != self.bits_v or self.bits_k not in MIXED:
            widths = ", ".join(map(str, sorted(MIXED)))
            raise UsageError(f"+{self.policy}: pages of mixed bits average {widths}, the same for keys and values",
                             f"--kv 4bit+{self.policy}, or no +{self.policy}")
        more, fewer, share = MIXED[self.bits_k]
        return PackedFormat(more, more), PackedFormat(fewer, fewer), share

    @property
    def is_packed(self) -> bool:
        return True

    def layout(self, kv_heads: int, head_dim: int) -> PageLayout:
        """The layout of exact tokens: slots in two parts, so that the sinks, and the newest page until half full, take half a slot."""
        return PageLayout(kv_heads, head_dim, F16, parts=2)

    def layers(self, heads: Sequence[tuple[int, int]], bases: Sequence[KVBasis] | None = None,
               bits: Sequence[Sequence[tuple[int, int]]] | None = None) -> list[PackedCodec]:
        """A codec for each layer. `heads`: (KV heads, head dimension) by layer; `bases`, `bits`: of a profile, None without one. Raises
        UsageError for an unsupported head dimension."""
        if reason := unpackable(heads):
            raise UsageError(reason, "--kv 16bit")
        plain = {} if bases else {shape: KVBasis.plain(*shape) for shape in dict.fromkeys(heads)}  # equal layers share one
        return [PackedCodec(tuple(bits[i]) if bits else ((self.bits_k, self.bits_v),) * shape[0], bases[i] if bases else plain[shape])
                for i, shape in enumerate(heads)]


def unpackable(heads: Sequence[tuple[int, int]]) -> str:
    """Why packed caches do not support a model of these (KV heads, head dimension) by layer; empty if they do."""
    unsupported = next((size for _, size in heads if size % GROUP_CHANNELS or size > GROUP_CHANNELS * MAX_GROUPS), None)
    return "" if unsupported is None else (f"packed caches take head dimensions that are a multiple of {GROUP_CHANNELS}, up to "
                                           f"{GROUP_CHANNELS * MAX_GROUPS}, this model has {unsupported}")


def exact_sides(exact: np.ndarray, layout: PageLayout) -> tuple[np.ndarray, np.ndarray]:
    """K and V, float32 [H, PAGE, D], of a raw layer-page."""
    k, v = (np.ascontiguousarray(side.swapaxes(0, 1), np.float32) for side in raw_pages.keys_and_values(exact, layout))
    return k, v


WIDTHS = (8, 6, 5, 4, 3, 2)  # bits that --kv takes; profiles also use 10 and 1
CODECS = {"32bit": RawCodec(F32), "16bit": RawCodec(F16)}
PACKED = re.compile(r"(?:([234568])bit|k([234568])v([234568]))(?:\+([a-z0-9_]+))?")
# Average -> (bits of pages with more, bits of pages with fewer, share of the first). The two are as close as widths allow, because noise
# grows by a factor of four per bit and attention is seldom that uneven.
MIXED = {6: (8, 5, 1 / 3), 5: (6, 4, 1 / 2), 4: (5, 3, 1 / 2), 3: (4, 2, 1 / 2)}


def codec(name: str, policies: Iterable[str] = ()) -> RawCodec | PackedFormat:
    """The codec of a `--kv` value. Raises UsageError listing the valid ones; `policies`: the names that may follow a +."""
    if name in CODECS:
        return CODECS[name]
    if match := PACKED.fullmatch(name):
        both, bits_k, bits_v, policy = match.groups()
        return PackedFormat(int(both or bits_k), int(both or bits_v), policy or "")
    if name.lower() in CACHE_TYPES:
        raise UsageError(f"--kv {name} is not known", f"use {CACHE_TYPES[name.lower()]}bit; -ctk and -ctv take llama.cpp's names")
    if "+" in name:
        widths = ", ".join(f"{bits}bit" for bits in sorted(MIXED))
        listed = " or ".join(f"+{policy}" for policy in policies) or "a policy"
        raise UsageError(f"--kv {name} is not known", f"policies need packed bits: {widths} take {listed}")
    widths = ", ".join(f"{bits}bit" for bits in WIDTHS)
    raise UsageError(f"--kv {name} is not known", f"use {', '.join(CODECS)}, {widths}, k8v4 and the like, or auto")


# Cache types of llama.cpp -> bits.
CACHE_TYPES = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q6_k": 6, "q5_0": 5, "q5_1": 5, "q4_0": 4, "q4_1": 4, "iq4_nl": 4,
               "q3_k": 3, "q2_k": 2}


def of_types(keys: str, values: str) -> str:
    """The `--kv` value for llama.cpp's `-ctk` and `-ctv` types, or `--kv` names. Raises UsageError for others."""
    known = {f"{bits}bit": bits for bits in CACHE_TYPES.values()} | CACHE_TYPES
    bits_k, bits_v = (known.get(name.lower(), 0) for name in (keys, values))
    for name, bits in ((keys, bits_k), (values, bits_v)):
        if not bits:
            raise UsageError(f"{name} is not a cache type", f"one of {', '.join(CACHE_TYPES)}, or --kv")
    if bits_k == bits_v:
        return f"{bits_k}bit"
    if min(bits_k, bits_v) > 8:
        raise UsageError(f"keys as {keys} with values as {values}: 32 and 16 bits do not mix",
                         f"-ctk {keys} -ctv {keys}, or {values} for both")
    if max(bits_k, bits_v) > 8:
        packed = min(keys, values, key=lambda name: known[name.lower()])
        raise UsageError(f"keys as {keys} with values as {values}: exact and packed ones do not mix",
                         f"-ctk {packed} -ctv {packed} packs both")
    return f"k{bits_k}v{bits_v}"
