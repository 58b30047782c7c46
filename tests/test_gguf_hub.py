"""GGUF files on the hub are models like any other: named by file, path or tag; run, listed, verified and removed one by one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub, running
from hub_user import FABLE, HubUser, Terminal

from effllm import EffllmError, ModelNotFound
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.catalog import Absent, resolve
from effllm.runtime.gguf.file_names import matching
from effllm.runtime.library import local_model as reading
from effllm.runtime.library.listing import local_models, model_names

REPO = "org/name"


def licensed(writer: object) -> None:
    add_fable_tokenizer(writer)
    writer.add_license("cc0-1.0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """fable as a repository of GGUF files: one at the top level, one in a folder and split, and one that is no model."""
    folder = tmp_path_factory.mktemp("made")
    write_model(FABLE, folder / "fable-Q8_0.gguf", "Q8_0", change=licensed)
    write_model(FABLE, folder / "fable-Q4_0.gguf", "Q4_0", change=add_fable_tokenizer, per_file=20)
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(made) == 4
    return {name if "Q8" in name else f"Q4_0/{name}": raw for name, raw in made.items()} | {"mmproj-Q8_0.gguf": b"pictures"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=files)
        yield hub


WHOLE, SPLIT = f"{REPO}:fable-Q8_0.gguf", f"{REPO}:Q4_0/fable-Q4_0-00001-of-00003.gguf"


def listed(user: HubUser) -> dict[str, dict]:
    return {model["name"]: model for model in user.run("list", "--json").json["models"]}


def test_a_second_list_reads_no_vocabulary(hub: Hub, user: HubUser, files: dict[str, bytes], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pulled file, of an alias, and of split files; a file that was replaced is read again."""
    assert user.run("pull", SPLIT).code == 0
    own, read, look = tmp_path / "own.gguf", [], reading._local_file
    own.write_bytes(files["fable-Q8_0.gguf"])
    assert user.run("alias", "mine", own).code == 0
    monkeypatch.setattr(reading, "_local_file", lambda name, path, *more: read.append(path) or look(name, path, *more))
    first = local_models(user.env)
    assert {model.name: model.source for model in first}.keys() == {"fable", "mine", SPLIT} and len(read) == 2
    assert local_models(user.env) == first and len(read) == 2
    asked = ("import sys\nfrom effllm.cli.app import main\nsys.argv = ['effllm', 'list', '--json']\n"
             "try:\n    main()\nfinally:\n    print('numpy' in sys.modules, file=sys.stderr)\n")
    ran = subprocess.run([sys.executable, "-P", "-c", asked], capture_output=True, text=True, check=True, env={**os.environ, **user.env})
    assert '"mine"' in ran.stdout and ran.stderr.strip() == "False"
    own.write_bytes(b"GGUF" + bytes(100))
    assert {model.name for model in local_models(user.env)} == {"fable", SPLIT}
    write_model(FABLE, own, "Q4_0", change=add_fable_tokenizer)
    now = {model.name: model for model in local_models(user.env)}
    assert now["mine"].bits < {model.name: model for model in first}["mine"].bits


