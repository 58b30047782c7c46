"""A model written in the compressed-tensors layout, which transformers, vLLM and SGLang read.

The matrices of the layers are integers of 4 or 8 bits in groups of 128 inputs, everything else is as it was; config.json describes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from .. import EffllmError, UsageError, __version__
from ..offload.checkpoint import TensorStore
from ..offload.shards import SINGLE, PlannedFile
from ..offload.writer import FolderWriter
from ..quant.imports.compressed_tensors import WORD, pack_words, quantize_groups
from ..quant.weight import RAW_NUMPY, from_f32, to_f32
from .config import read_config
from .container import DTYPES, read_container
from .convert import check_target, copied
from .events import Notice, Progress
from .model import ModelTensor, check_tensors
from .source import folder_files, open_store

KINDS = {"INT4": 4, "INT8": 8}
GROUP = 128
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
BLOCK_NBYTES = 16 << 20  # float32 rows at once
MARKER = "config.json"


@dataclass(frozen=True)
class CompressedFolder:
    """The folder that was made."""

    folder: Path
    nbytes: int
    quantized: int
    kept: int

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "file_bytes": self.nbytes, "quantized_tensors": self.quantized, "kept_tensors": self.kept}


def export_compressed(source: Path, out: Path, kind: str) -> Iterator[Progress | Notice | CompressedFolder]:
    """Write the model in `source` as the folder `out`; the result comes last.

    Raises UsageError where `out` exists, `kind` is unknown, the source is quantized already, or a row is no multiple of GROUP.
    """
    if kind not in KINDS:
        raise UsageError(f"no compressed-tensors type {kind!r} is written", f"known: {', '.join(KINDS)}")
    out = Path(os.path.abspath(out))
    check_target(out, False)
    if (made := read_container(source)) is not None:
        raise UsageError(f"{source} is quantized already ({made.spec_text})", "export the original checkpoint")
    config, bits = read_config(source), KINDS[kind]
    if config.family == "gpt_oss":
        raise UsageError("gpt_oss models are not written as compressed-tensors: other tools want their experts joined",
                         "effllm quantize makes a folder for effllm")
    with open_store(source, wide="f32") as store:
        tensors = {tensor.name: (role, tensor) for roles in check_tensors(config, store).values() for role, tensor in roles.items()}
        low = {name for name, (role, _) in tensors.items() if role in LINEARS}
        for name in low:
            if tensors[name][1].shape[1] % GROUP:
                raise UsageError(f"{name} has rows of {tensors[name][1].shape[1]}, which are no multiple of {GROUP}", "export as GGUF")
        entries = {}
        for name, (_, tensor) in tensors.items():
            entries |= _entries(name, tensor, bits if name in low else 0)
        file = _planned(entries)
        done, total = 0, sum(tensor.nbytes for _, tensor in tensors.values())
        with FolderWriter(out, [file], _fingerprint(store, source, kind, file), MARKER) as writer:
            if writer.resumed:
                yield Notice("going on where an earlier run stopped")
            if writer.discarded:
                yield Notice("an unfinished run of another type, another source or an older effllm was left here: starting afresh")
            for name, (_, tensor) in tensors.items():
                if not all(part in writer.finished for part in _entries(name, tensor, bits if name in low else 0)):
                    _write(store, writer, tensor, bits if name in low else 0)
                done += tensor.nbytes
                yield Progress("exporting", done, total, "bytes", name)
            store.check_unchanged()
            texts = folder_files(source)
            raw = json.loads(texts["config.json"] if texts else (source / "config.json").read_text(encoding="utf-8"))
            texts["config.json"] = json.dumps(raw | {"quantization_config": quantization_config(bits)}, indent=1) + "\n"
            files = copied(source)
            files.pop("config.json", None)
            writer.commit(files, texts)
    yield CompressedFolder(out, file.size, len(low), len(tensors) - len(low))


def quantization_config(bits: int) -> dict[str, object]:
    """The section of config.json."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False,
               "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None}


def _fingerprint(store: TensorStore, source: Path, kind: str, file: PlannedFile) -> str:
    """A hash of all that decides the bytes of the weights."""
    stamps = [(path.name, (status := os.fstat(store.descriptor(path))).st_size, status.st_mtime_ns) for path in store.files]
    parts = [__version__, str(source), kind, stamps, hashlib.sha256(file.head).hexdigest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _entries(name: str, tensor: ModelTensor, bits: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> dtype, shape and bytes of what a tensor becomes; `bits` 0 keeps it."""
    if not bits:
        return {name: (DTYPES[tensor.spec.scheme], tensor.shape, tensor.nbytes)}
    n, k = tensor.shape
    base, words = name.removesuffix("weight"), -(-k * bits // WORD)
    return {f"{base}weight_packed": ("I32", (n, words), 4 * n * words),
            f"{base}weight_scale": ("BF16", (n, k // GROUP), 2 * n * k // GROUP), f"{base}weight_shape": ("I64", (2,), 16)}


def _planned(entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> PlannedFile:
    """One file without padding between tensors, which other readers would take for tensors; the largest items first keep all aligned."""
    order = sorted(entries, key=lambda name: -{"I64": 8, "I32": 4, "F32": 4}.get(entries[name][0], 2))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, {}
    for name in order:
        dtype, shape, nbytes = entries[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        starts[name], at = at, at + nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return PlannedFile(SINGLE, head, {name: len(head) + start for name, start in starts.items()}, len(head) + at)


def _write(store: TensorStore, writer: FolderWriter, tensor: ModelTensor, bits: int) -> None:
    """A tensor, some rows at a time."""
    rows = tensor.shape[0]
    step = max(1, BLOCK_NBYTES // 4 // max(1, prod(tensor.shape[1:])))
    scheme, base = tensor.spec.scheme, tensor.name.removesuffix("weight")
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        raw = store.read(tensor.info, begin, end)
        values = to_f32(raw.view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)
        if not np.isfinite(values).all():
            raise EffllmError(f"{tensor.name}: NaN or infinity", "the checkpoint is damaged: download it again, or ask who published it")
        if not bits:
            writer.write(tensor.name, begin * (tensor.nbytes // rows), memoryview(raw))
            continue
        codes, scales = quantize_groups(values, bits, GROUP)
        words, stored = pack_words(codes, bits), from_f32(scales, "bf16")
        writer.write(f"{base}weight_packed", begin * 4 * words.shape[1], memoryview(words))
        writer.write(f"{base}weight_scale", begin * 2 * stored.shape[1], memoryview(np.ascontiguousarray(stored)))
    if bits:
        writer.write(f"{base}weight_shape", 0, np.array(tensor.shape, "<i8").tobytes())
    for part in _entries(tensor.name, tensor, bits):
        writer.finish(part, {})
