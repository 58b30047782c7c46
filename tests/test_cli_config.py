"""Settings files: precedence, the origin of each value, and errors reported by line."""

import json
import os
from pathlib import Path

import pytest
from command_line import CliRun

import effllm
from effllm.cli.flags import token_count, variable_name
from effllm.cli.settings import known_settings

FABLE = Path(effllm.__path__[0]) / "models" / "fable"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a user's folder of settings, both empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "effllm").mkdir(parents=True)
    return tmp_path


def project(place: Path, text: str) -> None:
    (place / "effllm.toml").write_text(text)


def user(place: Path, text: str) -> None:
    (place / "home" / "effllm" / "config.toml").write_text(text)


def planned(*argv: str, **variables: str) -> int:
    ran = CliRun("plan", "fable", "--json", *argv)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["ctx"]


@pytest.mark.slow
def test_each_place_wins_over_the_next(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned() == 2048
    user(place, "ctx-size = 512\n")
    assert planned() == 512
    project(place, "ctx-size = 384\n")
    assert planned() == 384
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "256")
    assert planned() == 256
    assert planned("-c", "128") == 128


def test_a_variable_of_no_flag_is_reported_and_one_of_another_command_is_not(place: Path) -> None:
    ran = CliRun("config", "show", EFFLLM_TMP="0.3", EFFLLM_NO_KV_PROFILE="1", EFFLLM_CTX_SIZE="256", EFFLLM_ZQX="1")
    said = [line for line in ran.err.splitlines() if "not the variable of any flag" in line]
    assert ran.code == 0 and len(said) == 2
    assert said[0] == "EFFLLM_TMP is not the variable of any flag, did you mean EFFLLM_TEMP?" and "EFFLLM_ZQX" in said[1]
    assert "did you mean EFFLLM_TEMP?" in CliRun("plan", "fable", "--no-probe", EFFLLM_TMP="0.3").err
    for short, meant in (("CTX", "CTX_SIZE"), ("N", "PREDICT"), ("NUM_CTX", "CTX_SIZE"), ("NGL", "GPU_LAYERS"), ("TEMPERATURE", "TEMP")):
        said = CliRun("config", "show", **{f"EFFLLM_{short}": "3"}).err
        assert said == f"EFFLLM_{short} is not the variable of any flag, did you mean EFFLLM_{meant}?\n"
    assert "did you mean EFFLLM_N_GEN?" in CliRun("bench", EFFLLM_N="3").err, "what -n is to this command"
    assert "variable" not in CliRun("plan", "fable", "--no-probe", EFFLLM_TEMP="0.3", EFFLLM_PREDICTOR="8").err


def test_strict_refuses_a_variable_of_no_flag(place: Path) -> None:
    refusal = "--strict refuses this: EFFLLM_TMP is not the variable of any flag, did you mean EFFLLM_TEMP?"
    for argv, more in ((("--strict",), {}), ((), {"EFFLLM_STRICT": "1"})):
        ran = CliRun("plan", "fable", "--no-probe", *argv, EFFLLM_TMP="0.3", **more)
        assert ran.code == 2 and refusal in ran.err and not ran.out
    user(place, "strict = true\n")
    assert refusal in CliRun("plan", "fable", "--no-probe", EFFLLM_TMP="0.3").err
    assert CliRun("config", "show", EFFLLM_TMP="0.3").code == 0, "where one looks for what is wrong"


@pytest.mark.slow
def test_a_context_may_be_written_in_thousands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned("-c", "1k") == planned("--ctx-size", "1K") == 1024 == token_count("1024")
    assert (token_count("16k"), token_count("16K"), token_count("1m"), token_count(4096)) == (16384, 16384, 1 << 20, 4096)
    for wrong in ("k", "1.5k", "16kb", "", "1 k k"):
        with pytest.raises(ValueError):
            token_count(wrong)
    project(place, 'ctx-size = "1k"\n')
    assert planned() == 1024 and json.loads(CliRun("config", "show", "--json").out)["ctx-size"]["value"] == 1024
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "1K")
    project(place, "")
    assert planned() == 1024 and json.loads(CliRun("config", "show", "--json").out)["ctx-size"]["value"] == 1024


