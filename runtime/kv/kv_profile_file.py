"""`kv_profile.json` beside a model's weights, and its arrays in plain float32; both are validated on read.

The JSON names the model and weights, the costs, and the size and SHA-256 of the arrays. It is written last, so a profile that exists is
complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ... import EffllmError, UsageError, not_written, typed
from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import is_gguf
from ...quant.kv_basis import KVBasis
from ...quant.kv_bits import SIDES
from ...quant.kv_noise_cost import MOST_TRIED, extrapolated_costs
from ...quant.kv_sink_split import SINK_SPLITS
from ..config import ModelConfig
from ..config_reader import read_json
from ..files.atomic_write import atomic_file, check_writable
from ..files.model_folder_files import KV_ARRAYS, KV_PROFILE
from ..source import open_weights
from .kv_profile import Profile

FILE, ARRAYS = KV_PROFILE, KV_ARRAYS
FORMAT, VERSION = "effllm-kv-profile", 2
BITS = {1: [bits for bits in SIDES if bits <= 8], 2: list(SIDES)}  # the bits whose costs each profile version contains
MAX_COST = 1e30  # keeps sums finite
SAMPLE_NBYTES = 4096  # from each end of a tensor, for the weights' identity
REMEDY = "effllm eval kv-profile {}"


def profile_paths(path: Path) -> tuple[Path, Path]:
    """The paths of a model's profile (folder or GGUF file): its JSON, its arrays."""
    if is_gguf(path):
        return path.with_name(f"{path.name}.{FILE}"), path.with_name(f"{path.name}.{ARRAYS}")
    return path / FILE, path / ARRAYS