def test_a_file_is_pulled_run_listed_verified_and_removed(hub: Hub, user: HubUser) -> None:
    commit = hub.repos[REPO].commit
    for name in (WHOLE, SPLIT):
        assert user.run("pull", name).code == 0
    ran = user.run("run", SPLIT, "Once", "--raw", "-n", "2")
    assert ran.code == 0 and ran.out.strip(), ran.err
    shown = user.run("show", WHOLE, "--json").json
    assert (shown["repo"], shown["revision"], shown["licence"]) == (REPO, commit, "cc0-1.0")

    here = listed(user)
    assert list(here) == ["fable", SPLIT, WHOLE] == model_names(user.env) == [model.name for model in local_models(user.env)]
    whole = here[WHOLE]
    assert (whole["family"], whole["source"], whole["revision"], whole["licence"]) == ("llama", "hub cache", commit, "cc0-1.0")
    assert whole["chat_template"] is True and whole["context"] == 2048 and 8.4 < whole["bits_per_weight"] < 8.8
    assert here[SPLIT]["parameters"] == whole["parameters"] and 4.4 < here[SPLIT]["bits_per_weight"] < 5

    assert user.run("verify", SPLIT, "--json").json == {
        "files": 4, "bytes": sum(len(raw) for name, raw in hub.repos[REPO].files.items() if "Q4_0" in name or "mmproj" in name),
        "damaged": [], "not_recorded": []}
    blob = (user.snapshot(REPO, commit) / "Q4_0" / "fable-Q4_0-00002-of-00003.gguf").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    assert "00002-of-00003" in user.run("verify", SPLIT).refused(1)

    folder = user.snapshot(REPO, commit)
    (folder / "Q4_0" / "fable-Q4_0-00001-of-00003.gguf.kv_profile.json").write_text("{}")
    assert "other programs share" in user.run("rm", SPLIT).refused(2)
    planned = user.run("rm", SPLIT, "--dry-run", "--json").json
    assert planned["bytes"] > sum(len(raw) for name, raw in hub.repos[REPO].files.items() if "Q4_0" in name)
    assert user.run("rm", SPLIT, "-y").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["fable-Q8_0.gguf", "mmproj-Q8_0.gguf"] and len(user.blobs(REPO)) == 2
    assert list(listed(user)) == ["fable", WHOLE] and user.run("verify", WHOLE).code == 0
    assert user.run("rm", WHOLE, "-y").code == 0
    assert not folder.parents[1].exists(), "what is left of a repository is no repository"


