"""Ctrl-C just after a model was written: the message says that it is complete, since the same command would be refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli_quantize import FABLE, Ran, private  # noqa: F401  a fixture

from effllm.offload import folder_writer
from effllm.offload.folder_writer import partial_folder
from effllm.runtime.files.model_folder_files import KV_PROFILE
from effllm.runtime.kv import kv_profile_run
from effllm.runtime.stores.container import read_container

GOES_ON = "the same command continues from here"


def stopped(behind: Callable[..., object], monkeypatch: pytest.MonkeyPatch, module: object, name: str, *words: object) -> str:
    """What is said where Ctrl-C comes when a call returns."""

    def called(*given: object, **more: object) -> None:
        behind(*given, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, name, called)
        ran = Ran(*words)
    assert ran.code == 130 and "Traceback" not in ran.err, ran.err
    return ran.err


@pytest.mark.parametrize("words", [("quantize", FABLE, "--bits", "4"), ("export", FABLE, "--format", "compressed-tensors")])
def test_what_has_its_name_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]) -> None:
    out = tmp_path / "out"
    said = stopped(os.rename, monkeypatch, os, "rename", *words, "-o", out)
    assert f"stopped; {out} is already complete\n" in said and GOES_ON not in said and not partial_folder(out).exists()
    assert "was stopped after it had finished" in (again := Ran(*words, "-o", out)).err and again.code == 0
    assert "exists" in Ran(*words, "-o", out).refused(2)
    if words[0] == "quantize":
        assert Ran("run", out, "Once", "-n", "2", "--temp", "0").code == 0 == Ran("verify", out).code


def test_what_takes_the_place_of_another_is_told_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("quantize", FABLE, "--force", "-o", out := tmp_path / "out")
    assert Ran(*words, "--bits", "3").code == 0
    said = stopped(folder_writer._copy, monkeypatch, folder_writer, "_copy", *words, "--bits", "4")
    assert GOES_ON in said and read_container(out).spec_text == "codebook3:16", "it is the old one yet"
    said = stopped(folder_writer._exchange, monkeypatch, folder_writer, "_exchange", *words, "--bits", "4")
    assert "is already complete" in said and read_container(out).spec_text == "codebook4:16"
    assert Ran(*words, "--bits", "4").code == 0 and not partial_folder(out).exists()


def test_a_model_is_listed_before_what_may_take_a_minute(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.delenv("EFFLLM_NO_KV_PROFILE")
    words = ("quantize", FABLE, "--bits", "4", "-o", private / "out")
    said = stopped(lambda *given, **more: None, monkeypatch, kv_profile_run, "record_profile", *words)
    assert "the model is complete; effllm eval kv-profile" in said
    assert str(private / "out") in Ran("list").out
    again = Ran(*words)  # and what comes behind a kill, of which nobody was told
    assert f"it lacks the profile for --kv alone: effllm eval kv-profile {private / 'out'}; --force" in again.err and again.refused(2)
    other = Ran("quantize", FABLE, "--bits", "3", "-o", private / "out")
    assert f"{private / 'out'} exists (codebook4:16, 4.75 bits per weight), not codebook3:16\n" in other.err and other.refused(2)
    assert "hint: --force replaces it" in other.err and "profile" not in other.err
    (private / "out" / KV_PROFILE).write_text("{}")
    assert "kv-profile" not in Ran(*words).err
