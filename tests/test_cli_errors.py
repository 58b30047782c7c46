"""The boundary where an exception becomes at most two lines and an exit code, in calls of `main` with a simulated environment."""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import effllm
from effllm.cli import errors
from effllm.cli.app import main
from effllm.cli.environment import Environment, OutputClosed

NOBODY = 65534


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def world(stdout: io.StringIO | None = None, stderr: io.StringIO | None = None, stdin: str = "", **variables: str) -> Environment:
    return Environment(io.StringIO(stdin), stdout or io.StringIO(), stderr or io.StringIO(), variables)


def guarded(error: BaseException, environment: Environment) -> tuple[int, str]:
    """(exit code, what stands on stderr) of a program that raises."""

    def program() -> int:
        raise error

    code = errors.run_guarded(program, environment)
    return code, environment.stderr.getvalue()


@pytest.mark.parametrize(("error", "code"), [
    (effllm.EffllmError("m", "h"), 1), (effllm.UsageError("m", "h"), 2), (effllm.ModelNotFound("m", "h"), 3),
    (effllm.DoesNotFit("m", "h"), 4), (effllm.ContextOverflow("m", "h"), 5), (effllm.DownloadFailed("m", "h"), 6)])
def test_our_errors_are_two_lines_and_their_code(error: effllm.EffllmError, code: int) -> None:
    assert guarded(error, world()) == (code, "effllm: m\nhint: h\n")


def test_without_a_hint_there_is_one_line() -> None:
    assert guarded(effllm.EffllmError("no luck"), world()) == (1, "effllm: no luck\n")


def test_the_unexpected_is_one_line_and_a_traceback_only_with_debug() -> None:
    code, text = guarded(ZeroDivisionError("division by zero"), world())
    assert code == 1 and text == "effllm: internal error: ZeroDivisionError: division by zero\nhint: --debug shows the traceback\n"
    environment = world()
    environment.debug = True
    assert "Traceback" in guarded(ZeroDivisionError(), environment)[1]


def test_memory_files_and_interrupts() -> None:
    assert guarded(MemoryError(), world())[0] == 4
    assert guarded(FileNotFoundError(2, "No such file or directory", "a.txt"), world()) == (
        1, "effllm: a.txt: No such file or directory\nhint: --debug shows where this happened\n")
    for error in (PermissionError(13, "Permission denied", "/no/.bashrc"), OSError(30, "Read-only file system", "/no/.bashrc")):
        assert guarded(error, world()) == (1, f"effllm: /no/.bashrc: {error.strerror}\nhint: check its permissions: ls -ld /\n")
    assert guarded(OSError(28, "No space left on device", "a.txt"), world())[0] == 4
    assert guarded(KeyboardInterrupt(), world()) == (130, "")


def test_a_reader_that_left_is_no_error() -> None:
    assert guarded(OutputClosed(), world()) == (0, "")
    environment = world(stdout=ClosedPipe())
    with pytest.raises(OutputClosed):
        environment.write("text")
    assert main(["--version"], environment) == 0 and environment.stderr.getvalue() == ""


def test_a_full_disk_is_reported() -> None:
    environment = world(stdout=FullDisk())
    assert main(["--version"], environment) == 4
    assert environment.stderr.getvalue() == (
        "effllm: the output cannot be written: No space left on device\nhint: free some space, or send the output elsewhere\n")


def test_nothing_hostile_reaches_the_terminal() -> None:
    code, text = guarded(effllm.EffllmError("name \x1b]0;owned\x07 and\nsecond line\x9b31m"), world(stderr=Terminal(), NO_COLOR="1"))
    assert code == 1 and text.count("\n") == 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text.rstrip("\n"))


def test_colour_only_where_it_is_wanted() -> None:
    error = effllm.EffllmError("m")
    assert "\x1b[" in guarded(error, world(stderr=Terminal()))[1]
    assert guarded(error, world(stderr=Terminal(), NO_COLOR="1"))[1] == "effllm: m\n"
    assert guarded(error, world(stderr=Terminal(), TERM="dumb"))[1] == "effllm: m\n"
    assert guarded(error, world())[1] == "effllm: m\n"


