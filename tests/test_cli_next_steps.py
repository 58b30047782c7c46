"""Error messages of commands name the origin of the problem and a next step that works as written."""

import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from effllm import UsageError, typed
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.kv import kv_profile_run
from effllm.runtime.prepare import EngineOptions

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
STORY = "Once upon a time there was a fox who wanted to be king. " * 200


def said(*argv: str | Path) -> tuple[int, str]:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    return main([str(word) for word in argv], environment), environment.stderr.getvalue()


@pytest.mark.parametrize("text", ("plain/path-1.0_x", "org/repo@v1:4bit", "a b", "it's", "ä ö/ü", "", "$HOME", "a\nb", "~"))
def test_what_is_typed_comes_back_through_a_shell(text: str) -> None:
    assert shlex.split(typed(text)) == [text]
    assert subprocess.run(["sh", "-c", f"printf %s {typed(text)}"], capture_output=True, text=True).stdout == text


def test_paths_in_next_steps_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # where folders that were made are noted
    folder = shutil.copytree(FABLE, tmp_path / "a model")
    (folder / "kv_profile.json").write_text("{}")
    assert f"effllm eval kv-profile '{folder}'" in said("run", folder, "hi", "--kv", "4bit")[1]
    code, text = said("quantize", FABLE, "-o", tmp_path / "made here", "--bits", "8", "--no-kv-profile")
    assert code == 0 and f"effllm run '{tmp_path / 'made here'}'" in text


def test_a_path_with_spaces_that_is_not_there_is_no_prompt() -> None:
    """And what is shown of a sentence can be typed as it is, whatever quotes it has."""
    for path in ("/no such/fold'er", "./no such", "../a b", "~/a b", "a b/"):
        code, err = said("run", path, "Hi")
        assert code == 3 and "there is no folder" in err and "then the prompt" not in err, err
    for sentence in ('say "it\'s $HOME"', "tell me, it's late"):
        message, hint = said("run", sentence)[1].splitlines()
        assert "then the prompt" in message and shlex.split(hint) == ["hint:", "effllm", "run", "fable", sentence], hint


