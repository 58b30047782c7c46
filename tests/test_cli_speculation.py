"""`--spec` and `--draft` on the command line: answers, statistics, plans, measurements, settings, refusals. With the packaged model."""

import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import CliRun

import effllm

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
ASKED = ("--raw", "The fox ran. The fox ran. The fox ran. The", "-n", "60", "--temp", "0", "--ignore-eos")


def test_the_text_is_the_same_with_and_without() -> None:
    plain, *others = (CliRun("run", "fable", *ASKED, "--json", *more).json
                      for more in (("--spec", "off"), (), ("--spec", "lookup"), ("--draft", "fable")))
    assert plain["speculation"] is None
    for other in others:
        found = other["speculation"]
        assert other["text"] == plain["text"] and found["passes"] + found["accepted"] == 59
        assert set(found) == {"passes", "drafted", "accepted", "tokens_per_pass", "gain", "undrafted"}
        assert (found["undrafted"] is None) == (found["drafted"] > 0)


def test_a_user_reads_what_was_drafted() -> None:
    repeats, ends = CliRun("run", "fable", *ASKED, "--stats"), CliRun("run", "fable", "--raw", "Once", "-n", "3", "--stats")
    line = r"^speculation: (\d+) drafted, \d+ accepted, \d\.\d\d tokens per pass, \d+\.\d times as fast$"
    drafted = re.search(line, repeats.err, re.MULTILINE)
    assert drafted and int(drafted[1]) > 0 or "speculation" not in repeats.err, "by what passes took just then"
    assert "speculation" not in ends.err, "of three tokens none is drafted: the first passes are timed"
    assert "speculation" not in CliRun("run", "fable", *ASKED, "--stats", "--spec", "off").err


@pytest.mark.parametrize("asked", (("--spec", "lookup"), ("--draft", "fable")))
def test_who_asked_for_drafts_reads_why_none_came(asked: tuple[str, ...]) -> None:
    ran = CliRun("run", "fable", "--raw", "Once", "-n", "3", "--stats", *asked)
    assert "speculation: nothing was drafted: the answer ended while passes of one token were timed\n" in ran.err


def test_the_plan_says_who_drafts() -> None:
    auto, off, lookup, drafted = (CliRun("plan", "fable", "--no-probe", "--json", *more).json["speculation"]
                                  for more in ((), ("--spec", "off"), ("--spec", "lookup"), ("--draft", "fable")))
    assert off == {"lookup": False, "draft": None, "draft_bytes": 0, "draft_bits": None, "mtp": False, "mtp_bytes": 0}
    assert auto == lookup == {**off, "lookup": True}
    assert Path(drafted["draft"]) == FABLE and drafted["draft_bytes"] > 11_540_992
    shown = CliRun("plan", "fable", "--no-probe", "--draft", "fable").out
    assert "speculation" in shown and "drafts from the text and by fable" in shown
    assert "drafts where the text repeats" in CliRun("plan", "fable", "--no-probe").out
    assert "speculation" not in CliRun("plan", "fable", "--no-probe", "--spec", "off").out


def test_a_measurement_of_what_the_model_writes() -> None:
    asked = ("bench", "fable", "-p", "0", "-n", "40", "-r", "1", "-o", "json")
    (plain,), (lookup,) = (CliRun(*asked, *more).json for more in ((), ("--spec", "lookup")))
    assert plain["tokens_per_pass"] == 1 and lookup["tokens_per_pass"] >= 1 and lookup["n_gen"] == 40
    refused = CliRun(*asked, "--spec", "lookup", "--columns", "2")
    assert refused.code == 2 and "--columns" in refused.err


@pytest.mark.parametrize(("more", "code", "said"), (
    (("--spec", "sometimes"), 2, "'sometimes' is not one of auto, off, lookup, mtp"),
    (("--draft", "fable", "--spec", "off"), 2, "--spec off forbids it"),
    (("--draft", "no-such-model-anywhere"), 3, "no-such-model-anywhere"),
))
def test_refusals(more: tuple[str, ...], code: int, said: str) -> None:
    ran = CliRun("run", "fable", "hi", *more)
    assert ran.code == code and said in ran.err and "Traceback" not in ran.err and not ran.out


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    other = shutil.copytree(FABLE, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {next(token for token, number in content["model"]["vocab"].items() if number == 4095): 4094,
                                  next(token for token, number in content["model"]["vocab"].items() if number == 4094): 4095}
    (other / "tokenizer.json").write_text(json.dumps(content))
    ran = CliRun("run", "fable", "hi", "--draft", other)
    assert ran.code == 2 and f"the draft model {other} has another tokenizer" in ran.err and "token 4094 is" in ran.err


def test_a_variable_and_a_file_of_settings_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFLLM_SPEC", "lookup")
    assert CliRun("plan", "fable", "--no-probe", "--json").json["speculation"]["lookup"]
    monkeypatch.delenv("EFFLLM_SPEC")
    (tmp_path / "effllm.toml").write_text('draft = "fable"\n')
    assert CliRun("plan", "fable", "--no-probe", "--json").json["speculation"]["draft_bytes"]
    shown = CliRun("config", "show", "--origin").out
    assert "spec " in shown and "draft " in shown and "effllm.toml:1" in shown
