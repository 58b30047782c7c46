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

BASH_COMPLETION = "complete_bash"
COLON = ":"
SCRIPT_FLAGS = ("--install-completion", "--show-completion")
# The last line of the library's script, and its replacement: at the first tab zsh loads the file as the body of the completion function,
# so that run has to complete, too.
ZSH_LAST_LINE = "compdef %(complete_func)s %(prog_name)s"
ZSH_REPLACEMENT = f'''if [ "$funcstack[1]" = "_%(prog_name)s" ]; then
  %(complete_func)s
else
  {ZSH_LAST_LINE}
fi'''


def patch_zsh_script(argv: Sequence[str]) -> None:
    """Print our corrected zsh completion script if the command line asks for it, unless this version of the library has changed its own."""
    if any(word in SCRIPT_FLAGS for word in argv):
        with suppress(ImportError, KeyError):
            from typer import _completion_shared

            scripts = getattr(_completion_shared, "_completion_scripts", {})
            head, end, rest = scripts["zsh"].rpartition(f"\n{ZSH_LAST_LINE}")
            scripts["zsh"] = f"{head}\n{ZSH_REPLACEMENT}{rest}" if end else rest


@contextmanager
def join_bash_words() -> Iterator[None]:
    """A context in which bash's split words are joined for completion."""
    if os.environ.get("_EFFLLM_COMPLETE") != BASH_COMPLETION or COLON not in os.environ.get("COMP_WORDS", ""):
        yield
        return
    line, index, prefix = join_at_colons(os.environ["COMP_WORDS"], int(os.environ["COMP_CWORD"]))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = line, str(index)
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        yield
    finally:
        output, sys.stdout = sys.stdout.getvalue(), stdout
        stdout.write("".join(line.removeprefix(prefix) for line in output.splitlines(keepends=True)))


def join_at_colons(line: str, target: int) -> tuple[str, int, str]:
    """Join the words that bash split at colons.

    line: the words, separated by line breaks or spaces; target: index of the word to complete.
    Returns the joined line, the index in it, and the prefix of the word that bash does not replace. Words that bash did not split (its
    COMP_WORDBREAKS has no colon) stay as they are.
    """
    separator = "\n" if "\n" in line else " "
    joined: list[str] = []
    joined_target, prefix, joins_next = target, "", False
    for index, word in enumerate(line.split(separator)):
        is_colons = bool(word) and not word.strip(COLON)
        if joined and (is_colons or joins_next):
            if index == target:
                joined_target, prefix = len(joined) - 1, joined[-1] + (word if is_colons else "")
            joined[-1] += word
        else:
            if index == target:
                joined_target = len(joined)
            joined.append(word)
        joins_next = is_colons
    return separator.join(joined), joined_target, prefix
