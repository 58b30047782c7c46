"""`effllm quantize` and `effllm verify`: their output, what they refuse, and models quantized on load."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conversions import lines_of

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.offload.checkpoint import TensorStore
from effllm.offload.folder_writer import JOURNAL, partial_folder
from effllm.quant.spec import QuantSpec
from effllm.runtime.config import read_config
from effllm.runtime.conversion.on_load import PREFIX
from effllm.runtime.files.scratch_folder import LOCK
from effllm.runtime.kv.kv_profile_file import load_profile

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
MINUTE = 60
STORY = "Once upon a time there was a fox who wanted to be king. " * 12


class Ran:
    """What a call of `main` wrote and returned."""

    def __init__(self, *argv: str | Path, stdin: str = "") -> None:
        self.environment = Environment(io.StringIO(stdin), io.StringIO(), io.StringIO(), os.environ)
        self.code, self.is_json = main([str(word) for word in argv], self.environment), "--json" in argv
        self.out, self.err = self.environment.stdout.getvalue(), self.environment.stderr.getvalue()

    @property
    def json(self) -> dict:
        assert self.code == 0, self.err
        (line,) = self.out.splitlines()
        return json.loads(line)

    def refused(self, code: int) -> str:
        """The error's line, after checking that there is one line of it and a next step."""
        assert self.code == code, self.err
        lines = self.err.splitlines()
        assert lines[-2].startswith("effllm: ") and lines[-1].startswith("hint: "), self.err
        if self.out:  # --json
            assert list(json.loads(self.out).values()) == [lines[-2].removeprefix("effllm: "), lines[-1].removeprefix("hint: "), code]
        assert bool(self.out) == self.is_json and "Traceback" not in self.err
        return lines[-2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantize") / "fable-4bit"
    assert Ran("quantize", "fable", "-o", out, "--bits", "4").code == 0
    return out


@pytest.mark.slow
def test_a_profile_for_packed_caches_comes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFFLLM_NO_KV_PROFILE")
    ran = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "4")
    assert ran.code == 0 and "no profile" not in ran.err, ran.err
    assert ("the weights are done; recording where a packed KV cache needs its bits, for about 60 s at most "
            "(--no-kv-profile skips this)") in ran.err
    assert re.search(r"made in \d+ s, the profile of its KV cache in \d+ s; effllm run ", ran.err), ran.err
    assert load_profile(tmp_path / "out", read_config(tmp_path / "out")).tokens > 500


def test_a_profile_that_cannot_be_recorded_costs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFFLLM_NO_KV_PROFILE")
    shutil.copytree(FABLE, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    ran = Ran("quantize", tmp_path / "mute", "-o", tmp_path / "out", "--bits", "4")
    assert ran.code == 0 and "no profile for --kv: " in ran.err, ran.err
    assert (tmp_path / "out" / "effllm.json").is_file() and not [*(tmp_path / "out").glob("kv_profile*")]


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of its own for data and temporary files."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


# -- quantize ------------------------------------------------------------------------------------------------------------------


def test_the_dry_run_knows_the_sizes_and_writes_nothing(tmp_path: Path) -> None:
    planned = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "3", "--dry-run", "--json").json
    table = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "3", "--dry-run")
    assert table.code == 0 and "nothing was written" in table.out and "codebook3:16" in table.out
    assert not list(tmp_path.iterdir())
    done = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "3", "--json").json
    for key in ("weights", "bytes_before", "bytes_after", "file_bytes", "bits_per_weight"):
        assert planned[key] == done[key], key
    shown = Ran("show", tmp_path / "out", "--json").json  # the same bits, whoever says them
    assert shown["bits_per_weight"] == shown["quantized"]["bits_per_weight"] == pytest.approx(done["bits_per_weight"], abs=1e-4)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == planned["file_bytes"]
    with TensorStore.open(FABLE) as store:
        assert planned["bytes_before"] == store.nbytes and planned["weights"] == store.nbytes // 2


