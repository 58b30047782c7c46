"""`quantize --bundle-ffn`: copies a model with every MLP neuron stored as one record, so that only the neurons a token uses are read.

Values are unchanged; folders that `quantize` made are accepted if it left the neurons in 16 or 32 bits. With `gate_sparsity` a model
whose activation is never zero gets thresholds (`gate_thresholds.py`), which change what it computes. Otherwise as `convert`: written
under a temporary name, resumable, renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ... import UsageError, __version__
from ...offload.checkpoint import TensorStore
from ...offload.folder_writer import FolderWriter, finish_cleanup, needs_cleanup, partial_nbytes
from ...offload.shards import INDEX, Planned, PlannedFile, index_json, plan_files
from ...quant.bundles import FFN_MULTIPLE, WIDTH_MULTIPLE, BundleLayout, bundle_name
from ...quant.spec import QuantSpec
from ...quant.weight import RAW_NUMPY
from ..config import ModelConfig, read_config
from ..convert import ClassResult, Converted, check_space, check_target, companion_files
from ..events import Notice, Progress
from ..families import base_role
from ..files.model_folder_files import already_complete
from ..planning.expected_store import RAW
from ..source import folder_files, open_store
from ..sparse.gate_thresholds import RULES, gate_thresholds
from ..sparse.neuron_bundles import ROLE, SPARSE, THRESHOLDS, is_bundled, threshold_name
from ..stores.container import DTYPES, FILE, FORMAT, VERSION, Container, StoredTensor, read_container
from ..tensors import ModelTensor, check_tensors
from .convert_plan import MATRICES, ORIGINAL, OTHER, SizeRow

COPY_NBYTES = 16 << 20
# Families whose blocks multiply gate, up and down themselves, norm what goes into down, or read rows of two tokens.
WHOLE = ("bitnet", "cohere", "cohere2", "ernie4_5_vl_moe_text", "falcon_h1", "gemma3n_text", "gemma4_text", "longcat_flash",
         "mllama_text_model", "phi", "rwkv7")


@dataclass(frozen=True)
class BundleJob:
    """A tensor of the new folder: one that is copied, or the bundles of a layer made of `up` (None where there is no gate) and `down`."""

    stored: StoredTensor
    role: str
    sources: tuple[ModelTensor, ...]
    layout: BundleLayout | None = None
    values: np.ndarray | None = None

    @property
    def before(self) -> int:
        """Bytes that are read for it."""
        return sum(tensor.nbytes for tensor in self.sources)


def bundle(folder: Path, out: Path, replace: bool = False, source: Mapping[str, object] | None = None, gate_sparsity: float | None = None,
           text: str | None = None, gate_rule: str = RULES[0]) -> Iterator[Progress | Notice | Converted]:
    """Write the model in `folder` as `out`, its MLPs neuron by neuron; yields what happens and the result last. `gate_sparsity`: the share
    of gates below a threshold that is made so on `text` (None: the sample), by `gate_rule` (`gate_thresholds.py`).

    Raises UsageError where that serves nothing (no sparse activation, a mixture, neurons in few bits, gates to leave out of an MLP without
    any), and what `convert` raises.
    """
    out, started = Path(os.path.abspath(out)), time.monotonic()
    if is_bundled(given := read_container(folder)):
        raise UsageError(f"the neurons of {folder} are bundled already ({given.spec_text})", ORIGINAL)
    config = read_config(folder)
    _check(config, gate_sparsity)
    if not (is_named := needs_cleanup(out, FILE)):
        check_target(out, replace, folder)
    with open_store(folder) as store:  # what headers tell is refused before the model is read and run
        tensors = check_tensors(config, store, given)
        if gate_sparsity is not None and not all("gate" in tensors[key] for key in tensors if key != "outer"):
            raise UsageError(f"--gate-sparsity needs an MLP with a gate, {config.family} has none", "leave it out")
        tuple(_jobs(config, tensors, ()))
    found: tuple[np.ndarray, ...] = ()
    if gate_sparsity is not None:
        for item in gate_thresholds(folder, gate_sparsity, text, gate_rule):
            if isinstance(item, tuple):
                found = item
            else:
                yield item
    with open_store(folder) as store:
        jobs = tuple(_jobs(config, check_tensors(config, store, given), found))
        files = _files(jobs)
        copies, texts = companion_files(folder), folder_files(folder)
        check_space(out, sum(file.size for file in files) - partial_nbytes(out) + sum(path.stat().st_size for path in copies.values()))
        layout = next(job.layout for job in jobs if job.layout is not None)
        yield from (Notice(said) for said in (*config.warnings, *_notices(layout, config, gate_sparsity)))
        fingerprint = _fingerprint(store, files, copies, source or {}, found)
        if is_named:
            if finish_cleanup(out, fingerprint, FILE) is not None:
                yield Notice(already_complete(out))
                yield _converted(out, jobs, store, files, started)
                return
            check_target(out, replace, folder)
        with FolderWriter(out, files, fingerprint, FILE) as writer:
            done, total = 0, sum(job.before for job in jobs)
            for job in jobs:
                if job.stored.name not in writer.finished:
                    writer.finish(job.stored.name, {"crc32": _write(job, store, writer)})
                done += job.before
                yield Progress("bundling", done, total, "bytes")
            store.check_unchanged()
            texts |= {INDEX: index_json(files)} if len(files) > 1 else {}
            origin = {**(source or {}), "nbytes": _stored(jobs, store)}
            made = _container(jobs, writer, config, given, origin, gate_sparsity, gate_rule).with_files(copies, texts)
            check_target(out, replace, folder)  # it may have been filled meanwhile
            writer.commit(copies, {**texts, FILE: made.to_json()}, replace)
    yield _converted(out, jobs, store, files, started)


def _converted(out: Path, jobs: tuple[BundleJob, ...], store: TensorStore, files: Sequence[PlannedFile], started: float) -> Converted:
    rows = tuple(ClassResult(row, None) for row in _rows(jobs, store))
    return Converted(out, sum(prod(tensor.shape) for job in jobs for tensor in job.sources), _stored(jobs, store),
                     sum(job.stored.nbytes for job in jobs), sum(file.size for file in files), rows, time.monotonic() - started)


def _check(config: ModelConfig, gate_sparsity: float | None) -> None:
    if gate_sparsity is not None and not 0.05 <= gate_sparsity <= 0.95:
        raise UsageError(f"--gate-sparsity {gate_sparsity:g} is not a fraction of gates to skip", "0.05 to 0.95; 0.5 is already a lot")
    if gate_sparsity is not None and config.hidden_act in SPARSE:
        raise UsageError(f"--gate-sparsity: {config.hidden_act} skips neurons already, without loss", "leave it out")
    if gate_sparsity is None and config.hidden_act not in SPARSE:
        raise UsageError(f"--bundle-ffn: {config.hidden_act} is never exactly zero, so every token would read all neurons",
                         f"it serves models with {' or '.join(SPARSE)} (hidden_act in config.json); --gate-sparsity 0.5 skips half, "
                         "with loss")
    if config.moe is not None:
        raise UsageError("--bundle-ffn: the experts of a mixture are read as a whole", "leave it out")
    if config.family in WHOLE or config.parallel_block:
        raise UsageError(f"--bundle-ffn: MLPs of the {config.family} family are read as a whole in this version", "leave it out")
    if config.intermediate_size % FFN_MULTIPLE or config.hidden_size % WIDTH_MULTIPLE:
        raise UsageError(f"--bundle-ffn takes {FFN_MULTIPLE} neurons and {WIDTH_MULTIPLE} channels at a time, this model has "
                         f"{config.intermediate_size} and {config.hidden_size}", "leave it out")


def _jobs(config: ModelConfig, tensors: Mapping[int | str, Mapping[str, ModelTensor]],
          thresholds: tuple[np.ndarray, ...]) -> Iterator[BundleJob]:
    for key in ("outer", *sorted(key for key in tensors if key != "outer")):
        roles = dict(tensors[key])
        bundled = [roles.pop(role) for role in ("up", "down") if role in roles and (role == "down" or "gate" in roles)]
        for role, tensor in roles.items():
            yield BundleJob(StoredTensor(tensor.name, tensor.spec, tensor.shape, 0), role, (tensor,))
        if thresholds and key != "outer":
            stored = StoredTensor(threshold_name(bundled[-1].name), QuantSpec.raw("f32"), thresholds[key].shape, 0)
            yield BundleJob(stored, THRESHOLDS, (), values=thresholds[key])
        if bundled:
            schemes = {tensor.spec.scheme for tensor in bundled}
            if (low := next((tensor for tensor in bundled if not tensor.spec.is_raw), None)) is not None:
                names = "|".join(tensor.name.split(".")[-2] for tensor in bundled)
                raise UsageError(f"--bundle-ffn: {low.name} is {low.spec}, but neurons can be read individually only in 16 or 32 bits",
                                 f"effllm quantize MODEL -o DIR --bits 4 --tensor-type '({names})={RAW[config.dtype]}' leaves them so")
            if len(schemes) > 1:
                raise UsageError(f"--bundle-ffn: {bundled[0].name} and {bundled[-1].name} are stored differently", ORIGINAL)
            layout = BundleLayout(schemes.pop(), config.hidden_size, len(bundled) == 2)
            stored = StoredTensor(bundle_name(bundled[-1].name), QuantSpec.raw(layout.scheme), layout.shape(bundled[-1].shape[1]), 0)
            yield BundleJob(stored, ROLE, tuple(bundled), layout)


def _files(jobs: tuple[BundleJob, ...]) -> tuple[PlannedFile, ...]:
    """Bundles begin on a block of their file."""
    groups: list[list[Planned]] = []
    for job in jobs:
        if not groups or job.layout is not None or ROLE in groups[-1][-1].name:
            groups.append([])
        raw = job.stored.spec.is_raw
        groups[-1].append(Planned(job.stored.name, DTYPES[job.stored.spec.scheme] if raw else "U8",
                                  job.stored.shape if raw else (job.stored.nbytes,), job.stored.nbytes))
    return plan_files(groups, {"format": FORMAT, "version": str(VERSION)})


def _write(job: BundleJob, store: TensorStore, writer: FolderWriter) -> int:
    """Bring a tensor over; its checksum."""
    crc = at = 0
    for piece in _pieces(job, store):
        view = memoryview(np.ascontiguousarray(piece)).cast("B") if piece.size else memoryview(b"")
        writer.write(job.stored.name, at, view)
        crc, at = zlib.crc32(view, crc), at + len(view)
    return crc


def _pieces(job: BundleJob, store: TensorStore) -> Iterator[np.ndarray]:
    if job.values is not None:
        yield job.values
        return
    if job.layout is None:
        rows = job.sources[0].info.shape[0] if job.sources[0].info.shape else 1
        each = max(1, COPY_NBYTES * rows // max(1, job.before))
        for first in range(0, max(1, rows), each):
            yield store.read(job.sources[0].info, first, min(rows, first + each))
        return
    kind, layout, ffn = RAW_NUMPY[job.layout.scheme], job.layout, job.stored.shape[0]
    down = store.read(job.sources[-1].info).view(kind).reshape(layout.width, ffn)
    each = max(1, COPY_NBYTES // layout.stride)
    for first in range(0, ffn, each):
        end = min(ffn, first + each)
        up = store.read(job.sources[0].info, first, end).view(kind).reshape(end - first, layout.width) if layout.has_up else None
        yield layout.pack(up, down[:, first:end])


def _fingerprint(store: TensorStore, files: tuple[PlannedFile, ...], copies: Mapping[str, Path], source: Mapping[str, object],
                 thresholds: tuple[np.ndarray, ...]) -> str:
    stamps = [(path.name, (status := os.fstat(store.descriptor(path))).st_size, status.st_mtime_ns) for path in store.files]
    heads = [hashlib.sha256(file.head).hexdigest() for file in files]
    texts = [(name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in sorted(copies.items())]
    values = [hashlib.sha256(own.tobytes()).hexdigest() for own in thresholds]
    return hashlib.sha256(json.dumps([__version__, ROLE, stamps, heads, texts, dict(source), values], sort_keys=True).encode()).hexdigest()


def _container(jobs: tuple[BundleJob, ...], writer: FolderWriter, config: ModelConfig, given: Container | None,
               source: Mapping[str, object], gate_sparsity: float | None, gate_rule: str) -> Container:
    tensors = {job.stored.name: StoredTensor(job.stored.name, job.stored.spec, job.stored.shape, writer.finished[job.stored.name]["crc32"])
               for job in jobs}
    weights, after = sum(prod(tensor.shape) for job in jobs for tensor in job.sources), sum(job.stored.nbytes for job in jobs)
    layout = next(job.layout for job in jobs if job.layout is not None)
    method = {"name": "bundle-ffn", "holds": "up row, down column" if layout.has_up else "down column", "bundle_bytes": layout.used,
              "stride_bytes": layout.stride} | ({} if gate_sparsity is None else {"gate_sparsity": gate_sparsity, "gate_rule": gate_rule})
    lossy = "" if gate_sparsity is None else f", {gate_sparsity:.0%} of gates left out"
    kept = layout.scheme if given is None else f"{given.spec_text}, {layout.scheme}"
    before = {} if given is None else dict(given.source)
    return Container(f"{kept}, neurons bundled{lossy}", 8 * after / weights, tensors,
                     {**before, **source, "dtype": config.dtype},
                     {"name": "effllm", "version": __version__}, method | ({} if given is None else {"weights": dict(given.method)}),
                     {} if given is None else given.calibration)


def _notices(layout: BundleLayout, config: ModelConfig, gate_sparsity: float | None) -> Iterator[str]:
    if gate_sparsity is not None:
        yield (f"{gate_sparsity:.0%} of the gates are skipped from now on, which changes answers; to measure by how much: "
               "`effllm eval kld OUT --against MODEL --text FILE`")
    what = "a row of up and a column of down" if layout.has_up else "a column of down"
    room = "" if layout.stride == layout.used else f", padded from {layout.used}: reads are of whole blocks"
    yield f"a neuron is {what}, {layout.stride} bytes{room}; {config.intermediate_size} neurons a layer"
    if layout.together > 1:
        yield f"{layout.together} neurons fill a block of the disk and are read together: models as small as this one gain nothing"


def _stored(jobs: Iterable[BundleJob], store: TensorStore) -> int:
    """Bytes of what goes into them, in the source's files."""
    return sum(store.stored_nbytes(tensor.info) for job in jobs for tensor in job.sources)


def _rows(jobs: tuple[BundleJob, ...], store: TensorStore) -> Iterator[SizeRow]:
    for name in (*MATRICES, OTHER, ROLE):
        own = [job for job in jobs if (kind if (kind := base_role(job.role)) in (*MATRICES, ROLE) else OTHER) == name]
        if own:
            yield SizeRow(name, len(own), sum(prod(tensor.shape) for job in own for tensor in job.sources), _stored(own, store),
                          sum(job.stored.nbytes for job in own), tuple(dict.fromkeys(str(job.stored.spec) for job in own)))
