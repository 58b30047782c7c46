"""The error boundary: turns an exception into a message on stderr and an exit code.

Commands let exceptions pass; nothing else in `cli/` turns one into text or into an exit code. Codes: 0 ok, 1 failure, 2 usage, 3 model
not found or gated, 4 does not fit, 5 context overflow, 6 download failed or offline, 130 interrupted.

- An answer that ends before its schema or grammar is complete is a failure (1).
- A reader that closes the pipe (`| head`) has what it wanted: the program ends quietly with 0.
- A full disk is 4 wherever it is noticed (`DiskFull`).
- With --json the failure is also written to stdout as a JSON document, unless the command has already written one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from .. import DiskFull, DoesNotFit, EffllmError, lacks_room, ls
from .environment import Environment, OutputClosed, OutputFailed, json_line
from .interrupt import EndedBySignal
from .migration_hints import flag_hint

INCOMPLETE, INTERRUPTED = EffllmError.exit_code, 130
STOPPED_MESSAGE = "stopped by Ctrl-C"
LIMIT_ERRORS = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "can't start new thread")
ADDRESS_SPACE_HINT = "`ulimit -v unlimited` raises the limit where that is allowed; otherwise a smaller context (-c) needs less"
MIN_SIMILARITY = 0.6  # of flags that are suggested
LIMITS_HINT = "`ulimit -v` and `ulimit -u` show the limits of this shell; a container has its own"


def run_guarded(program: Callable[[], int], environment: Environment) -> int:
    """Run `program` and return the exit code of the process, with at most one error message of two lines."""
    try:
        code = program()
        environment.write()
        if code == INTERRUPTED:  # the library returns it instead of raising KeyboardInterrupt
            write_json_error(environment, STOPPED_MESSAGE, "", code)
        return code
    except SystemExit as stop:  # a pipe closed during --help, or shell completion, which prints and leaves
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return exit_quietly(environment) if isinstance(stop.__context__, BrokenPipeError) else code
    except EndedBySignal as ended:
        return ended.die()
    except (OutputClosed, BrokenPipeError):
        return exit_quietly(environment)
    except KeyboardInterrupt:
        if environment.debug:
            write_traceback(environment)
        write_json_error(environment, STOPPED_MESSAGE, "", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if environment.debug:
            write_traceback(environment)
        message, hint, code = describe_error(error)
        write_error(environment, message, hint)
        if isinstance(error, OutputFailed):
            discard_output(environment)
        else:
            write_json_error(environment, message, hint, code)
        return code


def wants_json(command: Any, argv: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a possibly invalid command line asks for JSON: by --json, by its variable where the command has that flag, or by a format
    given to -o."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    parameters = {parameter.name: parameter for parameter in command.params}
    if "--json" in words:
        return True
    if "json" in parameters and (value := variables.get("EFFLLM_JSON")):
        from .config import BOOLEANS

        return BOOLEANS.get(value.lower(), False)
    if "output" not in parameters or "json" not in parameters["output"].metavar.split("|"):
        return False
    return not {"-ojson", "--output=json"}.isdisjoint(words) or any(
        word in ("-o", "--output") and value == "json" for word, value in zip(words, words[1:], strict=False))


def write_json_error(environment: Environment, message: str, hint: str, code: int) -> None:
    """Write an error to stdout as JSON, if --json was given and no document was written yet."""
    if not environment.json_pending:
        return
    environment.json_pending = False
    try:
        environment.write(json_line({"error": one_line(message), "hint": one_line(hint), "code": code}, environment.stdout))
    except (OutputClosed, OutputFailed):
        discard_output(environment)  # the exit code and stderr report the error


def describe_error(error: Exception) -> tuple[str, str, int]:
    """(message, hint, exit code) of any exception."""
    if isinstance(error, EffllmError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, typer.TyperException):
        return usage_message(error), usage_hint(error), error.exit_code
    if isinstance(error, typer.Abort):
        return "stopped", "", 1
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        if limit := address_space_limit():
            return f"out of memory: this process is limited to {limit}", ADDRESS_SPACE_HINT, DoesNotFit.exit_code
        return "out of memory", "a smaller context (-c) needs less: `effllm plan MODEL` shows what goes where", DoesNotFit.exit_code
    if is_limit_error(error):
        return "this process is not allowed the memory or threads that effllm itself needs", LIMITS_HINT, DoesNotFit.exit_code
    if isinstance(error, OSError) and error.strerror:
        prefix = f"{error.filename}: " if error.filename else ""
        if lacks_room(error):
            return f"{prefix}{error.strerror}", "free some space, or write elsewhere", DiskFull.exit_code
        if error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{prefix}{error.strerror}", f"check its permissions: {ls(error.filename)}", 1
        return f"{prefix}{error.strerror}", "--debug shows where this happened", 1
    text = str(error)
    return f"internal error: {type(error).__name__}{f': {text}' if text else ''}", "--debug shows the traceback", 1


def address_space_limit() -> str:
    """The address space limit of this process (ulimit -v) as text; empty if there is none. An allocation hardly ever fails without such a
    limit, so if there is one, it is taken for the cause."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # Windows has no such limits
        return ""
    from ..offload.size import format_size

    limit = getrlimit(RLIMIT_AS)[0]
    return "" if limit == RLIM_INFINITY else f"{format_size(limit)} (ulimit -v)"


