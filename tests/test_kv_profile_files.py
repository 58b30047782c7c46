"""Profiles stored with the weights they were recorded with: what is kept and used, and refused with other weights or when damaged."""

import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from conversions import options as conversion
from conversions import run
from test_config_latent import published

import effllm
from effllm import DiskFull, UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.offload.checkpoint import TensorStore
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.files.atomic_write import atomic_file
from effllm.runtime.kv import kv_profile_file
from effllm.runtime.kv.kv_profile import Profile, flips_of
from effllm.runtime.kv.kv_profile_file import ARRAYS, FILE, load_profile, save_profile
from effllm.runtime.kv.kv_profile_run import record_profile
from effllm.runtime.kv.kv_setting import profile_for, resolve_auto
from effllm.runtime.kv.kv_validation import AUTO_FLIPS
from effllm.runtime.prepare import EngineOptions, prepare

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
TEXT = built_in_text()[:9000]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    """A copy of fable with a profile, and what was recorded."""
    copy = shutil.copytree(FABLE, tmp_path_factory.mktemp("profiled") / "fable")
    *_, made = record_profile(copy, TEXT, 1e6)
    return copy, made


@pytest.fixture(scope="module")
def folder(profiled: tuple[Path, Profile]) -> Path:
    return profiled[0]


def test_a_profile_survives_its_file(profiled: tuple[Path, Profile]) -> None:
    folder, made = profiled
    loaded = load_profile(folder, read_config(folder))
    assert loaded.hash == made.hash
    assert loaded.tokens == made.tokens
    assert loaded.bits(3) == made.bits(3)
    for one, other in zip(loaded.bases(loaded.bits(4)), made.bases(made.bits(4)), strict=True):
        assert (one.k_matrix == other.k_matrix).all()
        assert (one.v_inverse == other.v_inverse).all()
        assert (one.widths(4, 4)[0] == other.widths(4, 4)[0]).all()
    assert load_profile(FABLE, read_config(FABLE)) is None


