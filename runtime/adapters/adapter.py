"""LoRA adapter folders: which weights of a model an adapter changes, and how.

An adapter holds two thin matrices per adapted weight (Hu et al. 2021, arXiv:2106.09685):

    W' = W + s B A          A [r, K], B [N, r], s = alpha / r, or alpha / sqrt(r) (rank-stabilised, arXiv:2312.03732)
    W' = m W' / |W'|        with magnitudes m [N] (DoRA, arXiv:2402.09353), rows of W' are rescaled to these norms

PEFT adapters (`adapter_model.safetensors`) are read, and those of mlx-lm (`adapters.safetensors`), whose matrices are transposed and
whose config states s. Fully trained modules in an adapter (embeddings, a head) replace the model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ... import UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import TensorInfo, shown
from ...quant.weight import RAW_NUMPY, to_f32
from ..config_reader import ADAPTER as STATED
from ..config_reader import MAX_NUMBER, read_json

PEFT, MLX = "adapter_model.safetensors", "adapters.safetensors"
DAMAGED = "the adapter is damaged: download it again"
HEAD, TABLE, FAN_IN = "lm_head", "embed_tokens", "fan_in_fan_out"
ENDINGS = {"lora_A": "a", "lora_B": "b", "lora_a": "a", "lora_b": "b", "lora_magnitude_vector": "m", "lora_embedding_A": "a",
           "lora_embedding_B": "b", "m": "m"}
# Entries of adapter_config.json that change the meaning of the matrices, and are not supported.
UNSUPPORTED = {"target_parameters": "LoRA of raw parameters", "lora_bias": "LoRA biases",
               "alora_invocation_tokens": "activated LoRA (aLoRA)", "layer_replication": "layer replication",
               "trainable_token_indices": "trained token embeddings", "use_bdlora": "block-diagonal LoRA",
               "kasa_config": "KaSA", "use_qalora": "QA-LoRA",
               "arrow_config": "Arrow routing", "monteclora_config": "MonteCLoRA"}
MAX_PATTERN, MAX_REPEATS = 256, 3  # of a pattern for module names: its length, and its repeats and groups each
# Initializations that do not change the base weights.
INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class Delta:
    """The change of a weight [N, K]."""

    a: np.ndarray  # float32 [r, K]
    b: np.ndarray  # float32 [N, r]
    scale: float
    lengths: np.ndarray | None  # DoRA magnitudes [N] of the new rows, None for plain LoRA

    def onto(self, weight: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of the new weight from those of the old one, float32."""
        rows = weight + self.scale * (self.b[begin:end] @ self.a)
        if self.lengths is not None:
            rows *= (self.lengths[begin:end] / np.linalg.norm(rows, axis=1))[:, None]
        return rows


