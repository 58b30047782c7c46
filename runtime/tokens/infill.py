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
REPOSITORY_TOKENS = ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<fim-repo>", "<REPO>", "<reponame>")
FILE_TOKENS = ("<|file_sep|>", "<file_sep>", "<filename>")
# A vocabulary that has StarCoder's names and these tokens is Mellum's, which puts the suffix first.
MELLUM_TOKENS = ("<fim_prefix>", "<filename>", "</assistant>")
# These end a completion too: the model starts another file, or pads.
END_TOKENS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|EOT|>", "<|file_separator|>", "<|endoftext|>")
UNNAMED_FILE_TOKEN = "<file_sep>"  # no file name follows it: StarCoder 2 was trained with half of its files unnamed
PROJECT, CURRENT_FILE = "myproject", "filename"  # llama.cpp's defaults
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, without a file token; as llama.cpp
SUFFIX_SHARE = 4  # the suffix may take 1 / SUFFIX_SHARE of the room
PREFIX_STEPS = 8  # a long prefix is cut in steps of 1 / PREFIX_STEPS of the room, so that most keystrokes keep the cached prefix
MIN_CONTEXT_TOKENS = 4096  # tokens reserved around the gap; other files may take the rest
COMPLETION_TOKENS = 512  # tokens that other files leave for the completion


@dataclass(frozen=True)
class FimTokens:
    """FIM tokens of one vocabulary, by id."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: frozenset[int]  # end a completion, in addition to the usual end tokens
    repository: int | None = None  # precedes the project name
    file: int | None = None  # precedes each file name
    names_files: bool = True


@dataclass(frozen=True)
class InfillContext:
    """A gap in a text."""

    prefix: str
    suffix: str
    middle: str = ""  # the beginning of the completion
    files: tuple[tuple[str, str], ...] = ()  # other files as (name, text)


@dataclass(frozen=True)
class InfillPrompt:
    """The token ids of a prompt."""

    ids: list[int]
    cacheable: int = 0  # the first so many are other files: the rest changes with the next keystroke, so only these are worth saving
    is_truncated: bool = False  # text was dropped to fit


def find_fim_tokens(vocabulary: Mapping[str, int], special_tokens: Mapping[str, str]) -> FimTokens | None:
    """The FIM tokens of a vocabulary (text -> id); None for a model without. `special_tokens`: role -> text by the model's files."""
    role_texts = [special_tokens.get(role, "") for role in TOKEN_ROLES]
    names = next((each for each in KNOWN_FIM_NAMES if all(part in vocabulary for part in (each.prefix, each.suffix, each.middle) if part)),
                 None)
    if all(part in vocabulary for part in role_texts[:3]):
        suffix_first_ = next((each.suffix_first for each in KNOWN_FIM_NAMES if each.prefix == role_texts[0]), False)
        names = FimNames(*role_texts[:3], suffix_first_) if names is None or names.prefix != role_texts[0] else names
    if names is None:
        return None
    suffix_first = names.suffix_first or all(part in vocabulary for part in MELLUM_TOKENS)
    repository = next((each for each in (role_texts[4], *REPOSITORY_TOKENS) if each in vocabulary), None)
    file = next((each for each in (role_texts[5], *FILE_TOKENS) if each in vocabulary), None)
    ends = (names.prefix, names.suffix, names.middle, role_texts[3], repository, file, *END_TOKENS)
    return FimTokens(vocabulary[names.prefix], vocabulary[names.suffix], vocabulary[names.middle] if names.middle else None, suffix_first,
                 frozenset(vocabulary[each] for each in ends if each in vocabulary), vocabulary.get(repository), vocabulary.get(file),
                     file != UNNAMED_FILE_TOKEN)


