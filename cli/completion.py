"""Where shells want other things than the library does: a script for zsh that serves at the first tab, and names with a colon in bash.

bash takes a colon for the end of a word (COMP_WORDBREAKS). `effllm run fable:4` reaches the program as `run`, `fable`, `:`, `4`, and bash
puts what it is told in the place of the `4`. The words are put together again for the library that finds the names, and of what it tells
bash, the end after the colon alone is handed on.
"""

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
    """Mend the script for zsh that the library hands out where a line asks for one; a version that keeps it elsewhere hands out its own."""
    if any(word in ASKS_FOR_SCRIPT for word in argv):
        with suppress(ImportError, KeyError):
            from typer import _completion_shared

            scripts = getattr(_completion_shared, "_completion_scripts", {})
            head, end, rest = scripts["zsh"].rpartition(f"\n{ZSH_END}")
            scripts["zsh"] = f"{head}\n{ZSH_OWN}{rest}" if end else rest


@contextmanager
def whole_words() -> Iterator[None]:
    """Within it, this process completes a word for bash as other shells would have it done."""
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
    """Words and the number of the one to be completed, as bash tells them -> the same with words on both sides of a colon in one, and what
    of that word bash does not replace. A word that bash left whole stays so: then it does not break there."""
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