class Adapter:
    """A folder with an adapter. Open one with `Adapter.open`."""

    def __init__(self, store: TensorStore, stated: Mapping[str, object], is_mlx: bool, tables: Collection[str] = ()) -> None:
        self.store, self.stated, self._is_mlx = store, stated, is_mlx
        self._tables = {TABLE, *tables}
        self._parts: dict[str, dict[str, TensorInfo]] = {}  # module -> a, b, m
        self._others: list[TensorInfo] = []
        for name, info in store.tensors.items():
            module, _, ending = name.removesuffix(".weight").removesuffix(".default").rpartition(".")
            if (part := ENDINGS.get(ending)) is not None:
                parts = self._parts.setdefault(_module(module), {})
                if part in parts:
                    self._refuse(f"holds a matrix of {shown(_module(module))} twice", DAMAGED)
                parts[part] = info
            else:
                self._others.append(info)

    @classmethod
    def open(cls, folder: Path, turned_over: bool = False, tables: Collection[str] = ()) -> Adapter:
        """Read the headers and the config of an adapter. Raises CheckpointError, UsageError.

        turned_over: the model's weights are stored inputs before outputs, which PEFT states too; the adapter's matrices are as usual.
        tables: further names of the model's embeddings.
        """
        if not folder.is_dir():
            raise UsageError(f"--lora: {folder} is not a folder", f"a folder with {STATED} and {PEFT}, or a GGUF file")
        path = next((folder / name for name in (PEFT, MLX) if (folder / name).is_file()), None)
        if path is None or not (folder / STATED).is_file():
            pickled = "; weights in a pickle are not opened" if (folder / "adapter_model.bin").exists() else ""
            raise UsageError(f"--lora: {folder} holds no LoRA adapter{pickled}", f"{STATED} beside {PEFT} (PEFT) or {MLX} (mlx-lm)")
        stated, is_mlx = read_json(folder / STATED), path.name == MLX
        _check_supported(stated if not turned_over else {**stated, FAN_IN: False}, folder, is_mlx)
        store = TensorStore.of_file(path)
        try:
            return cls(store, stated, is_mlx, tables)
        except CheckpointError:
            store.close()
            raise

    @property
    def replaced_names(self) -> list[str]:
        """Names of weights that modules in the adapter replace."""
        return [_replaced_name(info.name) for info in self._others]

    def tie(self) -> None:
        """Prepare for a model whose embeddings are its head. Raises CheckpointError if the adapter was not trained for that."""
        by_name = {_replaced_name(info.name): info for info in self._others}
        tables, heads = ([info for name, info in by_name.items() if is_one(name)] for is_one in (self._is_table, _is_head))
        if self.stated.get("ensure_weight_tying"):  # the head's entries duplicate those of the embeddings
            self._parts = {module: parts for module, parts in self._parts.items() if HEAD not in module}
            if tables:
                self._others = [info for info in self._others if info not in heads]
        elif not self._is_mlx and (tables or any(map(self._is_table, self._parts))):
            both_replaced = tables and heads and not any(self._is_table(module) or _is_head(module) for module in self._parts)
            if not both_replaced or not np.array_equal(self._values(tables[0]), self._values(heads[0])):
                self._refuse("changes the embeddings but not the tied output head in the same way",
                             "train with ensure_weight_tying, or merge it with the program that trained it, which unties the head")

    def deltas(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Delta]]:
        """(name of a weight, its change), read one after the other. `shapes`: of the model's weights. Raises CheckpointError for changes
        that do not match them."""
        seen: set[str] = set()
        for module, parts in self._parts.items():
            name = self._weight(shapes, f"{module}.weight")
            if name in seen:
                self._refuse(f"changes {shown(name)} twice", DAMAGED)
            seen.add(name)
            if not {"a", "b"} <= parts.keys():
                self._refuse(f"holds only one of the two LoRA matrices of {shown(module)}")
            a, b = (self._values(parts[part]) for part in "ab")
            if a.ndim != 2 or b.ndim != 2 or not a.size or not b.size:
                self._refuse(f"changes {shown(module)} with factors that are not matrices: {list(a.shape)} and {list(b.shape)}")
            is_table = any("lora_embedding" in part.name for part in parts.values())
            if self._is_mlx or is_table:  # PEFT's matrices of an embedding table are a [r, N] and b [K, r]
                a, b = (b.T, a.T) if is_table else (a.T, b.T)
            lengths = self._values(parts["m"]).reshape(-1) if "m" in parts else None
            if is_table and lengths is not None:
                self._refuse(f"has DoRA magnitudes for {shown(module)}, an embedding table", "merge it with the program that trained it")
            shape = (b.shape[0], a.shape[1])
            expected, ranks = shapes[name], {a.shape[0], b.shape[1]}
            if len(expected) != 2 or shape != tuple(expected) or len(ranks) > 1 or lengths is not None and len(lengths) != shape[0]:
                self._refuse(f"changes {shown(module)} of shape {list(shape)}, but the model has {list(expected)}")
            yield name, Delta(np.ascontiguousarray(a), np.ascontiguousarray(b), self._scale(module, a.shape[0]), lengths)

    def replaced(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        """By name of the model's tensor, the module of the adapter that replaces it. Raises CheckpointError for one that does not fit."""
        result, by_name = {}, {_replaced_name(info.name): info for info in self._others}
        for name, info in by_name.items():
            if HEAD in name and name not in shapes and any(map(self._is_table, by_name)):
                continue  # the model's head is its embeddings, which the adapter replaces too
            replaced = self._weight(shapes, name)
            if tuple(info.shape) != tuple(shapes[replaced]):
                self._refuse(f"replaces {shown(name)} with shape {list(info.shape)}, but the model has {list(shapes[replaced])}")
            result[replaced] = info
        return result

    def _is_table(self, name: str) -> bool:
        return not self._tables.isdisjoint(name.removesuffix(".weight").split("."))

    def _values(self, info: TensorInfo) -> np.ndarray:
        values = floats(self.store.read(info), info).reshape(info.shape)
        if not np.isfinite(values).all():
            self._refuse(f"has NaN or infinity in {shown(info.name)}", DAMAGED)
        return values

    def _weight(self, shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
        """The name of the model's tensor. Raises CheckpointError if there is none."""
        matches = matching_names(shapes, name)
        if len(matches) != 1:
            tied = "this model's output head is tied to its embeddings" if HEAD in name else "is this its base model?"
            self._refuse(f"changes {shown(name)}, which the model does not have", tied)
        return matches[0]

    def _scale(self, module: str, rank: int) -> float:
        """s. `alpha_pattern` is matched as PEFT does: with the end of a module's name."""
        if self._is_mlx:
            return float(self.stated["lora_parameters"]["scale"])
        alpha = self.stated["lora_alpha"]
        for pattern, value in (self.stated.get("alpha_pattern") or {}).items():
            try:
                matches = re.match(rf"(.*\.)?({pattern})$", module)
            except (re.error, OverflowError) as error:
                self._refuse(f"has an alpha_pattern {shown(pattern)} that is not a regular expression: {error}")
            if matches:
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.stated.get("use_rslora") else rank)

    def _refuse(self, why: str, hint: str = "is this its base model?") -> None:
        base = self.stated.get("base_model_name_or_path" if not self._is_mlx else "model")
        full_hint = f"{hint}{'' if hint.endswith('?') else ';'} it names {shown(base)}" if isinstance(base, str) and base else hint
        raise CheckpointError(f"{self.store.folder} {why}", full_hint)


def matching_names(names: Collection[str], name: str) -> list[str]:
    """The entries of `names` that mean the same weight: `name`, or those that end in the same way from the layers on, because files name
    the parts of a larger model in another way than programs. More than one if it is ambiguous."""
    if name in names:
        return [name]
    tail = name[name.find("layers.") :] if "layers." in name else name.rpartition(".")[0].rpartition(".")[2] + ".weight"
    prefix_words = _words(name, tail)
    matches = [other for other in names if (other.endswith("." + tail) or other == tail)
               and {*filter(str.isdigit, _words(other, tail))} == {*filter(str.isdigit, prefix_words)}]
    if len(matches) > 1:  # layers of text and of images: the words of the prefix decide, in any order
        scores = [len(prefix_words & (words := _words(other, tail))) - len(prefix_words ^ words) for other in matches]
        matches = [other for other, score in zip(matches, scores) if score == max(scores)]
    return matches


def _is_head(name: str) -> bool:
    return HEAD in name


def _words(name: str, tail: str) -> set[str]:
    return {*name.removesuffix(tail).split(".")} - {""}


def _module(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _replaced_name(name: str) -> str:
    """The name of the weight that a module of an adapter replaces."""
    return _module(name.replace(".modules_to_save.default", "").replace(".base_layer", ""))


def _check_supported(stated: Mapping[str, object], folder: Path, is_mlx: bool) -> None:
    """Raises CheckpointError for kinds of adapters that are not supported."""
    def refuse(why: str) -> None:
        raise CheckpointError(f"{folder / STATED}: {why}", "merge it with the program that trained it, then use the result")

    if is_mlx:
        parameters = stated.get("lora_parameters")
        if stated.get("fine_tune_type", "lora") not in ("lora", "dora") or not isinstance(parameters, dict):
            refuse(f"fine_tune_type {stated.get('fine_tune_type')!r} is not LoRA")
        if not _is_number(parameters.get("scale")):
            refuse("lora_parameters states no scale")
        return
    if stated.get("peft_type") != "LORA":
        refuse(f"peft_type {stated.get('peft_type')!r} is not LoRA")
    patterns = stated.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        refuse("alpha_pattern is not an object")
    alphas = {"lora_alpha": stated.get("lora_alpha"), **{f"alpha_pattern of {shown(key)}": value for key, value in patterns.items()}}
    for name, value in alphas.items():
        if not _is_number(value):
            refuse(f"{name} is not a number, or is out of range")
    for pattern in patterns:
        if not is_quick(pattern):
            refuse(f"alpha_pattern {shown(pattern)} could take hours to match")
    if (initialization := stated.get("init_lora_weights")) not in INITIALIZATIONS:
        refuse(f"the initialization changed the base weights (init_lora_weights = {initialization!r})")
    if stated.get(FAN_IN):
        refuse(f"transposed weights are not supported ({FAN_IN})")
    if stated.get("bias", "none") != "none":
        refuse(f"trained biases are not supported (bias = {stated['bias']!r})")
    for key, what in UNSUPPORTED.items():
        if stated.get(key):
            refuse(f"{key} ({what}) is not supported")


def _is_number(value: object) -> bool:
    """Whether it is a finite number within the range of floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def is_quick(pattern: str) -> bool:
    """Whether a regular expression is safe from catastrophic backtracking: Python's `re` tries every combination of nested and repeated
    quantifiers."""
    bare = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)  # escaped characters are literals
    return (len(bare) <= MAX_PATTERN and len(re.findall(r"(?<!\()[*+?{]", bare)) <= MAX_REPEATS and bare.count("(") <= MAX_REPEATS
            and re.search(r"\)[*+{]", bare) is None)


def floats(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Bytes of a tensor as float32."""
    kind = info.dtype.lower()
    if kind not in RAW_NUMPY:
        raise CheckpointError(f"{info.file} holds {shown(info.name)} as {info.dtype}, which cannot be merged",
                              "use the original 16-bit checkpoint, or the adapter in 16 or 32 bits")
    return to_f32(raw.view(RAW_NUMPY[kind]), kind)
