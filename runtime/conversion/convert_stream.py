"""Streams tensors through a quantization method in blocks of rows: reading, quantizing and writing overlap.

Memory is a few blocks, for a tensor of any size. Blocks depend on the tensor's shape alone, so the bytes written depend neither on the
number of threads nor on where an earlier run stopped. Each block's sections are written at their offsets in the tensor's blob; their
checksums are combined at the end.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import numpy as np

from ... import EffllmError
from ...kernels.tiles import ROWS, Sections
from ...offload import checksum
from ...offload.checkpoint import TensorStore
from ...offload.folder_writer import FolderWriter
from ...quant.codes import Codes, Sparse
from ...quant.error import squared_error
from ...quant.pack import pack, pack_sparse
from ...quant.spec import QuantSpec
from ...quant.weight import from_f32, to_f32
from .convert_plan import Job

BLOCK_NBYTES = 16 << 20  # float32 rows of a block
WHOLE_BLOCKS = 64  # row blocks of a weight whose sections need no padding in any format
SECTIONS = ("codes", "scales", "zeros", "row_scales")
MAX_PENDING = 2  # blocks that may wait to be written
Quantize = Callable[[Job, np.ndarray], Codes]
DAMAGED = "the checkpoint is damaged: download it again, or contact its publisher"


@dataclass(frozen=True)
class Block:
    """Rows [begin, end) of a tensor."""

    job: Job
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class BlockDone:
    """A block was quantized; `nbytes`: its size in the source."""

    job: Job
    nbytes: int


def blocks(job: Job) -> Iterator[Block]:
    """The blocks of a tensor: a single one for vectors and copied codes, and for outliers, which are selected among the whole tensor."""
    rows = job.shape[0] if job.shape else 1
    step = rows
    if len(job.shape) > 1 and not job.spec.outliers and not job.kept:
        step = max(ROWS, BLOCK_NBYTES // 4 // max(1, prod(job.shape[1:])) // ROWS * ROWS)
    for begin in range(0, max(1, rows), max(1, step)):
        end = min(rows, begin + step)
        yield Block(job, begin, end, end == rows)


def read_rows(store: TensorStore, block: Block) -> np.ndarray:
    """Stored bytes of a block's rows."""
    return store.read(block.job.info, block.begin, block.end)


def widen(raw: np.ndarray, job: Job) -> np.ndarray:
    """Stored values as float32 rows [n, K]."""
    values = to_f32(raw.view(np.float32 if job.source.scheme == "f32" else np.uint16), job.source.scheme)
    return values.reshape(-1, prod(job.shape[1:]))


def read_tensor(store: TensorStore, job: Job) -> np.ndarray:
    """A tensor as float32 of its shape."""
    return widen(store.read(job.info), job).reshape(job.shape)


def require_finite(job: Job, values: np.ndarray) -> np.ndarray:
    """The same values. Raises EffllmError with the tensor's name for NaN and infinity."""
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        raise EffllmError(f"{job.name}: NaN or infinity", DAMAGED)
    return values


