"""Validated access to `config.json`, which is hostile input: type and range of each value are checked before it sizes anything.

`Keys` records which keys are read: one that a family neither reads nor lists as known is reported as unknown. A JSON `true` is not a number
here, and neither is NaN (which Python's parser accepts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from .. import EffllmError, ModelNotFound, ls, typed
from .files.bounded_read import IrregularFile, read_bounded

ADAPTER = "adapter_config.json"  # what a LoRA adapter has instead of config.json
FILE_LIMIT = 10 * 2**20  # bytes
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # bounds of positive numbers, so that their inverses are representable in float32 too
REQUIRED = object()  # sentinel default: the key must be present
# Older name of a layer type -> its present name in transformers.
RENAMED_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention", **dict.fromkeys(
    ("deepseek_sparse_attention", "qwen_sparse_attention", "sparse_attention"), "indexed_attention")}
T = TypeVar("T")
REFETCH_HINT = "correct it there, or fetch the file again"


class ConfigError(EffllmError):
    """The model's config is malformed, out of range, or requires something unsupported."""

    def __init__(self, message: str, hint: str = REFETCH_HINT) -> None:
        super().__init__(message, hint)


def show(value: object) -> str:
    """A value from a file for an error message: control characters escaped, length bounded."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def json_problem(error: Exception) -> str:
    """Where and why a text is not JSON, as the end of an error message; empty if the decoder does not say."""
    return f" (line {error.lineno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""


def show_name(name: str) -> str:
    """A name or path that the user typed, for an error message: not truncated, since the mistake is usually at the end."""
    text = repr(name)
    return text if len(text) <= 400 else f"{text[:100]}...{text[-250:]}"


def is_count(value: object) -> bool:
    """Whether a value from a file is a valid count, also of bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


# A model_type used by several architectures -> class name in `architectures` -> our model_type for it.
SHARED_MODEL_TYPES = {"deepseek_vl_v2": {"DeepseekOCRForCausalLM": "deepseek_ocr", "DeepseekOCR2ForCausalLM": "deepseek_ocr2"}}


def resolve_shared_model_type(raw: Mapping[str, object]) -> dict[str, object]:
    """A copy of the config. A model_type that several architectures share is replaced by the one for the class in `architectures`."""
    model_types, architectures = SHARED_MODEL_TYPES.get(str(raw.get("model_type")), {}), raw.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if str(name) in model_types:
            return {**raw, "model_type": model_types[str(name)]}
    return dict(raw)


