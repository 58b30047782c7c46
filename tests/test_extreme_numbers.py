"""Numbers in files that overflow a float, are NaN or would need a machine's whole memory: a one-line error, or treated as if the file were
absent."""

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from config_samples import LLAMA, refused
from conversions import short_fable

from effllm import EffllmError, UsageError
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.page_file import DamagedPage, describe, read_page_file, write_page_file
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_bits import SIDES
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.kv.kv_profile_file import identity_of, load_profile, profile_paths, save_profile
from effllm.runtime.rope import rope_table
from effllm.runtime.sessions.conversation_file import load_conversation, parse_conversation
from effllm.runtime.sessions.session_format import Malformed, SavedSession, parse_saved
from effllm.runtime.sparse import activation_predictors, sparsity_file
from effllm.runtime.stores.container import FILE, read_container

BEYOND = 10**400  # a whole number that is no float


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e30])
@pytest.mark.parametrize("section", [
    {"type": "linear", "factor": None}, {"type": "yarn", "factor": 8.0, "beta_fast": None}, {"type": "yarn", "factor": None},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": None, "high_freq_factor": 4.0},
    {"type": "longrope", "factor": 2.0, "short_factor": [None] * 8, "long_factor": [1.0] * 8}])
def test_rotary_numbers_that_have_no_inverse(section: dict[str, object], value: float) -> None:
    filled = {key: value if own is None else [value if one is None else one for one in own] if isinstance(own, list) else own
              for key, own in section.items()}
    refused({**LLAMA, "rope_scaling": filled}, "expected", "number")


@pytest.mark.parametrize("value", [2e-30, 9e29])
def test_rotary_numbers_at_the_borders_make_a_table(value: float) -> None:
    for name in ("factor", "beta_fast"):
        config = parse_config({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 8.0, name: value}})
        assert np.isfinite(rope_table(config.rope, config.head_dim, 64, 64).inv_freq).all()


@pytest.mark.parametrize("error", [BEYOND, -BEYOND, float("inf")])
def test_errors_of_a_weight(tmp_path: Path, error: float) -> None:
    tensor = {"spec": "bf16", "shape": [2, 2], "crc32": 1, "error_db": error}
    text = json.dumps({"format": "effllm-weights", "version": 1, "spec": "4bit", "bits_per_weight": 4.0, "source": {}, "tool": {},
                       "method": {}, "calibration": {}, "tensors": {"w": tensor}}).replace("Infinity", "1e999")
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="impossible error") as caught:
        read_container(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("change", [
    lambda raw: raw | {"tokens": float("inf")}, lambda raw: raw | {"active": [BEYOND] * 2},
    lambda raw: raw | {"predictor": {"rank": float("inf"), "recall": [0.5] * 2, "named": [0.5] * 2}}])
def test_what_was_measured_of_neurons(tmp_path: Path, change: Callable[[dict], dict]) -> None:
    raw = sparsity_file.Sparsity(5, (0.5, 0.5), {0.5: (0.1, 0.1)}).to_json()
    path = tmp_path / sparsity_file.FILE
    path.write_text(json.dumps(raw))
    assert sparsity_file.load(tmp_path, 2) is not None
    path.write_text(json.dumps(change(raw)))
    assert sparsity_file.load(tmp_path, 2) is None


def test_predictors_that_unfold_or_are_no_archive(tmp_path: Path) -> None:
    path = tmp_path / activation_predictors.FILE
    good = {"into": np.ones((2, 8, 3), np.float32), "out": np.ones((2, 3, 16), np.float32), "thresholds": np.ones((2, 16), np.float32)}
    np.savez(path, **good)
    assert activation_predictors.load(tmp_path, 2, 8, 16) is not None
    np.savez_compressed(path, **good)
    assert activation_predictors.load(tmp_path, 2, 8, 16) is None
    np.savez(path, **good | {"into": np.float32(1)})
    assert activation_predictors.load(tmp_path, 2, 8, 16) is None
    with path.open("wb") as out:
        np.save(out, good["into"])
    assert activation_predictors.load(tmp_path, 2, 8, 16) is None
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846975,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("into.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
    assert activation_predictors.load(tmp_path, 2, 8, 16) is None


def test_a_page_is_as_long_as_its_file_before_memory_is_taken(tmp_path: Path) -> None:
    file = describe("0" * 32, [b"a page"])
    write_page_file(tmp_path, file, [b"a page"])
    assert bytes(read_page_file(tmp_path, file)) == b"a page"
    with pytest.raises(DamagedPage, match="instead of"):  # more than any machine has: asked for, it was a lack of memory
        read_page_file(tmp_path, type(file)(file.key, file.sha256, 1 << 62))


@pytest.mark.parametrize("saved", [BEYOND, -1, float("inf"), float("nan"), True])
def test_dates_of_sessions(saved: float) -> None:
    with pytest.raises(Malformed, match="date"):
        parse_saved(SavedSession("a", "fable", saved, {}, None).to_json().encode(), "a")


def test_settings_of_conversations(tmp_path: Path) -> None:
    history = {"format": "effllm-session", "version": 1, "messages": [], "system": None}
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(parse_conversation(history, "here").to_json()))
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"settings": {"temperature": BEYOND}}))
    with pytest.raises(EffllmError, match="too large") as caught:
        load_conversation(path)
    assert caught.value.hint


def profile(folder: Path, change: Callable[[np.ndarray], object], cost: object = 1.0) -> None:
    config = read_config(folder)
    heads, size = config.num_key_value_heads, config.head_dim
    square = np.tile(np.eye(size, dtype=np.float32), (heads, 1, 1))
    bases = [KVBasis(np.ones((heads, size), np.float32), square, square, None, *np.ones((2, heads, size // 16), np.float32))] * 2
    costs = ((np.ones((heads, len(SIDES))), np.ones((heads, len(SIDES)))),) * 2
    save_profile(Profile(tuple(bases), costs, identity_of(folder), 10, (), None), folder)
    target, arrays = profile_paths(folder)
    values = np.fromfile(arrays, "<f4")
    change(values)
    values.tofile(arrays)
    raw = json.loads(target.read_text())
    del raw["sha256"]  # as in profiles from before
    raw["arrays"]["sha256"] = hashlib.sha256(arrays.read_bytes()).hexdigest()
    raw["costs"][0][0][0][0] = cost
    target.write_text(json.dumps(raw))


def test_profiles_of_the_cache(tmp_path: Path) -> None:
    """Bits were shared without end by strengths that are no numbers."""
    folder = short_fable(tmp_path / "fable")
    profile(folder, lambda values: None)
    config = read_config(folder)
    assert load_profile(folder, config) is not None
    for value in (np.nan, np.inf):
        profile(folder, lambda values, value=value: values.__setitem__(-1, value))
        with pytest.raises(UsageError, match="NaN or infinity") as caught:
            load_profile(folder, config)
        assert caught.value.hint
    profile(folder, lambda values: values.fill(0))
    with pytest.raises(UsageError, match="singular matrix") as caught:  # was found while a prompt was read
        load_profile(folder, config)
    assert caught.value.hint
    profile(folder, lambda values: None, BEYOND)
    with pytest.raises(UsageError, match="damaged"):
        load_profile(folder, config)
