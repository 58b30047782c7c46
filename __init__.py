"""effllm: run large language models on the machine you have.

This file is light on purpose: `effllm --help` and library probes import it, so it pulls in nothing. The public names load on
first use. Errors live here because every layer raises them and none may import another for it.
"""

__version__ = "0.1.0"
__all__ = ["Engine", "QuantSpec", "EffllmError", "__version__"]

_LAZY = {"Engine": "runtime.engine", "QuantSpec": "quant.spec"}


class EffllmError(Exception):
    """A failure to show a person: `message` says what and why, `hint` the next step; `exit_code` is what the process ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class UsageError(EffllmError):
    """The request itself makes no sense (a wrong flag value, an empty prompt)."""

    exit_code = 2


class ModelNotFound(EffllmError):
    """The model is absent, gated, or its folder cannot be read."""

    exit_code = 3


class DoesNotFit(EffllmError):
    """The plan needs more memory or disk than the budget allows."""

    exit_code = 4


class ContextOverflow(EffllmError):
    """The prompt is longer than the context."""

    exit_code = 5


class DownloadFailed(EffllmError):
    """The network or the hub failed, or the machine is offline."""

    exit_code = 6


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