def test_the_table_has_sizes_bits_and_errors_by_class(tmp_path: Path) -> None:
    ran = Ran("quantize", "fable", "-o", tmp_path / "out", "--spec", "affine4:64", "--tensor-type", "down_proj=8bit")
    rows = {line.split()[0]: line for line in ran.out.splitlines()}
    assert {"q", "k", "v", "o", "gate", "up", "down", "embed", "other", "all"} <= set(rows)
    assert "affine4:64" in rows["gate"] and str(QuantSpec.parse("8bit")) in rows["down"] and rows["q"].endswith(" dB")
    assert "threads" in ran.err and "affine4:64 down_proj=8bit with rtn: 5.767 M weights take about" in ran.err
    assert re.search(rf"{tmp_path}/out: made in \d+ s; effllm run {tmp_path}/out$", ran.err, re.MULTILINE)
    finer = Ran("quantize", "fable", "-o", tmp_path / "two", "--bits", "8", "--json").json
    errors = {row["class"]: row["error_db"] for row in finer["classes"]}
    assert errors["q"] < -35 and errors["other"] is None


def test_eval_scores_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(STORY)
    result = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "8", "--eval", tmp_path / "text", "--json").json["eval"]
    assert 0 < result["kld_mean"] < 0.01 and result["ppl"] == pytest.approx(result["ppl_ref"], rel=0.02)
    assert 8 < result["weight_bits_per_value"] < 9
    again = Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "3", "--eval", tmp_path / "text", "--force")
    assert "before" in again.out and "KL divergence" in again.out


@pytest.mark.slow
def test_a_target_chooses_formats_tensor_by_tensor(tmp_path: Path) -> None:
    flags = ("quantize", "fable", "-o", tmp_path / "out", "--target", "4bpw", "--tensor-type", "embed_tokens=4bit", "--calib-tokens", "512")
    planned, done = Ran(*flags, "--dry-run", "--json").json, Ran(*flags, "--json").json
    assert planned["classes"] == [{key: row[key] for key in row if key != "error_db"} for row in done["classes"]]
    assert 3.8 < done["bits_per_weight"] <= 4
    specs = {row["class"]: row["specs"] for row in done["classes"]}
    assert specs["embed"] == [str(QuantSpec.parse("4bit"))] and len({spec for each in specs.values() for spec in each}) > 3
    recorded = json.loads((tmp_path / "out" / "effllm.json").read_text())
    assert recorded["spec"].startswith("4bpw") and recorded["bits_per_weight"] == pytest.approx(done["bits_per_weight"], abs=1e-3)


@pytest.mark.slow
def test_calibration_text_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(STORY * 5)
    flags = ("--bits", "3", "--calib", tmp_path / "text", "--calib-tokens", "512")
    assert Ran("quantize", "fable", "-o", tmp_path / "out", "--method", "gptq", *flags).code == 0
    recorded = json.loads((tmp_path / "out" / "effllm.json").read_text())
    assert recorded["calibration"]["tokens"] == 512 and recorded["method"] == {"name": "gptq"}
    (tmp_path / "text").write_text("short")
    assert "the calibration text has" in Ran("quantize", "fable", "-o", tmp_path / "two", "--method", "gptq", *flags).refused(2)
    assert "needs no calibration text" in Ran("quantize", "fable", "-o", tmp_path / "two", *flags).refused(2)


def test_an_eval_text_is_read_before_the_work(tmp_path: Path) -> None:
    assert "absent.txt" in Ran("quantize", "fable", "-o", tmp_path / "out", "--bits", "4", "--eval", tmp_path / "absent.txt").refused(2)
    assert not list(tmp_path.iterdir())


def test_a_width_alone_means_what_the_method_can_make() -> None:
    planned = Ran("quantize", "fable", "-o", "out", "--bits", "4", "--method", "hqq", "--tensor-type", "down_proj=3bit", "--dry-run",
                  "--json").json
    specs = {row["class"]: row["specs"] for row in planned["classes"]}
    assert (specs["q"], specs["down"], specs["embed"]) == (["affine4:64"], ["affine3:64"], ["affine6:64"])
    assert planned["bits_per_weight"] == pytest.approx(4.6, abs=0.2)


