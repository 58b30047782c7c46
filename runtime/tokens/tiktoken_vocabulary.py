"""Tokenizers published as ranked byte strings, converted for the `tokenizers` library: Mistral's tekken.json, Kimi's tiktoken.model and
Hunyuan's hy.tiktoken.

A byte string's rank is its id, and BPE merges the pair with the lowest resulting rank first; a word that is a token as a whole is not
split. tekken.json holds its pattern and its special tokens, whose ids come first. The others have a line "base64 rank" each; their pattern
is in Python code, which is not executed, so only known ones are supported. Their special tokens come after the ranks, named by
tokenizer_config.json or, for Hunyuan, by the code.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..files.bounded_read import TOKENIZER_NBYTES, read_bounded
from ..gguf.pre_tokenizers import KIMI, LLAMA3_WORDS, QWEN2_WORDS, SPLITTERS, same_pattern
from ..hub import RANKS
from ..templates.template import ChatTemplate
from .token_bytes import byte_to_unicode

TEKKEN, TIKTOKEN, HUNYUAN, _ = RANKS
MOST_PIECE = 1024  # bytes of a token, which is looked up cut at every place; the longest published one has 256
MOST_CUTS = 1 << 23
MOST_WORK = 1 << 30  # bytes that are looked at for it; published ones take a hundredth of it
# What tekken.json of the first versions leaves out.
FIRST_SPECIAL = ("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
                 "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]").split()
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PROGRAMS = {TIKTOKEN: ("tokenization_kimi", "tokenization_moonshot"), HUNYUAN: ("tokenization_hy",)}  # whose patterns are known
HUNYUAN_SPECIAL = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *(f"<|extra_{number}|>" for number in range(205))]
HUNYUAN_ROLES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
RESERVED = 256  # numbers behind Kimi's ranks that are special tokens, also those without a name
# How Mistral's models are asked. The system prompt stands in the last question up to version 3, later before all of them; those of version
# 11 and 13 that reason do so between tags, which their vocabulary does not tell from the others'.
ASKED_3 = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
ASKED_7 = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' -%}
[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
TEMPLATES = {"v3": ASKED_3, "v7": ASKED_7, "v11": ASKED_7 + "{# <think> </think> #}", "v13": ASKED_7 + "{# [THINK] [/THINK] #}"}


class VocabularyError(ValueError):
    """Why a vocabulary file is invalid; the text says where."""


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer and what its file states: `special` tokens by role, `template`: chat template of its version or None, `ends`: further ids
    that end a turn."""

    path: Path
    backend: Tokenizer
    special: dict[str, str]
    add_bos: bool = False
    template: ChatTemplate | None = None
    ends: tuple[int, ...] = ()


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a file of ranks; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    data = read_bounded(path, TOKENIZER_NBYTES)
    return _tekken(path, data) if path.name == TEKKEN else _tiktoken(path, data, settings)


