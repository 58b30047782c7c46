"""Types commands into a real terminal and records the result, as text and as a picture of the terminal.

    python tools/record_terminal.py OUT COMMAND... --home HOME [--folder FOLDER]

A shell with the prompt `$ ` runs on a pseudo-terminal of 80 columns in FOLDER, with a home of its own. Programs may print both paths:
choose neutral ones. OUT.txt gets the text as a terminal would show it, OUT.svg the same drawn by rich, without the web fonts that it would
fetch. Needs `.[test]`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from pathlib import Path

import pexpect
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 80, 40
PROMPT = "\x1b]7;\x07$ "  # an escape sequence that no program prints, so that the prompt is not found in an answer
HOUR = 3600
PERSONAL = ("XDG_", "PYTHON", "VIRTUAL_ENV", "EFFLLM_", "HF_")  # variables that a newcomer does not have


def record(commands: list[str], folder: Path, home: Path) -> str:
    """All terminal output, typed input included."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(PERSONAL)}
    variables |= {"HOME": str(home), "TERM": "xterm-256color", "PS1": PROMPT, "COLUMNS": str(COLUMNS)}
    shell = pexpect.spawn("bash", ["--norc", "--noprofile", "--noediting"], cwd=folder, env=variables, dimensions=(ROWS, COLUMNS),
                          encoding="utf-8", timeout=HOUR)
    output = io.StringIO()
    shell.logfile_read = output
    shell.expect_exact(PROMPT)
    for command in commands:
        shell.sendline(command)
        shell.expect_exact(PROMPT)
        status = command_status(shell)
        if status:
            sys.exit(f"{command!r} ended with {status}:\n{output.getvalue()}")
    shell.logfile_read = None
    shell.sendeof()
    shell.expect(pexpect.EOF)
    return output.getvalue()


def command_status(shell: pexpect.spawn) -> int:
    """The exit code of the previous command, queried without leaving a trace in the recording."""
    logfile, shell.logfile_read = shell.logfile_read, None
    shell.sendline("echo status=$?")
    shell.expect(r"status=(\d+)\r\n")
    status = int(shell.match[1])
    shell.expect_exact(PROMPT)
    shell.logfile_read = logfile
    return status


def shown(raw: str) -> Text:
    """What a terminal shows in the end: the last state of redrawn lines; no control codes but colors; long lines cut at the edge."""
    lines = []
    for line in raw.replace(PROMPT, "$ ").replace("\r\n", "\n").split("\n")[:-1]:  # the last is a prompt at which nothing was typed
        last = re.sub(r"\x1b\[[0-9;]*[A-HJ-KSTfhl]", "\r", line).rsplit("\r", 1)[-1]
        lines.append(last)
    texts = [Text.from_ansi(line) for line in lines]
    return Text("\n").join(piece for line in texts for piece in line.divide(range(COLUMNS, max(len(line), 1), COLUMNS)))


def svg(text: Text, title: str) -> str:
    """The picture; it uses the viewer's fonts."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    console.print(text, soft_wrap=False)
    form = re.sub(r"\s*@font-face \{\{.*?\}\}|https://www\.textualize\.io", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=form.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--title", default="effllm")
    options = parser.parse_args()
    text = shown(record(options.commands, options.folder, options.home))
    options.out.with_suffix(".txt").write_text(text.plain.rstrip() + "\n", encoding="utf-8")
    options.out.with_suffix(".svg").write_text(svg(text, options.title), encoding="utf-8")


if __name__ == "__main__":
    main()
