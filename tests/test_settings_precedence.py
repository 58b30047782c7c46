"""Settings from a file or a variable that do not apply: flags, the command and the model take precedence. Cheap checks run before a model
is downloaded or quantized."""

import io
import json
import os
from pathlib import Path

import pytest
from command_line import CliRun
from hub_server import Hub
from hub_user import FABLE, HubUser, Terminal

from effllm import UsageError
from effllm.cli import chat, doctor
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.conversion import on_load
from effllm.runtime.speculation import draft_model

STORY = "Tell me a story about a fox."
FEW = ("-n", "2", "--temp", "0")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory for effllm.toml, and folders of a user who has nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def settings(place: Path, text: str) -> None:
    (place / "effllm.toml").write_text(text)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "fable-4bit"
    assert CliRun("quantize", str(FABLE), "-o", str(folder), "--bits", "4").code == 0
    return folder


def test_raw_text_leaves_out_a_system_prompt_and_a_session_of_the_settings(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = CliRun("run", "fable", STORY, "--raw", *FEW)
    settings(place, 'system = "Be brief."\nsession = "tale"\n')
    ran = CliRun("run", "fable", STORY, "--raw", *FEW)
    assert ran.code == 0 and ran.out == usual.out
    assert "--raw: system of effllm.toml:1 is ignored" in ran.err and "--raw: session of effllm.toml:2 is ignored" in ran.err
    assert not list(place.rglob("tale.json"))
    monkeypatch.setenv("EFFLLM_SYSTEM", "Be long.")
    assert "--raw: system of EFFLLM_SYSTEM is ignored" in CliRun("run", "fable", STORY, "--raw", *FEW).err
    for typed in (("-s", "Be brief."), ("--session", "x")):
        assert CliRun("run", "fable", STORY, "--raw", *typed, *FEW).code == 2, "what is typed in one line still contradicts itself"


def test_raw_of_a_variable_gives_way_to_what_is_typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brief = CliRun("run", "fable", STORY, "-s", "Be brief.", *FEW)
    monkeypatch.setenv("EFFLLM_RAW", "1")
    ran = CliRun("run", "fable", STORY, "-s", "Be brief.", *FEW)
    assert ran.code == 0 and ran.out == brief.out and "--system was typed: raw of EFFLLM_RAW is ignored" in ran.err
    both = CliRun("run", "fable", STORY, "-s", "Be brief.", "--session", "tale", *FEW)
    assert both.code == 0 and "--system and --session were typed: raw of EFFLLM_RAW is ignored" in both.err
    assert len(list(place.rglob("tale.json"))) == 1
    monkeypatch.setenv("EFFLLM_SYSTEM", "Be long.")
    ran = CliRun("run", "fable", STORY, *FEW)
    assert ran.code == 0 and "--raw: system of EFFLLM_SYSTEM is ignored" in ran.err, "of two variables, raw text has no room for the other"
    said = CliRun("run", "fable", STORY, "--raw", "-s", "Be brief.", *FEW)
    assert said.code == 2 and "--system cannot be combined with --raw" in said.err


@pytest.mark.parametrize("key", ["raw", "ignore-eos"])
def test_a_chat_leaves_out_what_variables_say_of_one_answer(place: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    name = "EFFLLM_" + key.upper().replace("-", "_")
    monkeypatch.setenv("EFFLLM_SYSTEM", "Be brief.")
    told: list[str | None] = []
    monkeypatch.setattr(chat, "converse", lambda screen, ref, answer, *rest: told.append(answer.system) or 0)
    environment = Environment(Terminal(), Terminal(), Terminal(), dict(os.environ))
    with monkeypatch.context() as patched:
        patched.setenv(name, "1")
        assert main(["run", "fable", *FEW], environment) == 0
    said = environment.stderr.getvalue()
    assert f"no prompt, so this is a chat: {key} of {name} is ignored" in said and told == ["Be brief."]
    typed = Environment(Terminal(""), Terminal(), Terminal(), dict(os.environ))
    assert main(["run", "fable", f"--{key}", *FEW], typed) == 2 and "no prompt" in typed.stderr.getvalue()


def test_bits_give_way_to_a_name_and_to_weights_that_are_quantized(place: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(place, "bits = 4\n")
    ran = CliRun("run", str(quantized), STORY, *FEW)
    assert ran.code == 0 and "is quantized already" in ran.err and "bits of effllm.toml:1 is ignored" in ran.err
    ran = CliRun("run", "fable:8bit", STORY, *FEW)
    assert ran.code == 0 and "quantized on load to 8." in ran.err
    settings(place, "")
    assert "is quantized already" in CliRun("run", str(quantized), STORY, "--bits", "4", *FEW).err
    assert CliRun("run", str(quantized), STORY, "--bits", "4", *FEW).code == 2
    monkeypatch.setenv("EFFLLM_BITS", "4")
    for words in (("run", str(quantized), STORY, *FEW), ("plan", str(quantized), "--no-probe"), ("plan", "fable:8bit", "--no-probe")):
        assert CliRun(*words).code == 0, words


def test_a_plan_takes_the_bits_that_a_run_takes(place: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(*words: str) -> int:
        ran = CliRun("plan", *words, "--no-probe", "--device", "cpu", "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["weights_bytes"]

    wide, small, smaller = (weights("fable", *words) for words in ((), ("--bits", "4"), ("--bits", "2")))
    settings(place, "bits = 4\nkeep = true\n")
    assert weights("fable") == small < wide and weights("fable", "--bits", "2") == weights("fable:2bit") == smaller
    ran = CliRun("plan", str(quantized), "--no-probe")
    assert ran.code == 0 and "bits of effllm.toml:1 is ignored" in ran.err
    settings(place, "")
    monkeypatch.setenv("EFFLLM_BITS", "2")
    assert weights("fable") == smaller and weights("fable:4bit") == small
    ran = CliRun("plan", str(quantized), "--bits", "3", "--no-probe")
    assert ran.code == 2 and "is quantized already" in ran.err


def test_keep_alone_in_the_settings_keeps_nothing_and_breaks_nothing(place: Path) -> None:
    settings(place, "keep = true\n")
    assert CliRun("run", "fable", STORY, *FEW).code == 0
    assert CliRun("bench", "--synthetic", "tinyllama-1.1b", "-p", "x").code == 2
    settings(place, "")
    ran = CliRun("run", "fable", STORY, "--keep", *FEW)
    assert ran.code == 2 and "--keep keeps the weights that --bits quantizes" in ran.err


def test_keep_of_a_format_that_is_kept_already_runs_it(place: Path) -> None:
    for _ in range(2):
        ran = CliRun("run", "fable:4bit", STORY, "--keep", *FEW)
        assert ran.code == 0, ran.err


@pytest.mark.parametrize(("text", "typed", "said"), [
    ('kv = "4bit"\n', ("-ctk", "q8_0", "-ctv", "q8_0"), "8bit"), ('cache-type-k = "q8_0"\ncache-type-v = "q8_0"\n', ("--kv", "16bit"), ""),
    ("exact = true\n", ("--kernel", "lut"), ""), ('kernel = "lut"\n', ("--exact",), ""), (f'draft = "{FABLE}"\n', ("--spec", "off"), ""),
    ('vram = "1G"\ngpu-layers = 2\n', ("--device", "cpu"), "")])
def test_what_is_typed_wins_over_a_setting_that_excludes_it(place: Path, text: str, typed: tuple[str, ...], said: str) -> None:
    settings(place, text)
    ran = CliRun("plan", "fable", "--no-probe", "--json", *typed)
    assert ran.code == 0, ran.err
    assert said in json.loads(ran.out)["kv"]


def test_settings_that_a_model_cannot_have_are_left_with_a_notice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(place, 'ctx-size = 4096\npredict-neurons = true\nload = "mmap"\n')
    ran = CliRun("plan", "fable", "--no-probe", "--json")
    assert ran.code == 0 and json.loads(ran.out)["ctx"] == 2048, ran.err
    assert "a context of 4096 is more than the 2048 positions" in ran.err and "ignored" in ran.err and "--predict-neurons" in ran.err
    settings(place, "")
    assert CliRun("plan", "fable", "--no-probe", "-c", "4096").code == 2
    assert CliRun("plan", "fable", "--no-probe", "--predict-neurons").code == 2
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "4096")
    assert CliRun("plan", "fable", "--no-probe").code == 0


def test_codes_of_another_tool_are_not_quantized_again_for_a_setting(place: Path) -> None:
    model = place / "fable.gguf"
    assert CliRun("export", str(FABLE), "-o", str(model), "--type", "Q8_0").code == 0
    settings(place, "bits = 4\n")
    for words in (("run", str(model), STORY, *FEW), ("plan", str(model), "--no-probe", "--json")):
        ran = CliRun(*words)
        assert ran.code == 0 and "quantized on load" not in ran.err, ran.err
    assert "bits of effllm.toml:1 is ignored" in CliRun("run", str(model), STORY, *FEW).err
    settings(place, "")
    assert "quantized on load" in CliRun("run", str(model), STORY, "--bits", "3", *FEW).err


def test_a_cache_or_a_draft_that_this_model_cannot_have_is_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 144, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "torch_dtype": "float16"}
    (place / "config.json").write_text(json.dumps(shape))
    words = ("bench", "--synthetic", str(place / "config.json"), "-p", "8", "-n", "2", "-r", "1", "-o", "json")
    for text in ('kv = "4bit"\n', 'cache-type-k = "q8_0"\ncache-type-v = "q8_0"\n'):
        settings(place, text)
        ran = CliRun(*words)
        assert ran.code == 0 and "this model has 72" in ran.err and "ignored" in ran.err, ran.err
        assert json.loads(ran.out)[0]["type_k"] == "16bit"
    settings(place, "")
    assert CliRun(*words, "--kv", "4bit").code == 2

    def other(folder: Path, draft: Path) -> None:
        raise UsageError("the draft model has another tokenizer", "another one")

    monkeypatch.setattr(draft_model, "refuse_other_vocabulary", other)
    settings(place, f'draft = "{FABLE}"\n')
    ran = CliRun("run", "fable", STORY, *FEW)
    assert ran.code == 0 and "the draft model has another tokenizer: ignored" in ran.err
    settings(place, "")
    assert CliRun("run", "fable", STORY, "--draft", str(FABLE), *FEW).code == 2


def test_a_sound_machine_is_sound_whatever_the_settings_say(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(place, 'system = "Be brief."\nsession = "tale"\nram = "1M"\nbits = 2\nkeep = true\n')
    (place / "fable").mkdir()
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "0")
    monkeypatch.setenv("EFFLLM_KV", "7bit")
    works, said = doctor.trial()
    assert works and "fable wrote" in said, said
    assert not list(place.rglob("tale.json"))


# ---- what is cheap is judged first


WRONG = [(("--temp", "-1"), 2, "--temp must be"), (("--top-p", "2"), 2, "--top-p must be"), (("--stop", ""), 2, "stop string"),
         (("-n", "-2"), 2, "-n -2"), (("--kv", "7bit"), 2, "--kv 7bit"), (("--ram", "much"), 2, "'much' is not a size"),
         (("--session", "a/b"), 2, "not a valid session name"), (("--session", "a", "--session-disk", "much"), 2, "much"),
         (("--draft", "./nowhere"), 3, "nowhere"), (("-f", "typo.txt"), 2, "typo.txt"), (("--bits", "7"), 2, "3 or 2, not 7")]


@pytest.mark.parametrize(("words", "code", "said"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_nothing_is_downloaded_for_flags_that_are_wrong(hub: Hub, tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    hub.add("org/name", FABLE)
    assert said in HubUser(tmp_path, hub.endpoint).run("run", "org/name", STORY, "-y", *words).refused(code)
    assert not hub.requests


@pytest.mark.parametrize(("words", "code", "said"), [*WRONG[:-1], (("-c", "9999"), 2, "2048 positions")],
                         ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_nothing_is_quantized_for_flags_that_are_wrong(place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int,
                                                       said: str) -> None:
    def converted(*given: object) -> None:
        raise AssertionError("the weights were quantized before the flags were judged")

    monkeypatch.setattr(on_load, "quantize_on_load", converted)
    commands = [("run", "fable", STORY)] + ([] if words[0] == "-f" else [("chat", "fable")])
    for command in commands:
        ran = CliRun(*command, "--bits", "4", *words, stdin=STORY)
        assert ran.code == code and said.lower() in ran.err.lower() and len(ran.err.splitlines()) <= 2, ran.err


def test_nothing_is_quantized_without_a_tokenizer_a_prompt_or_a_terminal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_load, "quantize_on_load", lambda *given: pytest.fail("quantized"))
    bare = place / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(FABLE / name)
    ran = CliRun("run", str(bare), STORY, "--bits", "4")
    assert ran.code == 3 and "tokenizer.json" in ran.err
    for command in ("run", "chat"):
        ran = CliRun(command, "fable", "--bits", "4", stdin="  \n")
        assert ran.code == 2 and "the prompt is empty" in ran.err


# ---- variables of flags that may be repeated


def test_the_variable_of_a_stop_text_is_one_text(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CliRun("run", "fable", STORY, "--temp", "0", "-n", "40").out
    stop = next(f"{one} {two}" for one, two in zip(whole.split()[4:], whole.split()[5:]) if f"{one} {two}" in whole)
    monkeypatch.setenv("EFFLLM_STOP", stop)
    assert CliRun("run", "fable", STORY, "--temp", "0", "-n", "40").out.rstrip("\n") == whole.partition(stop)[0].rstrip("\n")
    assert json.loads(CliRun("config", "show", "--json").out)["stop"] == {"value": [stop], "origin": "EFFLLM_STOP"}
    assert repr(stop) in CliRun("config", "show").out
    typed = CliRun("run", "fable", STORY, "--temp", "0", "-n", "40", "--stop", "no such words", "--stop", "nor these")
    assert typed.out == whole, "typed ones take its place"


def test_the_variable_of_a_rule_for_tensors_is_one_rule(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFLLM_TENSOR_TYPE", "down_proj|no such=8bit")
    ran = CliRun("quantize", str(FABLE), "-o", str(place / "out"), "--bits", "4")
    assert ran.code == 0 and "down_proj|no such=8bit" in ran.err, ran.err


@pytest.mark.parametrize(("lines", "variables", "holds"), [
    ('spec = "off"\n', {"EFFLLM_DRAFT": str(FABLE)}, "draft"), (f'draft = "{FABLE}"\n', {"EFFLLM_SPEC": "off"}, "spec"),
    ('kv = "4bit"\n', {"EFFLLM_CACHE_TYPE_K": "f16"}, "cache-type-k"), ('kernel = "lut"\n', {"EFFLLM_EXACT": "1"}, "exact")])
def test_of_two_settings_that_exclude_each_other_the_stronger_place_holds(
        place: Path, lines: str, variables: dict[str, str], holds: str) -> None:
    settings(place, lines)
    ran = CliRun("run", "fable", STORY, *FEW, **variables)
    assert ran.code == 0, ran.err
    shown = json.loads(CliRun("config", "show", "fable", "--json", **variables).out)
    (weaker,) = (key for key, each in shown.items() if "is left out" in each["origin"])
    assert lines.startswith(weaker) and shown[holds]["origin"] == f"EFFLLM_{holds.upper().replace('-', '_')}"


def test_two_of_one_place_are_named_with_it(place: Path) -> None:
    settings(place, 'spec = "off"\ntemp = 0\ndraft = "fable"\n')
    for argv in (("run", "fable", STORY, *FEW), ("config", "show", "fable")):
        ran = CliRun(*argv)
        assert ran.code == 2 and "--draft (effllm.toml:3) and --spec (effllm.toml:1) contradict each other" in ran.err
    assert CliRun("run", "fable", STORY, *FEW, "--spec", "off").code == 0, "what is typed is stronger than both"
    ran = CliRun("run", "fable", STORY, *FEW, EFFLLM_SPEC="off", EFFLLM_DRAFT="fable")
    assert ran.code == 2 and "the variable EFFLLM_DRAFT) and --spec (the variable EFFLLM_SPEC) contradict" in ran.err


def test_json_is_whole_where_the_terminal_has_another_encoding(place: Path) -> None:
    settings(place, 'system = "say “hi” … → ü 日本"\n')
    raw = io.BytesIO()
    environment = Environment(io.StringIO(), io.TextIOWrapper(raw, "latin-1", "effllm.plain", write_through=True), io.StringIO(),
                              dict(os.environ))
    assert main(("config", "show", "--json"), environment) == 0
    assert json.loads(raw.getvalue())["system"]["value"] == "say “hi” … → ü 日本"


def test_a_size_of_a_variable_gives_way_to_one_that_was_typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFLLM_QUANTIZE_SPEC", "2bit")
    ran = CliRun("quantize", "fable", "-o", "made", "--bits", "4", "--dry-run")
    assert ran.code == 0 and "EFFLLM_QUANTIZE_SPEC is ignored: --bits was typed" in ran.err
    assert CliRun("quantize", "fable", "-o", "other", "--target", "4.5bpw", "--bits", "4", "--dry-run").code == 2
    monkeypatch.setenv("EFFLLM_BITS", "3")
    ran = CliRun("quantize", str(FABLE.parent / "fable-relu"), "-o", "made", "--bundle-ffn", "--no-kv-profile")
    assert ran.code == 0 and "EFFLLM_BITS is ignored: --bundle-ffn was typed" in ran.err


def test_a_draft_of_the_settings_that_is_not_here_is_left_out(place: Path) -> None:
    settings(place, 'draft = "nowhere"\n')
    ran = CliRun("run", "fable", STORY, *FEW)
    assert ran.code == 0 and "effllm.toml:1: there is no model 'nowhere'; left out" in ran.err
    assert "left out" in json.loads(CliRun("config", "show", "fable", "--json").out)["draft"]["origin"]
    ran = CliRun("run", "fable", STORY, *FEW, "--strict")
    assert ran.code == 3 and ran.err.startswith("effllm: effllm.toml:1: there is no model 'nowhere'")
    assert CliRun("run", "fable", STORY, *FEW, "--draft", "nowhere").code == 3


@pytest.mark.slow
def test_a_kept_copy_that_is_damaged_is_made_again_by_what_its_hint_says(place: Path) -> None:
    assert CliRun("run", "fable", STORY, *FEW, "--bits", "3", "--keep").code == 0
    weights = next(place.rglob("model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = CliRun("run", "fable", STORY, *FEW, "--bits", "3")
    assert ran.code != 0 and "effllm rm fable:3bit removes the stored copy" in ran.err
    assert CliRun("rm", "fable:3bit", "-y").code == 0 and CliRun("run", "fable", STORY, *FEW, "--bits", "3", "--keep").code == 0
