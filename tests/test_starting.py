"""Program start-up: what is imported and what is not; that its commands, names and exit codes are all there."""

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import FOLDERS, ROOT

import effllm
from effllm.cli.app import COMMANDS, command_name

EXIT_CODES = {1, 2, 3, 4, 5, 6}


def in_fresh_interpreter(code: str) -> dict:
    """What `code` prints as JSON on its last line, in a new process outside the checkout."""
    command = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_import_and_help_load_nothing_heavy() -> None:
    loaded = in_fresh_interpreter(
        "import io, json, sys\n"
        "import effllm\n"
        "after_import = sorted(sys.modules)\n"
        "from effllm.cli.app import main\n"
        "sys.argv, real, sys.stdout = ['effllm', '--help'], sys.stdout, io.StringIO()\n"
        "try:\n    code = main()\n"
        "except SystemExit as stop:\n    code = stop.code or 0\n"
        "page, sys.stdout = sys.stdout.getvalue(), real\n"
        "print(json.dumps({'code': code, 'page': page, 'after_import': after_import, 'after_help': sorted(sys.modules)}))\n"
    )
    assert loaded["code"] == 0 and "run" in loaded["page"]
    assert not {"torch", "numba", "numpy", "huggingface_hub", "typer", "rich"} & set(loaded["after_import"])
    heavy = {"torch", "numba", "llvmlite", "numpy", "huggingface_hub", "transformers", "tokenizers", "jinja2", "pydantic", "prompt_toolkit",
             "starlette", "uvicorn", "asyncio"}
    assert not heavy & set(loaded["after_help"])


def test_a_list_and_a_completed_name_load_little(tmp_path: Path) -> None:
    """One command's flags, no library for tables, none for arrays or schemas; unless a model has an unknown vision or audio tower."""
    for argv, variables in ((["list"], {}), (["list", "--all"], {}), (["list", "--json"], {}),
                            ([], {"_EFFLLM_COMPLETE": "complete_bash", "COMP_WORDS": "effllm show f", "COMP_CWORD": "2"})):
        loaded = in_fresh_interpreter(
            "import io, json, os, sys\n"
            f"os.environ.update({dict(variables, XDG_DATA_HOME=str(tmp_path))!r})\n"
            "from effllm.cli.app import main\n"
            f"sys.argv, real, sys.stdout = ['effllm', *{argv!r}], sys.stdout, io.StringIO()\n"
            "try:\n    code = main()\n"
            "except SystemExit as stop:\n    code = stop.code or 0\n"
            "page, sys.stdout = sys.stdout.getvalue(), real\n"
            "print(json.dumps({'code': code, 'page': page, 'modules': sorted(sys.modules)}))\n")
        assert loaded["code"] == 0 and "fable" in loaded["page"], argv
        modules = set(loaded["modules"])
        assert not {"rich", "numpy", "numba", "pydantic", "jinja2", "tokenizers", "ssl", "http.client", "psutil"} & modules, argv
        commands = {name for name in modules if name.startswith("effllm.cli.") and name.removeprefix("effllm.cli.") in COMMANDS.values()}
        assert 1 <= len(commands) <= 2, commands  # `show` takes a word from `list`


def test_the_table_of_commands_is_the_folder() -> None:
    """And a line is about the command that it names, however it is typed or completed."""
    files = {file.stem for file in (ROOT / "cli").glob("*.py") if "\ndef register(" in file.read_text(encoding="utf-8")}
    assert set(COMMANDS.values()) == files
    assert [command_name(line.split(), {}) for line in ("list --all", "--debug run x", "--help", "", "lst", "x list")] == \
        ["list", "run", None, None, None, None]
    complete = {"_EFFLLM_COMPLETE": "complete_bash"}
    for words, command in (("effllm ", None), ("effllm ru", None), ("effllm run", None), ("effllm run ", "run"), ("effllm rm x", "rm")):
        for variable in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):
            assert command_name([], complete | {variable: words}) == command, words


def test_import_has_no_side_effects() -> None:
    """Limits, signal handlers, variables, warning filters, threads: as they were."""
    state = in_fresh_interpreter(
        "import json, os, resource, signal, threading, warnings\n"
        "def state():\n"
        "    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith('RLIMIT_')]\n"
        "    handlers = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]\n"
        "    return limits, handlers, dict(os.environ), str(warnings.filters), threading.active_count(), os.getcwd()\n"
        "before = state()\n"
        "import effllm\n"
        "print(json.dumps({'before': before, 'after': state()}, default=str))\n"
    )
    assert state["before"] == state["after"]


def test_a_run_on_the_cpu_never_imports_torch() -> None:
    loaded = in_fresh_interpreter(
        "import json, sys\n"
        "from effllm.cli.app import main\n"
        "sys.argv = ['effllm', 'run', 'fable', 'Once upon a time', '-n', '2', '--device', 'cpu']\n"
        "try:\n    code = main()\n"
        "except SystemExit as stop:\n    code = stop.code or 0\n"
        "print()\n"
        "print(json.dumps({'code': code, 'modules': sorted(sys.modules)}))\n"
    )
    assert loaded["code"] == 0
    assert "effllm.kernels.cpu.low_bit" in loaded["modules"], "the run did not go through the kernels"
    assert not {"torch", "transformers", "huggingface_hub", "numba"} & set(loaded["modules"]), "what is compiled needs no compiler"


def test_public_names_resolve() -> None:
    for name in effllm.__all__:
        assert getattr(effllm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        effllm.no_such_name  # noqa: B018


def test_every_error_has_a_known_exit_code() -> None:
    for module in pkgutil.walk_packages(effllm.__path__, "effllm."):
        if module.name.split(".")[1] in FOLDERS and ".cuda" not in module.name:
            importlib.import_module(module.name)
    found = list(subclasses(effllm.EffllmError))
    assert {effllm.UsageError, effllm.ModelNotFound, effllm.DoesNotFit, effllm.ContextOverflow, effllm.DownloadFailed} <= set(found)
    for error in found:
        assert error.exit_code in EXIT_CODES, error
        raised = error("what and why", "the next command")
        assert (str(raised), raised.hint) == ("what and why", "the next command"), f"{error} is built differently from the others"
    assert [error.exit_code for error in (effllm.EffllmError, effllm.UsageError, effllm.ModelNotFound, effllm.DoesNotFit,
                                          effllm.ContextOverflow, effllm.DownloadFailed)] == [1, 2, 3, 4, 5, 6]


def subclasses(error: type[Exception]) -> Iterator[type[Exception]]:
    for child in error.__subclasses__():
        yield child
        yield from subclasses(child)
