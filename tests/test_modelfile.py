"""Ollama Modelfiles as aliases with settings: what is read, where it is stored, and what has no counterpart."""

import tomllib
from pathlib import Path

import pytest
from gguf_bytes import small_model
from hub_user import FABLE, HubUser
from hypothesis import given
from hypothesis import strategies as st
from library_trees import OllamaTree

from effllm import UsageError
from effllm.runtime.library.modelfile import FENCE, INSTRUCTIONS, Instruction, parse_modelfile

WHOLE = """# A storyteller
from fable
PARAMETER temperature 0.25
PARAMETER stop "the king"
parameter\tstop <|end|>
PARAMETER num_ctx 512
PARAMETER num_gpu 99
TEMPLATE \"\"\"{{ if .System }}{{ .System }}
{{ end }}{{ .Prompt }}\"\"\"
SYSTEM \"\"\"
Speak of "foxes" \\ and é.
Nothing else.
\"\"\"
MESSAGE user hello there
LICENSE CC0
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return HubUser(tmp_path, "http://127.0.0.1:9")


def config_of(user: HubUser) -> Path:
    return user.home / "config" / "effllm" / "config.toml"


def written(user: HubUser, text: str, name: str = "Modelfile") -> Path:
    path = user.home / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_modelfile_is_taken_apart() -> None:
    said = parse_modelfile(WHOLE, "Modelfile")
    assert said[0] == Instruction(2, "FROM", "fable") and said[2] == Instruction(4, "PARAMETER", "the king", "stop")
    assert said[3] == Instruction(5, "PARAMETER", "<|end|>", "stop") and said[-2] == Instruction(14, "MESSAGE", "hello there", "user")
    assert said[-3].value == 'Speak of "foxes" \\ and é.\nNothing else.' and said[-4].value.endswith("{{ .Prompt }}")


@pytest.mark.parametrize("text, said", [
    ("", "no FROM"), ("SYSTEM x", "no FROM"), ("FROM", ":1: FROM says nothing"),
    ("FROM x\nRUN y", ":2: 'RUN y' is not a Modelfile instruction"),
    ("FROM x\nPARAMETER temperature", ":2: PARAMETER says nothing"), (f"FROM x\n\nSYSTEM {FENCE}y\nz", ":3: the quotes that SYSTEM opens"),
    ("{json}", ":1: '{json}' is not a Modelfile instruction")])
def test_what_is_no_modelfile_is_said_by_its_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_modelfile(text, "Modelfile")
    assert said in caught.value.message and caught.value.hint


WORDS = (*INSTRUCTIONS, "from", FENCE, '"', " ", "\n", "\t", "stop", "x", "#", "\x00", "é")


@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
def test_any_text_is_a_modelfile_or_refused(text: str) -> None:
    try:
        said = parse_modelfile(text, "Modelfile")
    except UsageError as error:
        assert error.message.startswith("Modelfile") and error.hint
    else:
        assert any(each.name == "FROM" for each in said) and all(1 <= each.line <= len(text.splitlines()) for each in said)


def test_it_becomes_an_alias_with_settings_of_its_own(user: HubUser) -> None:
    config_of(user).parent.mkdir(parents=True)
    config_of(user).write_text('# mine\nctx-size = 1024\n\n[model.other]\ntemp = 1.0')
    made = user.run("alias", "teller", "--modelfile", written(user, WHOLE))
    assert made.code == 0, made.err
    for left in ("line 7: PARAMETER num_gpu", "line 8: TEMPLATE", "line 14: MESSAGE"):
        assert left in made.err
    said = tomllib.loads(config_of(user).read_text())
    assert said["model"]["teller"] == {"temp": 0.25, "stop": ["the king", "<|end|>"], "ctx-size": 512,
                                       "system": 'Speak of "foxes" \\ and é.\nNothing else.'}
    assert said["ctx-size"] == 1024 and said["model"]["other"] == {"temp": 1.0} and config_of(user).read_text().startswith("# mine\n")
    assert "of 512 tokens" in user.run("run", "teller", "A fox", "-n", "2", "--stats").err
    assert "of 1024 tokens" in user.run("run", "fable", "A fox", "-n", "2", "--stats").err
    before = config_of(user).read_text()
    assert "has settings of teller already" in user.run("alias", "teller", "--modelfile", user.home / "Modelfile").refused(2)
    assert "stay in" in user.run("alias", "--rm", "teller").err and config_of(user).read_text() == before


def test_from_is_a_file_a_folder_or_one_of_ollamas_names(user: HubUser) -> None:
    small = small_model()
    (user.home / "inner").mkdir()
    (user.home / "inner" / "m.gguf").write_bytes(small)
    tree = OllamaTree(user.home / ".ollama" / "models")
    tree.add("fable:8b", small)
    for name, text, stands in (("one", "FROM ./m.gguf", "inner/m.gguf"), ("two", "FROM m.gguf", "inner/m.gguf"),
                               ("three", f"FROM {FABLE}", str(FABLE)), ("four", "FROM fable:8b", "ollama:fable:8b"),
                               ("five", f"FROM {tree.blob(small)}\nFROM /x/projector", str(tree.blob(small)))):
        made = user.run("alias", name, "--modelfile", written(user, text, "inner/Modelfile"))
        assert made.code == 0 and f"{name} is " in made.err and stands in made.err, made.err
    assert "a second FROM" in made.err and not config_of(user).exists(), "no settings, no table"


def test_what_is_wrong_leaves_nothing_behind(user: HubUser) -> None:
    for text, said, code in (("FROM nothing-here", "nothing-here", 3), ("FROM fable\nPARAMETER temperature hot", "Modelfile:2", 2),
                             ("FROM fable\nADAPTER ./gone", "there is no adapter", 2), ("FROM ./gone.gguf", "gone.gguf", 3)):
        assert said in user.run("alias", "teller", "--modelfile", written(user, text)).refused(code)
    config_of(user).parent.mkdir(parents=True)
    config_of(user).write_text("model = {other = {temp = 1.0}}\n")
    assert "cannot take another table" in user.run("alias", "teller", "--modelfile", written(user, WHOLE)).refused(2)
    assert "teller" not in user.run("alias", "--json").out
    written(user, "x").write_bytes(b"FROM \xff\xfe")
    for words in (("teller", "--modelfile", user.home / "gone"), ("--modelfile", "x"), ("teller", "fable", "--modelfile", "x"),
                  ("teller", "--modelfile", user.home / "Modelfile"), ("Bad Name", "--modelfile", "x")):
        user.run("alias", *words).refused(2)
