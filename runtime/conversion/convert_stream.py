"""Streams tensors through a quantization method in blocks of rows: reading, quantizing and writing overlap.

Memory is a few blocks, whatever the tensor's size. Blocks depend on the tensor's shape alone, so the bytes written depend neither on
thread count nor on where an earlier run stopped. Each block's sections are written at their offsets in the tensor's blob; their
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
WHOLE_BLOCKS = 64  # row blocks whose sections fill whole 64-byte lines, whatever a row block takes
SECTIONS = ("codes", "scales", "zeros", "row_scales")
WAITING = 2  # blocks that may wait to be written
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
    """A block has been quantized: `nbytes` of the source are behind."""

    job: Job
    nbytes: int


def blocks(job: Job) -> Iterator[Block]:
    """The blocks of a tensor. One that is no matrix is a block of its own, and one with outliers, which compete over all of it."""
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


def widened(raw: np.ndarray, job: Job) -> np.ndarray:
    """float32 rows [n, K]."""
    values = to_f32(raw.view(np.float32 if job.source.scheme == "f32" else np.uint16), job.source.scheme)
    return values.reshape(-1, prod(job.shape[1:]))


def whole(store: TensorStore, job: Job) -> np.ndarray:
    """A tensor as float32 of its shape."""
    return widened(store.read(job.info), job).reshape(job.shape)


def finite(job: Job, values: np.ndarray) -> np.ndarray:
    """The same values. Raises EffllmError with the tensor's name where one is NaN or infinite."""
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        raise EffllmError(f"{job.name}: NaN or infinity", DAMAGED)
    return values