def test_a_list_of_versions_fits_a_terminal(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commit = hub.repos[REPO].commit
    for name in (WHOLE, SPLIT):
        assert user.run("pull", name).code == 0
    assert user.run("run", "fable", "Once", "--raw", "-n", "1", "--bits", "2", "--keep").code == 0
    screen = Environment(Terminal(), Terminal(), Terminal(), user.env)
    assert main(["list", "-l"], screen) == 0
    lines = screen.stdout.getvalue().splitlines()
    assert 75 <= max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert rows[0] == ["model", "revision", "template", "licence", "from"]
    assert ["fable", "yes", "Apache-2.0", "effllm"] in rows and [WHOLE, commit[:12], "yes", "CC0-1.0", "hub", "cache"] in rows
    (kept,) = (row for row in rows if row[0] == "fable:2bit")
    assert kept[1].startswith("local-") and len(kept[1]) == 14
    heading, *piped = [line.split() for line in user.run("list", "--long").out.splitlines()]
    assert heading == ["model", "family", "parameters", "bits", "size", "context", "revision", "template", "licence", "from"]
    assert ["2048", commit[:12], "yes", "Apache-2.0", "hub", "cache"] in [row[-6:] for row in piped if row[0] == SPLIT], "whole in a pipe"


def test_a_blob_that_something_else_shows_stays(hub: Hub, user: HubUser) -> None:
    whole = hub.repos[REPO].files["fable-Q8_0.gguf"]
    hub.add(REPO, files={"fable-Q8_0.gguf": whole, "copy-Q8_0.gguf": whole})
    for name in (WHOLE, f"{REPO}:copy-Q8_0.gguf"):
        assert user.run("pull", name).code == 0
    assert user.run("rm", WHOLE, "-y", "--json").json["bytes"] == 0
    assert user.run("verify", f"{REPO}:copy-Q8_0.gguf").code == 0 and list(listed(user)) == ["fable", f"{REPO}:copy-Q8_0.gguf"]
    hub.add(REPO, files={"copy-Q8_0.gguf": whole, "README.md": b"# Another commit"})
    assert user.run("pull", f"{REPO}:copy-Q8_0.gguf").code == 0
    old, new = sorted((user.home / "hf" / "hub" / "models--org--name" / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
    assert user.run("rm", f"{REPO}@{new.name}:copy-Q8_0.gguf", "-y", "--json").json["bytes"] == 0
    assert not new.exists() and old.exists() and len(user.blobs(REPO)) == 1


def test_a_name_that_is_not_here_removes_nothing(hub: Hub, user: HubUser) -> None:
    assert user.run("pull", WHOLE).code == 0
    for name in (f"{REPO}:typo.gguf", f"{REPO}:Q2_K", SPLIT):
        assert "is here, but" in user.run("rm", name, "-y").refused(3)
    assert user.run("pull", SPLIT).code == 0
    said = user.run("run", REPO, "Hi").refused(3)
    assert "only GGUF files of" in said and WHOLE in said and SPLIT in said
    assert listed(user)[WHOLE] and user.run("rm", REPO, "-y").code == 0 and not user.blobs(REPO)


def test_a_repository_by_its_name_alone_is_its_only_file_or_the_one_of_the_usual_precision(hub: Hub, user: HubUser) -> None:
    said = user.run("pull", REPO).refused(3)
    assert "holds only GGUF files" in said and WHOLE in said and SPLIT in said
    assert user.run("pull", WHOLE).code == 0
    hub.forget()
    assert resolve(REPO, user.env).folder == user.snapshot(REPO, hub.repos[REPO].commit) / "fable-Q8_0.gguf"
    assert user.run("verify", REPO).code == 0 and not hub.requests
    assert user.run("rm", REPO, "-y").code == 0 and not user.blobs(REPO), "the name of a repository removes all of it"
    raw = hub.repos[REPO].files["fable-Q8_0.gguf"]
    hub.add("org/usual", files={"m-Q8_0.gguf": raw[:-1] + b"x", "m-Q4_K_M.gguf": raw, "m-Q4_K_S.gguf": raw[:-1] + b"y"})
    plan = user.run("pull", "org/usual", "--dry-run")
    assert plan.code == 0 and "file      m-Q4_K_M.gguf" in plan.err, plan.err
    ran = user.run("run", "org/usual", "Once", "--raw", "-n", "1", "-y")
    assert ran.code == 0 and list(listed(user)) == ["fable", "org/usual:m-Q4_K_M.gguf"], ran.err


def test_bits_of_a_repository_of_gguf_files_lead_to_the_file_that_is_nearest(hub: Hub, user: HubUser) -> None:
    """It asked for a file, first of all for one of 4 bits, and did not say why. Bits of the settings do not stand in the way."""
    raw = hub.repos[REPO].files["fable-Q8_0.gguf"]
    names = ("m-Q8_0.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-BF16.gguf", "m-UD-Q2_K_XL.gguf", "m-Q3_K_M.gguf")
    hub.add("org/several", files={name: raw[:-1] + name[2:3].encode() for name in names})
    for asked, near in ((("org/several:4bit",), "m-Q4_K_M"), (("org/several", "--bits", "8"), "m-Q8_0"),
                        (("org/several:2bit",), "m-UD-Q2_K_XL"), (("org/several:ternary",), "m-UD-Q2_K_XL"),
                        (("org/several", "--bits", "3"), "m-Q3_K_M")):
        said = " ".join(user.run("pull", *asked).refused(3).split())
        assert "holds only GGUF files, which are pulled as they are" in said and f"effllm pull org/several:{near}.gguf" in said, said
    plan = user.run("pull", "org/several", "--dry-run", EFFLLM_BITS="8")
    assert plan.code == 0 and "file      m-Q4_K_M.gguf" in plan.err, plan.err


def test_a_folder_of_one_file_is_that_file(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "m-Q8_0.gguf").write_bytes(files["fable-Q8_0.gguf"])
    assert resolve(str(tmp_path), {}).folder == tmp_path / "m-Q8_0.gguf"
    (tmp_path / "n-Q8_0.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="holds GGUF files and no config.json"):
        resolve(str(tmp_path), {})


def test_a_split_file_whose_parts_are_not_all_here(hub: Hub, user: HubUser) -> None:
    assert user.run("pull", SPLIT).code == 0
    lost = user.snapshot(REPO, hub.repos[REPO].commit) / "Q4_0" / "fable-Q4_0-00002-of-00003.gguf"
    lost.resolve().unlink()
    assert "partly downloaded" in user.run("run", SPLIT, "Hi").refused(3) and list(listed(user)) == ["fable"]
    assert "is missing" in user.run("verify", lost.with_name("fable-Q4_0-00001-of-00003.gguf")).refused(3)
    ran = user.run("run", SPLIT, "Once", "--raw", "-n", "1", "-y")
    assert ran.code == 0 and list(listed(user)) == ["fable", SPLIT], ran.err
    lost.resolve().unlink()
    assert user.run("rm", SPLIT, "-y").code == 0 and not user.blobs(REPO)


def test_a_tag_means_the_one_file_that_states_it(hub: Hub, user: HubUser) -> None:
    said = user.run("pull", f"{REPO}:Q5_K_M").refused(3)
    assert "fable-Q8_0.gguf" in said and "Q4_0/fable-Q4_0-00001-of-00003.gguf" in said and "00002" not in said
    assert user.run("pull", f"{REPO}:q8_0").code == 0 and hub.requests_for("mmproj") and not hub.requests_for("Q4_0/")
    ran = user.run("run", f"{REPO}:Q4_0", "Once", "--raw", "-n", "1", "-y")
    assert ran.code == 0 and len(hub.requests_for("Q4_0/")) >= 3, ran.err
    hub.forget()
    for name, path in ((f"{REPO}:Q8_0", "fable-Q8_0.gguf"), (f"{REPO}:q4_0", "Q4_0/fable-Q4_0-00001-of-00003.gguf")):
        assert resolve(name, user.env).folder == user.snapshot(REPO, hub.repos[REPO].commit) / path
    assert user.run("verify", f"{REPO}:Q8_0").code == 0 and not hub.requests
    more = hub.repos[REPO].files
    hub.add(REPO, files=more | {"other-Q8_0.gguf": more["fable-Q8_0.gguf"]})
    said = user.run("pull", f"{REPO}:Q8_0").refused(3)
    assert "2 files of Q8_0" in said and f"{REPO}:other-Q8_0.gguf" in said
    assert user.run("pull", f"{REPO}:other-Q8_0.gguf").code == 0 and user.run("pull", WHOLE).code == 0
    said = user.run("run", f"{REPO}:Q8_0", "Hi").refused(3)
    assert "2 files of Q8_0" in said and WHOLE in said


def test_what_a_model_sees_with_comes_along_and_goes_with_the_last_that_does(hub: Hub, user: HubUser) -> None:
    whole = hub.repos[REPO].files["fable-Q8_0.gguf"]
    seen = {f"mmproj-fable-{kind}.gguf": kind.encode() * 1000 for kind in ("Q8_0", "f16", "F32", "BF16")}
    hub.add(REPO, files={"fable-Q8_0.gguf": whole, "other-Q8_0.gguf": whole[:-1] + b"x", "text/mmproj-a-f16.gguf": b"a",
                         "text/mmproj-b-f16.gguf": b"b", "text/fable-Q2_K.gguf": whole[:-1] + b"y", **seen})
    plan = user.run("pull", WHOLE, "--dry-run")
    assert "images    2.93 KiB of the download is its projector, mmproj-fable-f16.gguf" in plan.err
    assert user.run("pull", WHOLE, "--dry-run", "--json").json["files"] == ["fable-Q8_0.gguf", "mmproj-fable-f16.gguf"]
    assert user.run("pull", f"{REPO}:text/fable-Q2_K.gguf", "--dry-run", "--json").json["files"] == ["text/fable-Q2_K.gguf"]
    for name in (WHOLE, f"{REPO}:other-Q8_0.gguf"):
        assert user.run("pull", name).code == 0
    folder = user.snapshot(REPO, hub.repos[REPO].commit)
    assert sorted(path.name for path in folder.iterdir()) == ["fable-Q8_0.gguf", "mmproj-fable-f16.gguf", "other-Q8_0.gguf"]
    here = listed(user)
    assert not [name for name in here if "mmproj" in name] and here["fable"]["mmproj"] is None
    assert here[WHOLE]["mmproj"] == str(folder / "mmproj-fable-f16.gguf")
    (folder / "mmproj-fable-f16.gguf").resolve().write_bytes(b"F16" * 1000)
    assert "mmproj-fable-f16.gguf" in user.run("verify", WHOLE).refused(1)
    assert user.run("rm", WHOLE, "-y").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["mmproj-fable-f16.gguf", "other-Q8_0.gguf"]
    assert user.run("rm", f"{REPO}:other-Q8_0.gguf", "-y").code == 0 and not folder.parents[1].exists()


def test_bits_quantize_a_file_when_it_is_here_and_those_of_the_settings_leave_its_codes(
        hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan before the pull, the run and a plan after it agree."""
    own, typed = (user.run("plan", WHOLE, "--no-probe", "--json", *bits).json for bits in ((), ("--bits", "2")))
    assert typed["weights_bytes"] < 3_000_000 < own["weights_bytes"] and typed["pull"]["bits"] is None
    monkeypatch.setenv("EFFLLM_BITS", "2")
    assert user.run("plan", WHOLE, "--no-probe", "--json").json["weights_bytes"] == own["weights_bytes"]
    ran = user.run("run", WHOLE, "Once", "--raw", "-n", "1", "-y")
    assert ran.code == 0 and "bits of EFFLLM_BITS is ignored" in ran.err and "quantized on load" not in ran.err, ran.err
    here = user.run("plan", WHOLE, "--no-probe", "--json").json
    assert abs(here["weights_bytes"] - own["weights_bytes"]) < 0.01 * own["weights_bytes"]
    monkeypatch.delenv("EFFLLM_BITS")
    ran = user.run("run", WHOLE, "Once", "--raw", "-n", "1", "--bits", "2")
    assert ran.code == 0 and "quantized on load to 3.19 bits" in ran.err, ran.err


def test_a_tag_in_a_folder_of_ones_own(user: HubUser, hub: Hub) -> None:
    folder = user.home / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "tale-Q8_0.gguf").write_bytes(hub.repos[REPO].files["fable-Q8_0.gguf"])
    for text in (f"{folder}:Q8_0", f"{folder}:deep/tale-Q8_0.gguf"):
        assert resolve(text, user.env).folder == folder / "deep" / "tale-Q8_0.gguf"
    said = user.run("run", f"{folder}:Q4_0", "Hi").refused(3)
    assert f"{folder}' has no GGUF file of type Q4_0" in said and f"{folder}:deep/tale-Q8_0.gguf" in said
    assert f"{folder}:deep/tale-Q8_0.gguf" in user.run("run", f"{folder}:tale.gguf", "Hi").refused(3)
    said = user.run("run", "fable:Q4_K_M", "Hi").refused(3)
    assert "'fable' has no GGUF file of type Q4_K_M" in said and said.endswith("leave it out: fable")
    assert not hub.requests


@pytest.mark.parametrize(("asked", "found"), [
    ("Q4_K_M", ["m-Q4_K_M.gguf"]), ("q4_k_m", ["m-Q4_K_M.gguf"]), ("Q4_K", []), ("Q4_XS", []), ("IQ4_XS", ["m.IQ4_XS.gguf"]),
    ("F16", ["F16/m-00001-of-00002.gguf"]), ("BF16", ["m-bf16.gguf"]), ("UD-Q2_K_XL", ["m-UD-Q2_K_XL.gguf"]), ("m.IQ4_XS.gguf",
    ["m.IQ4_XS.gguf"]), ("M.IQ4_XS.gguf", []), ("F16/m-00002-of-00002.gguf", ["F16/m-00002-of-00002.gguf"])])
def test_what_a_tag_means(asked: str, found: list[str]) -> None:
    assert matching(asked, ("m-Q4_K_M.gguf", "m.IQ4_XS.gguf", "F16/m-00001-of-00002.gguf", "F16/m-00002-of-00002.gguf", "m-bf16.gguf",
                         "m-UD-Q2_K_XL.gguf", "mmproj-F16.gguf", "Q4_K.safetensors")) == found


def test_a_path_never_leads_out_of_the_cache(hub: Hub, user: HubUser) -> None:
    for text in (f"{REPO}:../../x.gguf", f"{REPO}:/etc/x.gguf", f"{REPO}:.hidden/x.gguf", f"{REPO}:a//b.gguf", f"{REPO}:a/../b.gguf"):
        with pytest.raises(EffllmError) as failed:
            resolve(text, user.env)
        assert not isinstance(failed.value, Absent), text
    files = hub.repos[REPO].files
    evil = ("../evil-Q6_K.gguf", "a/../../evil-Q6_K.gguf", ".git/evil-Q6_K.gguf", "/e/evil-Q6_K.gguf", "a/b/c/d/e/deep-Q6_K.gguf")
    hub.add(REPO, files=files | dict.fromkeys(evil, b"x"))
    assert "Q6_K" in user.run("pull", f"{REPO}:Q6_K").refused(3) and not hub.requests_for("evil") and not hub.requests_for("deep")


def test_two_files_of_a_repository_are_kept_apart_when_quantized(hub: Hub, user: HubUser) -> None:
    words = ("Once", "--raw", "-n", "1", "--bits", "2", "--keep")
    for name in (WHOLE, SPLIT):
        assert user.run("pull", name).code == 0
        ran = user.run("run", name, *words)
        assert ran.code == 0 and "quantized on load" in ran.err, ran.err
    assert "2bit weights from" in user.run("run", WHOLE, *words).err


def test_an_alias_of_a_file_leads_to_that_file(hub: Hub, user: HubUser) -> None:
    for name in (WHOLE, SPLIT):
        assert user.run("pull", name).code == 0
    assert user.run("alias", "tale", SPLIT).code == 0
    assert resolve("tale", user.env).folder == resolve(SPLIT, user.env).folder
    assert resolve("tale", user.env).folder.suffix == ".gguf", "a blob has no name to tell what it is"
    ran = user.run("run", "tale", "Once", "--raw", "-n", "2")
    assert ran.code == 0 and ran.out.strip(), ran.err
    assert listed(user)["tale"]["licence"] == hub.repos[REPO].licence, "no file states it, the hub did"
    assert user.run("verify", "tale").code == 0
    assert user.run("alias", "llama3", WHOLE).code == 0, "a name of the catalog, for another model"
    assert resolve("llama3", user.env).folder.name == "fable-Q8_0.gguf"


def test_an_alias_of_a_file_of_a_known_repository(hub: Hub, user: HubUser) -> None:
    hub.add("Qwen/Qwen3-4B", files={"fable-Q8_0.gguf": hub.repos[REPO].files["fable-Q8_0.gguf"]})
    assert user.run("pull", "qwen3-4b:fable-Q8_0.gguf").code == 0
    assert "qwen3-4b:fable-Q8_0.gguf" in listed(user)
    assert user.run("alias", "mine", "qwen3-4b:fable-Q8_0.gguf").code == 0
    assert resolve("mine", user.env).folder.name == "fable-Q8_0.gguf"
    assert "effllm pull" in user.run("alias", "other", "qwen3-4b:Q2_K").refused(3)


def test_the_shell_is_told_files_and_loads_little(hub: Hub, user: HubUser) -> None:
    assert user.run("pull", WHOLE).code == 0
    code = ("import os, sys\nimport effllm.cli.app\nfrom effllm.cli.options import complete_model\nprint(*complete_model('org'))\n"
            "assert not {'numpy', 'tokenizers', 'ssl', 'http.client'} & set(sys.modules)")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | user.env)
    assert ran.stdout == f"{WHOLE}\n"


def test_a_place_of_several_gguf_files_names_them(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    """In a repository, where one is to be quantized, the nearest, and in a folder; one file is one file."""
    whole = hub.repos[REPO].files["fable-Q8_0.gguf"]
    hub.add("org/several", files={f"fable-{kind}.gguf": whole for kind in ("F16", "Q8_0", "Q4_K_M")})
    said = user.run("pull", "org/several", "--bits", "4").refused(3)
    assert said.endswith("effllm pull org/several:fable-Q4_K_M.gguf"), said
    hub.add("org/unusual", files={f"fable-{kind}.gguf": whole for kind in ("F16", "Q8_0", "Q6_K")})
    said = user.run("pull", "org/unusual").refused(3)
    assert said.endswith("effllm pull org/unusual:fable-F16.gguf or org/unusual:fable-Q6_K.gguf or org/unusual:fable-Q8_0.gguf"), said
    pulled = user.run("pull", "org/several:fable-F16.gguf", "-y")
    assert pulled.code == 0 and " in 1 file\n" in pulled.err, pulled.err
    assert user.run("verify", "org/several:fable-F16.gguf").out.startswith("1 file, ")
    folder = tmp_path / "folder"
    folder.mkdir()
    for kind in ("Q8_0", "F16"):
        (folder / f"fable-{kind}.gguf").write_bytes(whole)
    said = user.run("show", folder).refused(3)
    assert "holds GGUF files and no config.json" in said and f"{folder}:fable-F16.gguf" in said and f"{folder}:fable-Q8_0.gguf" in said
