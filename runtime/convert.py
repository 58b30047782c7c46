"""`convert`: quantizes a checkpoint into a new folder. It streams, can be killed at any point, and never leaves a half-written folder under
the final name.

Every tensor's format and location is known from headers (`convert_plan.py`); rows go through a method block by block (`convert_stream.py`)
into a hidden folder beside the final one (`offload/folder_writer.py`), which is renamed once it has `effllm.json`. The same command after a
kill resumes with the first unfinished tensor and gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from .. import DoesNotFit, EffllmError, UsageError, __version__, typed
from ..kernels.threads import MAX_WORKERS, ThreadPool
from ..offload import hardware
from ..offload.checkpoint import CheckpointError
from ..offload.folder_writer import FolderWriter, finish_cleanup, needs_cleanup, partial_nbytes
from ..offload.shards import INDEX, index_json
from ..offload.size import format_size, plural
from ..quant import methods
from ..quant.error import error_db
from ..quant.recipe import Recipe, parse_rule, parse_target
from ..quant.spec import FOREIGN, QuantSpec
from .calibrate import LEAST, TOKENS, built_in_text, calibration_ids, variety_warning
from .config import read_config
from .conversion.convert_plan import MATRICES, ConversionPlan, SizeRow, plan_conversion
from .conversion.convert_tensors import Converter
from .engine import Engine, EngineOptions, open_engine
from .events import Notice, Progress
from .files.bounded_read import MAX_TOKENIZER_NBYTES
from .files.model_folder_files import KV_PROFILE, already_complete, describe_existing, foreign_entry, require_folder
from .hub import COMPANIONS, NESTED
from .images.tower_copy import copy_tower, tower_nbytes
from .planning.compile_kernels import compile_needed
from .planning.needed_kernels import calibration_kinds
from .prepare import TEXT_ONLY_WARNING, too_many_threads
from .source import folder_files
from .stores.container import FILE, Container, StoredTensor, read_container

OTHER_FOLDER = "give another folder with -o"


def target_of(text: str) -> float:
    """Parse bits per weight (`4.25bpw`). Raises UsageError."""
    return parse_target(text)


def recipe_of(spec: str, rules: Sequence[str], method: str | None = None) -> Recipe:
    """Parse a recipe: a format, `REGEX=SPEC` rules, and what the method adds. Raises UsageError."""
    module = methods.get(methods.PLAIN if method is None else method)
    recipe = Recipe(QuantSpec.parse(spec, module.SHORT), tuple(parse_rule(rule, module.SHORT) for rule in rules), module.SHORT)
    return recipe.with_outliers(module.OUTLIERS) if module.OUTLIERS else recipe


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert a model to, and how. Raises UsageError for options that do not go together."""

    recipe: Recipe
    spec_text: str  # recorded in effllm.json
    method: str = methods.PLAIN
    calibration_text: str | None = None  # None for the built-in sample, if the method needs one
    calibration_tokens: int = TOKENS
    target: float | None = None  # bits per weight for which formats are searched; None for the recipe's
    threads: int | None = None
    replace: bool = False  # overwrite a quantized folder
    tower: bool = True  # include the vision tower
    source: Mapping[str, object] = field(default_factory=dict)  # where the model came from, recorded in effllm.json

    def __post_init__(self) -> None:
        method = methods.get(self.method)
        specs = [spec for spec in (self.recipe.base, *(spec for _, spec in self.recipe.rules)) if not spec.is_raw]
        if imported := [spec for spec in specs if spec.scheme in FOREIGN]:
            raise UsageError(f"{imported[0]} is only for weights that other tools quantized, not a format to quantize to",
                             "effllm export writes GGUF files")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads {self.threads} is too small", "at least 1")
        for spec in specs:
            method.check(spec)
        if self.target is not None and any(spec.outliers for spec in specs):
            raise UsageError("--target chooses among formats without outliers", "leave one of the two out, or another --method")
        if self.calibration_tokens < LEAST:
            raise UsageError(f"--calib-tokens {self.calibration_tokens} is too few", f"at least {LEAST}, {TOKENS} do well")


