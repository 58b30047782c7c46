"""A licence stated only by the hub: stored in our folder when a model is pulled, shown from then on, and removed with the model."""

import re
from pathlib import Path

import gguf
import pytest
from gguf_samples import Reader, add_fable_tokenizer, write_model
from hub_server import Hub
from hub_user import FABLE, HubUser

from effllm.runtime.hub import shown_licence
from effllm.runtime.library.aliases import own_file

REPO = "org/name"
SILENT = {path.name: path.read_bytes() for path in FABLE.iterdir() if path.name != "README.md"}


def told(user: HubUser, name: str = REPO) -> tuple[str | None, str | None]:
    """The licence that `list` and `show` print for a model."""
    listed = {each["name"]: each["licence"] for each in user.run("list", "--json").json["models"]}
    return listed[name], user.run("show", name, "--json").json["licence"]


def notes(user: HubUser) -> list[str]:
    folder = user.home / "data" / "effllm" / "licences"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_it_is_reported_after_the_pull_and_goes_with_the_model(hub: Hub, user: HubUser) -> None:
    commit = hub.add(REPO, files=SILENT, licence="cc-by-4.0").commit
    assert "CC-BY-4.0" in user.run("pull", REPO, "--dry-run").err and notes(user) == []
    assert user.run("pull", REPO).code == 0
    assert told(user) == ("cc-by-4.0", "cc-by-4.0") and "CC-BY-4.0" in user.run("list").out
    assert notes(user) == [f"org--name@{commit}"]
    assert {path.name for path in user.snapshot(REPO, commit).iterdir()} == set(SILENT), "the shared cache holds nothing that is ours"
    made = user.home / "made"
    assert user.run("quantize", REPO, "-o", made, "--bits", "4").code == 0 and told(user, str(made)) == ("cc-by-4.0", "cc-by-4.0")
    assert str(user.home / "data" / "effllm" / "licences" / notes(user)[0]) in user.run("rm", REPO, "--dry-run").out
    assert notes(user) and user.run("rm", REPO, "-y").code == 0 and notes(user) == []


def test_it_is_kept_for_what_another_tool_had_fetched(hub: Hub, user: HubUser) -> None:
    commit = hub.add(REPO, files=SILENT, licence="cc-by-4.0").commit
    assert user.run("pull", REPO).code == 0
    (user.home / "data" / "effllm" / "licences" / f"org--name@{commit}").unlink()
    assert told(user) == (None, None)
    assert user.run("pull", REPO, "--json").json["bytes_loaded"] == 0 and told(user) == ("cc-by-4.0", "cc-by-4.0")


def test_a_revision_takes_its_own_note_alone(hub: Hub, user: HubUser) -> None:
    older = hub.add(REPO, files=SILENT | {"NOTICE": b"1"}, licence="mit", branches=("v1",))
    assert user.run("pull", f"{REPO}@v1").code == 0
    newer = hub.add(REPO, files=SILENT, licence="cc-by-4.0")
    assert user.run("pull", REPO).code == 0
    assert told(user) == ("cc-by-4.0", "cc-by-4.0") and told(user, f"{REPO}@{older.commit[:12]}") == ("mit", "mit")
    assert user.run("rm", f"{REPO}@v1", "-y").code == 0 and notes(user) == [f"org--name@{newer.commit}"]