@pytest.mark.parametrize(("argv", "code", "said"), [
    (["rnu"], 2, "did you mean 'run'"),
    (["run", "--tmep", "1"], 2, "--temp"),
    (["run", "fable", "hi", "--seed"], 2, "hint: --seed N: effllm run --help"),
    (["run", "fable", "tell", "me"], 2, "several words in quotes"),
    (["chat", "fable", "hello"], 2, "for a single answer"),
    (["list", "fable"], 2, "hint: for one model: effllm show MODEL"),
    (["eval", "ppl", "fable", "--text"], 2, "hint: --text FILE: effllm eval ppl --help"),
    (["run", "fable", "hi", "--temp", "hot"], 2, "'hot' is not a number"),
    (["run", "fable", "hi", "--top-k", "1.5"], 2, "'1.5' is not a whole number"),
    (["run", "fable", "hi", "--device", "tpu"], 2, "'tpu' is not one of auto, cpu, cuda"),
    (["run", "fable", "hi", "--kv", "7bit"], 2, "--kv 7bit is not known"),
    (["run", "fable", "hi", "--kv", "16bit", "-ctk", "q8_0", "-ctv", "q8_0"], 2, "--kv and -ctk or -ctv say the same thing"),
    (["plan", "fable", "--kv", "16", "-ctv", "q8_0"], 2, "--kv and -ctk or -ctv say the same thing"),
    (["run", "fable", "hi", "-n", "-2"], 2, "-n -2"),
    (["run", "fable", "hi", "-c", "0"], 2, "--ctx-size 0 is too small"),
    (["run", "fable", "hi", "-c", "4096"], 2, "2048"),
    (["run", "fable", "hi", "-c", "4k"], 2, "a context of 4096 is more than the 2048"),
    (["plan", "fable", "-c", "16kk"], 2, "'16kk' is not a number of tokens, such as 4096 or 16k"),
    (["run", "fable", "hi", "--top-p", "2"], 2, "effllm: --top-p must be above 0 and at most 1 (off), not 2.0"),
    (["run", "fable", "hi", "--repeat-penalty", "0"], 2, "effllm: --repeat-penalty must be "),
    (["run", "fable", "hi", "--frobnicate"], 2, "effllm: no such option: --frobnicate hint: effllm run --help"),
    (["run", "fable", "hi", "--theads", "2"], 2, "no such option: --theads (Possible options: --threads)"),
    (["run", "fable:Q4_K_M", "hi"], 3, "has no GGUF file of type Q4_K_M"),
    (["run", "fable", "hi", "--stop", ""], 2, "stop string"),
    (["run", "fable", "hi", "--ram", "much"], 2, "'much' is not a size"),
    (["run", "fable", "hi", "--ram", "100M"], 4, "the budget is"),
    (["run", "fable", "hi", "--raw", "-s", "Be brief."], 2, "--system"),
    (["run", "fable", "  "], 2, "the prompt is empty"),
    (["run", "fable", "-f", "/nowhere/at/all.txt"], 2, "No such file"),
    (["run", "fable", "hi", "--kv-ram", "16M", "--spill-dir", "~nobody-of-this-name/x"], 2, "no such user"),
    (["plan", "fable", "--kv-ram", "16M", "--spill-dir", "/nowhere/at/all"], 2, "hint: correct the path, or make it: mkdir -p /nowhere/at"),
    (["rm", "tinyllama"], 3, "effllm list shows what is here"),
    (["run", "fabel", "hi"], 3, "did you mean fable"),
    (["run", "tell me a story"], 3, 'effllm run fable "tell me a story"'),
    (["run", "./no-such-folder", "hi"], 3, "no-such-folder"),
    (["chat", "fabel"], 3, "did you mean fable"),
    (["run"], 2, "effllm run fable"),
    (["plan", "fable", "--ram", "100M"], 4, "the budget is"),
    (["show"], 2, "'MODEL'"),
    (["bench"], 2, "--synthetic"), (["bench", "fable", "--synthetic", "tinyllama-1.1b"], 2, "are both given"),
    (["bench", "--synthetic", "gpt-9"], 2, "tinyllama-1.1b"),
    (["bench", "fable", "-d", "0,x"], 2, "several"),
    (["bench", "--synthetic", "tinyllama-1.1b", "--bits", "9"], 2, "--bits is 8, 6, 5, 4, 3 or 2, not 9"),
    (["bench", "fable", "-r", "0"], 2, "-r 0 is too small"),
    (["quantize", "fable", "-o", "made", "--bits", "4", "--eval", "/nowhere/at/all.txt"], 2, "--eval takes the path"),
    (["quantize", "fable", "-o", "made", "--bits", "4", "--method", "gptq", "--calib", "/dev/null"], 2, "--calib takes the path"),
    (["eval"], 2, "missing command hint: one of ppl, kld, kv-profile, recall: effllm eval --help"),
    (["eval", "ppl", "fable"], 2, "--text"),
])
def test_bad_input_is_one_error_with_its_code(argv: list[str], code: int, said: str) -> None:
    environment = world()
    assert main(argv, environment) == code
    lines = [line for line in environment.stderr.getvalue().splitlines() if not line.startswith("compiling kernels")]
    assert lines[0].startswith("effllm: ") and len(lines) <= 2, lines
    assert said.lower() in " ".join(lines).lower(), lines
    assert environment.stdout.getvalue() == ""


@pytest.mark.parametrize(("variable", "value", "said"), [
    ("EFFLLM_SEED", "abc", "'abc' is not a whole number"), ("EFFLLM_OVERFLOW", "x", "'x' is not one of error, shift"),
    ("EFFLLM_STRICT", "maybe", "'maybe' is neither true nor false"),
    ("EFFLLM_CTX_SIZE", "9z", "'9z' is not a number of tokens, such as 4096 or 16k")])