def test_a_disk_with_no_room_for_the_last_of_it_keeps_the_profile_that_was_there(
        profiled: tuple[Path, Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = profiled
    copy = shutil.copytree(folder, tmp_path / "copy")

    class NoRoom(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def full(path: Path) -> Iterator[BinaryIO]:
        with atomic_file(path) as file:
            given = NoRoom() if path.name == FILE else file
            yield given
            given.flush()

    monkeypatch.setattr(kv_profile_file, "atomic_file", full)
    other = replace(made, layers=tuple(replace(basis, k_scale=basis.k_scale * 2) for basis in made.layers))
    with pytest.raises(DiskFull):
        save_profile(other, copy)
    assert load_profile(copy, read_config(copy)).hash == made.hash and sorted(os.listdir(copy)) == sorted(os.listdir(folder))


def test_a_profile_from_before_sides_of_10_bits_is_read(folder: Path, tmp_path: Path) -> None:
    """It says no costs of them, and of 8 bits what they were without groups of 10: both follow from what was measured."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    raw = json.loads((copy / FILE).read_text())
    raw["bits"].remove(10)
    raw["version"] = 1
    raw["costs"] = [[[row[:-2] + [2 * row[-2]] for row in side] for side in cost] for cost in raw["costs"]]
    raw["sha256"] = kv_profile_file._own_hash({key: value for key, value in raw.items() if key != "sha256"})
    (copy / FILE).write_text(json.dumps(raw))
    old, new = (load_profile(each, read_config(each)) for each in (copy, folder))
    assert 10 in np.array(new.bits(8))
    for one, other in zip(old.costs, new.costs, strict=True):
        assert all(np.allclose(*sides, rtol=1e-9) for sides in zip(one, other, strict=True))
    assert old.bits(8) == new.bits(8) and old.hash == new.hash


def test_a_layer_that_was_not_reached_survives_too(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    whole = load_profile(copy, read_config(copy))
    partial = replace(whole, layers=(*whole.layers[:5], KVBasis.plain(2, 64)), costs=(*whole.costs[:5], None))
    save_profile(partial, copy)
    loaded = load_profile(copy, read_config(copy))
    assert loaded.bits(4) == partial.bits(4)
    assert loaded.layers[5].strength_v is None
    assert loaded.hash == partial.hash


def test_auto_takes_the_fewest_bits_that_keep_the_answers(folder: Path) -> None:
    """The check ran on text that is not in the profile; `run` relies on its result."""
    profile = load_profile(folder, read_config(folder))
    assert profile.auto in {3, 4, 5, 6, 8}
    assert 2 <= len(profile.checks) <= 4
    *fewest, two = *profile.checks[-1], profile.bits(2)
    assert fewest[0] == pytest.approx(profile.cost(two)) and profile.flips(two) == pytest.approx(flips_of(*fewest[1:]))
    for cost, kld, flips in profile.checks[:-1]:
        assert cost > 0 and 0 < kld < 0.01 and 0 <= flips < 0.05
    assert profile.flips(profile.bits(profile.auto)) <= AUTO_FLIPS
    assert profile.flips(profile.bits(2)) > profile.flips(profile.bits(8))
    prepared = prepare(folder, EngineOptions(device="cpu", kv="auto"))
    prepared.store.close()
    assert prepared.options.kv == f"{profile.auto}bit"
    assert any("by this model's profile" in notice for notice in prepared.notices)
    without = prepare(FABLE, EngineOptions(device="cpu", kv="auto"))
    without.store.close()
    assert without.options.kv == "16bit"
    assert any("no profile of this model" in notice for notice in without.notices)


def test_auto_sends_nobody_to_record_a_profile_that_no_cache_can_use(tmp_path: Path) -> None:
    config, said = replace(own := parse_config(published("GLM-4.7-Flash")), mla=replace(own.mla, rank=1024), head_dim=1088), []
    with TensorStore.open(FABLE) as store:
        assert resolve_auto("auto", profile_for("auto", tmp_path, config, store, said.append), said.append) == "16bit"
    assert len(said) == 1 and "this model has 1088" in said[0] and "kv-profile" not in said[0]


def test_a_plan_suggests_fewer_bits_for_a_model_with_a_profile(folder: Path) -> None:
    """The suggestions are plans for weights that are not here: the profile was asked of them, and the plan ended with an internal error."""
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), dict(os.environ))
    assert main(("plan", str(folder), "--kv", "8bit", "--no-probe", "--json"), environment) == 0, environment.stderr.getvalue()
    assert json.loads(environment.stdout.getvalue())["kv"] == "8bit"


@pytest.mark.slow
def test_what_8_bit_activations_round_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    """Low-bit weights round another way whatever changes: checks that ran with them saw 2% of changed tokens at 8 bits, refused 2 bits with
    a number that was not the cache's, and left `--kv auto` at 16."""
    run(FABLE, tmp_path / "small", conversion("4bit"))
    *_, made = record_profile(tmp_path / "small", TEXT, 30.0)
    assert len(made.checks) > 1 and all(kld < 5e-5 for _, kld, _ in made.checks[:-1]) and made.checks[-1][1] < 5e-3
    assert made.auto is not None and made.auto <= 5
    for kv in ("auto", "2bit"):
        prepared = prepare(tmp_path / "small", EngineOptions(device="cpu", kv=kv))
        prepared.store.close()
        assert prepared.options.kv != "16bit"


def test_bits_that_break_the_model_are_refused_with_the_number(folder: Path, tmp_path: Path) -> None:
    made = load_profile(folder, read_config(folder))
    copy = spoilt(folder, tmp_path, checks=[[made.cost(made.bits(2)), 0.1, 0.31]], auto=None)
    with pytest.raises(UsageError, match="--kv 2bit would change 31% of this model's top next tokens, more than 5%") as refused:
        prepare(copy, EngineOptions(device="cpu", kv="2bit"))
    assert "--force" in refused.value.hint
    for options in (EngineOptions(device="cpu", kv="2bit", force=True), EngineOptions(device="cpu", kv="8bit")):
        prepare(copy, options).store.close()
    nothing = prepare(copy, EngineOptions(device="cpu", kv="auto"))
    nothing.store.close()
    assert nothing.options.kv == "16bit"
    assert any("no setting that was validated" in notice for notice in nothing.notices)


@pytest.mark.slow
def test_bits_that_break_a_twin_are_refused_with_the_number(tmp_path: Path) -> None:
    """A twin of fable whose queries are eight times as long: noise in K costs it far more, which its own profile finds out."""
    twin = shutil.copytree(FABLE, tmp_path / "twin")
    path = twin / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for name, info in json.loads(raw[8 : 8 + length]).items():
        if name.endswith("q_proj.weight"):
            begin, end = info["data_offsets"]
            numbers = np.frombuffer(raw, np.uint16, (end - begin) // 2, 8 + length + begin)  # bfloat16: three more in the exponent
            numbers[numbers & 0x7F80 != 0] += 3 << 7
    path.write_bytes(raw)
    *_, made = record_profile(twin, built_in_text(), 45.0)
    assert made.flips(made.bits(2, 8)) > 0.05 > made.flips(made.bits(8))
    with pytest.raises(UsageError, match=r"--kv k2v8 would change \d+% of this model's top next tokens, more than 5%"):
        prepare(twin, EngineOptions(device="cpu", kv="k2v8"))
    for options in (EngineOptions(device="cpu", kv="k2v8", force=True), EngineOptions(device="cpu", kv="8bit")):
        prepare(twin, options).store.close()


def spoilt(folder: Path, tmp_path: Path, **changes: object) -> Path:
    copy = shutil.copytree(folder, tmp_path / "copy")
    raw = json.loads((copy / FILE).read_text())
    del raw["sha256"]  # as in profiles from before
    (copy / FILE).write_text(json.dumps(raw | changes))
    return copy


@pytest.mark.parametrize(("changes", "message"), [
    ({"format": "other"}, "not a KV profile"), ({"version": 3}, "version 3"), ({"version": True}, "version True"),
    ({"version": [2]}, r"version \[2\]"),
    ({"head_dim": 128}, "another model: 6 layers of 2 KV heads of 128"),
    ({"layers": 22}, "another model: 22 layers"), ({"weights": "0" * 64}, "other weights"), ({"costs": [None] * 5}, "damaged"),
    ({"costs": [[[["x"] * 8] * 2] * 2] * 6}, "damaged"), ({"bits": [4]}, "damaged"), ({"tokens": "many"}, "damaged"),
    ({"checks": [[1, 2]]}, "damaged"), ({"auto": 7}, "damaged"), ({"ends": [64, 64]}, "damaged"), ({"ends": None}, "damaged"),
    ({"arrays": {"nbytes": 5, "sha256": ""}}, "should have"), ({"arrays": None}, "should have"),
])
def test_a_profile_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    copy = spoilt(folder, tmp_path, **changes)
    with pytest.raises(UsageError, match=message) as refused:
        load_profile(copy, read_config(copy))
    assert refused.value.hint


def test_a_profile_of_which_a_figure_was_altered_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    raw = json.loads((copy / FILE).read_text())
    (copy / FILE).write_text(json.dumps(raw | {"auto": 2}))
    with pytest.raises(UsageError, match="is damaged: its checksum does not match") as refused:
        load_profile(copy, read_config(copy))
    assert "kv-profile" in refused.value.hint


@pytest.mark.parametrize("keep", [0, 700])
def test_a_profile_that_was_cut_off_is_recorded_again(folder: Path, tmp_path: Path, keep: int) -> None:
    """No download gives it back, unlike a config."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / FILE).write_bytes((copy / FILE).read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"kv_profile\.json is not valid JSON") as refused:
        load_profile(copy, read_config(copy))
    assert refused.value.hint == f"remove it, or effllm eval kv-profile {copy}"


def test_damaged_arrays_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = read_config(copy)
    whole = (copy / ARRAYS).read_bytes()
    (copy / ARRAYS).write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(UsageError, match="checksum"):
        load_profile(copy, config)
    (copy / ARRAYS).write_bytes(whole[:-4])
    with pytest.raises(UsageError, match="bytes, expected"):
        load_profile(copy, config)
    (copy / ARRAYS).unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(copy, config)


def test_other_weights_under_the_same_names_are_noticed(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        last = file.read(64)
        file.seek(-64, os.SEEK_END)
        file.write(bytes(byte ^ 1 for byte in last))
        file.seek(0)
        header = int.from_bytes(file.read(8), "little")
        file.seek(8 + header)
        first = file.read(64)
        file.seek(8 + header)
        file.write(bytes(byte ^ 1 for byte in first))
    with pytest.raises(UsageError, match="recorded with other weights"):
        load_profile(copy, read_config(copy))


@pytest.mark.slow
def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    copy = shutil.copytree(FABLE, tmp_path / "copy")
    sample = tmp_path / "sample.txt"
    sample.write_text(TEXT)

    def ran(*argv: object) -> tuple[int, str, str]:
        environment = Environment(io.StringIO(""), io.StringIO(), io.StringIO(), os.environ)
        code = main(["eval", "kv-profile", *map(str, argv)], environment)
        return code, environment.stdout.getvalue(), environment.stderr.getvalue()

    code, out, err = ran(copy, "--text", sample, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert Path(said["file"]) == copy / FILE
    assert said["hash"] == f"{load_profile(copy, read_config(copy)).hash:016x}"
    assert said["presets"]["4"][2] < 0.3
    assert said["auto"] == load_profile(copy, read_config(copy)).auto
    assert {"bits", "cost", "kld", "flips"} == set(said["checks"][0]) and 4 in [each["bits"] for each in said["checks"]]
    code, out, err = ran(copy, "--text", sample)
    assert code == 0, err
    assert "noise" in out and "\n4 bits checked  KL divergence " in out
    sample.write_text(TEXT[:3000])
    code, out, err = ran(copy, "--text", sample)
    assert code == 0 and "16bit: nothing was checked" in out and "a longer --text" in err, (out, err)
    assert ran(copy, "--seconds", "0")[0] == 2
    assert ran(copy, "--text", tmp_path / "absent")[0] == 2
    assert ran(tmp_path / "absent")[0] == 3