@pytest.mark.parametrize("flags, said", [
    ((), "--bits"),
    (("--bits", "4", "--spec", "4bit"), "--bits"),
    (("--bits", "4", "--target", "4bpw"), "--target"),
    (("--target", "a few"), "a few"),
    (("--target", "1.5bpw"), "'1.5bpw' is out of range"), (("--target", "fourbpw"), "'fourbpw' is not a number"),
    (("--target", "4bpw", "--method", "spqr"), "outliers"),
    (("--bits", "4", "--calib", "-", "--eval", "-"), "standard input"),
    (("--bits", "4", "--method", "gptq", "--calib-tokens", "5"), "--calib-tokens 5"),
    (("--bits", "7"), "--bits is 8, 6, 5, 4, 3 or 2, not 7"),
    (("--bits", "0"), "--bits is 8, 6, 5, 4, 3 or 2, not 0"),
    (("--bits", "four"), "four"),
    (("--spec", "codebook4:32"), "codebook"),
    (("--bits", "4", "--tensor-type", "down_proj"), "down_proj"),
    (("--bits", "4", "--tensor-type", "(=4bit"), "regular expression"),
    (("--bits", "4", "--tensor-type", "down_proj=tiny"), "tiny"),
    (("--bits", "4", "--tensor-type", "down_prj=8bit"), "no matrix of this model has a name that 'down_prj' matches"),
    (("--bits", "4", "--tensor-type", "layernorm=8bit"), "input_layernorm.weight, which 'layernorm' matches, stays as it is"),
    (("--bits", "4", "--method", "magic"), "magic"),
    (("--spec", "codebook4:16", "--method", "hqq"), "hqq optimizes zero points"),
    (("--spec", "ternary", "--method", "hqq"), "hqq optimizes zero points, which ternary:64 does not have"),
    (("--bits", "4", "--method", "hqq", "--tensor-type", "embed=symmetric8:32"), "hqq optimizes zero points"),
    (("--spec", "4bit+1%"), "rtn cannot make codebook4:16+0.01: it stores no outliers"),
    (("--spec", "4bit+1%", "--method", "smooth"), "smooth cannot make"),
    (("--bits", "4", "-t", "0"), "--threads 0 is too small"),
])
def test_flags_that_make_no_sense(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    assert said in Ran("quantize", "fable", "-o", tmp_path / "out", *flags).refused(2)
    assert said in Ran("quantize", "fable", "-o", tmp_path / "out", *flags, "--dry-run").refused(2)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_or_quantized_already(tmp_path: Path, made: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    assert "not a model that effllm quantized" in Ran("quantize", "fable", "-o", tmp_path / "mine", "--bits", "4", "--force").refused(2)
    assert "exists" in Ran("quantize", "fable", "-o", made, "--bits", "4").refused(2)
    assert "quantized already" in Ran("quantize", made, "-o", tmp_path / "out", "--bits", "4").refused(2)
    assert "is not a model" in Ran("quantize", "no such model", "-o", tmp_path / "out", "--bits", "4").refused(3)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, made: Path) -> None:
    """The signal comes when the journal shows that something is done; a run that was faster than that has nothing to go on with."""
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "effllm", "quantize", str(FABLE), "-o", str(out), "--bits", "4"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        journal = partial_folder(out) / JOURNAL
        while running.poll() is None and lines_of(journal) < 4:
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=MINUTE)[1]
    assert running.returncode in (0, 130)
    assert "Traceback" not in said and out.exists() != ("the same command continues" in said)
    if not out.exists():
        assert "earlier run stopped" in Ran("quantize", FABLE, "-o", out, "--bits", "4").err
    assert (out / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


# -- verify ----------------------------------------------------------------------------------------------------------------------


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_verify_names_the_damaged_tensor(tmp_path: Path, made: Path) -> None:
    assert "all match their checksums" in Ran("verify", made).out
    assert Ran("verify", made, "--json").json["damaged"] == []
    folder = copy(made, tmp_path / "damaged")
    with TensorStore.open(folder) as store:
        places = {name: store.tensors[name].offset for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight")}
    with (folder / "model.safetensors").open("r+b") as file:
        for place in places.values():
            file.seek(place + 5)
            byte = file.read(1)[0]
            file.seek(place + 5)
            file.write(bytes([byte ^ 0x10]))
    message = Ran("verify", folder).refused(1)
    assert all(name in message for name in places)
    ran = Ran("verify", folder, "--json")
    assert ran.code == 1 and json.loads(ran.out)["damaged"] == list(places)


@pytest.mark.parametrize(("name", "old", "new"), [("tokenizer.json", b"a", b"b"), ("config.json", b"silu", b"gelu"),
                                                  ("kv_profile.json", b"", b"{}"), ("tokenizer.json", None, None)])
def test_verify_looks_at_the_small_files_too(tmp_path: Path, made: Path, name: str, old: bytes | None, new: bytes | None) -> None:
    folder = copy(made, tmp_path / "damaged")
    if old is None:
        (folder / name).unlink()
    else:
        whole = (folder / name).read_bytes() if old else b""
        assert old in whole
        (folder / name).write_bytes(whole.replace(old, new, 1))
    assert f"is damaged: {name} is not as written" in Ran("verify", folder).refused(1)


def test_verify_says_what_was_not_recorded(tmp_path: Path, made: Path) -> None:
    folder = copy(made, tmp_path / "before")
    content = json.loads((folder / "effllm.json").read_text())
    assert {"config.json", "tokenizer.json"} <= content.pop("files").keys()
    (folder / "effllm.json").write_text(json.dumps(content))
    ran = Ran("verify", folder)
    assert ran.code == 0 and "not checked, because no checksums were recorded: config.json" in ran.err
    (folder / "effllm.json").write_text(json.dumps(content | {"files": {"config.json": -1}}))
    assert "expected a checksum for each" in Ran("verify", folder).refused(1)
    for name in ("../config.json", "/dev/zero", "..", ""):
        (folder / "effllm.json").write_text(json.dumps(content | {"files": {name: 1}}))
        assert "expected the name of one beside it" in Ran("verify", folder).refused(1), name


def test_headers_and_the_record_are_checked_on_load_too(tmp_path: Path, made: Path) -> None:
    cut = copy(made, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 100_000)
    newer = copy(made, tmp_path / "newer")
    (newer / "effllm.json").write_text((newer / "effllm.json").read_text().replace('"version": 1', '"version": 2', 1))
    other = copy(made, tmp_path / "other")
    text = (other / "effllm.json").read_text()
    line = next(line for line in text.splitlines() if "layers.2.mlp.down_proj" in line)
    (other / "effllm.json").write_text(text.replace(line, line.replace("codebook4:16", "codebook3:16")))
    half = copy(made, tmp_path / "half")
    os.truncate(half / "effllm.json", 1000)
    again = "quantize or download it again"  # it may have been made here, where there is nothing to download
    for folder, said, step in ((cut, "bytes of tensors", again), (newer, "newer effllm", "upgrade effllm: git pull"),
                               (other, "layers.2.mlp.down_proj", again), (half, "effllm.json", again)):
        for command in (("verify", folder), ("run", folder, "hi", "-n", "1")):
            ran = Ran(*command)
            assert said in ran.refused(1) and f"hint: {step}" in ran.err, (command, ran.err)


# -- on load -----------------------------------------------------------------------------------------------------------------------


def test_a_quantized_folder_runs_alone_and_on_load_says_the_same(made: Path, private: Path) -> None:
    flags = ("--raw", "Once upon a time", "-n", "12", "--temp", "0")
    stored = Ran("run", made, *flags)
    assert stored.code == 0 and stored.out.strip()
    for words in (("fable", *flags, "--bits", "4"), ("fable:4bit", *flags), (FABLE, *flags, "--bits", "4")):
        ran = Ran("run", *words)
        assert ran.out == stored.out, ran.err
        assert "quantized on load to" in ran.err and "--keep" in ran.err
    assert not list((private / "tmp").iterdir()) and not (private / "data").exists()


@pytest.mark.slow
def test_a_plan_says_what_a_run_that_quantizes_takes(private: Path) -> None:
    """What quantizing takes, more than all of the weights, is gone when the run is planned, but for modules that it needs."""
    commands = (("plan", "fable", "--no-probe"), ("run", "fable", "--raw", "hi", "-n", "2"))
    done = [subprocess.run([sys.executable, "-P", "-m", "effllm", *words, "--bits", "2", "--json"], capture_output=True, text=True)
            for words in commands]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    plan, ran = (json.loads(each.stdout) for each in done)
    assert abs(plan["total_bytes"] - ran["memory"]["planned_bytes"]) < 4 << 20


def test_quantizing_on_load_fails_as_it_does_by_itself(tmp_path: Path, private: Path) -> None:
    folder = copy(FABLE, tmp_path / "cut")
    os.truncate(folder / "model.safetensors", 100_000)
    said = [Ran(*words).refused(1) for words in (("quantize", folder, "-o", tmp_path / "out", "--bits", "4"),
                                                 ("run", folder, "hi", "--bits", "4"))]
    assert said[0] == said[1] and not list((private / "tmp").iterdir())


def test_keep_is_found_again(private: Path) -> None:
    flags = ("--raw", "Once upon a time", "-n", "4", "--temp", "0", "--bits", "3")
    first, second = Ran("run", "fable", *flags, "--keep"), Ran("run", "fable", *flags)
    assert "kept in" in first.err and "quantized on load" not in second.err and "3bit weights from" in second.err
    assert first.out == second.out
    (kept,) = (private / "data").glob("effllm/models/fable/local-*/3bit")
    assert Ran("verify", kept).code == 0
    assert not list((private / "tmp").iterdir())


def test_what_a_killed_run_left_is_cleaned_up_and_a_living_ones_stays(private: Path) -> None:
    import fcntl

    stale, living, strange = (private / "tmp" / f"{PREFIX}{name}" for name in ("stale", "living", "strange"))
    for folder in (stale, living, strange):
        folder.mkdir()
    for folder in (stale, living):
        (folder / LOCK).write_text("")
        (folder / "model.bin").write_text("weights")
    with (living / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Ran("run", "fable:4bit", "hi", "-n", "1").code == 0
    assert sorted(path.name for path in (private / "tmp").iterdir()) == [living.name, strange.name]


@pytest.mark.slow
def test_eval_of_bits_is_held_against_the_stored_model(private: Path) -> None:
    (private / "text").write_text(STORY)
    result = Ran("eval", "kld", "fable", "--bits", "2", "--text", private / "text", "--json").json
    assert result["kld_mean"] > 0.01 and result["weight_bits_per_value"] < 4
    assert Ran("eval", "ppl", "fable:2bit", "--text", private / "text", "--json").json["ppl"] > 1


@pytest.mark.parametrize("words, said", [
    (("run", "fable", "hi", "--keep"), "--keep"),
    (("run", "fable:4bit", "hi", "--bits", "3"), "disagree"),
    (("run", "fable", "hi", "--bits", "7"), "--bits is 8, 6, 5, 4, 3 or 2, not 7"),
    (("plan", "fable:4bit", "--bits", "3"), "disagree"),
    (("quantize", "fable:4bit", "-o", "x", "--bits", "4"), "this command does not do"),
    (("run", "fable:4bit:3bit", "hi"), "two formats"),
])
def test_requests_that_contradict_themselves(private: Path, words: tuple[str, ...], said: str) -> None:
    assert said in Ran(*words).refused(2)


def test_bits_on_a_quantized_folder(made: Path, private: Path) -> None:
    assert "quantized already" in Ran("run", made, "hi", "--bits", "3").refused(2)