def is_limit_error(error: BaseException | None) -> bool:
    """Whether a limit of the process is the cause: a library could not be mapped, or a thread could not be started."""
    while error is not None:
        if isinstance(error, ImportError | OSError | RuntimeError) and any(phrase in str(error) for phrase in LIMIT_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def usage_message(error: typer.TyperException) -> str:
    """The library's message in the style of ours."""
    # The library suggests similarly spelled flags, which would contradict a hint about another program's flag. It counts the dashes, too.
    if getattr(error, "possibilities", None):
        error.possibilities = [flag for flag in error.possibilities if is_similar(flag, error.option_name)]
    message = (error.message if foreign_flag_hint(error) else error.format_message()).removesuffix(".")
    if variable := source_variable(error):
        value = error.ctx.find_root().obj.variables.get(variable, "")
        reason = f"{value!r} is neither true nor false" if "valid boolean" in message else message.partition(": ")[2]
        return f"the variable {variable}: {reason}"
    return message[:1].lower() + message[1:]


def is_similar(flag: str, typed_flag: str) -> bool:
    """Whether a flag may be what was meant by one that does not exist."""
    import difflib

    return difflib.SequenceMatcher(None, flag.lstrip("-"), typed_flag.lstrip("-")).ratio() >= MIN_SIMILARITY


# Command -> hint for too many arguments.
EXTRA_ARGUMENT_HINTS = {"list": "for one model: effllm show MODEL", "doctor": "for one model: effllm plan MODEL or effllm show MODEL",
            "run": 'put a prompt of several words in quotes: effllm run MODEL "your prompt"',
            "chat": 'a chat takes no prompt; for a single answer:  effllm run MODEL "your prompt"'}


def source_variable(error: typer.TyperException) -> str:
    """The environment variable that an invalid value was read from; empty if the value was typed."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or not parameter.envvar:
        return ""
    source = context.get_parameter_source(parameter.name)
    return parameter.envvar if source is not None and source.name == "ENVIRONMENT" else ""


def unset_hint(variable: str) -> str:
    """The hint for a variable with an invalid value."""
    return f"correct it, or `unset {variable}`"


def foreign_flag_hint(error: typer.TyperException) -> str:
    """The hint for an unknown flag that another program has."""
    context, name = getattr(error, "ctx", None), getattr(error, "option_name", None)
    return flag_hint(context.command, name) if context is not None and name and not source_variable(error) else ""


def usage_hint(error: typer.TyperException) -> str:
    """The hint for an invalid command line; by default the command's help page."""
    context = getattr(error, "ctx", None)  # set on usage errors alone
    if variable := source_variable(error):
        return unset_hint(variable)
    if context is None:
        return "effllm --help"
    if hint := foreign_flag_hint(error):
        return hint
    missing = getattr(getattr(error, "param", None), "metavar", None) if "missing argument" in error.format_message().lower() else None
    if missing == "MODEL" and context.command_path == "effllm pull":
        return "effllm list --all shows names of models that can be pulled: effllm pull qwen3-0.6b"
    if missing == "MODEL":
        return f"effllm list shows local models: {context.command_path} fable"
    if "missing option" in error.format_message().lower():
        return f"{context.command_path} MODEL {error.param.opts[0]} {error.param.metavar}: {context.command_path} --help"
    if "missing command" in error.format_message().lower():
        return f"one of {', '.join(context.command.commands)}: {context.command_path} --help"
    if "requires an argument" in error.format_message() and (metavar := flag_metavar(context.command, error.option_name)):
        return f"{error.option_name} {metavar}: {context.command_path} --help"
    hint = ""
    if "unexpected extra argument" in error.format_message():
        hint = EXTRA_ARGUMENT_HINTS.get(context.command_path.removeprefix("effllm "), "")
    return hint or f"{context.command_path} --help"


def flag_metavar(command: Any, name: str | None) -> str | None:
    """The metavar of a flag; None if the command has no such flag."""
    return next((parameter.metavar for parameter in command.params if name in parameter.opts), None)


def write_error(environment: Environment, message: str, hint: str) -> None:
    """Write `effllm: message` and, if there is one, `hint: next step`, without control characters and line breaks, wrapped to a narrow
    terminal."""
    from .screen import wrap_line

    styled = environment.is_styled(environment.stderr)
    width = environment.width if environment.is_terminal(environment.stderr) else None
    output = []
    for name, text, style in (("effllm:", message, "\x1b[31m\x1b[1m"), ("hint:", hint, "\x1b[1m")):
        line = f"{name} {one_line(text)}"
        lines = [line] if width is None else wrap_line(line, width, 2)
        if styled:
            lines[0] = f"{style}{name}\x1b[0m{lines[0].removeprefix(name)}"
        output += [f"{each}\n" for each in lines if text]
    try:
        environment.stderr.writelines(output)
        environment.stderr.flush()
    except OSError:
        return  # nobody is left to tell; the exit code still says it


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def write_traceback(environment: Environment) -> None:
    import traceback

    traceback.print_exc(file=environment.stderr)


def exit_quietly(environment: Environment) -> int:
    discard_output(environment)
    return 0


def discard_output(environment: Environment) -> None:
    """Redirect stdout to nowhere, so that Python's flush at exit cannot fail."""
    try:
        descriptor = environment.stdout.fileno()
    except (OSError, ValueError):
        return  # a stream of a test, without a descriptor
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