def _tekken(path: Path, data: bytes) -> FileTokenizer:
    try:
        content = json.loads(data)
        config, entries = content["config"], content["vocab"]
        pattern, version, rows, count = (config[key] for key in ("pattern", "version", "default_vocab_size", "default_num_special_tokens"))
        named = [(entry["rank"], entry["token_str"]) for entry in content.get("special_tokens") or ()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VocabularyError(f"it is not a valid tekken.json: {type(error).__name__} {str(error)[:80]}") from None
    if not all(type(number) is int and 0 < number < 1 << 24 for number in (rows, count)) or not count < rows <= count + len(entries):
        raise VocabularyError(f"it names {rows!r} tokens, of which {count!r} are special, and has {len(entries)} ranks")
    if not isinstance(pattern, str) or not all(isinstance(name, str) and type(rank) is int for rank, name in named):
        raise VocabularyError("its pattern or one of its special tokens is not text")
    names = dict(named) or dict(enumerate(FIRST_SPECIAL))
    specials = [AddedToken(names.get(number, f"<SPECIAL_{number}>"), special=True, normalized=False) for number in range(count)]
    if any(not 0 <= rank < count for rank in names) or len({token.content for token in specials}) != count:
        raise VocabularyError("the ids of its special tokens are not consecutive")
    ranks = _numbered((entry.get("token_bytes"), entry.get("rank")) for entry in entries[: rows - count])
    made = _backend(ranks, count, pattern, specials, 0)
    special = {role: text for role, text in ROLES.items() if text in names.values()}
    asked = TEMPLATES.get(version) if "[INST]" in names.values() else None
    return FileTokenizer(path, made, special, True, None if asked is None else ChatTemplate(asked, special))


def _tiktoken(path: Path, data: bytes, settings: Mapping[str, Any]) -> FileTokenizer:
    if not any(program in json.dumps(settings.get("auto_map")) for program in PROGRAMS[path.name]):
        raise VocabularyError("its pre-tokenizer pattern is in Python code that tokenizer_config.json does not name as "
                              f"{' or '.join(PROGRAMS[path.name])}")
    lines = [line.split() for line in data.splitlines()]
    if any(len(line) != 2 or not line[1].isdigit() or len(line[1]) > 9 for line in lines):
        raise VocabularyError("one of its lines is not a token and a rank")
    if path.name == HUNYUAN:  # whose program numbers the lines itself, without those that are there twice
        ranks = _numbered((text, number) for number, text in enumerate(dict.fromkeys(text for text, _ in lines)))
        specials = [AddedToken(name, special=True, normalized=False) for name in HUNYUAN_SPECIAL]
        made = _backend(ranks, 0, QWEN2_WORDS, specials, len(ranks))
        made.normalizer = normalizers.NFC()
        return FileTokenizer(path, made, HUNYUAN_ROLES)
    ranks = _numbered((line[0], int(line[1])) for line in lines)
    stated = settings.get("added_tokens_decoder")
    named = {number: entry for number, entry in (stated if isinstance(stated, dict) else {}).items() if isinstance(entry, dict)}
    specials = []
    for number in range(len(ranks), len(ranks) + RESERVED):
        entry = named.get(str(number), {})
        name = entry.get("content")
        specials.append(AddedToken(name if isinstance(name, str) and name else f"<|reserved_token_{number}|>", normalized=False,
                                   special=entry.get("special") is not False))
    if len({token.content for token in specials}) != RESERVED:
        raise VocabularyError("tokenizer_config.json gives two special tokens the same name")
    return FileTokenizer(path, _backend(ranks, 0, KIMI.patterns[0], specials, len(ranks)), {})


def _numbered(entries: Iterable[tuple[object, object]]) -> dict[bytes, int]:
    """Byte string -> rank, from entries in order of rank."""
    ranks: dict[bytes, int] = {}
    work = 0
    for number, (text, rank) in enumerate(entries):
        try:
            token = binascii.a2b_base64(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise VocabularyError(f"its token {number} is not base64") from None
        if rank != number or not token or len(token) > MOST_PIECE or ranks.setdefault(token, number) != number:
            raise VocabularyError(f"its token {number} is empty, too long, out of order or a duplicate")
        work += len(token) ** 2
        if work > MOST_WORK:
            raise VocabularyError("its tokens exceed the size limits of a vocabulary")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise VocabularyError("it lacks tokens for some of the 256 bytes")
    return ranks


def _backend(ranks: Mapping[bytes, int], first: int, pattern: str, specials: list[AddedToken], first_special: int) -> Tokenizer:
    """A tokenizer with `ranks` numbered from `first` and `specials` from `first_special`."""
    spelt = _spelling()
    names = {token: spelt(token) for token in ranks}
    vocab = {names[token]: first + rank for token, rank in ranks.items()}
    for number, token in enumerate(specials, first_special):
        if vocab.setdefault(token.content, number) != number:
            raise VocabularyError(f"the special token {token.content[:40]!r} is also an ordinary token")
    merges = [(names[left], names[right]) for left, right in _cuts(ranks)]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))
    made.pre_tokenizer = _cutter(pattern)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(specials)
    return made


def _cuts(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every split of a token into two tokens, lowest rank first: the merges."""
    found = 0
    for token in ranks:
        cuts = [(ranks[left], ranks[right], left, right) for at in range(1, len(token))
                if (left := token[:at]) in ranks and (right := token[at:]) in ranks]
        found += len(cuts)
        if found > MOST_CUTS:
            raise VocabularyError(f"its tokens imply more than {MOST_CUTS:,} merges")
        for *_, left, right in sorted(cuts):
            yield left, right


def fix_mistral_pattern(backend: Tokenizer) -> bool:
    """Replace the pre-tokenizer pattern of a Mistral tokenizer.json that has Llama's by mistake, as early conversions of Mistral Small 3.1
    do; returns whether it did."""
    if backend.pre_tokenizer is None:
        return False
    raw = json.loads(backend.pre_tokenizer.__getstate__())
    steps = raw["pretokenizers"] if raw["type"] == "Sequence" else [raw]
    first = steps[0]["pattern"].get("Regex", "") if steps and steps[0]["type"] == "Split" else ""
    if same_pattern(first) != same_pattern(LLAMA3_WORDS):
        return False
    backend.pre_tokenizer = _cutter(SPLITTERS["tekken"].patterns[0])
    return True


def _cutter(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _spelling() -> Callable[[bytes], str]:
    """Bytes as byte-level vocabularies write them."""
    table = byte_to_unicode()
    return lambda token: token.decode("latin-1").translate(table)