def test_show_says_what_holds_and_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(place, "# mine\ntop-k = 7\nkv = '32bit'\n")
    project(place, 'kv = "16bit"\n\nstop = ["END"]\nstrict = true\n')
    monkeypatch.setenv("EFFLLM_THREADS", "2")
    shown = json.loads(CliRun("config", "show", "fable", "--json").out)
    assert shown["kv"] == {"value": "16bit", "origin": "effllm.toml:1"}
    assert shown["stop"] == {"value": ["END"], "origin": "effllm.toml:3"} and shown["strict"]["value"] is True
    assert shown["top-k"] == {"value": 7, "origin": f"{place}/home/effllm/config.toml:2"}
    assert shown["threads"] == {"value": 2, "origin": "EFFLLM_THREADS"}
    assert shown["repeat-penalty"] == {"value": 1.2, "origin": "generation_config.json"}
    assert shown["kv-window"] == {"value": 128, "origin": "built in"}
    assert list(shown) == list(known_settings())
    assert json.loads(CliRun("config", "show", "--json").out)["repeat-penalty"] == {"value": 1.0, "origin": "built in"}
    table = CliRun("config", "show", "--origin")
    assert "effllm.toml:1" in table.out and "EFFLLM_THREADS" in table.out and "looked for effllm.toml" in table.err
    assert "effllm.toml" not in CliRun("config", "show").out


def test_show_and_a_run_leave_the_same_out(place: Path) -> None:
    """What is set for all models and this one cannot have: the same words, and the value that holds."""
    project(place, "ctx-size = 9000\npredict-neurons = true\nkv = '8bit'\n")
    reason = ("a context of 9000 is more than the 2048 positions that the model was trained for: ignored, since it is a setting for all "
              "models")
    for words in (("run", "fable", "Tell me a story.", "-n", "2"), ("plan", "fable", "--no-probe"), ("config", "show", "fable")):
        ran = CliRun(*words)
        assert ran.code == 0 and reason in ran.err and "--predict-neurons" in ran.err, words
    shown = json.loads(CliRun("config", "show", "fable", "--json").out)
    assert shown["ctx-size"] == {"value": None, "origin": "built in, effllm.toml:1 is left out"}
    assert shown["predict-neurons"] == {"value": False, "origin": "built in, effllm.toml:2 is left out"}
    assert shown["kv"] == {"value": "8bit", "origin": "effllm.toml:3"}, "what the model can have stays"
    assert json.loads(CliRun("config", "show", "--json").out)["ctx-size"] == {"value": 9000, "origin": "effllm.toml:1"}
    project(place, "ctx-size = 512\n")
    assert json.loads(CliRun("config", "show", "fable", "--json").out)["ctx-size"] == {"value": 512, "origin": "effllm.toml:1"}


def test_show_leaves_out_the_bits_of_a_model_that_is_quantized(place: Path) -> None:
    project(place, "bits = 4\n")
    assert json.loads(CliRun("config", "show", "fable", "--json").out)["bits"]["value"] == 4
    assert CliRun("quantize", "fable", "-o", str(place / "small"), "--bits", "8").code == 0
    ran = CliRun("config", "show", str(place / "small"), "--json")
    assert json.loads(ran.out)["bits"] == {"value": None, "origin": "built in, effllm.toml:1 is left out"}
    assert "is quantized already (symmetric8:32): bits of effllm.toml:1 is ignored" in ran.err


def test_switches_and_numbers_arrive(place: Path) -> None:
    project(place, "stats = true\ntemp = 0\npredict = 3\nsystem = 'Speak of the sea.'\n")
    ran = CliRun("run", "fable", "Tell me a story.")
    assert ran.code == 0 and "answer 3 tokens" in ran.err and "stopped after 3 tokens" in ran.err
    assert "stopped after 2 tokens" in CliRun("run", "fable", "Tell me a story.", "-n", "2").err