def test_what_a_file_states_needs_no_note(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    hub.add(REPO, files=SILENT | {"README.md": b"---\nlicense: apache-2.0\n---\n"}, licence="cc-by-4.0")
    assert user.run("pull", REPO).code == 0 and told(user) == ("apache-2.0", "apache-2.0") and notes(user) == []

    def licensed(writer: object) -> None:
        add_fable_tokenizer(writer)
        writer.add_license("cc0-1.0")

    write_model(FABLE, tmp_path / "said-Q8_0.gguf", "Q8_0", change=licensed)
    write_model(FABLE, tmp_path / "mute-Q4_0.gguf", "Q4_0", change=add_fable_tokenizer)
    hub.add("org/files", files={path.name: path.read_bytes() for path in tmp_path.glob("*.gguf")}, licence="cc-by-4.0")
    said, mute = "org/files:said-Q8_0.gguf", "org/files:mute-Q4_0.gguf"
    assert user.run("pull", said).code == 0 and told(user, said) == ("cc0-1.0", "cc0-1.0") and notes(user) == []
    assert user.run("pull", mute).code == 0 and told(user, mute) == ("cc-by-4.0", "cc-by-4.0") and len(notes(user)) == 1
    assert user.run("rm", said, "-y").code == 0 and told(user, mute) == ("cc-by-4.0", "cc-by-4.0")
    assert user.run("rm", mute, "-y").code == 0 and notes(user) == []


def test_a_note_that_cannot_be_written_or_read_costs_no_more_than_the_licence(hub: Hub, user: HubUser) -> None:
    hub.add(REPO, files=SILENT, licence="cc-by-4.0")
    place = user.home / "data" / "effllm" / "licences"
    place.parent.mkdir(parents=True)
    place.write_text("in the way")
    pulled = user.run("pull", REPO)
    assert pulled.code == 0 and "cannot show the licence, cc-by-4.0" in pulled.err and told(user) == (None, None)
    assert user.run("rm", REPO, "-y").code == 0 and place.read_text() == "in the way"


def test_where_none_is_stated_every_command_says_so_alike(user: HubUser) -> None:
    """A file of aliases has to name a licence and says that none is stated, which is no licence of that name."""
    model = user.home / "silent"
    model.mkdir()
    for name, content in SILENT.items():
        (model / name).write_bytes(content)
    assert user.run("alias", "mute", model).code == 0
    assert "licence: not stated" in own_file(user.env).read_text()
    assert told(user, "mute") == (None, None)
    assert user.run("alias", "--json").json["aliases"]["mute"]["licence"] is None
    assert "not stated" in user.run("show", "mute").out and "not stated" not in user.run("list").out
    assert user.run("quantize", "mute", "-o", user.home / "made", "--bits", "4").code == 0
    assert told(user, str(user.home / "made")) == (None, None)


def test_tables_spell_a_licence_as_spdx_does(hub: Hub, user: HubUser) -> None:
    """Cards have small letters and the catalog has not; for a script a licence stays as it was stated."""
    hub.add(REPO, files=SILENT | {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    assert re.search(r"licence +Apache-2\.0", user.run("pull", REPO).err)
    assert user.run("list").out.count("Apache-2.0") == 2 and "apache-2.0" not in user.run("list", "--long").out
    assert "Apache-2.0" in user.run("show", REPO).out and told(user) == ("apache-2.0", "apache-2.0")
    assert [shown_licence(each) for each in ("cc-by-nc-4.0", "mit", "llama3.2", None)] == ["CC-BY-NC-4.0", "MIT", "llama3.2", ""]


@pytest.mark.parametrize("card", ("license: apache-2.0", "license: other\nlicense_name: its-own"))
def test_a_file_states_it_and_what_is_made_of_the_file_does(user: HubUser, tmp_path: Path, card: str) -> None:
    source, file, again, small = (tmp_path / name for name in ("source", "a.gguf", "b.gguf", "small"))
    said = card.split(": ")[-1]
    source.mkdir()
    for name, data in (SILENT | {"README.md": f"---\n{card}\n---\n".encode()}).items():
        (source / name).write_bytes(data)
    for made_of, out in ((source, file), (file, again)):
        assert user.run("export", made_of, "-o", out, "--type", "Q8_0").code == 0
        assert Reader(out).fields["general.license"].contents() == said
    for made_of in (source, again):
        assert user.run("quantize", made_of, "-o", small, "--bits", "4", "--force").code == 0
        assert told(user, str(small)) == (said, said)
    assert user.run("export", small, "-o", tmp_path / "c.gguf", "--type", "Q8_0").code == 0
    assert user.run("show", tmp_path / "c.gguf", "--json").json["licence"] == said


def test_a_file_of_an_unusual_licence_keeps_all_that_it_states(user: HubUser, tmp_path: Path) -> None:
    keys = {"general.license": "other", "general.license.name": "its-own", "general.license.link": "https://example.org/licence"}
    write_model(FABLE, tmp_path / "m.gguf", "Q8_0", change=lambda writer: _stated(writer, keys))
    assert user.run("show", tmp_path / "m.gguf", "--json").json["licence"] == "its-own"
    assert user.run("export", tmp_path / "m.gguf", "-o", tmp_path / "n.gguf", "--type", "Q8_0").code == 0
    fields = Reader(tmp_path / "n.gguf").fields
    assert {key: fields[key].contents() for key in keys} == keys


def _stated(writer: gguf.GGUFWriter, keys: dict[str, str]) -> None:
    add_fable_tokenizer(writer)
    for key, value in keys.items():
        writer.add_string(key, value)
