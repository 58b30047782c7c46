"""The one place where an exception becomes a line for a person and a code for a script.

Commands let exceptions pass; nothing else in `cli/` turns one into text or into an exit code. Codes: 0 ok, 1 failure, 2 usage, 3 model
not found or gated, 4 does not fit, 5 context overflow, 6 download failed or offline, 130 interrupted. An answer that is not whole as its
form wants it is a failure. A reader that closes the pipe (`| head`) has what it wanted: that ends quietly with 0. Want of room on a disk is
4 wherever it is found (`DiskFull`). Where --json was asked for, the failure is the one document on stdout too, unless the command had
printed its own.
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

NOT_WHOLE, INTERRUPTED = EffllmError.exit_code, 130
STOPPED = "stopped by Ctrl-C"
NO_ROOM = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "can't start new thread")
UNLIMITED = "`ulimit -v unlimited` raises the limit where that is allowed; otherwise a smaller context (-c) needs less"
LIMITS = "`ulimit -v` and `ulimit -u` show the limits of this shell; a container has its own"


def guarded(program: Callable[[], int], environment: Environment) -> int:
    """Run `program` and return the exit code of the process, with at most one error message of two lines."""
    try:
        code = program()
        environment.write()
        if code == INTERRUPTED:  # as the library returns it
            write_document(environment, STOPPED, "", code)
        return code
    except SystemExit as stop:  # a pipe closed during --help, or shell completion, which prints and leaves
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return quiet(environment) if isinstance(stop.__context__, BrokenPipeError) else code
    except EndedBySignal as ended:
        return ended.die()
    except (OutputClosed, BrokenPipeError):
        return quiet(environment)
    except KeyboardInterrupt:
        if environment.debug:
            write_traceback(environment)
        write_document(environment, STOPPED, "", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if environment.debug:
            write_traceback(environment)
        message, hint, code = describe(error)
        write_error(environment, message, hint)
        if isinstance(error, OutputFailed):
            discard_output(environment)
        else:
            write_document(environment, message, hint, code)
        return code


def wants_json(command: Any, argv: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a possibly invalid command line asks for JSON: by --json, by its variable where the command has that flag, or by a format
    given to -o."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    has = {parameter.name: parameter for parameter in command.params}
    if "--json" in words:
        return True
    if "json" in has and (value := variables.get("EFFLLM_JSON")):
        from .config import SWITCH

        return SWITCH.get(value.lower(), False)
    if "output" not in has or "json" not in has["output"].metavar.split("|"):
        return False
    return not {"-ojson", "--output=json"}.isdisjoint(words) or any(
        word in ("-o", "--output") and value == "json" for word, value in zip(words, words[1:], strict=False))


def write_document(environment: Environment, message: str, hint: str, code: int) -> None:
    """An error as the JSON document on stdout."""
    if not environment.owes_json:
        return
    environment.owes_json = False
    try:
        environment.write(json_line({"error": one_line(message), "hint": one_line(hint), "code": code}, environment.stdout))
    except (OutputClosed, OutputFailed):
        discard_output(environment)  # the code says it, and stderr has said why


def describe(error: Exception) -> tuple[str, str, int]:
    """(message, hint, exit code) of any exception."""
    if isinstance(error, EffllmError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, typer.TyperException):
        return usage_message(error), usage_hint(error), error.exit_code
    if isinstance(error, typer.Abort):
        return "stopped", "", 1
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        if allowed := memory_allowed():
            return f"out of memory: this process is limited to {allowed}", UNLIMITED, DoesNotFit.exit_code
        return "out of memory", "a smaller context (-c) needs less: `effllm plan MODEL` shows what goes where", DoesNotFit.exit_code
    if is_under_limit(error):
        return "this process is not allowed the memory or threads that effllm itself needs", LIMITS, DoesNotFit.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        if lacks_room(error):
            return f"{where}{error.strerror}", "free some space, or write elsewhere", DiskFull.exit_code
        if error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{where}{error.strerror}", f"check its permissions: {ls(error.filename)}", 1
        return f"{where}{error.strerror}", "--debug shows where this happened", 1
    text = str(error)
    return f"internal error: {type(error).__name__}{f': {text}' if text else ''}", "--debug shows the traceback", 1


def memory_allowed() -> str:
    """The address space limit of this process (ulimit -v), in words; empty if there is none. With a limit the system refuses memory that is
    free, without one it hardly ever refuses: so a limit, if any, is the cause."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # Windows has no such limits
        return ""
    from ..offload.size import format_size

    allowed = getrlimit(RLIMIT_AS)[0]
    return "" if allowed == RLIM_INFINITY else f"{format_size(allowed)} (ulimit -v)"