def infill_prompt(fim: FimTokens, gap: InfillContext, encode_start: Encode, encode_continuation: Encode, bos: int | None, n_ctx: int,
                  completion_tokens: int,
                  may_truncate: bool) -> InfillPrompt:
    """The prompt for a gap in a context of `n_ctx` tokens, of which `completion_tokens` are reserved for the answer.

    `encode_start` tokenizes a text at its beginning, `encode_continuation` one that continues another.
    `may_truncate`: what does not fit is dropped, other files from the first on, then the start of the prefix and the end of the suffix.
    Raises ContextOverflow.
    """
    start = [] if bos is None else [bos]
    prefix, suffix = encode_start(gap.prefix) if gap.prefix else [], encode_continuation(gap.suffix)
    middle = (encode_continuation if gap.prefix else encode_start)(gap.middle)
    frame_tokens = len(start) + (2 if fim.middle is None else 3) + len(middle)
    files, files_dropped = _files(fim, gap.files, encode_continuation,
                                  n_ctx - min(n_ctx // 2, MIN_CONTEXT_TOKENS) - min(n_ctx // 8, COMPLETION_TOKENS), may_truncate)
    budget = n_ctx - frame_tokens - len(files) - max(1, min(completion_tokens, n_ctx // 2))
    total = frame_tokens + len(files) + len(prefix) + len(suffix)
    if not may_truncate and total >= n_ctx:
        raise ContextOverflow(f"the prompt has {total} tokens and the context holds {n_ctx}", "shorten it")
    if is_truncated := may_truncate and len(prefix) + len(suffix) > budget:
        if budget < 0:
            raise ContextOverflow(f"the begun completion has {len(middle)} tokens and the context holds {n_ctx}", "shorten it")
        prefix, suffix = _truncate_around_gap(prefix, suffix, budget)
    prefix_part, suffix_part = [fim.prefix, *prefix, *middle], [fim.suffix, *suffix]
    parts = suffix_part + prefix_part if fim.suffix_first else prefix_part + suffix_part
    return InfillPrompt([*start, *files, *parts, *([] if fim.middle is None else [fim.middle])], len(start) + len(files),
                        files_dropped or is_truncated)


def _truncate_around_gap(prefix: list[int], suffix: list[int], budget: int) -> tuple[list[int], list[int]]:
    """End of the prefix and start of the suffix that fit together."""
    suffix_tokens = min(len(suffix), max(budget // SUFFIX_SHARE, budget - len(prefix)))
    prefix_tokens = min(len(prefix), budget - suffix_tokens)
    if prefix_tokens < len(prefix):
        step = max(1, prefix_tokens // PREFIX_STEPS)
        prefix_tokens = max(0, len(prefix) - -(-(len(prefix) - prefix_tokens) // step) * step)
    return prefix[len(prefix) - prefix_tokens :], suffix[:suffix_tokens]


def _files(fim: FimTokens, files: Sequence[tuple[str, str]], encode: Encode, budget: int, may_truncate: bool) -> tuple[list[int], bool]:
    """(other files and the header of the gap's file, whether any were dropped), in at most `budget` tokens if `may_truncate`.

    The budget does not depend on the gap, so that the same files fit the next request.
    """
    if not files:
        return [], False
    header = [] if fim.repository is None else [fim.repository, *encode(f"{PROJECT}\n" if fim.names_files else PROJECT)]
    current_header = _file_header(fim, CURRENT_FILE, encode) if fim.file is not None else []
    kept, tokens_left = [], budget - len(header) - len(current_header)
    for name, text in reversed(files):
        file_header = encode(SNIPPET) if fim.file is None else _file_header(fim, name, encode)
        ids = [*file_header, *encode(text)]
        if may_truncate and len(ids) > tokens_left:
            if not kept and tokens_left > len(file_header):  # the newest is truncated to the remaining room
                kept.append([*file_header, *ids[len(ids) - (tokens_left - len(file_header)) :]])
            return [*header, *(token for file_ids in reversed(kept) for token in file_ids), *current_header] if kept else [], True
        kept.append(ids)
        tokens_left -= len(ids)
    return [*header, *(token for file_ids in reversed(kept) for token in file_ids), *current_header], False


def _file_header(fim: FimTokens, name: str, encode: Encode) -> list[int]:
    return [fim.file, *(encode(f"{name}\n") if fim.names_files else [])]
