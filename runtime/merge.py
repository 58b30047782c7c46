"""A LoRA adapter merged into the model that it was made for: a folder as the model's, with other weights.

An adapter holds two thin matrices for each weight that it changes (Hu et al. 2021, arXiv:2106.09685):

    W' = W + s B A          A [r, K], B [N, r], s = alpha / r, or alpha / sqrt(r) (rank-stabilised, arXiv:2312.03732)
    W' = m W' / |W'|        where it has magnitudes m [N] too: rows of W' are given these lengths (DoRA, arXiv:2402.09353)

computed in float32 and rounded once, to what the weight was stored as. PEFT's adapters (`adapter_model.safetensors`) are read, and those of
mlx-lm (`adapters.safetensors`), whose matrices lie the other way round and whose s is stated. What an adapter brings whole (embeddings, a
head) takes the place of the model's. Tensors lie in files of the same names as before, and one is written some rows at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import EffllmError, UsageError, __version__
from ..offload.checkpoint import CheckpointError, TensorStore
from ..offload.header import TensorInfo, is_gguf, shown
from ..offload.shards import PlannedFile
from ..offload.writer import FolderWriter
from ..quant.weight import RAW_NUMPY, from_f32, to_f32
from .config import read_config
from .config_reader import ADAPTER as STATED
from .config_reader import read_json
from .container import read_container
from .convert import check_space, check_target, copied
from .events import Notice, Progress
from .hub import PIECES, RANKS
from .source import is_rounded

PEFT, MLX = "adapter_model.safetensors", "adapters.safetensors"
MARKER, INDEX = "config.json", "model.safetensors.index.json"
HEAD, TABLE = "lm_head", "embed_tokens"
BLOCK_NBYTES = 16 << 20  # float32 rows at once
ENDINGS = {"lora_A": "a", "lora_B": "b", "lora_a": "a", "lora_b": "b", "lora_magnitude_vector": "m", "lora_embedding_A": "a",
           "lora_embedding_B": "b", "m": "m"}
# Of adapter_config.json: what changes what the matrices mean, and is not computed here.
REFUSED = {"target_parameters": "matrices of parameters that are no weights of their own", "lora_bias": "biases of its own",
           "alora_invocation_tokens": "an adapter that begins in the midst of a text", "layer_replication": "layers that are used again",
           "trainable_token_indices": "rows of the embeddings alone", "use_bdlora": "matrices of blocks",
           "kasa_config": "weights cut by rank", "use_qalora": "matrices over groups of channels",
           "arrow_config": "a choice among adapters", "monteclora_config": "drawn matrices"}
# How an adapter may begin that is added to the model's own weights; other ways change these first.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
VOCABULARIES = ("tokenizer.json", *RANKS, PIECES)


@dataclass(frozen=True)
class Delta:
    """What is added to a weight [N, K]: a [r, K] and b [N, r] as float32, `scale`, and the lengths [N] that rows then get, or None."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    lengths: np.ndarray | None

    def onto(self, weight: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of the new weight from those of the old one, float32."""
        made = weight + self.scale * (self.b[begin:end] @ self.a)
        if self.lengths is not None:
            made *= (self.lengths[begin:end] / np.linalg.norm(made, axis=1))[:, None]
        return made


@dataclass(frozen=True)
class Merged:
    """The folder that was made, and how many of its weights the adapter changed."""

    folder: Path
    nbytes: int
    changed: int
    tensors: int

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "file_bytes": self.nbytes, "changed_tensors": self.changed, "tensors": self.tensors}


def merge(source: Path, adapter: Path, out: Path) -> Iterator[Progress | Notice | Merged]:
    """Write the model in `source` with the adapter in `adapter` as the folder `out`; the result comes last.

    Raises UsageError where `out` exists, the model is quantized or no folder, and CheckpointError where the two do not fit.
    """
    out = Path(os.path.abspath(out))
    check_target(out, None)
    config = read_config(source)
    if is_gguf(source) or read_container(source) is not None or is_rounded(source):
        raise UsageError(f"an adapter is merged into a folder of 16-bit weights, and {source} is quantized, or a GGUF file",
                         "take the original checkpoint; effllm quantize makes what comes of it small")
    own = Adapter.open(adapter)
    with own.store, TensorStore.open(source) as store:
        if config.tie_word_embeddings:
            own.tie()
        deltas, whole = own.deltas(store), own.replaced(store)
        if not deltas and not whole:
            raise CheckpointError(f"{adapter} changes no weight", "look at what it holds: its training may not have been saved")
        files = _files(store)
        sizes = sum(file.size for file in files)
        check_space(out, sizes)
        with FolderWriter(out, files, _fingerprint(store, own, files), MARKER, source.name) as writer:
            if writer.resumed:
                yield Notice("going on where an earlier run stopped")
            done, total = 0, sum(info.nbytes for info in store.tensors.values())
            for name, info in store.tensors.items():
                if name not in writer.finished:
                    _write(store, own, writer, info, deltas.get(name), whole.get(name))
                done += info.nbytes
                yield Progress("merging", done, total, "bytes", name)
            store.check_unchanged()
            own.store.check_unchanged()
            check_target(out, None)  # it may have been filled meanwhile
            beside = copied(source)
            if theirs := _vocabulary(source, adapter):
                yield Notice("the tokenizer and the chat template are those of the adapter's folder")
                beside = {name: path for name, path in beside.items() if not _is_of_text(name)} | theirs
            if (index := source / INDEX).is_file():
                beside[INDEX] = index
            beside.pop(MARKER, None)
            writer.commit(beside, {MARKER: (source / MARKER).read_text(encoding="utf-8")})
    yield Merged(out, sizes, len({*deltas, *whole}), len(store.tensors))


class Adapter:
    """A folder with an adapter. Open one with `Adapter.open`."""

    def __init__(self, store: TensorStore, stated: Mapping[str, object], is_mlx: bool) -> None:
        self.store, self.stated, self._is_mlx = store, stated, is_mlx
        self._parts: dict[str, dict[str, TensorInfo]] = {}  # module -> a, b, m
        self._others: list[TensorInfo] = []
        for name, info in store.tensors.items():
            module, _, ending = name.removesuffix(".weight").removesuffix(".default").rpartition(".")
            if (part := ENDINGS.get(ending)) is not None:
                self._parts.setdefault(_module(module), {})[part] = info
            else:
                self._others.append(info)

    @classmethod
    def open(cls, folder: Path) -> Adapter:
        """Read the headers and the config of an adapter. Raises CheckpointError, UsageError."""
        if not folder.is_dir():
            raise UsageError(f"--lora: {folder} is no folder", f"a folder with {STATED} and {PEFT}")
        path = next((folder / name for name in (PEFT, MLX) if (folder / name).is_file()), None)
        if path is None or not (folder / STATED).is_file():
            pickled = "; weights in a pickle are not opened" if (folder / "adapter_model.bin").exists() else ""
            raise UsageError(f"--lora: {folder} holds no LoRA adapter{pickled}", f"{STATED} beside {PEFT} (PEFT) or {MLX} (mlx-lm)")
        stated, is_mlx = read_json(folder / STATED), path.name == MLX
        _demand_known(stated, folder, is_mlx)
        return cls(TensorStore.of_file(path), stated, is_mlx)

    def tie(self) -> None:
        """The model's embeddings are its head: both have to be trained as one. Raises CheckpointError where they were not."""
        whole = {_whole(info.name): info for info in self._others}
        tables, heads = ([info for name, info in whole.items() if part in name] for part in (TABLE, HEAD))
        if self.stated.get("ensure_weight_tying"):  # what is said of the head says the same
            self._parts = {module: parts for module, parts in self._parts.items() if HEAD not in module}
            if tables:
                self._others = [info for info in self._others if info not in heads]
        elif not self._is_mlx and (tables or any(TABLE in module for module in self._parts)):
            same = tables and heads and not any(part in module for module in self._parts for part in (TABLE, HEAD))
            if not same or not np.array_equal(self._values(tables[0]), self._values(heads[0])):
                self._refuse("changes the embeddings and not the head in the same way, which in this model are one matrix",
                             "train with ensure_weight_tying, or merge with the program that trained it, which gives the model a head")

    def deltas(self, store: TensorStore) -> dict[str, Delta]:
        """By names of the weights that they change. Raises CheckpointError where they do not fit."""
        found = {}
        for module, parts in self._parts.items():
            info = self._weight(store, f"{module}.weight")
            if not {"a", "b"} <= parts.keys():
                self._refuse(f"holds one of the two matrices of {shown(module)} alone")
            a, b = (self._values(parts[part]) for part in "ab")
            if a.ndim != 2 or b.ndim != 2 or not a.size or not b.size:
                self._refuse(f"changes {shown(module)} by what are no two matrices: {list(a.shape)} and {list(b.shape)}")
            table = any("lora_embedding" in part.name for part in parts.values())
            if self._is_mlx or table:  # of a table PEFT has a [r, N] and b [K, r]
                a, b = (b.T, a.T) if table else (a.T, b.T)
            lengths = self._values(parts["m"]).reshape(-1) if "m" in parts else None
            if table and lengths is not None:
                self._refuse(f"has lengths for rows of {shown(module)}, a table", "merge it with the program that trained it")
            shape = (b.shape[0], a.shape[1])
            if len(info.shape) != 2 or shape != info.shape or a.shape[0] != b.shape[1] or lengths is not None and len(lengths) != shape[0]:
                self._refuse(f"changes {shown(module)} of shape {list(shape)}, in the model it is {list(info.shape)}")
            found[info.name] = Delta(np.ascontiguousarray(a), np.ascontiguousarray(b), self._scale(module, a.shape[0]), lengths)
        return found

    def replaced(self, store: TensorStore) -> dict[str, TensorInfo]:
        """What the adapter brings whole, by names of the tensors whose place it takes. Raises CheckpointError where it does not fit."""
        found, names = {}, {_whole(own.name): own for own in self._others}
        for name, own in names.items():
            if HEAD in name and name not in store.tensors and any(TABLE in other for other in names):
                continue  # the embeddings, which come as well, are the head
            info = self._weight(store, name)
            if own.shape != info.shape:
                self._refuse(f"brings {shown(name)} of shape {list(own.shape)}, in the model it is {list(info.shape)}")
            found[info.name] = own
        return found

    def _values(self, info: TensorInfo) -> np.ndarray:
        values = _floats(self.store.read(info), info).reshape(info.shape)
        if not np.isfinite(values).all():
            self._refuse(f"has NaN or infinity in {shown(info.name)}")
        return values

    def _weight(self, store: TensorStore, name: str) -> TensorInfo:
        """The model's tensor of that name, or the only one whose name ends alike from the layers on: parts of a larger model are named
        otherwise in files than in programs."""
        if (info := store.tensors.get(name)) is not None:
            return info
        tail = name[name.find("layers.") :] if "layers." in name else name.rpartition(".")[0].rpartition(".")[2] + ".weight"
        said = _words(name, tail)
        alike = [info for other, info in store.tensors.items() if (other.endswith("." + tail) or other == tail)
                 and {*filter(str.isdigit, _words(other, tail))} == {*filter(str.isdigit, said)}]
        if len(alike) > 1:  # layers of text and of images: the part is told by the words before, in whatever order
            near = [len(said & (words := _words(info.name, tail))) - len(said ^ words) for info in alike]
            alike = [info for info, score in zip(alike, near) if score == max(near)]
        if len(alike) != 1:
            tied = "the embeddings of this model are its head as well" if HEAD in name else "is it the model that it was made for?"
            self._refuse(f"changes {shown(name)}, which the model does not have", tied)
        return alike[0]

    def _scale(self, module: str, rank: int) -> float:
        """s. Ranks and alphas that are stated for some modules are matched as PEFT does: by the end of a module's name."""
        if self._is_mlx:
            return float(self.stated["lora_parameters"]["scale"])
        alpha = self.stated["lora_alpha"]
        for pattern, value in (self.stated.get("alpha_pattern") or {}).items():
            try:
                matches = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                self._refuse(f"states an alpha for {shown(pattern)}, which is no pattern: {error}")
            if matches:
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.stated.get("use_rslora") else rank)

    def _refuse(self, why: str, hint: str = "is it the model that it was made for?") -> None:
        base = self.stated.get("base_model_name_or_path" if not self._is_mlx else "model")
        named = f"{hint}{'' if hint.endswith('?') else ';'} it names {shown(base)}" if isinstance(base, str) and base else hint
        raise CheckpointError(f"{self.store.folder} {why}", named)


