"""Store that quantizes some matrices as they are read: weights that are small beside the model, at the bits of the model's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ... import EffllmError
from ...offload.checkpoint import CheckpointError, TensorInfo, TensorStore
from ...quant.methods import rtn
from ...quant.pack import put_rows, put_tables
from ...quant.spec import QuantSpec
from ...quant.weight import RAW_NUMPY, to_f32
from .container import Container, StoredTensor
from .converting_store import ConvertingStore

MIN_BITS = 4
SCHEMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def format_like(container: Container | None) -> QuantSpec | None:
    """A format with as many bits as most of the model's weights, at least FEWEST_BITS; None for an unquantized model."""
    counts = Counter()
    for stored in () if container is None else container.tensors.values():
        if len(stored.shape) == 2:
            counts[0 if stored.spec.is_raw else stored.spec.bits] += prod(stored.shape)
    bits = counts.most_common(1)[0][0] if counts else 0
    return QuantSpec.parse(f"{max(MIN_BITS, bits)}bit") if bits else None


class QuantizingStore(ConvertingStore):
    """A store's tensors with the matrices `infos` quantized to `spec`, scales by least squared error (`rtn`)."""

    repacks_on_read = False  # needs no compiled function

    def __init__(self, store: TensorStore, infos: Sequence[TensorInfo], spec: QuantSpec) -> None:
        self._stored = {info.name: info for info in infos}
        self._spec, blobs, container_tensors = spec, {}, {}
        for info in infos:
            blobs[info.name] = replace(info, dtype="U8", shape=(spec.nbytes(info.shape),), nbytes=spec.nbytes(info.shape))
            container_tensors[info.name] = StoredTensor(info.name, spec, tuple(info.shape), 0)
        super().__init__(store.folder, store.tensors | blobs, store.take_files())
        self.converted = self._stored
        weights = sum(prod(info.shape) for info in infos)
        bits = 8 * sum(info.nbytes for info in blobs.values()) / max(1, weights)
        self.container = Container(str(spec), bits, container_tensors, {}, {}, {"name": "rtn"}, {})

    def stored_nbytes(self, info: TensorInfo) -> int:
        return self._stored.get(info.name, info).nbytes

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        return super().files_of(self._stored.get(info.name, info))

    def fill(self, info: TensorInfo, begin: int, end: int, out: object) -> None:
        raise TypeError(f"{info.name} is codes")

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: object) -> None:
        stored = self._stored[info.name]
        scheme = SCHEMES[stored.dtype]
        raw = TensorStore.read(self, stored, begin, end).view(RAW_NUMPY[scheme])
        try:
            codes = rtn.quantize(to_f32(raw, scheme).reshape(end - begin, -1), self._spec)
        except EffllmError as error:
            raise CheckpointError(f"{self.folder}: {info.name}: {error.message}", error.hint) from None
        put_rows(blob, self._spec, tuple(stored.shape), begin, codes)
        if begin == 0 and codes.levels is not None:
            put_tables(blob, self._spec, tuple(stored.shape), codes.levels, codes.steps)