@pytest.mark.parametrize("own", [False, True])
def test_a_profile_names_the_text_that_it_was_to_be_recorded_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    def recorded(folder: Path, text: str, threads: int | None, source: str) -> Iterator[None]:
        assert (text == STORY) is own
        raise UsageError(f"{source} has too few tokens", "a longer one")
        yield

    monkeypatch.delenv("EFFLLM_NO_KV_PROFILE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(kv_profile_run, "record_profile", recorded)
    text = tmp_path / "story.txt"
    text.write_text(STORY)
    flags = ("--method", "smooth", "--calib", text, "--calib-tokens", "512") if own else ()
    code, err = said("quantize", FABLE, "-o", tmp_path / "out", "--bits", "4", *flags)
    assert code == 0 and f"no profile for --kv: {text if own else 'the sample'} has too few tokens" in err, err


@pytest.mark.parametrize(("line", "message"), [('kernel = "nope"', "kernel is auto or dot or lut, not 'nope'"),
                                               ('ram = "0"', "--ram 0 is 0 bytes")])
def test_a_wrong_setting_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    (tmp_path / "effllm.toml").write_text(f"# mine\n{line}\n")
    monkeypatch.chdir(tmp_path)
    code, text = said("run", "fable", "hi")
    assert code in (2, 3) and text.startswith(f"effllm: effllm.toml:2: {message}"), text


@pytest.mark.parametrize("words", [("caf\udce9",), ("hi", "-s", "caf\udce9"), ("hi", "--stop", "caf\udce9")])
def test_bytes_that_are_no_text_are_refused_wherever_they_are_typed(words: tuple[str, ...]) -> None:
    code, text = said("run", "fable", *words)
    assert code == 2 and "is not UTF-8 text" in text


def test_what_changes_nothing_is_said_and_refused_by_strict() -> None:
    words, message = ("run", "fable", "--raw", "hi", "-n", "1"), "--kernel lut has no effect: this model has no low-bit weights"
    code, text = said(*words, "--kernel", "lut")
    assert code == 0 and message in text
    code, text = said(*words, "--kernel", "lut", "--strict")
    assert code == 2 and message in text
    code, text = said(*words, "--exact", "--strict")
    assert code == 0, "weights that are not quantized are multiplied exactly, which is what was asked for"


def test_a_larger_context_is_advised_where_there_is_one() -> None:
    for ctx, is_advised in (("512", True), ("2048", False)):
        code, text = said("run", "fable", "--raw", STORY, "-c", ctx)
        assert code == 5 and ("raise -c" in text) == is_advised, text


def test_bits_of_a_cache_are_given_as_those_of_weights_are() -> None:
    assert EngineOptions(kv="8").kv == "8bit"
    for wrong in ("9", "²", "", "08", "9" * 5000):
        with pytest.raises(UsageError, match="is not known"):
            EngineOptions(kv=wrong)


def test_two_sizes_are_named(tmp_path: Path) -> None:
    code, text = said("quantize", "fable", "-o", tmp_path / "out", "--bits", "4", "--target", "3.4")
    assert code == 2 and text.startswith("effllm: --bits and --target each set the size")


def test_weights_that_are_rounded_twice_are_remarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    again = "these weights were quantized before"
    code, text = said("export", "fable", "-o", tmp_path / "fable.gguf", "--type", "Q4_0")
    assert code == 0
    for source, is_again in ((tmp_path / "fable.gguf", True), ("fable", False)):
        code, text = said("quantize", source, "-o", tmp_path / f"out-{is_again}", "--bits", "3", "--no-kv-profile")
        assert code == 0 and (again in text) == is_again, text


def test_neurons_that_are_never_zero_are_not_to_be_predicted() -> None:
    code, text = said("run", "fable", "hi", "--predict-neurons")
    assert code == 2 and "silu is never exactly zero" in text and "calibrate-sparsity" not in text


def test_neurons_whose_gates_are_left_out_are_to_be_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    code, text = said("quantize", "fable", "-o", tmp_path / "out", "--bundle-ffn", "--gate-sparsity", "0.5")
    assert code == 0, text
    code, text = said("run", tmp_path / "out", "hi", "--predict-neurons")
    assert code == 2 and f"effllm calibrate-sparsity {tmp_path / 'out'} --predictor 64 trains some" in text


def test_a_tokenizer_in_another_encoding_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    folder = shutil.copytree(FABLE, tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(b"{\xff}")
    code, text = said("run", folder, "hi")
    assert code == 1 and "is not a readable tokenizer: byte 1 is not UTF-8" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize("words", [("plan", "fable", "--no-probe"), ("--help",), *(
    pytest.param(each, marks=pytest.mark.slow) for each in (("list",), ("plan", "--help")))])
def test_output_that_finds_no_room_is_reported(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-P", "-m", "effllm", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4 and "No space left on device\nhint: free some space" in done.stderr, done.stderr


def test_a_remark_after_an_answer_on_the_same_pipe_begins_a_line() -> None:
    command = [sys.executable, "-P", "-m", "effllm", "run", "fable", "--raw", "Once upon a time", "-c", "20", "--temp", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "\nthe context of 20 tokens is full" in done.stdout, done.stdout


def test_a_format_after_the_name_of_a_quantized_model_is_left_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint was a command that refuses it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    four = tmp_path / "f4"
    assert said("quantize", FABLE, "-o", four, "--bits", "4", "--no-kv-profile")[0] == 0
    for words in (("show", f"{four}:4bit"), ("verify", f"{four}:6bit"), ("run", f"{four}:3bit", "Hi"), ("alias", "four", f"{four}:4bit")):
        code, err = said(*words)
        asked = words[1 + (words[0] == "alias")].rpartition(":")[2]
        assert code == 2 and err == f"effllm: {four} is quantized already (codebook4:16)\nhint: leave out :{asked}\n"


@pytest.mark.parametrize(("argv", "step"), (
    (("run", "fable:1bit", "hi"), "known: 8bit, 6bit, 5bit, 4bit, 3bit, 2bit, ternary"),
    (("run", "qwen3:4b", "hi"), "did you mean qwen3-4b?"),
    (("verify", "fable:4bit"), "leave out :4bit, or make a folder of it: effllm quantize fable -o DIR --spec 4bit\n"),
    (("export", "fable", "-o", "x.gguf", "--type", "INT4"), "INT8 and INT4 go with --format compressed-tensors"),
))
def test_a_precision_that_does_not_fit_is_answered_with_those_that_do(argv: tuple[str, ...], step: str) -> None:
    code, err = said(*argv)
    assert code != 0 and step in err, err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("width", "has_repositories"), [(80, False), (140, True)])
def test_names_that_can_be_pulled_are_a_line_each_and_say_what_to_type(
        monkeypatch: pytest.MonkeyPatch, width: int, has_repositories: bool) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out, err = Terminal(), Terminal()
    assert main(["list", "--all"], Environment(io.StringIO(), out, err, {**os.environ, "NO_COLOR": "1"})) == 0
    absent = out.getvalue().partition("\nnot here ")[2].splitlines()[1:]
    names = [line.split()[0] for line in absent]
    assert len(names) == len(set(names)) > 40 and "qwen3-0.6b" in names and max(map(len, absent)) <= width
    assert any("Qwen/Qwen3-0.6B" in line for line in absent) == has_repositories
    note = " ".join(err.getvalue().split())
    assert "`effllm plan NAME` says whether one fits this machine; `effllm pull NAME` downloads it" in note


@pytest.mark.parametrize("words", [("run", "fable", "hi", "--bits", "16"), ("pull", "org/name", "--bits=16"),
                                   ("plan", "fable", "--bits", "32")])
def test_bits_as_they_are_stored_are_no_flag(words: tuple[str, ...]) -> None:
    code, text = said(*words)
    assert code == 2 and "--bits is 8, 6, 5, 4, 3 or 2, not " in text and "hint: leave out --bits" in text


@pytest.mark.parametrize(("bits", "hint"), [*((bits, "--bits 4 is usual") for bits in ("7", "16", "-1", "²")), ("4bit", "--bits 4"),
                                            ("8-bit", "--bits 8"), ("codebook4:16", "ternary and other formats: ")])
def test_bits_that_are_not_offered_are_named_as_typed(bits: str, hint: str) -> None:
    code, text = said("quantize", "fable", "-o", "made", "--bits", bits)
    assert code == 2 and "--bits is 8, 6, 5, 4, 3 or 2, not " in text and bits in text and f"hint: {hint}" in text
