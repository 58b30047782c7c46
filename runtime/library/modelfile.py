"""Parser of Ollama Modelfiles: what a model is made FROM, and its PARAMETER, SYSTEM and similar instructions.

    FROM llama3.2            a name, a folder or a GGUF file, relative to the Modelfile
    PARAMETER temperature 0.6
    SYSTEM \"\"\"text of
    several lines\"\"\"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ... import EffllmError, UsageError, ls
from ..config_reader import show
from ..files.bounded_read import read_bounded

MAX_NBYTES = 1 << 20  # bytes
INSTRUCTIONS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "RENDERER", "PARSER", "REQUIRES")
INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)(?:[ \t]+(.*))?", re.DOTALL)
FENCE = '"""'


@dataclass(frozen=True)
class Instruction:
    """`name` in capitals; `about`: of PARAMETER its name, of MESSAGE its role."""

    line: int
    name: str
    value: str
    about: str = ""


def read_modelfile(path: Path) -> list[Instruction]:
    """In the order of the file. Raises EffllmError for one that cannot be read, UsageError naming the line that is none of a Modelfile."""
    try:
        text = read_bounded(path, MAX_NBYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}", "ollama show --modelfile NAME > FILE writes one") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8", "--modelfile takes a Modelfile, and FROM in it a model") from error
    except OSError as error:
        raise EffllmError(f"{path} cannot be read: {error.strerror}", f"check its permissions: {ls(path)}") from error
    return parse_modelfile(text, str(path))


def parse_modelfile(text: str, where: str) -> list[Instruction]:
    """The instructions in the text of a Modelfile, in order. Raises UsageError, which names `where` and the line."""
    lines, instructions, next_line = text.splitlines(), [], 0
    while next_line < len(lines):
        line_number, line = next_line + 1, lines[next_line]
        next_line += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = INSTRUCTION.fullmatch(line)
        name = match[1].upper() if match else ""
        if name not in INSTRUCTIONS:
            raise UsageError(f"{where}:{line_number}: {show(line.strip()[:40])} is not a Modelfile instruction",
                             f"known: {', '.join(INSTRUCTIONS)}")
        argument, rest = "", (match[2] or "").strip()
        if name in ("PARAMETER", "MESSAGE"):
            argument, _, rest = rest.partition(" ") if "\t" not in rest.partition(" ")[0] else rest.partition("\t")
            rest = rest.strip()
        if rest.startswith(FENCE):
            value, next_line = _read_fenced(lines, next_line, rest.removeprefix(FENCE), f"{where}:{line_number}", name)
        else:
            value = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] == '"' else rest
        if not value and name != "SYSTEM" or name in ("PARAMETER", "MESSAGE") and not argument:
            raise UsageError(f"{where}:{line_number}: {name} says nothing", "give it a value, or remove the line")
        instructions.append(Instruction(line_number, name, value, argument))
    if not any(each.name == "FROM" for each in instructions):
        raise UsageError(f"{where} has no FROM", "FROM names the model: a name, a folder or a GGUF file")
    return instructions


def _read_fenced(lines: list[str], next_line: int, first: str, where: str, name: str) -> tuple[str, int]:
    """A text between threefold quotes, and the line behind it."""
    parts = [first]
    while FENCE not in parts[-1]:
        if next_line == len(lines):
            raise UsageError(f"{where}: the quotes that {name} opens are never closed", f"close them with {FENCE}")
        parts.append(lines[next_line])
        next_line += 1
    last, _, _ = parts[-1].partition(FENCE)
    return "\n".join([*parts[:-1], last]).strip("\n"), next_line