@dataclass(frozen=True)
class ClassResult:
    """Sizes of a class of tensors and its error, None if lossless."""

    size: SizeRow
    error_db: float | None

    def to_json(self) -> dict[str, object]:
        return {**self.size.to_json(), "error_db": self.error_db}


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    folder: Path
    weights: int
    before: int  # bytes of the tensors
    after: int  # bytes of the tensors
    file_nbytes: int  # of the weight files
    classes: tuple[ClassResult, ...]
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.after / self.weights

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "weights": self.weights, "bytes_before": self.before, "bytes_after": self.after,
                "file_bytes": self.file_nbytes, "bits_per_weight": self.bits_per_weight, "seconds": self.seconds,
                "classes": [row.to_json() for row in self.classes]}


def convert(folder: Path, out: Path, options: ConvertOptions) -> Iterator[Progress | Notice | Converted]:
    """Quantize the model in `folder` into the new folder `out`; yields events and the result last.

    Raises UsageError if `out` exists or the input is quantized, DoesNotFit if the disk is too small or fills up (the same call resumes
    later), EffllmError naming a tensor with NaN or infinity. If a run was killed after `out` had its final name, the same call finishes
    the rest.
    """
    out = Path(os.path.abspath(out))
    plan = plan_conversion(folder, options.recipe, options.target is None)
    with plan.store:
        is_named = needs_cleanup(out, FILE)
        if not is_named:
            check_target(out, options.replace, wanted=options.spec_text)
        ids = calibration(plan, options)
        yield from variety_warning(ids)
        if is_named:
            finished_plan, started = _finished_plan(plan, out, options), time.monotonic()
            if (finished := finish_cleanup(out, fingerprint(finished_plan, options, ids), FILE)) is not None:
                yield Notice(already_complete(out))
                yield _converted(out, finished_plan, finished, started)
                return
            check_target(out, options.replace, wanted=options.spec_text)
        tower, copies = tower_nbytes(plan.folder) if options.tower else 0, companion_files(plan.folder)
        other_nbytes = sum(path.stat().st_size for path in copies.values()) + tower - partial_nbytes(out)
        if options.target is None:  # before kernels are compiled; for a target, the formats are not known yet
            check_space(out, plan.file_nbytes + other_nbytes)
        for item in resolve_plan(plan, options):
            if isinstance(item, ConversionPlan):
                plan = item
            else:
                yield item
        warnings = [warning for warning in plan.config.warnings if not (tower and TEXT_ONLY_WARNING in warning)]
        yield from (Notice(text) for text in (*warnings, *plan.notices(), *too_many_threads(options.threads)))
        started = time.monotonic()
        pool = ThreadPool(min(MAX_WORKERS, options.threads or hardware.cpu_threads()))
        check_space(out, plan.file_nbytes + other_nbytes)
        try:
            with FolderWriter(out, plan.files, fingerprint(plan, options, ids), FILE, str(options.source.get("model", ""))) as writer:
                yield from _resume_notices(plan, writer)
                converter = Converter(plan, options.method, writer, pool, ids)
                yield from converter.announce(options.spec_text)
                yield from converter.run()
                plan.store.check_unchanged()
                texts = folder_files(plan.folder) | ({INDEX: index_json(plan.files)} if len(plan.files) > 1 else {})
                tower_files = (yield from copy_tower(plan.folder, writer)) if tower else {}
                record = container(plan, writer.finished, options, ids).with_files(copies, texts)
                record = replace(record, files={**record.files, **tower_files})
                check_target(out, options.replace, wanted=options.spec_text)  # the first check may be hours ago
                writer.commit(copies, {**texts, FILE: record.to_json()}, options.replace)
                finished = writer.finished
        finally:
            pool.close()
    yield _converted(out, plan, finished, started)


def _finished_plan(plan: ConversionPlan, out: Path, options: ConvertOptions) -> ConversionPlan:
    """The plan that an existing folder was built by: for a target, with the formats it has, without a new search."""
    record = None if options.target is None else read_container(out)
    if record is None:
        return plan
    names = {name: tensor.spec for name, tensor in record.tensors.items() if options.recipe.ruled(name) is None}
    return plan.with_recipe(replace(options.recipe, names=names))