def stream(store: TensorStore, writer: FolderWriter, jobs: Iterable[Job], quantize: Quantize,
           changed: Mapping[str, np.ndarray] = MappingProxyType({})) -> Iterator[BlockDone]:
    """Convert `jobs`; `quantize` is called in this thread. When it ends, every tensor is on the disk and in the writer's journal.

    `changed`: float32 values that take the place of the store's, by name.
    """
    with ThreadPoolExecutor(1, "effllm-read") as reader, ThreadPoolExecutor(1, "effllm-write") as packer, \
            ThreadPoolExecutor(1, "effllm-sync") as syncer:
        waiting: deque[Future] = deque()
        syncing: list[Future] = []

        def read(block: Block) -> np.ndarray:
            job = block.job
            if job.kept:
                return store.read(job.info)
            if job.name in changed:
                values = np.ascontiguousarray(changed[job.name][block.begin : block.end], np.float32)
                return from_f32(values, job.spec.scheme).view(np.uint8) if job.spec == job.source else values
            raw = read_rows(store, block)
            return raw if job.spec == job.source else widened(raw, job)

        todo = (block for job in jobs for block in blocks(job))
        upcoming = next(todo, None)
        ahead = reader.submit(read, upcoming) if upcoming else None
        sink: Sink | None = None
        puts: list[Future] = []
        try:
            while upcoming:
                block, rows = upcoming, ahead.result()
                upcoming = next(todo, None)
                ahead = reader.submit(read, upcoming) if upcoming else None
                if block.begin == 0:
                    sink, puts = Sink(block.job, writer), []
                made = named(block.job, quantize, rows) if block.job.quantized else rows
                puts.append(packer.submit(sink.put, rows, made))
                waiting.append(puts[-1])
                if block.last:
                    syncing.append(packer.submit(finished, syncer, writer, sink, puts))
                while len(waiting) > WAITING:
                    waiting.popleft().result()
                yield BlockDone(block.job, rows.nbytes if block.job.spec == block.job.source else rows.size * block.job.source.bits // 8)
            for future in [*waiting, *(future.result() for future in syncing)]:
                future.result()
        except BaseException:
            for pool in (reader, packer, syncer):
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def finished(syncer: ThreadPoolExecutor, writer: FolderWriter, sink: Sink, puts: Iterable[Future]) -> Future:
    """A tensor is written, unless one of its blocks was not; waiting for the disk is left to a thread of its own."""
    for put in puts:
        put.result()
    return syncer.submit(writer.finish, sink.job.name, sink.entry())


def named(job: Job, quantize: Quantize, rows: np.ndarray) -> Codes:
    """A method's error with the tensor's name in it."""
    try:
        return quantize(job, rows)
    except EffllmError as error:
        raise type(error)(f"{job.name}: {error.message}", error.hint) from error


class Sink:
    """One tensor on its way to the writer. `put` takes its blocks in order; `entry` is what the journal keeps of it."""

    def __init__(self, job: Job, writer: FolderWriter) -> None:
        self.job, self._writer = job, writer
        self._crc = 0
        self._error = self._squares = 0.0
        self._done = 0  # rows, of a raw tensor bytes
        if job.quantized:
            self._at = job.spec.sections(job.shape)
            self._part_crcs: dict[str, int] = {}
            self._tables: tuple[bytes, bytes] | None = None
            self._sparse: list[Sparse] = []
            self._per_block = section_steps(job.spec, job.shape[1])

    def put(self, rows: np.ndarray, made: np.ndarray | Codes) -> None:
        """`made` is the quantized block, or for a raw tensor its bytes or float32 rows."""
        if isinstance(made, Codes):
            self._put_codes(rows, made)
        else:
            self._put_raw(made)

    def entry(self) -> Mapping[str, object]:
        """Checksum and sums of squares, all of it exact in JSON."""
        if not self.job.quantized:
            return {"crc32": self._crc}
        self._put_tail()
        return {"crc32": self._joined(), "error": self._error, "squares": self._squares}

    def _put_raw(self, data: np.ndarray) -> None:
        job = self.job
        if job.kept:
            self._put_bytes(data)
            return
        if job.spec == job.source:
            finite(job, widened(data, job))
            self._put_bytes(data)
            return
        with np.errstate(over="ignore"):
            made = from_f32(finite(job, data), job.spec.scheme)
        if job.spec.scheme == "f16" and np.isinf(made.view(np.float16)).any():
            raise EffllmError(f"{job.name}: weights exceed the 16-bit range", DAMAGED)
        self._put_bytes(made)

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
        blob, at = pack(replace(codes, sparse=None), base), base.sections(rows.shape)
        first, count = self._done // ROWS, at.rows // ROWS
        for name, step in self._per_block.items():
            start = getattr(at, name)
            self._write_part(name, getattr(self._at, name) + first * step, blob[start : start + count * step])
        if at.tables >= 0 and first == 0:
            self._write_part("tables", self._at.tables, blob[at.tables :])
        self._done += len(rows)

    def _put_tail(self) -> None:
        if self._at.sparse >= 0:
            found = Sparse(*(np.concatenate([getattr(part, name) for part in self._sparse]) for name in ("row", "col", "value")))
            if len(found.row) != self._at.sparse_count:
                raise ValueError(f"{self.job.name}: {len(found.row)} outliers, the format has room for {self._at.sparse_count}")
            self._write_part("sparse", self._at.sparse, pack_sparse(found, self._at.rows // ROWS))

    def _write_part(self, name: str, offset: int, data: np.ndarray) -> None:
        view = memoryview(np.ascontiguousarray(data))
        self._writer.write(self.job.name, offset, view)
        self._part_crcs[name] = zlib.crc32(view, self._part_crcs.get(name, 0))

    def _joined(self) -> int:
        """The sum of the whole blob: each section with the zeros after it, in order."""
        at, used = self._at, section_nbytes(self._at, self._per_block)
        starts = [getattr(at, name) for name in used]
        parts = []
        for name, start, end in zip(used, starts, [*starts[1:], at.nbytes], strict=True):
            parts.append((zlib.crc32(bytes(end - start - used[name]), self._part_crcs[name]), end - start))
        return checksum.join(parts)


def section_steps(spec: QuantSpec, depth: int) -> dict[str, int]:
    """Bytes that 16 rows take of each section that is laid out by rows. Found from a weight whose sections need no padding."""
    at = spec.sections((WHOLE_BLOCKS * ROWS, depth))
    starts = {name: getattr(at, name) for name in SECTIONS if getattr(at, name) >= 0}
    ends = [*list(starts.values())[1:], at.tables if at.tables >= 0 else at.sparse if at.sparse >= 0 else at.nbytes]
    return {name: (end - start) // WHOLE_BLOCKS for (name, start), end in zip(starts.items(), ends, strict=True)}


def section_nbytes(at: Sections, per_block: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each section, without the padding after it, in order."""
    used = {name: at.rows // ROWS * step for name, step in per_block.items()}
    if at.tables >= 0:
        used["tables"] = (at.sparse if at.sparse >= 0 else at.nbytes) - at.tables
    if at.sparse >= 0:
        used["sparse"] = 4 * (at.rows // ROWS + 1) + 6 * at.sparse_count
    return used
