"""Models written into our models folder by `-o`, and those left unfinished by interrupted `run --keep`, `quantize` and `export`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from hub_user import FABLE, HubUser

from effllm.offload.folder_writer import JOURNAL, PAD, FolderWriter, partial_folder
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime.catalog import resolve
from effllm.runtime.conversion import on_load
from effllm.runtime.conversion.compressed_tensors import export_compressed
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.convert import ConvertOptions, convert
from effllm.runtime.events import Progress
from effllm.runtime.library import storage
from effllm.runtime.library.listing import model_names

REPO = "org/name"


def stop(going: Iterator[object]) -> None:
    """A conversion that ends in the middle."""
    for item in going:
        if isinstance(item, Progress) and item.done > item.total // 2 and item.phase in ("quantizing", "exporting"):
            break
    else:
        raise AssertionError("it was over before the middle")
    going.close()


def keeping(user: HubUser, name: str) -> Path:
    """A stopped `run NAME --keep`; the folder that was being made. In this process: one of its own goes on, to the end where a test is kept
    from looking."""
    ref = resolve(name, user.env)
    request = on_load.Request(ref, ref.variant, storage.models_folder(user.env), keep=True)
    request.folder.parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on_load, "_convert_in_subprocess", convert)
        stop(on_load.quantize_on_load(request, request.folder))
    return request.folder


def incomplete(user: HubUser) -> dict[str, tuple[int, int]]:
    return {each["name"]: (each["bytes_here"], each["bytes_total"]) for each in user.run("list", "--json").json["incomplete"]}


@pytest.mark.slow
def test_a_stopped_keep_is_listed_by_the_name_that_was_typed_and_removed_by_it(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, FABLE)
    assert user.run("pull", REPO).code == 0
    mine = user.home / "own"
    shutil.copytree(FABLE, mine)
    for name in ("fable:4bit", f"{REPO}:3bit", f"{mine}:4bit"):
        out = keeping(user, name)
        assert list(incomplete(user)) == [name]
        here, size = incomplete(user)[name]
        assert 0.1 * size < here < size
        said = user.run("list").err
        assert f"{name}: run the same command to continue" in said and "effllm pull NAME" not in said
        request = on_load.Request(resolve(name, user.env), out.name, storage.models_folder(user.env), keep=True)
        went_on = list(on_load.quantize_on_load(request, out))
        assert any("resuming where an earlier run stopped" in str(item) for item in went_on)
        assert incomplete(user) == {} and user.run("rm", name, "-y").code == 0
        assert keeping(user, name) == out
        removed = user.run("rm", name, "-y")
        assert removed.code == 0 and "was removed" in removed.err
        assert ("the unfinished folder" in removed.err) == (REPO not in name), "what lies at a commit may have been a pull's"
        assert incomplete(user) == {} and not partial_folder(out).exists() and not out.parent.exists()


def test_bytes_are_those_of_tensors(user: HubUser) -> None:
    out = keeping(user, "fable:4bit")
    here, size = incomplete(user)["fable:4bit"]
    plan = plan_conversion(FABLE, Recipe(QuantSpec.parse("4bit")))
    with plan.store, FolderWriter(out, plan.files, "another", storage.MARKER) as writer:
        assert writer.discarded and size == plan.after and here < size
        assert any(name.startswith(PAD) for file in plan.files for name in file.places), "padding is not a tensor"
    assert incomplete(user) == {"fable:4bit": (0, size)}, "the writer empties what another one has left"


@pytest.mark.parametrize("deep", ["mine", "mine/small", "mine/small/4bit"])
def test_what_was_put_into_our_folder_is_listed_and_removed_by_its_path(user: HubUser, deep: str) -> None:
    out = storage.models_folder(user.env) / deep
    out.parent.mkdir(parents=True)
    options = ConvertOptions(Recipe(QuantSpec.parse("4bit")), "4bit")
    stop(convert(FABLE, out, options))
    assert list(incomplete(user)) == [str(out)] and user.run("rm", out, "-y").code == 0 and incomplete(user) == {}
    assert "no folder" in user.run("rm", out).refused(3)
    out.parent.mkdir(parents=True, exist_ok=True)
    stop(export_compressed(FABLE, out, "INT8"))
    assert list(incomplete(user)) == [str(out)]
    assert user.run("export", "fable", "-o", out, "--format", "compressed-tensors", "--type", "INT8").code == 0
    models = {each["name"]: each for each in user.run("list", "--json").json["models"]}
    assert incomplete(user) == {} and list(models) == ["fable", str(out)] and set(model_names(user.env)) == set(models)
    assert models[str(out)]["parameters"] == models["fable"]["parameters"] and 8 < models[str(out)]["bits_per_weight"] < 12
    assert user.run("show", out, "--json").json["parameters"] == models["fable"]["parameters"]
    (out / "mine.txt").write_text("mine")
    assert "mine.txt" in user.run("rm", out).refused(2) and (out / "config.json").exists()
    (out / "mine.txt").unlink()
    assert user.run("rm", out, "-y").code == 0 and not out.exists()
    assert user.run("quantize", "fable", "-o", storage.models_folder(user.env) / "made", "--bits", "4").code == 0
    assert storage.registered(user.env) == []
    assert str(storage.models_folder(user.env) / "made") in [each["name"] for each in user.run("list", "--json").json["models"]]


def test_what_stands_beside_goes_with_no_model(user: HubUser) -> None:
    """A user's file in our folder outlives the last model next to it."""
    out = storage.models_folder(user.env) / "mine" / "small"
    out.parent.mkdir(parents=True)
    (out.parent / "notes.txt").write_text("mine")
    assert user.run("export", "fable", "-o", out, "--format", "compressed-tensors").code == 0
    assert user.run("rm", out, "-y").code == 0 and (out.parent / "notes.txt").read_text() == "mine" and not out.exists()


def test_one_that_is_being_made_is_left_alone(user: HubUser) -> None:
    out = keeping(user, "fable:4bit")
    plan = plan_conversion(FABLE, Recipe(QuantSpec.parse("4bit")))
    with plan.store, FolderWriter(out, plan.files, "another", storage.MARKER):
        assert "is being written by another effllm process" in user.run("rm", "fable:4bit").refused(1)
        assert (partial_folder(out) / JOURNAL).exists()
    assert user.run("rm", "fable:4bit", "-y").code == 0


@pytest.mark.parametrize("said", [b"", b"{", b"[]\n", b'{"of": "fable"}\n', b'{"fingerprint": "x", "of": 5}\n'])
def test_a_torn_journal_costs_the_name_at_most(user: HubUser, said: bytes) -> None:
    out = keeping(user, "fable:4bit")
    (partial_folder(out) / JOURNAL).write_bytes(said)
    assert list(incomplete(user)) == (["fable:4bit"] if b"fingerprint" in said else [])
    assert user.run("rm", "fable:4bit", "-y").code == 0 and not partial_folder(out).exists()


def test_files_in_other_folders_are_left_alone(user: HubUser) -> None:
    out = user.home / "made"
    stop(export_compressed(FABLE, out, "INT4"))
    assert incomplete(user) == {} and partial_folder(out).is_dir()
    assert "no folder" in user.run("rm", out).refused(3) and partial_folder(out).is_dir()