@pytest.mark.parametrize(("text", "said"), [
    ("kv = '16bit'\ntmep = 1\n", "effllm.toml:2: there is no setting 'tmep', did you mean temp?"),
    ("ctx_size = 5\n", "effllm.toml:1: there is no setting 'ctx_size', did you mean ctx-size?"),
    ("ctx = 512\n", "effllm.toml:1: there is no setting 'ctx', did you mean ctx-size?"),
    ("n = 4\n", "effllm.toml:1: there is no setting 'n', did you mean predict?"),
    ("ngl = 0\n", "effllm.toml:1: there is no setting 'ngl', did you mean gpu-layers?"),
    ("num_ctx = 512\n", "effllm.toml:1: there is no setting 'num_ctx', did you mean ctx-size?"),
    ("[run]\ntemp = 1\n", "effllm.toml:1: there is no setting 'run'"),
    ("a" + ".a" * 300_000 + " = 1\n", "effllm.toml: names are nested too deeply"),
    ("".join(f"k{at} = 1\n" for at in range(50_000)), "effllm.toml:1: there is no setting 'k0'"),
    ("".join(f"[model.m{at}]\n" for at in range(1001)), "effllm.toml has settings of 1,001 models, at most 1,000 are read"),
    (f"temp = 0x{'f' * 5000}\n", "effllm.toml:1: temp is a number, not one of more than 64 bits"),
    (f"top-k = 0x{'f' * 5000}\n", "effllm.toml:1: top-k is a whole number, not one of more"),
    ("mcp = 'x'\n", "effllm.toml:1: mcp is not allowed in a settings file"),
    ("\n\nyes = true\n", "effllm.toml:3: there is no setting 'yes'"),
    ("temp = 'hot'\n", "effllm.toml:1: temp is a number, not 'hot'"), ("temp = true\n", "effllm.toml:1: temp is a number, not true"),
    ("top-k = 1.5\n", "effllm.toml:1: top-k is a whole number, not 1.5"), ("strict = 1\n", "effllm.toml:1: strict is true or false, not 1"),
    ("device = 'tpu'\n", "effllm.toml:1: device is auto or cpu or cuda, not 'tpu'"),
    ("ctx-size = 1.5\n", "effllm.toml:1: ctx-size is a number of tokens"), ("ctx-size = '1g'\n", "effllm.toml:1: ctx-size is a number of"),
    ("stop = [1]\n", "effllm.toml:1: stop is text or a list of texts"), ("a = 1\ntemp = = 2\n", "effllm.toml:2: "),
    ("\udc80", "effllm.toml: ")])