def read_model(folder: Path) -> dict[str, object]:
    """The config.json of a folder, with its model_type resolved by `resolve_shared_model_type`. Raises like `read_json`."""
    return resolve_shared_model_type(read_json(folder / "config.json"))


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of at most FILE_LIMIT bytes. Raises ModelNotFound if none can be read, ConfigError for anything else."""
    try:
        text = read_bounded(path, FILE_LIMIT)
    except IrregularFile as error:
        raise ConfigError(f"{path} is {error.strerror}") from error
    except FileNotFoundError as error:
        if (path.parent / ADAPTER).exists():
            raise ModelNotFound(f"{path.parent} holds a LoRA adapter, not a model",
                                f"effllm export MODEL -o DIR --lora {typed(path.parent)} merges it into its model") from error
        if path.parent.is_dir():
            raise ModelNotFound(f"{path.parent} has no {path.name}, so it is not a model folder",
                                "a model folder holds config.json, tokenizer.json and *.safetensors") from error
        raise ModelNotFound(f"there is no folder {path.parent}", "effllm list shows the models that are here") from error
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}", f"check its permissions: {ls(path)}") from error
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:  # the decoder's own errors are ValueErrors
        raise ConfigError(f"{path} is not valid JSON{json_problem(error)}", "the download may be incomplete") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, not a JSON object")
    return raw


class Keys:
    """Typed access to a JSON object.

    A value of null counts as absent: a method then returns its default, or raises if that is REQUIRED. All methods raise ConfigError.
    """

    def __init__(self, raw: Mapping[str, object], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where  # file and section, the beginning of every error message
        self.accessed: set[str] = set()  # keys that were read or marked as known

    def with_values(self, **values: object) -> Keys:
        """A copy with some values overridden, which shares `accessed` with the original."""
        keys = Keys({**self.raw, **values}, self.where)
        keys.accessed = self.accessed
        return keys

    def mark_known(self, *names: str) -> None:
        """Mark keys as known without reading them."""
        self.accessed.update(names)

    def _get(self, name: str, default: object) -> object:
        self.accessed.add(name)
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default

    def fail(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {show(self.raw.get(name))}, expected {expected}")

    def has(self, name: str) -> bool:
        """Whether the key is present, null included."""
        self.accessed.add(name)
        return name in self.raw

    def integer(self, name: str, default: object = REQUIRED, low: int = 1, high: int = 2**31) -> int:
        """A whole number from `low` to `high`."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: object = REQUIRED, above: float = 0.0) -> float:
        """A number greater than `above`, within MIN_NUMBER and MAX_NUMBER."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not max(above, MIN_NUMBER) < value < MAX_NUMBER:
            extreme = isinstance(value, int | float) and not isinstance(value, bool) and value > above
            raise self.fail(name, f"a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}" if extreme else f"a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: object = REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: object = REQUIRED) -> str:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def choice(self, name: str, table: Mapping[str, T], default: str) -> T:
        """The entry of `table` that the key's string names."""
        value = self.text(name, default)
        if value not in table:
            raise ConfigError(f"{self.where}: {name} {show(value)} is not supported", f"known: {', '.join(table)}")
        return table[value]

    def section(self, name: str) -> Mapping[str, object] | None:
        """A nested object, None when absent or empty."""
        value = self._get(name, None)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, "an object")
        return value or None

    def numbers(self, name: str, length: int, or_zero: bool = False) -> tuple[float, ...]:
        """A list of exactly `length` positive numbers; with `or_zero` they may be 0."""
        value = self._get(name, REQUIRED)
        if not isinstance(value, list) or len(value) != length:
            raise self.fail(name, f"a list of {length} numbers")
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not (MIN_NUMBER < v < MAX_NUMBER or or_zero and v == 0)
               for v in value):
            raise self.fail(name, f"a list of {length} {'numbers of 0 or more' if or_zero else 'positive numbers'}")
        return tuple(float(v) for v in value)

    def flags(self, name: str, length: int) -> tuple[bool, ...] | None:
        """A list of exactly `length` zeros and ones, None if absent."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(type(v) in (int, bool) and v in (0, 1) for v in value):
            raise self.fail(name, f"a list of {length} zeros and ones")
        return tuple(map(bool, value))

    def layers(self, name: str, count: int) -> frozenset[int]:
        """A list of layer numbers below `count`; empty if absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < count for v in value):
            raise self.fail(name, f"a list of layers from 0 to {count - 1}")
        return frozenset(value)

    def layer_indices(self, name: str, count: int) -> tuple[int, ...] | None:
        """A list of exactly `count` layer numbers, None if absent."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(type(v) is int and 0 <= v < count for v in value):
            raise self.fail(name, f"a list of {count} layers from 0 to {count - 1}")
        return tuple(value)

    def strings(self, name: str, length: int) -> tuple[str, ...] | None:
        """A list of exactly `length` strings, None if absent."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise self.fail(name, f"a list of {length} strings")
        return tuple(value)

    def layer_types(self, name: str, length: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """A list of exactly `length` layer types, all of them `known`, with older names replaced by present ones; None if absent."""
        stated = self.strings(name, length)
        if stated is None:
            return None
        for layer_type in stated:
            if layer_type not in known and RENAMED_LAYER_TYPES.get(layer_type) not in known:
                raise ConfigError(f"{self.where}: {name} holds {show(layer_type)}, which is not supported", f"known: {', '.join(known)}")
        return tuple(layer_type if layer_type in known else RENAMED_LAYER_TYPES[layer_type] for layer_type in stated)

    def token_ids(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Token ids, from one number or a list; `default` if the key is absent, empty if it is null."""
        if name in self.raw and self.raw[name] is None:
            default = ()
        value = self._get(name, default)
        ids = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in ids):
            raise self.fail(name, "a token id or a list of token ids")
        return tuple(ids)


def special_tokens(keys: Keys, bos: int | None, eos: tuple[int, ...], vocab: int) -> tuple[int | None, tuple[int, ...], tuple[str, ...]]:
    """(BOS id, EOS ids, warnings). `bos` and `eos` are the family's defaults.

    An id outside the vocabulary can never be generated: it is dropped, with a warning if it comes from the file."""
    warnings: list[str] = []
    resolved: dict[str, tuple[int, ...]] = {}
    for name, default in (("bos_token_id", () if bos is None else (bos,)), ("eos_token_id", eos)):
        ids = keys.token_ids(name, default)
        resolved[name] = tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))
        if len(resolved[name]) < len(set(ids)) and keys.raw.get(name) is not None:
            warnings.append(f"config.json: {name} {show(keys.raw[name])} is outside the vocabulary of {vocab} and is ignored")
    return (resolved["bos_token_id"] or (None,))[0], resolved["eos_token_id"], tuple(warnings)