def is_under_limit(error: BaseException | None) -> bool:
    """Whether the error is of a library that could not be mapped, or of a thread that could not be started."""
    while error is not None:
        if isinstance(error, ImportError | OSError | RuntimeError) and any(said in str(error) for said in NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False


def usage_message(error: typer.TyperException) -> str:
    # The library suggests similarly spelled flags; the hint knows better.
    message = (error.message if own_hint(error) else error.format_message()).removesuffix(".")
    if variable := variable_of(error):
        value = error.ctx.find_root().obj.variables.get(variable, "")
        reason = f"{value!r} is neither true nor false" if "valid boolean" in message else message.partition(": ")[2]
        return f"the variable {variable}: {reason}"
    return message[:1].lower() + message[1:]


# Command -> the next step where more words stand on its line than it takes.
UNQUOTED = {"list": "for one model: effllm show MODEL", "doctor": "for one model: effllm plan MODEL or effllm show MODEL",
            "run": 'put a prompt of several words in quotes: effllm run MODEL "your prompt"',
            "chat": 'a chat takes no prompt; for a single answer:  effllm run MODEL "your prompt"'}


def variable_of(error: typer.TyperException) -> str:
    """The variable that an invalid value was read from; empty if it was typed."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or not parameter.envvar:
        return ""
    source = context.get_parameter_source(parameter.name)
    return parameter.envvar if source is not None and source.name == "ENVIRONMENT" else ""


def unset(variable: str) -> str:
    """The hint for a variable with an invalid value."""
    return f"correct it, or `unset {variable}`"


def own_hint(error: typer.TyperException) -> str:
    """The hint for an unknown flag that another program has."""
    context, name = getattr(error, "ctx", None), getattr(error, "option_name", None)
    return flag_hint(context.command, name) if context is not None and name and not variable_of(error) else ""


def usage_hint(error: typer.TyperException) -> str:
    """The hint that shows the help page, or how to quote a prompt."""
    context = getattr(error, "ctx", None)  # set on usage errors alone
    if variable := variable_of(error):
        return unset(variable)
    if context is None:
        return "effllm --help"
    if hint := own_hint(error):
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
    if "requires an argument" in error.format_message() and (wanted := value_of(context.command, error.option_name)):
        return f"{error.option_name} {wanted}: {context.command_path} --help"
    surplus = "unexpected extra argument" in error.format_message()
    return (surplus and UNQUOTED.get(context.command_path.removeprefix("effllm "))) or f"{context.command_path} --help"


def value_of(command: Any, name: str | None) -> str | None:
    """The metavar of a flag; None for no flag of the command."""
    return next((parameter.metavar for parameter in command.params if name in parameter.opts), None)


def write_error(environment: Environment, message: str, hint: str) -> None:
    """Write `effllm: message` and, if there is one, `hint: next step`, without control characters and line breaks, wrapped to a narrow
    terminal."""
    from .screen import broken

    styled = environment.is_styled(environment.stderr)
    width = environment.width if environment.is_terminal(environment.stderr) else None
    written = []
    for name, text, style in (("effllm:", message, "\x1b[31m\x1b[1m"), ("hint:", hint, "\x1b[1m")):
        line = f"{name} {one_line(text)}"
        lines = [line] if width is None else broken(line, width, 2)
        if styled:
            lines[0] = f"{style}{name}\x1b[0m{lines[0].removeprefix(name)}"
        written += [f"{each}\n" for each in lines if text]
    try:
        environment.stderr.writelines(written)
        environment.stderr.flush()
    except OSError:
        return  # nobody is left to tell; the exit code still says it


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def write_traceback(environment: Environment) -> None:
    import traceback

    traceback.print_exc(file=environment.stderr)


def quiet(environment: Environment) -> int:
    discard_output(environment)
    return 0


def discard_output(environment: Environment) -> None:
    """Redirect stdout to nowhere, so that Python's flush at exit cannot fail."""
    try:
        descriptor = environment.stdout.fileno()
    except (OSError, ValueError):
        return  # a stream of a test, without a descriptor
    void = os.open(os.devnull, os.O_WRONLY)
    os.dup2(void, descriptor)
    os.close(void)
