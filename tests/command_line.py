"""Calls the command line in this process, with streams that are not terminals."""

from __future__ import annotations

import io
import json
import os

from effllm.cli.app import main
from effllm.cli.environment import Environment


class CliRun:
    """The output and return value of a call of `main`."""

    def __init__(self, *argv: object, stdin: str = "", **variables: str) -> None:
        self.environment = Environment(io.StringIO(stdin), io.StringIO(), io.StringIO(), {**os.environ, **variables})
        self.code = main([str(word) for word in argv], self.environment)
        self.out, self.err = self.environment.stdout.getvalue(), self.environment.stderr.getvalue()

    @property
    def json(self) -> dict:
        """The JSON output of a successful call."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def run_cli(*argv: object) -> tuple[int, str, str]:
    """The exit code of a call, and its output on both streams."""
    ran = CliRun(*argv)
    return ran.code, ran.out, ran.err