def _converted(out: Path, plan: ConversionPlan, finished: Mapping[str, Mapping[str, object]], started: float) -> Converted:
    return Converted(out, plan.weights, plan.before, plan.after, plan.file_nbytes, tuple(_class_results(plan, finished)),
                     time.monotonic() - started)


def resolve_plan(plan: ConversionPlan, options: ConvertOptions) -> Iterator[Progress | Notice | ConversionPlan]:
    """Compile missing kernels, and search formats if there is a target; yields the resulting plan last."""
    yield from compile_needed(calibration_kinds(plan.config))
    if options.target is None:
        yield plan
        return
    from .conversion.bit_search import WINDOW, BitAllocation, search

    text = built_in_text() if options.calibration_text is None else options.calibration_text
    ids = calibration_ids(plan.folder, plan.config, text, options.calibration_tokens)
    ctx = min(WINDOW, plan.config.context_length)
    engine_options = EngineOptions(device="cpu", threads=options.threads, kv="32bit", ctx=ctx, spec="off", exact=True)
    for item in open_engine(plan.folder, engine_options):
        if not isinstance(item, Engine):
            yield item
    try:
        for result in search(plan, item, ids, options.target, options.recipe):
            if not isinstance(result, BitAllocation):
                yield result
    finally:
        item.close()
    resolved = plan.with_recipe(result.recipe)
    counts = Counter(str(job.spec) for job in resolved.jobs if not job.spec.is_raw)
    shares = ", ".join(f"{plural(count, 'tensor')} {spec}" for spec, count in sorted(counts.items()))
    yield Notice(f"{options.target:g} bits per weight: {shares}")
    yield resolved


def check_target(out: Path, replace: bool | None, source: Path | None = None, wanted: str | None = None) -> None:
    """Raises UsageError unless `out` is free: absent, empty, or, with `replace`, a folder with only files that effllm wrote, other than
    `source`. `replace`: None if replacing is not an option. `wanted`: the format to be written (`Container.spec_text`), for the message."""
    require_folder(out.parent)
    if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"{out} is {describe_existing(out)}, which cannot be replaced", OTHER_FOLDER)
    if source is not None and os.path.samefile(out, source):
        raise UsageError(f"{out} is the model itself", OTHER_FOLDER)
    try:
        record = read_container(out)
    except CheckpointError:
        record = None
    if record is None:
        raise UsageError(f"{out} exists" + ("" if replace is None else " and is not a model that effllm quantized"), OTHER_FOLDER)
    if not replace:
        is_same = wanted in (None, record.spec_text)
        held = f"({record.spec_text})" if is_same else f"({record.spec_text}, {record.bits_per_weight:.2f} bits per weight), not {wanted}"
        raise UsageError(f"{out} exists {held}", OTHER_FOLDER if replace is None else
                         f"{_profile_hint(out) if is_same else ''}--force replaces it, or {OTHER_FOLDER}")
    if (other := foreign_entry(out)) is not None:
        raise UsageError(f"{out} holds {other}, which effllm did not write and will not delete", f"move it away, or {OTHER_FOLDER}")


def _profile_hint(out: Path) -> str:
    """The hint for a complete model without KV profile: if a run was killed while recording it, `eval kv-profile` records it again."""
    if (out / KV_PROFILE).exists():
        return ""
    try:
        return f"it lacks the profile for --kv alone: effllm eval kv-profile {typed(out)}; " if read_config(out).cache_kv_heads else ""
    except EffllmError:  # an encoder, or a model of a newer effllm
        return ""


