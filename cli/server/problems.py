"""Errors of requests, as a status and the error object of each API."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ... import ContextOverflow, EffllmError, UsageError
from ...runtime.images.media_markers import MediaGone
from ...runtime.templates.template import TemplateError

INVALID, REFUSED, FAILED, BUSY = "invalid_request_error", "authentication_error", "server_error", "overloaded_error"
UNSUPPORTED = "not_supported_error"
TOO_LONG, NO_MODEL, JOB_GONE = "context_length_exceeded", "model_not_found", "job_not_found"
THREAD_NOT_FOUND, THREAD_MISMATCH = "thread_not_found", "thread_fingerprint_mismatch"  # Anthropic's clients then resend the conversation
MESSAGES = "/v1/messages"  # Anthropic's API
OLLAMA, LM_STUDIO, LM_STUDIO_1 = "/api/", "/api/v0/", "/api/v1/"  # LM Studio's first has OpenAI's errors
GOOGLE = "/v1beta/"
ANTHROPIC_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
                         408: "timeout_error", 504: "timeout_error"}
GOOGLE_STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED",
                   501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
CLOSING = "the server is shutting down"
SEE_TERMINAL = "the server's terminal says more"
LEAVE_OUT, LEAVE_ONE_OUT = "leave it out", "leave one of them out"
SEND_SEPARATELY = "send the others in another request"
RETRY = "retry in a moment"
CONTEXT_SIZE = re.compile(r"the context holds (\d+)")
PATH_PATTERN = re.compile(r"(?<![\w/.<>:#-])(?:~|\.{1,2})?/(?!(?:v1|api)/)[^\s:,;'\"]*")  # paths of files, not of this API


class Problem(Exception):
    """A request that is refused, or an answer that fails.

    param: the field at fault.
    hint: the next step; clients show one text, so it is appended to the message after a colon.
    """

    def __init__(self, status: int, message: str, type: str = INVALID, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None, hint: str = "") -> None:
        message = f"{message}: {hint}" if hint else message
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code, self.headers = status, message, type, param, code, headers or {}

    def to_json(self) -> dict[str, object]:
        return {"error": {"message": self.client_message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def client_message(self) -> str:
        """The message for clients of OpenAI's and Ollama's APIs. Many recognize a full context by this wording alone, and then shorten the
        conversation."""
        context = CONTEXT_SIZE.search(self.message) if self.code == TOO_LONG else None
        return self.message if context is None else f"{self.message} (this model's maximum context length is {context[1]} tokens)"

    def at(self, path: str) -> dict[str, object]:
        """The error object of the API at a path."""
        if path.startswith(LM_STUDIO_1):
            return self.to_lm_studio()
        if path.startswith(OLLAMA) and not path.startswith(LM_STUDIO):
            return self.to_ollama()
        if path.startswith(GOOGLE):
            return self.to_google()
        return self.to_anthropic() if path.startswith(MESSAGES) else self.to_json()

    def to_anthropic(self) -> dict[str, object]:
        """Anthropic's format. Clients recognize a full context by this wording, and then shorten the conversation."""
        message = f"prompt is too long: {self.message}" if self.code == TOO_LONG else self.message
        kind = BUSY if self.type == BUSY else ANTHROPIC_ERROR_TYPES.get(self.status,
                                                                        "invalid_request_error" if self.status < 500 else "api_error")
        details = {"details": {"error_code": self.code}} if self.code in (THREAD_NOT_FOUND, THREAD_MISMATCH) else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def to_lm_studio(self) -> dict[str, object]:
        """LM Studio's format since v1, with its own error types."""
        kinds = {NO_MODEL: NO_MODEL, JOB_GONE: JOB_GONE}
        kind = kinds.get(self.code or "", "not_implemented" if self.status == 501 else "invalid_request" if self.status < 500 else
                         "internal_error")
        optional = {name: value for name, value in (("code", self.code), ("param", self.param)) if value is not None}
        return {"error": {"type": kind, "message": self.client_message, **optional}}

    def to_google(self) -> dict[str, object]:
        """Google's format: HTTP status, Google's name for it, and the field in the details."""
        details = [] if self.param is None else [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [
            {"field": self.param, "description": self.message}]}]
        status = GOOGLE_STATUSES.get(self.status, "INVALID_ARGUMENT" if self.status < 500 else "INTERNAL")
        error = {"code": self.status, "message": self.client_message, "status": status}
        return {"error": error | ({"details": details} if details else {})}

    def to_ollama(self) -> dict[str, object]:
        """Ollama's format; some clients recognize a missing model by this wording."""
        return {"error": f"model not found: {self.message}" if self.code == NO_MODEL else self.client_message}

    def renamed(self, names: Mapping[str, str]) -> Problem:
        """The same problem with the client's field names; `names`: ours -> the client's."""
        for field, name in names.items():
            if self.param == field or self.param is not None and self.param.startswith(f"{field}."):
                return Problem(self.status, self.message.replace(field, name, 1), self.type, name + self.param[len(field) :], self.code,
                               self.headers)
        return self


def problem_of(error: BaseException, param: str | None = None) -> Problem:
    """The problem to report for an error, without paths of this machine: 4xx for errors of the request, 500 for all others. `param`: the
    field at fault."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ContextOverflow):
        return Problem(400, message_of(error), param=param, code=TOO_LONG)
    if isinstance(error, MediaGone):  # a text contains a marker of media that are not in the request
        return Problem(400, error.message, param=param, hint="send it with the request")
    if isinstance(error, UsageError | TemplateError):
        return Problem(400, message_of(error), param=param)
    if isinstance(error, EffllmError):
        return Problem(500, message_of(error), FAILED)
    if isinstance(error, OSError):
        return Problem(500, f"reading or writing failed: {error.strerror or type(error).__name__}", FAILED, hint=SEE_TERMINAL)
    if isinstance(error, MemoryError):
        return Problem(500, "out of memory", FAILED, hint="send less, or serve it with a smaller context (-c)")
    return internal(error)


def internal(error: BaseException) -> Problem:
    return Problem(500, f"internal error: {type(error).__name__}", FAILED, hint=SEE_TERMINAL)


def message_of(error: EffllmError) -> str:
    return without_paths(f"{error.message}: {error.hint}" if error.hint else error.message)


def without_paths(text: str) -> str:
    return PATH_PATTERN.sub("(a file)", text)


def stays_loaded() -> Problem:
    """A server of one model refuses to unload it."""
    return Problem(501, "the served model stays loaded until the server ends", UNSUPPORTED, code="not_supported",
                   hint="effllm serve without MODEL loads and unloads models by name")


def closing() -> Problem:
    return Problem(503, CLOSING, BUSY, code="server_closing", hint="retry when it has restarted")