def identity(store: TensorStore) -> str:
    """The identity of a model's weights: SHA-256 over every tensor's name, type, shape, and first and last bytes (a fine-tune may change
    only the embeddings of reserved tokens, at the end). Not proof against forgery."""
    digest = hashlib.sha256()
    for name, info in sorted(store.tensors.items()):
        digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        rows = info.shape[0] if info.shape else 1
        if rows and info.nbytes:
            count = max(1, min(rows, SAMPLE_NBYTES * rows // info.nbytes))
            digest.update(store.read(info, 0, count)[:SAMPLE_NBYTES].tobytes())
            digest.update(store.read(info, rows - count, rows)[-SAMPLE_NBYTES:].tobytes())
    return digest.hexdigest()


def refuse_unwritable(path: Path) -> None:
    """Raises EffllmError up front if no profile can be written beside the model at `path`, instead of after a minute of work."""
    target, _ = profile_paths(path)
    try:
        check_writable(target)
    except OSError as error:
        raise _not_saved(error, target) from error


def _not_saved(error: OSError, target: Path) -> EffllmError:
    return not_written(error, f"{target} cannot be written", "copy the model to a folder that you can write to")


def save_profile(profile: Profile, path: Path) -> Path:
    """Write the profile of the model at `path`; returns the JSON's path. Raises EffllmError."""
    target, arrays = profile_paths(path)
    parts = [part for basis in profile.layers for part in _parts(basis)]
    raw = b"".join(np.ascontiguousarray(part, "<f4").tobytes() for part in parts)
    content = {
        "format": FORMAT, "version": VERSION, **_model_fields([basis.k_scale.shape for basis in profile.layers]),
        "weights": profile.weights, "tokens": profile.tokens,
        "checks": [list(check) for check in profile.checks], "auto": profile.auto, "ends": list(profile.ends),
        "arrays": {"nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}, "bits": list(SIDES),
        "costs": [None if cost is None else [np.asarray(side).tolist() for side in cost] for cost in profile.costs],
    }
    try:
        # written so that a full disk keeps the previous profile
        with atomic_file(target) as json_file, atomic_file(arrays) as array_file:
            json_file.write(json.dumps({**content, "sha256": _own_hash(content)}).encode())
            json_file.flush()
            array_file.write(raw)
    except OSError as error:
        raise _not_saved(error, target) from error
    return target


def load_profile(path: Path, config: ModelConfig, store: TensorStore | None = None) -> Profile | None:
    """The profile of the model at `path`, None if there is none.

    store: the model's weights, if open

    Raises UsageError for a profile of another model, of other weights, of a newer version, or damaged.
    """
    target, arrays = profile_paths(path)
    if not target.exists():
        return None
    hint = REMEDY.format(typed(path))
    try:
        raw = read_json(target)
    except EffllmError as error:  # the usual hint for a bad config, downloading again, does not apply here
        raise UsageError(str(error), f"remove it, or {hint}") from error
    if raw.get("format") != FORMAT:
        raise UsageError(f"{target} is not a KV profile", f"remove it, or {hint}")
    version = raw.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version not in BITS:
        raise UsageError(f"{target} is of version {version!r}, this effllm reads {VERSION}", hint)
    shapes, expected = config.cache_kv_heads, _model_fields(config.cache_kv_heads)
    recorded = {key: raw.get(key) for key in expected}
    if recorded != expected:
        raise UsageError(f"{target} is of another model: {_describe(recorded)}, this one has {_describe(expected)}", hint)
    # Blocks of a GGUF file may have been widened; a plan for weights that are not here has no bytes to check.
    weights = identity(store) if isinstance(store, TensorStore) and not is_gguf(path) else identity_of(path)
    if raw.get("weights") != weights:
        raise UsageError(f"{target} was recorded with other weights than those beside it", hint)
    bits, tokens, checks, auto = raw.get("bits"), raw.get("tokens"), raw.get("checks", []), raw.get("auto")
    costs = _costs(raw.get("costs"), shapes, len(bits)) if bits == BITS[version] else None
    ends = raw.get("ends", list(SINK_SPLITS[0]))  # absent from older profiles
    is_valid = costs is not None and isinstance(tokens, int) and tokens >= 0 and _are_rows(checks, 3)
    if not is_valid or not (auto is None or auto in SIDES) or ends not in map(list, SINK_SPLITS):
        raise UsageError(f"{target} is damaged", hint)
    hashed = {key: value for key, value in raw.items() if key != "sha256"}
    if "sha256" in raw and raw["sha256"] != _own_hash(hashed):  # absent from older profiles
        raise UsageError(f"{target} is damaged: its checksum does not match", hint)
    values = np.frombuffer(_array_bytes(arrays, raw.get("arrays"), shapes, hint), "<f4")
    if not np.isfinite(values).all():  # bit allocation would not terminate on values that cannot be compared
        raise UsageError(f"{arrays} holds NaN or infinity", hint)
    bases = _bases(values, shapes, [cost is None for cost in costs])
    if not all(map(_is_invertible, bases)):
        raise UsageError(f"{arrays} holds a singular matrix", hint)
    if version < VERSION:
        costs = tuple(cost and _extrapolate(cost, basis) for cost, basis in zip(costs, bases, strict=True))
        if not all(np.isfinite(side).all() for cost in costs for side in cost or ()):
            raise UsageError(f"{arrays} holds invalid strengths", hint)
    return Profile(tuple(bases), costs, weights, tokens, tuple(tuple(map(float, check)) for check in checks), auto, tuple(ends))


def _own_hash(content: Mapping[str, object]) -> str:
    """SHA-256 of the profile's JSON, without this field."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _model_fields(shapes: Sequence[tuple[int, int]]) -> dict[str, object]:
    """The layers, KV heads and head sizes; lists by layer where layers differ."""
    heads, sizes = ([int(value) for value in column] for column in zip(*shapes, strict=True))
    if len(set(shapes)) > 1:
        return {"layers": len(shapes), "kv_heads": heads, "head_dim": sizes}
    return {"layers": len(shapes), "kv_heads": heads[0], "head_dim": sizes[0]}


def _describe(fields: Mapping[str, object]) -> str:
    return "{layers} layers of {kv_heads} KV heads of {head_dim}".format(**fields)


def identity_of(path: Path) -> str:
    """`identity` of the model at `path`."""
    store, _ = open_weights(path)
    with store:
        return identity(store)


def _parts(basis: KVBasis) -> list[np.ndarray]:
    heads, groups = len(basis.k_scale), basis.k_scale.shape[1] // 16
    zeros = np.zeros((heads, groups), np.float32)
    strengths = (zeros if side is None else side for side in (basis.strength_k, basis.strength_v))
    return [basis.k_scale, basis.k_matrix, basis.v_matrix, *strengths]


def _shapes(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes of `_parts` for one layer."""
    heads, size = shape
    return [(heads, size), (heads, size, size), (heads, size, size), (heads, size // 16), (heads, size // 16)]


def _array_bytes(path: Path, entry: object, shapes: Sequence[tuple[int, int]], hint: str) -> bytes:
    """The bytes of the arrays' file. `entry`: its size and SHA-256 from the profile. Raises UsageError if they differ."""
    expected = 4 * sum(int(np.prod(part)) for shape in shapes for part in _shapes(shape))
    if not isinstance(entry, Mapping) or entry.get("nbytes") != expected:
        raise UsageError(f"{path} should have {expected} bytes for this model, but its profile states another size", hint)
    try:
        if path.stat().st_size != expected:
            raise UsageError(f"{path} has {path.stat().st_size} bytes, expected {expected}", hint)
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error
    if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise UsageError(f"{path} is damaged: its checksum does not match the profile", hint)
    return data


def _bases(values: np.ndarray, shapes: Sequence[tuple[int, int]], has_no_cost: Sequence[bool]) -> list[KVBasis]:
    offset, bases = 0, []
    for layer, shape in enumerate(shapes):
        parts = []
        for part in _shapes(shape):
            count = int(np.prod(part))
            parts.append(values[offset : offset + count].reshape(part).astype(np.float32))
            offset += count
        k_scale, k_matrix, v_matrix, *strengths = parts
        bases.append(KVBasis(k_scale, k_matrix, v_matrix, None, *([None, None] if has_no_cost[layer] else strengths)))
    return bases


def _is_invertible(basis: KVBasis) -> bool:
    """Whether the transforms of queries and outputs invert those of keys and values."""
    try:
        return bool(np.isfinite(basis.k_inverse).all() and np.isfinite(basis.v_inverse).all() and (basis.k_scale > 0).all())
    except np.linalg.LinAlgError:
        return False


def _extrapolate(cost: tuple[np.ndarray, np.ndarray], basis: KVBasis) -> tuple[np.ndarray, np.ndarray]:
    k, v = (extrapolated_costs(side[:, : SIDES.index(MOST_TRIED) + 1], strength)
            for side, strength in zip(cost, (basis.strength_k, basis.strength_v), strict=True))
    return k, v


def _costs(raw: object, shapes: Sequence[tuple[int, int]], width: int) -> tuple[tuple[np.ndarray, np.ndarray] | None, ...] | None:
    """None unless these are finite numbers in the shape of a profile of this model."""
    if not isinstance(raw, list) or len(raw) != len(shapes):
        return None
    costs: list[tuple[np.ndarray, np.ndarray] | None] = []
    for entry, (heads, _) in zip(raw, shapes, strict=True):
        if entry is None:
            costs.append(None)
            continue
        if not (isinstance(entry, list) and len(entry) == 2 and all(_is_table(side, heads, width) for side in entry)):
            return None
        costs.append((np.array(entry[0], np.float64), np.array(entry[1], np.float64)))
    return tuple(costs)


def _is_table(raw: object, heads: int, width: int) -> bool:
    return isinstance(raw, list) and len(raw) == heads and _are_rows(raw, width)


def _are_rows(raw: object, width: int) -> bool:
    """Whether these are lists of `width` finite, non-negative numbers."""
    return isinstance(raw, list) and all(isinstance(row, list) and len(row) == width and all(map(_is_cost, row)) for row in raw)


def _is_cost(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < MAX_COST