def fingerprint(plan: ConversionPlan, options: ConvertOptions, ids: Sequence[int],
                stamps: Sequence[tuple[str, int, object]] | None = None) -> str:
    """A hash of everything that determines the output: source files, formats, layout, method, text, version. `stamps`: (name, size,
    checksum) of the source files, None for those of the plan's store."""
    if stamps is None:
        stamps = [(path.name, (status := os.fstat(plan.store.descriptor(path))).st_size, status.st_mtime_ns) for path in plan.store.files]
    specs = [(job.name, str(job.spec)) for job in plan.jobs]
    heads = [hashlib.sha256(file.head).hexdigest() for file in plan.files]
    copies = [(name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in sorted(companion_files(plan.folder).items())]
    parts = [__version__, stamps, specs, heads, copies, options.method, list(ids), options.spec_text,
             dict(options.source)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def container(plan: ConversionPlan, finished: Mapping[str, Mapping[str, object]], options: ConvertOptions, ids: Sequence[int]) -> Container:
    """The record (effllm.json) of a finished conversion."""
    tensors = {}
    for job in plan.jobs:
        entry = finished[job.name]
        error = error_db(entry["error"], entry["squares"]) if "error" in entry else None
        tensors[job.name] = StoredTensor(job.name, job.spec, job.shape, entry["crc32"], error)
    calibration_record: dict[str, object] = {}
    if ids:
        calibration_record = {"tokens": len(ids), "sha256": hashlib.sha256(np.array(ids, "<i8").tobytes()).hexdigest(),
                              "text": "built-in" if options.calibration_text is None else "given"}
    source = {**options.source, "dtype": plan.config.dtype, "nbytes": plan.before}
    return Container(options.spec_text, plan.bits_per_weight, tensors, source, {"name": "effllm", "version": __version__},
                     {"name": options.method}, calibration_record)


def calibration(plan: ConversionPlan, options: ConvertOptions) -> list[int]:
    """The tokens of the calibration text, empty for a method that needs none. Raises UsageError for a text that is too short or not
    needed, and for a method that does not support the model's layers."""
    method = methods.get(options.method)
    if plan.config.cross_attention_layers and (method.NEEDS or options.target is not None):
        modality = "audio" if plan.config.family == "whisper" else "images"
        raise UsageError(f"layers of this model attend to {modality}, which a calibration text does not cover",
                         "--bits 4 with --method rtn or hqq, which need no text")
    if method.equalise is not None and plan.config.moe is not None:
        raise UsageError(f"{options.method} does not support mixtures of experts", "--method gptq")
    if not method.NEEDS:
        if options.calibration_text is not None and options.target is None:
            raise UsageError(f"{options.method} needs no calibration text", "leave out --calib, or --method gptq")
        return []
    text = built_in_text() if options.calibration_text is None else options.calibration_text
    return calibration_ids(plan.folder, plan.config, text, options.calibration_tokens)


def _resume_notices(plan: ConversionPlan, writer: FolderWriter) -> Iterator[Notice]:
    if writer.resumed:
        yield Notice(f"resuming where an earlier run stopped: {len(writer.finished)} of {len(plan.jobs)} tensors are done")
    elif writer.discarded:
        yield Notice("an unfinished run with other options, another source or an older effllm is discarded: starting over")


def companion_files(folder: Path) -> dict[str, Path]:
    """Name -> file of the files that are copied unchanged. Raises UsageError for one that is unreasonably large."""
    if not folder.is_dir():
        return {}
    files = {entry.name: entry for entry in sorted(folder.iterdir())
             if entry.is_file() and any(fnmatch(entry.name, pattern) for pattern in COMPANIONS)}
    for nested, name in NESTED.items():
        if (folder / nested).is_file():
            files[name] = folder / nested
    for entry in files.values():
        if (nbytes := entry.stat().st_size) > MAX_TOKENIZER_NBYTES:
            raise UsageError(f"{entry} is {nbytes:,} bytes, too large for a file that is copied with a model", "move it elsewhere")
    return files


def check_space(out: Path, nbytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if nbytes > free:
        raise DoesNotFit(f"{out.name} needs {format_size(nbytes)} more, and the disk of {out.parent} has {format_size(free)} free",
                         "make room, or give a folder on another disk with -o")


def _class_results(plan: ConversionPlan, finished: Mapping[str, Mapping[str, object]]) -> Iterator[ClassResult]:
    for row in plan.rows():
        entries = [finished[job.name] for job in plan.jobs if job.group == row.name and "error" in finished[job.name]]
        error = error_db(sum(entry["error"] for entry in entries), sum(entry["squares"] for entry in entries)) if entries else None
        yield ClassResult(row, error if row.name in MATRICES else None)
