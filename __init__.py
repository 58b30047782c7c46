"""effllm: run large language models on the machine you have.

This file is light on purpose: `effllm --help` and library probes import it, so it pulls in nothing. The public names load on
first use. Errors live here because every layer raises them and none may import another for it.
"""

__version__ = "0.1.0"
__all__ = ["Engine", "QuantSpec", "EffllmError", "__version__"]

_LAZY = {"Engine": "runtime.engine", "QuantSpec": "quant.spec"}


class EffllmError(Exception):
    """A failure to show a person: `message` says what and why, `hint` the next step; `exit_code` is what the process ends with.
    `option`: the one whose value is at fault, where the model alone tells; whoever knows where that value was said can name the place."""

    exit_code = 1
    option = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return self.message

    def prefix_origin(self, place: str) -> None:
        """From here on the failure begins with the place that what is at fault comes from."""
        self.message = f"{place}: {self.message}"


class UsageError(EffllmError):
    """The request itself makes no sense (a wrong flag value, an empty prompt)."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "", option: str = "") -> None:
        super().__init__(message, hint)
        self.option = option


class ModelNotFound(EffllmError):
    """The model is absent, gated, or its folder cannot be read."""

    exit_code = 3


class DoesNotFit(EffllmError):
    """The plan needs more memory or disk than the budget allows."""

    exit_code = 4


class MemoryTooSmall(DoesNotFit):
    """The host's memory is too small for a plan. `required_nbytes`: memory that it takes; `fitting_ctx`: a shorter context that fits, 0 if
    none was found."""

    option = "ram"

    def __init__(self, message: str, hint: str = "", required_nbytes: int = 0, fitting_ctx: int = 0) -> None:
        super().__init__(message, hint)
        self.required_nbytes, self.fitting_ctx = required_nbytes, fitting_ctx


class DiskFull(DoesNotFit):
    """A disk, a quota or a limit on the size of files has no room for what is being written, whatever that is."""


class ContextOverflow(EffllmError):
    """The prompt is longer than the context."""

    exit_code = 5


class DownloadFailed(EffllmError):
    """The network or the hub failed, or the machine is offline."""

    exit_code = 6


def typed(text: object) -> str:
    """A path or a name as it is typed in a shell, for next steps that are copied."""
    said = str(text)
    if said and all(letter.isalnum() or letter in "@%+=:,./-_" for letter in said):
        return said
    return "'" + said.replace("'", "'\"'\"'") + "'"


def ls(path: object) -> str:
    """The command that shows who may use a path: of what is not there, or may not be seen, the nearest above it that can be listed."""
    from os.path import abspath, dirname, lexists

    found = abspath(str(path))
    while not lexists(found) and found != dirname(found):
        found = dirname(found)
    return f"ls -ld {typed(found)}"


def lacks_room(error: OSError) -> bool:
    """Did a write fail for want of room?"""
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def not_written(error: OSError, what: str, hint: str, room: str = "make room on that disk, then run it again") -> EffllmError:
    """What an error that ended a write is for a person, `what` and the system's reason: DiskFull with the next step `room`, or an
    EffllmError with `hint`."""
    message = f"{what}: {error.strerror or error}"
    return DiskFull(message, room) if lacks_room(error) else EffllmError(message, hint)


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