def test_a_wrong_value_of_a_variable_names_the_variable_and_no_flag(monkeypatch: pytest.MonkeyPatch, variable: str, value: str,
                                                                    said: str) -> None:
    """Nobody typed the flag."""
    monkeypatch.setenv(variable, value)
    environment = world(**{variable: value})
    assert main(["run", "fable", "hi"], environment) == 2
    assert environment.stderr.getvalue() == f"effllm: the variable {variable}: {said}\nhint: correct it, or `unset {variable}`\n"


def test_a_model_folder_without_read_permission() -> None:
    """As another user where the administrator runs the tests, because that one may read everything."""
    code = ("import os, sys\nimport effllm.runtime.engine, effllm.runtime.catalog, effllm.runtime.tokenizer\n"
            "from effllm.cli.app import main\n"
            f"if os.geteuid() == 0:\n    os.setegid({NOBODY}); os.seteuid({NOBODY})\n"
            "sys.exit(main(['show', sys.argv[1]]))")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "locked"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        folder.chmod(0)
        ran = subprocess.run([sys.executable, "-P", "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=False)
        folder.chmod(0o700)
    assert ran.returncode == 3 and "permission denied" in ran.stderr.lower(), ran.stderr
    assert len(ran.stderr.splitlines()) == 2 and not ran.stdout
    assert ran.stderr.splitlines()[1] == f"hint: check its permissions: ls -ld {folder}", "the folder that is closed, not the one around it"


def test_what_shows_permissions_can_be_typed_also_of_what_is_not_there(tmp_path: Path) -> None:
    assert effllm.ls(tmp_path) == f"ls -ld {tmp_path}"
    assert effllm.ls(tmp_path / "state" / "effllm" / "sessions") == f"ls -ld {tmp_path}"
    (tmp_path / "a file").touch()
    shown = shell(effllm.ls(tmp_path / "a file" / "sessions"))
    assert shown.returncode == 0 and shown.stdout.startswith("-rw")


def shell(line: str) -> subprocess.CompletedProcess:
    """A line of bash in which EFFLLM is the program."""
    line = line.replace("EFFLLM", f'"{sys.executable}" -P -m effllm')
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-"])
def test_a_stream_that_the_caller_closed(redirection: str) -> None:
    ran = shell(f"EFFLLM --version {redirection}")
    assert ran.returncode == 0 and ran.stderr == "", ran


@pytest.mark.parametrize("command", ["list", "plan fable", "config show", "session list", "bench fable", "eval ppl fable --text README.md"])
def test_a_report_that_has_nowhere_to_go_is_an_error_before_the_work(command: str) -> None:
    ran = shell(f"EFFLLM {command} >&-")
    assert ran.returncode == 1 and ran.stderr.splitlines() == ["effllm: standard output is closed: the answer has nowhere to go",
                                                              "hint: leave it open, or write to a file: > answer.txt"], ran


def test_help_into_a_closed_pipe_is_quiet() -> None:
    ran = shell('EFFLLM run --help | head -c 1; echo "${PIPESTATUS[0]}"')
    assert ran.stdout.endswith("0\n") and ran.stderr == "", ran


def test_a_limit_that_the_program_itself_is_under_is_no_fault_of_it() -> None:
    unmapped = OSError("Could not find/load shared object file")
    unmapped.__context__ = OSError("libllvmlite.so: failed to map segment from shared object")
    for error in (unmapped, ImportError("numpy.so: cannot allocate memory"), RuntimeError("can't start new thread")):
        code, said = guarded(error, world())
        assert code == 4 and said.count("\n") == 2 and "ulimit -v" in said and "internal error" not in said
    assert guarded(RuntimeError("another"), world())[0] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
def test_memory_that_runs_out_names_the_limit_of_the_process_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for allowed, said in ((500_000 << 10, ("limited to 488.28 MiB (ulimit -v)", "`ulimit -v unlimited`")),
                          (resource.RLIM_INFINITY, ("effllm: out of memory\n", "hint: a smaller context"))):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, resource.RLIM_INFINITY))
        for error in (MemoryError(), OSError(12, "Cannot allocate memory")):
            code, shown = guarded(error, world())
            assert code == 4 and shown.count("\n") == 2 and all(each in shown for each in said), shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold a process to such a limit")
def test_whatever_memory_a_shell_allows_it_runs_or_says_so() -> None:
    seen = set()
    for kib in (200_000, 300_000, 420_000, 450_000, 480_000, 520_000, 600_000, 4_000_000):
        ran = subprocess.run(["bash", "-c", f'ulimit -v {kib}; exec "$@"', "-", sys.executable, "-P", "-m", "effllm", "run", "fable", "Hi",
                              "-n", "2"], capture_output=True, text=True, check=False, timeout=120)
        if not ran.stderr.startswith("OpenBLAS error"):  # NumPy's, which ends the process by itself
            assert ran.returncode in (0, 4) and "internal error" not in ran.stderr and "Traceback" not in ran.stderr, (kib, ran.stderr)
            assert ran.returncode == 0 or "ulimit -v" in ran.stderr, (kib, ran.stderr)
            seen.add(ran.returncode)
    assert seen == {0, 4}