def stream(store: TensorStore, writer: FolderWriter, jobs: Iterable[Job], quantize: Quantize,
           changed: Mapping[str, np.ndarray] = MappingProxyType({})) -> Iterator[BlockDone]:
    """Convert `jobs`; `quantize` is called in this thread. At the end every tensor is on the disk and in the writer's journal.

    changed: by name, float32 values to convert instead of the store's.
    """
    with ThreadPoolExecutor(1, "effllm-read") as reader, ThreadPoolExecutor(1, "effllm-write") as packer, \
            ThreadPoolExecutor(1, "effllm-sync") as syncer:
        pending: deque[Future] = deque()
        syncing: list[Future] = []

        def read(block: Block) -> np.ndarray:
            job = block.job
            if job.kept:
                return store.read(job.info)
            if job.name in changed:
                values = np.ascontiguousarray(changed[job.name][block.begin : block.end], np.float32)
                return from_f32(values, job.spec.scheme).view(np.uint8) if job.spec == job.source else values
            raw = read_rows(store, block)
            return raw if job.spec == job.source else widen(raw, job)

        todo = (block for job in jobs for block in blocks(job))
        upcoming = next(todo, None)
        next_rows = reader.submit(read, upcoming) if upcoming else None
        sink: Sink | None = None
        puts: list[Future] = []
        try:
            while upcoming:
                block, rows = upcoming, next_rows.result()
                upcoming = next(todo, None)
                next_rows = reader.submit(read, upcoming) if upcoming else None
                if block.begin == 0:
                    sink, puts = Sink(block.job, writer), []
                output = _quantize_named(block.job, quantize, rows) if block.job.quantized else rows
                puts.append(packer.submit(sink.put, rows, output))
                pending.append(puts[-1])
                if block.last:
                    syncing.append(packer.submit(_finish, syncer, writer, sink, puts))
                while len(pending) > MAX_PENDING:
                    pending.popleft().result()
                yield BlockDone(block.job, rows.nbytes if block.job.spec == block.job.source else rows.size * block.job.source.bits // 8)
            for future in [*pending, *(future.result() for future in syncing)]:
                future.result()
        except BaseException:
            for pool in (reader, packer, syncer):
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finish(syncer: ThreadPoolExecutor, writer: FolderWriter, sink: Sink, puts: Iterable[Future]) -> Future:
    """Finish a tensor, unless writing one of its blocks failed. A separate thread waits for the disk."""
    for put in puts:
        put.result()
    return syncer.submit(writer.finish, sink.job.name, sink.entry())


def _quantize_named(job: Job, quantize: Quantize, rows: np.ndarray) -> Codes:
    """Quantize; errors of the method name the tensor."""
    try:
        return quantize(job, rows)
    except EffllmError as error:
        raise type(error)(f"{job.name}: {error.message}", error.hint) from error


class Sink:
    """Writes one tensor. `put` takes its blocks in order; `entry` is its record in the journal."""

    def __init__(self, job: Job, writer: FolderWriter) -> None:
        self.job, self._writer = job, writer
        self._crc = 0
        self._error = self._squares = 0.0
        self._done = 0  # rows of a quantized tensor, bytes of a raw one
        if job.quantized:
            self._sections = job.spec.sections(job.shape)
            self._section_crcs: dict[str, int] = {}
            self._tables: tuple[bytes, bytes] | None = None
            self._sparse: list[Sparse] = []
            self._step_nbytes = section_steps(job.spec, job.shape[1])

    def put(self, rows: np.ndarray, output: np.ndarray | Codes) -> None:
        """Write a block. `output`: the quantized block, or for a raw tensor its bytes or float32 rows."""
        if isinstance(output, Codes):
            self._put_codes(rows, output)
        else:
            self._put_raw(output)

    def entry(self) -> Mapping[str, object]:
        """The tensor's checksum and sums of squares, exact in JSON."""
        if not self.job.quantized:
            return {"crc32": self._crc}
        self._put_sparse()
        return {"crc32": self._blob_crc(), "error": self._error, "squares": self._squares}

    def _put_raw(self, data: np.ndarray) -> None:
        job = self.job
        if job.kept:
            self._put_bytes(data)
            return
        if job.spec == job.source:
            require_finite(job, widen(data, job))
            self._put_bytes(data)
            return
        with np.errstate(over="ignore"):
            output = from_f32(require_finite(job, data), job.spec.scheme)
        if job.spec.scheme == "f16" and np.isinf(output.view(np.float16)).any():
            raise EffllmError(f"{job.name}: weights exceed the 16-bit range", DAMAGED)
        self._put_bytes(output)

    def _put_bytes(self, stored: np.ndarray) -> None:
        job = self.job
        piece = memoryview(stored).cast("B") if stored.size else b""
        self._writer.write(job.name, self._done, piece)
        self._crc = zlib.crc32(piece, self._crc)
        self._done += len(piece)

    def _put_codes(self, rows: np.ndarray, codes: Codes) -> None:
        spec = self.job.spec
        tables = None if codes.levels is None else (codes.levels.tobytes(), codes.steps.tobytes())
        if self._done and tables != self._tables:
            raise ValueError(f"{self.job.name}: the method gave blocks of one tensor different tables")
        self._tables = tables
        error, squares = squared_error(rows, codes, spec)
        self._error, self._squares = self._error + error, self._squares + squares
        if codes.sparse is not None:
            self._sparse.append(replace(codes.sparse, row=codes.sparse.row + np.uint32(self._done)))
        base = replace(spec, outliers=0.0)
        blob, block_sections = pack(replace(codes, sparse=None), base), base.sections(rows.shape)
        first, count = self._done // ROWS, block_sections.rows // ROWS
        for name, step in self._step_nbytes.items():
            start = getattr(block_sections, name)
            self._write_part(name, getattr(self._sections, name) + first * step, blob[start : start + count * step])
        if block_sections.tables >= 0 and first == 0:
            self._write_part("tables", self._sections.tables, blob[block_sections.tables :])
        self._done += len(rows)

    def _put_sparse(self) -> None:
        """Write the outliers of all blocks."""
        sections = self._sections
        if sections.sparse >= 0:
            sparse = Sparse(*(np.concatenate([getattr(part, name) for part in self._sparse]) for name in ("row", "col", "value")))
            if len(sparse.row) != sections.sparse_count:
                raise ValueError(f"{self.job.name}: {len(sparse.row)} outliers, the format has room for {sections.sparse_count}")
            self._write_part("sparse", sections.sparse, pack_sparse(sparse, sections.rows // ROWS))

    def _write_part(self, name: str, offset: int, data: np.ndarray) -> None:
        view = memoryview(np.ascontiguousarray(data))
        self._writer.write(self.job.name, offset, view)
        self._section_crcs[name] = zlib.crc32(view, self._section_crcs.get(name, 0))

    def _blob_crc(self) -> int:
        """The checksum of the whole blob: each section with the zeros after it, in order."""
        sections, used = self._sections, section_nbytes(self._sections, self._step_nbytes)
        starts = [getattr(sections, name) for name in used]
        parts = []
        for name, start, end in zip(used, starts, [*starts[1:], sections.nbytes], strict=True):
            parts.append((zlib.crc32(bytes(end - start - used[name]), self._section_crcs[name]), end - start))
        return checksum.join(parts)

def section_steps(spec: QuantSpec, depth: int) -> dict[str, int]:
    """Bytes that 16 rows take in each section that is laid out by rows. Computed from a weight whose sections need no padding."""
    sections = spec.sections((WHOLE_BLOCKS * ROWS, depth))
    starts = {name: getattr(sections, name) for name in SECTIONS if getattr(sections, name) >= 0}
    end = sections.tables if sections.tables >= 0 else sections.sparse if sections.sparse >= 0 else sections.nbytes
    ends = [*list(starts.values())[1:], end]
    return {name: (end - start) // WHOLE_BLOCKS for (name, start), end in zip(starts.items(), ends, strict=True)}


def section_nbytes(sections: Sections, step_nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each section in order, without the padding after it. `step_nbytes`: see `section_steps`."""
    used = {name: sections.rows // ROWS * step for name, step in step_nbytes.items()}
    if sections.tables >= 0:
        used["tables"] = (sections.sparse if sections.sparse >= 0 else sections.nbytes) - sections.tables
    if sections.sparse >= 0:
        used["sparse"] = 4 * (sections.rows // ROWS + 1) + 6 * sections.sparse_count
    return used
