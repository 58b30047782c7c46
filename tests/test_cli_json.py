"""`--json` prints exactly one document on stdout whatever happens: the command's own, or the error's."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from effllm.cli.app import build, main
from effllm.cli.environment import Environment
from effllm.cli.errors import INTERRUPTED

# Command -> a line of it that is understood and fails, and the exit code.
FAILING = {
    "run": ("nobody/knows hi", 3), "embed": ("nobody/knows hi", 3),
    "serve": ("nobody/knows", 3), "session list": (None, 1), "session rm": ("nothing -y", 2),
    "search": ("tale", 6), "pull": ("./a-path", 2), "rm": ("fable -y", 2),
    "alias": ("--rm nothing", 3), "list": (None, 1), "show": ("nobody/knows", 3), "plan": ("fable --ram 10M", 4),
    "quantize": ("fable -o {here}/made --bits 4 --eval /nowhere.txt", 2), "export": ("nobody/knows -o {here}/x.gguf", 3),
    "verify": ("nobody/knows", 3), "bench": ("nobody/knows", 3), "eval ppl": ("fable --text /nowhere.txt", 2),
    "eval kld": ("fable --text /nowhere.txt", 2), "eval recall": ("fable --text /nowhere.txt", 2),
    "eval kv-profile": ("fable --text /nowhere.txt", 2), "calibrate-sparsity": ("fable --text /nowhere.txt", 2),
    "transcribe": ("fable /nowhere.wav", 2), "doctor": ("--probe --no-probe", 2), "config show": ("nobody/knows", 3),
}


def commands(command: typer.core.TyperGroup | None = None, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Those that take --json."""
    command = command or typer.main.get_command(build())
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)


def ran(*words: str, **variables: str) -> tuple[int, str, str]:
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {**os.environ, "HF_HUB_OFFLINE": "1", **variables})
    code = main(words, environment)
    return code, environment.stdout.getvalue(), environment.stderr.getvalue()


def document(out: str) -> dict:
    (line,) = out.splitlines()
    return json.loads(line)


def test_every_command_with_json_has_a_failure_here() -> None:
    assert set(commands()) == FAILING.keys()


@pytest.mark.parametrize("command", FAILING)
def test_a_failure_is_the_document(command: str, tmp_path: Path) -> None:
    words, code = FAILING[command]
    if words is not None:
        given = (*command.split(), *words.format(here=tmp_path).split())
        assert ran(*given)[:2] == (code, ""), "without --json stdout is empty"
        got, out, err = ran(*given, "--json")
        failed = document(out)
        assert got == failed["code"] == code and failed.keys() == {"error", "hint", "code"}
        lines = [line for line in err.splitlines() if line.startswith(("effllm: ", "hint: "))]
        assert lines == [f"effllm: {failed['error']}", f"hint: {failed['hint']}"], "stderr says the same to a person"
    got, out, _ = ran(*command.split(), "--json", "--no-such-flag")
    assert got == document(out)["code"] == 2 and "--no-such-flag" in document(out)["error"], "nor is a line that is not understood silent"


def test_whatever_way_it_is_asked_for() -> None:
    for words, variables in ((("bench", "-o", "json"), {}), (("bench", "-ojson"), {}), (("bench", "--output=json"), {}),
                             (("show", "nobody/knows"), {"EFFLLM_JSON": "1"}), (("nonsense", "--json"), {}), (("chat", "x", "--json"), {})):
        code, out, _ = ran(*words, **variables)
        assert document(out)["code"] == code != 0, words
    for words, variables in ((("bench", "-o", "csv"), {}), (("show", "nobody/knows"), {"EFFLLM_JSON": "0"}),
                             (("chat", "nobody/knows"), {"EFFLLM_JSON": "1"}), (("run", "nobody/knows", "--", "--json"), {})):
        code, out, _ = ran(*words, **variables)
        assert out == "" and code != 0, words


def test_what_was_printed_is_not_printed_twice(tmp_path: Path) -> None:
    assert ran("quantize", "fable", "-o", str(tmp_path / "made"), "--bits", "4", "--no-kv-profile")[0] == 0
    weights = next((tmp_path / "made").glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-5000] ^= 1
    weights.write_bytes(raw)
    code, out, err = ran("verify", str(tmp_path / "made"), "--json")
    assert code == 1 and "is damaged" in err and document(out)["damaged"], "a report of damage is the document of verify"


def test_ctrl_c_leaves_a_document_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("effllm.runtime.catalog.resolve", pressed)
    code, out, err = ran("show", "fable", "--json")
    assert code == INTERRUPTED == document(out)["code"] and err == ""


def test_a_reader_that_has_left_is_no_second_failure() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    environment = Environment(io.StringIO(), Gone(), io.StringIO(), os.environ)
    assert main(["show", "nobody/knows", "--json"], environment) == 3 and environment.stderr.getvalue().count("\n") == 2
