"""Shell completion where the library falls short: a zsh script that works at the first tab, and names with a colon in bash.

bash splits words at colons (COMP_WORDBREAKS): `effllm run fable:4` arrives as `run`, `fable`, `:`, `4`, and bash replaces only the `4` by a
completion. The words are joined again for the library that completes them, and of its completions only the part after the colon is passed
to bash."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

ASKED = "complete_bash"
COLON = ":"
ASKS_FOR_SCRIPT = ("--install-completion", "--show-completion")
# The last line of the library's script, and what stands there instead: zsh loads the file at the first tab and takes it for the function
# itself, which then must complete, too.
ZSH_END = "compdef %(complete_func)s %(prog_name)s"
ZSH_OWN = f'''if [ "$funcstack[1]" = "_%(prog_name)s" ]; then
  %(complete_func)s
else
  {ZSH_END}
fi'''


def own_script(argv: Sequence[str]) -> None:
    """Print our corrected zsh completion script if the command line asks for it, unless this version of the library has changed its own."""
    if any(word in ASKS_FOR_SCRIPT for word in argv):
        with suppress(ImportError, KeyError):
            from typer import _completion_shared

            scripts = getattr(_completion_shared, "_completion_scripts", {})
            head, end, rest = scripts["zsh"].rpartition(f"\n{ZSH_END}")
            scripts["zsh"] = f"{head}\n{ZSH_OWN}{rest}" if end else rest


@contextmanager
def whole_words() -> Iterator[None]:
    """A context in which bash's split words are joined for completion."""
    if os.environ.get("_EFFLLM_COMPLETE") != ASKED or COLON not in os.environ.get("COMP_WORDS", ""):
        yield
        return
    line, at, before = joined(os.environ["COMP_WORDS"], int(os.environ["COMP_CWORD"]))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = line, str(at)
    bash, sys.stdout = sys.stdout, io.StringIO()
    try:
        yield
    finally:
        said, sys.stdout = sys.stdout.getvalue(), bash
        bash.write("".join(line.removeprefix(before) for line in said.splitlines(keepends=True)))


def joined(line: str, at: int) -> tuple[str, int, str]:
    """bash's words and the index of the one to complete -> the same with words joined at colons, and the prefix that bash does not replace.
    A word that bash did not split stays as it is: its COMP_WORDBREAKS has no colon."""
    apart = "\n" if "\n" in line else " "
    whole: list[str] = []
    number, before, glue = at, "", False
    for index, word in enumerate(line.split(apart)):
        colons = bool(word) and not word.strip(COLON)
        if whole and (colons or glue):
            if index == at:
                number, before = len(whole) - 1, whole[-1] + (word if colons else "")
            whole[-1] += word
        else:
            if index == at:
                number = len(whole)
            whole.append(word)
        glue = colons
    return apart.join(whole), number, before