def test_a_file_that_is_wrong_is_one_line_with_its_place(place: Path, text: str, said: str) -> None:
    (place / "effllm.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    for command in (("plan", "fable"), ("config", "show")):
        ran = CliRun(*command)
        lines = ran.err.splitlines()
        assert ran.code == 2 and ran.out == "" and len(lines) == 2 and lines[0].startswith(f"effllm: {said}"), ran.err


@pytest.mark.parametrize("text", ("yes = true\n", "a = 1\ntemp = = 2\n", "\udc80"))
def test_help_is_there_whatever_a_file_says(place: Path, text: str) -> None:
    (place / "effllm.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert CliRun("plan", "--help").code == 0 and CliRun("--version").code == 0


def test_a_size_without_its_unit_is_answered_with_one(place: Path) -> None:
    for key in ("ram", "kv-ram", "session-disk"):
        project(place, f"{key} = 6\n")
        said = f'effllm: effllm.toml:1: {key} is a size between quotes, not 6\nhint: with its unit: {key} = "6G", or M\n'
        assert CliRun("config", "show").err == said


def test_text_without_quotes_is_answered_with_how_it_is_written(place: Path) -> None:
    project(place, "kv = 8bit\n")
    ran = CliRun("plan", "fable")
    assert ran.code == 2 and ran.err.splitlines()[1] == 'hint: settings are lines of TOML, such as `temp = 0.5` or `kv = "8bit"`'


def test_a_file_that_cannot_be_read_is_one_line(place: Path) -> None:
    (place / "effllm.toml").mkdir()
    ran = CliRun("plan", "fable")
    assert ran.code == 2 and ran.err.startswith("effllm: effllm.toml: not a regular file\nhint: ")


def test_a_file_that_is_a_link_to_itself_is_one_line(place: Path) -> None:
    (place / "effllm.toml").symlink_to("effllm.toml")
    ran = CliRun("plan", "fable")
    assert ran.code == 2 and ran.err.startswith("effllm: effllm.toml: Too many levels of symbolic links\nhint: ")


def test_a_file_that_is_linked_to_nothing_sets_nothing(place: Path) -> None:
    (place / "effllm.toml").symlink_to(os.devnull)
    assert json.loads(CliRun("config", "show", "--json").out)["kv"]["origin"] == "built in"


def test_every_setting_is_a_flag_and_has_a_default(place: Path) -> None:
    shown = json.loads(CliRun("config", "show", "--json").out)
    assert {"temp", "ctx-size", "bits", "think", "markdown", "stats"} <= shown.keys()
    assert not {"json", "yes", "debug", "output", "file", "raw"} & shown.keys(), "what one command is to do is not a setting"
    for key, entry in shown.items():
        assert entry["origin"] == "built in" or os.environ.get(variable_name(key)), key


WRONG = [("SEED", "abc", "'abc' is not a whole number"), ("TEMP", "hot", "'hot' is not a number"),
         ("CTX_SIZE", "1g", "'1g' is not a number of"), ("DEVICE", "tpu", "'tpu' is not one of auto, cpu, cuda"),
         ("STRICT", "maybe", "'maybe' is neither true nor false"), ("KV", "foo", "--kv foo is not known"),
         ("CACHE_TYPE_K", "q9", "q9 is not a cache type"), ("THREADS", "0", "--threads 0 is too"),
         ("RAM", "lots", "'lots' is not a size"),
         ("SESSION_DISK", "x", "'x' is not a size"), ("TEMP", "-1", "--temp must be 0"), ("TOP_P", "2", "--top-p must be above 0"),
         ("PREDICT", "-7", "-n -7 is out of range"), ("BITS", "9", "--bits is 8, 6, 5, 4, 3 or 2, not 9"),
         ("SESSION", "a/b", "'a/b' is not a valid session name")]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_a_wrong_value_of_a_variable_is_said_by_show_as_by_a_run(place: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str,
                                                                 said: str) -> None:
    monkeypatch.setenv(f"EFFLLM_{name}", value)
    shown, ran = CliRun("config", "show"), CliRun("run", "fable", "hi")
    assert shown.code == ran.code == 2 and shown.out == ran.out == ""
    assert shown.err == ran.err and shown.err.startswith(f"effllm: the variable EFFLLM_{name}: {said}") and "\nhint: " in shown.err


def test_a_wrong_value_of_a_file_is_reported_with_its_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(place, '# mine\nkv = "foo"\n')
    for command in (("config", "show"), ("plan", "fable"), ("run", "fable", "hi")):
        assert CliRun(*command).err.startswith("effllm: effllm.toml:2: --kv foo is not known\nhint: use 32bit"), command
    assert CliRun("plan", "fable", "--no-probe", "--kv", "8bit").code == 0, "what is typed holds"
    monkeypatch.setenv("EFFLLM_KV", "8bit")
    assert CliRun("plan", "fable", "--no-probe").code == 0, "and so does a variable"
    assert json.loads(CliRun("config", "show", "--json").out)["kv"] == {"value": "8bit", "origin": "EFFLLM_KV"}


@pytest.mark.parametrize(("on", "off"), [("1", "0"), ("true", "false"), ("T", "f"), ("Yes", "NO"), ("y", "n"), ("on", "off"),
                                         (" on ", " Off")])
def test_show_knows_the_words_of_a_switch_that_commands_know(place: Path, monkeypatch: pytest.MonkeyPatch, on: str, off: str) -> None:
    monkeypatch.setenv("EFFLLM_EXACT", on)
    monkeypatch.setenv("EFFLLM_STRICT", off)
    shown = json.loads(CliRun("config", "show", "--json").out)
    assert shown["exact"]["value"] is True and shown["strict"]["value"] is False
    assert CliRun("plan", "fable", "--no-probe").code == 0


@pytest.mark.parametrize("word", ["2", "enable", "-"])
def test_show_refuses_the_words_of_a_switch_that_commands_refuse(place: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("EFFLLM_STRICT", word)
    shown, ran = CliRun("config", "show"), CliRun("plan", "fable", "--no-probe")
    assert shown.code == ran.code == 2 and shown.err == ran.err and f"{word!r} is neither true nor false" in shown.err


def test_a_model_has_settings_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that is typed, with what stands behind it or without; in each file before what is said of all."""
    user(place, "[model.fable]\nctx-size = 384\ntop-k = 9\n")
    project(place, "ctx-size = 512\n\n[model.'no/other.1']\nctx-size = 128\n")
    shown = json.loads(CliRun("config", "show", "fable", "--json").out)
    assert shown["ctx-size"] == {"value": 512, "origin": "effllm.toml:1"}, "the stronger file holds"
    assert shown["top-k"] == {"value": 9, "origin": f"{place}/home/effllm/config.toml:3"}
    assert json.loads(CliRun("config", "show", "--json").out)["top-k"]["origin"] == "built in"
    project(place, "ctx-size = 512\n[model.fable]\nctx-size = 256\n[model.'fable:4bit']\nctx-size = 320\n")
    assert json.loads(CliRun("config", "show", "fable", "--json").out)["ctx-size"] == {"value": 256, "origin": "effllm.toml:3"}
    assert planned() == 256 and planned("-c", "128") == 128
    for name, ctx in (("fable:8bit", 256), ("fable:4bit", 320), (str(FABLE), 512)):
        ran = CliRun("plan", name, "--json", "--no-probe")
        assert ran.code == 0 and json.loads(ran.out)["ctx"] == ctx, (name, ran.err)
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "192")
    assert planned() == 192


def test_what_is_said_of_one_model_is_not_left_out(place: Path) -> None:
    """A context that a model cannot have gives way where it was said of all models, and is an error where it was said of this one."""
    project(place, "ctx-size = 9000\n")
    assert CliRun("plan", "fable", "--no-probe").code == 0
    project(place, "[model.fable]\nctx-size = 9000\n")
    ran = CliRun("plan", "fable", "--no-probe")
    assert ran.code == 2 and ran.err.startswith("effllm: effllm.toml:2: a context of 9000 is more than the 2048 positions"), ran.err
    typed = CliRun("plan", "fable", "--no-probe", "-c", "9001")
    assert typed.code == 2 and typed.err.startswith("effllm: a context of 9001 is more"), "what was typed stands in no file"


@pytest.mark.parametrize(("line", "code", "said", "is_shown"), [
    ("ctx-size = 9000", 2, "a context of 9000 is more than", True), ('draft = "nobody/here"', 3, "nobody/here", True),
    ('draft = "./no-folder"', 3, "there is no folder", True), ('lora = "no-adapter"', 2, "--lora: no-adapter does not exist", True),
    ('spec = "mtp"', 2, "--spec mtp drafts by", True), ("predict-neurons = true", 2, "--predict-neurons: silu", True),
    ('kv-ram = "1K"', 4, "--kv-ram 1000 B is too small", False), ('ram = "10M"', 4, "needs ", False)])
def test_what_a_model_has_of_its_own_and_cannot_have_is_reported_with_its_place(
        place: Path, line: str, code: int, said: str, is_shown: bool) -> None:
    """By a run; and where headers alone tell, by `config show`, which leaves nothing out that a run refuses."""
    project(place, f"temp = 1\n[model.fable]\n{line}\n")
    for command, refuses in ((("run", "fable", "hi", "-n", "1"), True), (("config", "show", "fable"), is_shown)):
        ran = CliRun(*command)
        if refuses:
            assert ran.code == code and ran.out == "" and ran.err.startswith(f"effllm: effllm.toml:3: {said}"), ran.err
            assert "left out" not in ran.err and ran.err.count("\n") == 2
        else:  # what memory decides may be otherwise the next time
            assert ran.code == 0 and f"a run would be refused because of effllm.toml:3: {said}" in ran.err, ran.err
    assert CliRun("config", "show", "--json").code == 0, "of no model in particular nothing is refused"


def test_show_says_what_the_machine_refuses_and_no_more(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from effllm.runtime.planning import devices

    monkeypatch.setattr(devices, "detect_gpu", lambda: None)
    for line, said in (('device = "cuda"', "effllm.toml:1: --device cuda: torch finds no GPU here"),
                       ('vram = "2G"\nbits = 4', "effllm.toml:1: --vram 2G"), ('ram = "20M"', "effllm.toml:1: needs ")):
        project(place, line)
        ran = CliRun("config", "show", "fable", "--json")
        assert ran.code == 0 and ran.err.count("\n") == 1 and f"a run would be refused because of {said}" in ran.err, ran.err
        assert json.loads(ran.out)[line.split()[0]]["origin"] == "effllm.toml:1", "it holds, whatever comes of it"
    project(place, 'ram = "4G"\nkv-ram = "64M"\ndevice = "cpu"\nctx-size = 512\n')
    assert CliRun("config", "show", "fable").err == ""


def test_a_format_that_was_typed_wins_over_the_bits_of_the_name(place: Path) -> None:
    project(place, "[model.fable]\nbits = 4\nctx-size = 256\n[model.'fable:8bit']\nbits = 2\n")
    bits = {name: json.loads(CliRun("plan", name, "--json", "--no-probe").out)["weights_bytes"]
            for name in ("fable", "fable:4bit", "fable:6bit")}
    assert bits["fable"] == bits["fable:4bit"] < bits["fable:6bit"]
    shown = json.loads(CliRun("config", "show", "fable:6bit", "--json").out)
    assert planned() == 256 == shown["ctx-size"]["value"] and shown["bits"] == {"value": None, "origin": "built in"}
    ran = CliRun("plan", "fable:8bit", "--no-probe")
    assert ran.code == 2 and ran.err.startswith("effllm: effllm.toml:5: fable:8bit and --bits 2 disagree"), "a table of that very name"
    project(place, "bits = 4\n")
    shown = json.loads(CliRun("config", "show", "fable:6bit", "--json").out)
    assert shown["bits"] == {"value": None, "origin": "built in, effllm.toml:1 is left out"}


def test_a_draft_that_was_typed_is_reported_without_a_place(place: Path) -> None:
    project(place, '[model.fable]\ndraft = "nobody/here"\n')
    ran = CliRun("run", "fable", "hi", "-n", "1", "--draft", "./none")
    assert ran.code == 3 and ran.err.startswith("effllm: there is no folder"), ran.err


@pytest.mark.parametrize(("text", "said"), [
    ("[model.qwen2.5-7b]\ntemp = 1\n", "effllm.toml:1: put a name with a dot in quotes\nhint: [model.\"qwen2.5-7b\"]"),
    ("temp = 1\n\n[model.fable]\n\ntmep = 1\n", "effllm.toml:5: there is no setting 'tmep', did you mean temp?"),
    ("temp = 1\n[model.fable]\ntemp = 'hot'\n", "effllm.toml:3: temp is a number, not 'hot'"),
    ("model = 'fable'\n", "effllm.toml:1: a model's own settings go under its name"),
    ("[model]\ntemp = 1\n", "effllm.toml:1: a model's own settings go under its name"),
    ("[fable]\ntemp = 1\n", "effllm.toml:1: there is no setting 'fable'\nhint: [model.\"fable\"], and its settings")])
def test_a_table_of_a_model_that_is_wrong_is_one_line_with_its_place(place: Path, text: str, said: str) -> None:
    project(place, text)
    for command in (("plan", "fable"), ("config", "show")):
        ran = CliRun(*command)
        assert ran.code == 2 and ran.out == "" and ran.err.startswith(f"effllm: {said}"), ran.err
