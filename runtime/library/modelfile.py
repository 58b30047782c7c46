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

LARGEST = 1 << 20  # bytes
INSTRUCTIONS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "RENDERER", "PARSER", "REQUIRES")
BEGIN = re.compile(r"[ \t]*([A-Za-z]+)(?:[ \t]+(.*))?", re.DOTALL)
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
        text = read_bounded(path, LARGEST).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}", "ollama show --modelfile NAME > FILE writes one") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8", "--modelfile takes a Modelfile, and FROM in it a model") from error
    except OSError as error:
        raise EffllmError(f"{path} cannot be read: {error.strerror}", f"check its permissions: {ls(path)}") from error
    return parse_modelfile(text, str(path))


def parse_modelfile(text: str, where: str) -> list[Instruction]:
    """The instructions in the text of a Modelfile, in order. Raises UsageError, which names `where` and the line."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        first, line = at + 1, lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = BEGIN.fullmatch(line)
        name = begun[1].upper() if begun else ""
        if name not in INSTRUCTIONS:
            raise UsageError(f"{where}:{first}: {show(line.strip()[:40])} is not a Modelfile instruction",
                             f"known: {', '.join(INSTRUCTIONS)}")
        about, rest = "", (begun[2] or "").strip()
        if name in ("PARAMETER", "MESSAGE"):
            about, _, rest = rest.partition(" ") if "\t" not in rest.partition(" ")[0] else rest.partition("\t")
            rest = rest.strip()
        if rest.startswith(FENCE):
            value, at = _fenced(lines, at, rest.removeprefix(FENCE), f"{where}:{first}", name)
        else:
            value = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] == '"' else rest
        if not value and name != "SYSTEM" or name in ("PARAMETER", "MESSAGE") and not about:
            raise UsageError(f"{where}:{first}: {name} says nothing", "give it a value, or remove the line")
        found.append(Instruction(first, name, value, about))
    if not any(each.name == "FROM" for each in found):
        raise UsageError(f"{where} has no FROM", "FROM names the model: a name, a folder or a GGUF file")
    return found


def _fenced(lines: list[str], at: int, begun: str, where: str, name: str) -> tuple[str, int]:
    """A text between threefold quotes, and the line behind it."""
    held = [begun]
    while FENCE not in held[-1]:
        if at == len(lines):
            raise UsageError(f"{where}: the quotes that {name} opens are never closed", f"close them with {FENCE}")
        held.append(lines[at])
        at += 1
    last, _, _ = held[-1].partition(FENCE)
    return "\n".join([*held[:-1], last]).strip("\n"), at