def _is_of_text(name: str) -> bool:
    """Does a file say how text becomes tokens, or a chat a text?"""
    return name in RANKS or name.startswith(("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template"))


def _vocabulary(source: Path, adapter: Path) -> dict[str, Path]:
    """The files about text that lie beside an adapter, which was trained with them, where they are whole and say something else."""
    theirs = {name: path for name, path in copied(adapter).items() if _is_of_text(name)}
    if "tokenizer_config.json" not in theirs or theirs.keys().isdisjoint(VOCABULARIES):
        return {}
    if _has_template(source) and not _has_template(adapter):
        return {}
    same = all((source / name).is_file() and (source / name).read_bytes() == path.read_bytes() for name, path in theirs.items())
    return {} if same else theirs


def _has_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    return any(folder.glob("chat_template*")) or settings.is_file() and b'"chat_template"' in settings.read_bytes()


def _words(name: str, tail: str) -> set[str]:
    return {*name.removesuffix(tail).split(".")} - {""}


def _module(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _whole(name: str) -> str:
    """The weight that one of an adapter takes the place of."""
    return _module(name.replace(".modules_to_save.default", "").replace(".base_layer", ""))


def _demand_known(stated: Mapping[str, object], folder: Path, is_mlx: bool) -> None:
    """Raises CheckpointError for what is not computed here."""
    def refuse(why: str) -> None:
        raise CheckpointError(f"{folder / STATED}: {why}", "merge it with the program that trained it, then take what comes of it")

    if is_mlx:
        own = stated.get("lora_parameters")
        if stated.get("fine_tune_type", "lora") not in ("lora", "dora") or not isinstance(own, dict):
            refuse(f"fine_tune_type {stated.get('fine_tune_type')!r} is no LoRA")
        if isinstance(own.get("scale"), bool) or not isinstance(own.get("scale"), int | float):
            refuse("lora_parameters states no scale")
        return
    if stated.get("peft_type") != "LORA":
        refuse(f"peft_type {stated.get('peft_type')!r} is no LoRA")
    patterns = stated.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        refuse("alpha_pattern is no object")
    alphas = {"lora_alpha": stated.get("lora_alpha"), **{f"alpha_pattern of {shown(each)}": value for each, value in patterns.items()}}
    for name, value in alphas.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(f"{name} is no number")
    if (began := stated.get("init_lora_weights")) not in BEGINNINGS:
        refuse(f"weights of the model were changed before the training (init_lora_weights = {began!r})")
    if stated.get("fan_in_fan_out"):
        refuse("weights that lie the other way round (fan_in_fan_out)")
    if stated.get("bias", "none") != "none":
        refuse(f"biases that were trained (bias = {stated['bias']!r})")
    for key, what in REFUSED.items():
        if stated.get(key):
            refuse(f"{what} ({key})")


def _files(store: TensorStore) -> tuple[PlannedFile, ...]:
    """The model's own files, laid out as they are."""
    made = []
    for path in store.files:
        fd = store.descriptor(path)
        length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        head = b""
        while len(head) < length:
            head += os.pread(fd, length - len(head), len(head))
        places = {name: info.offset for name, info in store.tensors.items() if info.file == path}
        made.append(PlannedFile(path.name, head, places, os.fstat(fd).st_size))
    return tuple(made)


def _fingerprint(store: TensorStore, adapter: Adapter, files: tuple[PlannedFile, ...]) -> str:
    """A hash of all that decides the bytes of the weights."""
    stamps = [(str(path), (status := os.fstat(each.descriptor(path))).st_size, status.st_mtime_ns)
              for each in (store, adapter.store) for path in each.files]
    heads = [hashlib.sha256(file.head).hexdigest() for file in files]
    return hashlib.sha256(json.dumps([__version__, "merge", stamps, heads, adapter.stated]).encode()).hexdigest()


def _write(store: TensorStore, adapter: Adapter, writer: FolderWriter, info: TensorInfo, delta: Delta | None,
           whole: TensorInfo | None) -> None:
    """A tensor, some rows at a time; where nothing changes it, its bytes."""
    rows, kind = info.shape[0] if info.shape else 1, info.dtype.lower()
    row_nbytes = info.nbytes // rows if rows else 0
    step = max(1, BLOCK_NBYTES // max(1, 2 * row_nbytes))
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        raw = store.read(info, begin, end) if whole is None else adapter.store.read(whole, begin, end)
        if delta is not None or whole is not None:
            values = _floats(raw, info if whole is None else whole).reshape(end - begin, *info.shape[1:])
            made = values if delta is None else delta.onto(values, begin, end)
            if not np.isfinite(made).all():
                raise EffllmError(f"{info.name}: NaN or infinity comes of the adapter", "the adapter is damaged: download it again")
            raw = np.ascontiguousarray(from_f32(made, kind)).reshape(-1).view(np.uint8)
        writer.write(info.name, begin * row_nbytes, memoryview(raw))
    writer.finish(info.name, {})


def _floats(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Bytes of a tensor as float32."""
    kind = info.dtype.lower()
    if kind not in RAW_NUMPY:
        raise CheckpointError(f"{info.file} holds {shown(info.name)} as {info.dtype}, which is not merged",
                              "take the original 16-bit checkpoint, or the adapter in 16 or 32 bits")
    return to_f32(raw.view(RAW_NUMPY[kind]), kind)
