"""Fill-in-the-middle (FIM): builds the prompt of a code model from the text around a gap.

Such models mark prefix, suffix and middle by special tokens. They are found by name in the vocabulary, as llama.cpp does, or as the model's
files state them. The order follows from the names too: most take prefix then suffix (PSM); Codestral, Seed Coder and Mellum the reverse
(SPM). Other files come first, each after its name.

Everything here is token ids; the caller tokenizes text as plain text (`plain_text.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ... import ContextOverflow

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class FimNames:
    """A family's names of its FIM tokens. Without a `middle` token the completion follows the prefix, which then comes last."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


KNOWN_FIM_NAMES = (FimNames("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 and later, CodeGemma, Granite 4
         FimNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 1 and 2, Granite Code, Mellum
         FimNames("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
         FimNames("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
         FimNames("▁<PRE>", "▁<SUF>", "▁<MID>"), FimNames("<PRE>", "<SUF>", "<MID>"),  # CodeLlama
         FimNames("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed Coder
         FimNames("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral, whose [MIDDLE] no prompt has
         FimNames("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
         FimNames("<|prefix|>", "<|suffix|>", "<|middle|>"))  # Falcon H1 Coder
# Roles in tokenizer_config.json, and of GGUF files (`fim_pre_token_id` and so on) as read here.
TOKEN_ROLES = ("prefix_token", "suffix_token", "middle_token", "fim_pad_token", "fim_rep_token", "fim_sep_token")
REPOSITORIES = ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<fim-repo>", "<REPO>", "<reponame>")
FILES = ("<|file_sep|>", "<file_sep>", "<filename>")
# A vocabulary with StarCoder's names and these tokens is Mellum's, which puts the suffix first.
OF_MELLUM = ("<fim_prefix>", "<filename>", "</assistant>")
# These end a completion too: the model starts another file, or pads.
END_TOKENS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|EOT|>", "<|file_separator|>", "<|endoftext|>")
NAMELESS = "<file_sep>"  # StarCoder 2 was trained with half of its files unnamed, and the names elsewhere
PROJECT, HERE = "myproject", "filename"  # llama.cpp's defaults
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, without a file token; as llama.cpp
SHARE = 4  # the suffix may take 1 / SHARE of the room
STEPS = 8  # a long prefix is cut in steps of 1 / STEPS of the room, so that most keystrokes keep the cached prefix
MIN_AROUND = 4096  # tokens reserved around the gap; other files may take the rest
ROOM_TO_WRITE = 512  # tokens that other files leave for the completion


@dataclass(frozen=True)
class FimTokens:
    """FIM tokens of one vocabulary. `ends`: end a completion, beside the usual end tokens. `repository` and `file` precede the project name
    and each file name; None without one."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None
    names_files: bool = True


@dataclass(frozen=True)
class InfillContext:
    """A gap: text before and after it, the beginning of its completion (`begun`), and other files as (name, text)."""

    prefix: str
    suffix: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class InfillPrompt:
    """Token ids, of which the first `lasting` are other files: the rest changes at the next keystroke, so only these are worth caching.
    `is_cut`: text was dropped to fit."""

    ids: list[int]
    lasting: int = 0
    is_cut: bool = False


def find_fim_tokens(numbers: Mapping[str, int], stated: Mapping[str, str]) -> FimTokens | None:
    """The FIM tokens of a vocabulary (text -> id); None for a model without. `stated`: role -> text by the model's files."""
    said = [stated.get(role, "") for role in TOKEN_ROLES]
    names = next((each for each in KNOWN_FIM_NAMES if all(part in numbers for part in (each.prefix, each.suffix, each.middle) if part)),
                 None)
    if all(part in numbers for part in said[:3]):
        first = next((each.suffix_first for each in KNOWN_FIM_NAMES if each.prefix == said[0]), False)
        names = FimNames(*said[:3], first) if names is None or names.prefix != said[0] else names
    if names is None:
        return None
    suffix_first = names.suffix_first or all(part in numbers for part in OF_MELLUM)
    repository = next((each for each in (said[4], *REPOSITORIES) if each in numbers), None)
    file = next((each for each in (said[5], *FILES) if each in numbers), None)
    ends = (names.prefix, names.suffix, names.middle, said[3], repository, file, *END_TOKENS)
    return FimTokens(numbers[names.prefix], numbers[names.suffix], numbers[names.middle] if names.middle else None, suffix_first,
                 frozenset(numbers[each] for each in ends if each in numbers), numbers.get(repository), numbers.get(file), file != NAMELESS)


def infill_prompt(marks: FimTokens, gap: InfillContext, first: Encode, going_on: Encode, bos: int | None, room: int, answer: int,
                  may_cut: bool) -> InfillPrompt:
    """The prompt for a gap in a context of `room` tokens, of which `answer` are to be generated.

    `first` tokenizes a text at its beginning, `going_on` a continuation. What does not fit is dropped if `may_cut`: other files from the
    first on, then the start of the prefix and the end of the suffix. Raises ContextOverflow.
    """
    start = [] if bos is None else [bos]
    prefix, suffix = first(gap.prefix) if gap.prefix else [], going_on(gap.suffix)
    begun = (going_on if gap.prefix else first)(gap.begun)
    overhead = len(start) + (2 if marks.middle is None else 3) + len(begun)
    files, dropped = _files(marks, gap.files, going_on, room - min(room // 2, MIN_AROUND) - min(room // 8, ROOM_TO_WRITE), may_cut)
    around = room - overhead - len(files) - max(1, min(answer, room // 2))
    whole = overhead + len(files) + len(prefix) + len(suffix)
    if not may_cut and whole >= room:
        raise ContextOverflow(f"the prompt has {whole} tokens and the context holds {room}", "shorten it")
    if is_long := may_cut and len(prefix) + len(suffix) > around:
        if around < 0:
            raise ContextOverflow(f"the begun completion has {len(begun)} tokens and the context holds {room}", "shorten it")
        prefix, suffix = _near(prefix, suffix, around)
    before, behind = [marks.prefix, *prefix, *begun], [marks.suffix, *suffix]
    parts = behind + before if marks.suffix_first else before + behind
    return InfillPrompt([*start, *files, *parts, *([] if marks.middle is None else [marks.middle])], len(start) + len(files),
                        dropped or is_long)


def _near(prefix: list[int], suffix: list[int], room: int) -> tuple[list[int], list[int]]:
    """End of the prefix and start of the suffix that fit together."""
    behind = min(len(suffix), max(room // SHARE, room - len(prefix)))
    before = min(len(prefix), room - behind)
    if before < len(prefix):
        step = max(1, before // STEPS)
        before = max(0, len(prefix) - -(-(len(prefix) - before) // step) * step)
    return prefix[len(prefix) - before :], suffix[:behind]


def _files(marks: FimTokens, files: Sequence[tuple[str, str]], encode: Encode, room: int, may_cut: bool) -> tuple[list[int], bool]:
    """Other files and the header of the gap's file, in at most so many tokens if `may_cut`, and whether any were dropped. The budget does
    not depend on the gap, so that the same files fit the next request."""
    if not files:
        return [], False
    head = [] if marks.repository is None else [marks.repository, *encode(f"{PROJECT}\n" if marks.names_files else PROJECT)]
    tail = _named(marks, HERE, encode) if marks.file is not None else []
    kept, left = [], room - len(head) - len(tail)
    for name, text in reversed(files):
        begin = encode(SNIPPET) if marks.file is None else _named(marks, name, encode)
        ids = [*begin, *encode(text)]
        if may_cut and len(ids) > left:
            if not kept and left > len(begin):  # the newest is truncated to the remaining room
                kept.append([*begin, *ids[len(ids) - (left - len(begin)) :]])
            return [*head, *(token for each in reversed(kept) for token in each), *tail] if kept else [], True
        kept.append(ids)
        left -= len(ids)
    return [*head, *(token for each in reversed(kept) for token in each), *tail], False


def _named(marks: FimTokens, name: str, encode: Encode) -> list[int]:
    return [marks.file, *(encode(f"{name}\n") if marks.names_files else [])]
