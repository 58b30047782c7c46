"""`effllm verify` of a folder with a SHA256SUMS file in it or next to it: the packaged model, and any checkpoint listed so."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hub_user import HubUser

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Path(shutil.copytree(FABLE, tmp_path / "model", ignore=shutil.ignore_patterns("kv_profile*", "sparsity*", "predictors*")))
    recorded(made)
    return made


def recorded(folder: Path) -> None:
    """As the hint of `verify` says to do it."""
    subprocess.run("sha256sum * > SHA256SUMS", shell=True, cwd=folder, check=True)


def test_the_packaged_model_is_whole_and_says_of_which_files(user: HubUser) -> None:
    found = user.run("verify", "fable", "--json").json
    assert found["damaged"] == [] and found["files"] == 6 and not {"model.safetensors", "config.json"} & {*found["not_recorded"]}
    assert user.run("verify", "fable").out.startswith("6 files, ")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_what_was_changed_or_is_gone_is_named(user: HubUser, folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"\0")
    assert f"is damaged: {name} is not as written" in user.run("verify", folder).refused(1)
    (folder / name).unlink()
    assert f"is damaged: {name} is not" in user.run("verify", folder).refused(1)


def test_without_a_list_the_next_step_makes_one_that_is_read(user: HubUser, folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    ran = user.run("verify", folder)
    assert "has no checksums to compare with (effllm quantize and downloads record them)" in ran.refused(2)
    assert f"cd {folder} && sha256sum * > SHA256SUMS" in ran.err
    recorded(folder)
    (folder / "notes.txt").write_text("later")
    ran = user.run("verify", folder)
    assert ran.code == 0 and ran.out.startswith("6 files, ") and "no checksums were recorded: notes.txt" in ran.err


def test_a_gguf_file_is_found_in_the_list_of_its_folder(user: HubUser, tmp_path: Path) -> None:
    out = tmp_path / "several" / "fable.gguf"
    out.parent.mkdir()
    assert user.run("export", "fable", "-o", out).code == 0
    assert "has no checksums to compare with (a GGUF file has none)" in user.run("verify", out).refused(2)
    assert f"cd {out.parent} && sha256sum fable.gguf >> SHA256SUMS" in user.run("verify", out).err
    (out.parent / "notes.txt").write_text("of another kind")
    recorded(out.parent)
    (out.parent / "notes.txt").write_text("and changed")
    assert user.run("verify", out).out.startswith("1 file, ")
    with out.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    assert "fable.gguf is not as written" in user.run("verify", out).refused(1)


def test_the_list_of_a_gguf_file_goes_behind_those_of_others(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hint says to do it, where the file lies."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.gguf", "two of mine.gguf"):
        assert user.run("export", "fable", "-o", name).code == 0
        command = user.run("verify", name).err.rpartition("verify it later: ")[2].strip()
        assert command.startswith("sha256sum ")
        subprocess.run(command, shell=True, check=True)
    assert all(user.run("verify", name).out.startswith("1 file, ") for name in ("one.gguf", "two of mine.gguf"))


def test_a_list_beside_the_folder_speaks_of_it_by_its_name(user: HubUser, folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "config.json").write_text("{}")
    subprocess.run("sha256sum */* > SHA256SUMS", shell=True, cwd=folder.parent, check=True)
    with (folder.parent / "SHA256SUMS").open("a") as file:
        file.write("what else its folder has to say\n")
    (folder.parent / "other" / "config.json").write_text("[]")
    assert user.run("verify", folder).out.startswith("6 files, ")
    (folder / "config.json").unlink()
    assert "config.json is not as written" in user.run("verify", folder).refused(1)


@pytest.mark.parametrize("line", ["0" * 64 + "  ../config.json", "0" * 64 + "  /etc/passwd", "0" * 64 + "  ..", "0" * 63 + "  config.json",
                                  "config.json", ""])
def test_a_list_that_is_none_is_said_by_its_line(user: HubUser, folder: Path, line: str) -> None:
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(f"{line}\n")
    assert "SHA256SUMS: line 7 is " in user.run("verify", folder).refused(1)
