"""RWKV's World vocabulary, for the `tokenizers` library: byte strings, of which the longest match is taken greedily, from a folder's
rwkv_vocab_v20230424.txt or a GGUF file.

The library has no such model, but a regular expression built from the trie of all byte strings splits a text the same way, into words of a
word-level vocabulary. A line of the file is an id, a Python literal of text or bytes, and its length in bytes; id 0 is the end of a text
and has no line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..files.bounded_read import TOKENIZER_NBYTES, read_bounded
from .tiktoken_vocabulary import FileTokenizer, VocabularyError
from .token_bytes import byte_to_unicode

END = "<|rwkv_tokenizer_end_of_text|>"  # what published folders call number 0
LINE = re.compile(r"""(\d{1,7}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) (\d{1,4})""")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)  # in tokens of a GGUF file
NAMED = {"t": "\t", "n": "\n", "r": "\r"}
MOST_PIECE = 256  # bytes of a token; the longest published one has 128
MOST_BYTES = 1 << 22  # of all tokens, for each of which the tree may grow; a published vocabulary has a tenth of it
MOST_NUMBER = 1 << 22
SYNTAX = frozenset("\\.^$*+?{}[]|()-&~#")  # what is escaped, within brackets or without; to some engines other escapes mean something
DEEPEST = 8  # groups of the expression in one another
# How models are asked whose GGUF file names this format, as llama.cpp does it.
FORMAT, ASKED = "rwkv-world", """{%- for message in messages -%}
{%- if message.role == 'system' %}{{ 'System: ' + message.content | trim + '\\n\\n' }}
{%- elif message.role == 'user' %}{{ 'User: ' + message.content | trim + '\\n\\n' }}{% if loop.last %}{{ 'Assistant:' }}{% endif %}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content | trim + '\\n\\n' }}{% endif %}
{%- endfor -%}"""


def read_rwkv(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a folder's file; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    tokens: dict[bytes, int] = {}
    numbers: set[int] = set()
    for place, line in enumerate(read_bounded(path, TOKENIZER_NBYTES).decode("utf-8", "replace").split("\n"), 1):
        if not line.rstrip("\r"):
            continue
        number, token = _read(line.rstrip("\r"), place)
        if number in numbers or tokens.setdefault(token, number) != number:
            raise VocabularyError(f"its line {place} repeats an id or a text")
        numbers.add(number)
    stated = settings.get("added_tokens_decoder")
    named = {int(number): entry.get("content") for number, entry in (stated if isinstance(stated, dict) else {}).items()
             if isinstance(entry, dict) and str(number).isdecimal() and len(str(number)) < 8}
    special = {number: text for number, text in {0: END, **named}.items() if isinstance(text, str) and text and number not in numbers}
    made = rwkv_tokenizer(tokens, special)
    roles = {"bos_token": special[0], "eos_token": special[0]} if 0 in special else {}
    end = settings.get("eos_token")
    ends = tokens.get(end.encode()) if isinstance(end, str) else None  # a text, as two ends of a line, that ends a turn
    return FileTokenizer(path, made, roles, ends=() if ends is None else (ends,))


def _read(line: str, place: int) -> tuple[int, bytes]:
    """Id and bytes of a line. Raises VocabularyError."""
    found, token = LINE.fullmatch(line) if len(line) <= 8 * MOST_PIECE else None, None
    if found:
        said = found[2]
        try:
            text = said[1:-1] if "\\" not in said and said[0] != "b" else ast.literal_eval(said)  # which takes its time
            token = text.encode() if isinstance(text, str) else text
        except (ValueError, SyntaxError):
            token = None
    if not token or len(token) != int(found[3]):
        raise VocabularyError(f"its line {place} is not an id, a text and its length in bytes")
    return int(found[1]), token


def gguf_tokens(texts: Sequence[str], words: Iterable[int]) -> dict[bytes, int]:
    """Byte strings and their ids, from tokens as a GGUF file writes them; the first of equal ones."""
    tokens: dict[bytes, int] = {}
    for number in words:
        tokens.setdefault(unescape_bytes(texts[number]), number)
    tokens.pop(b"", None)
    return tokens


def unescape_bytes(text: str) -> bytes:
    """Bytes of a GGUF token, in which non-printing bytes are Python escapes."""
    made = bytearray()
    at = 0
    for found in ESCAPE.finditer(text):
        made += text[at : found.start()].encode("utf-8", "replace")
        own = found[1]
        made += bytes([int(own[1:], 16)]) if len(own) == 3 else NAMED.get(own, own).encode("utf-8", "replace")
        at = found.end()
    return bytes(made + text[at:].encode("utf-8", "replace"))


def rwkv_tokenizer(tokens: Mapping[bytes, int], special: Mapping[int, str]) -> Tokenizer:
    """The library's tokenizer for byte strings and `special` tokens by id. Raises VocabularyError."""
    if any(bytes([byte]) not in tokens for byte in range(256)):
        raise VocabularyError("it lacks tokens for some of the 256 bytes")
    if max(map(len, tokens)) > MOST_PIECE or sum(map(len, tokens)) > MOST_BYTES or max((*tokens.values(), *special)) > MOST_NUMBER:
        raise VocabularyError("its tokens exceed the size limits of a vocabulary")
    table = byte_to_unicode()
    vocab = {token.decode("latin-1").translate(table): number for token, number in tokens.items()}
    tree: dict = {}
    for word in vocab:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    taken = {*vocab.values()}
    for number, text in special.items():
        if number in taken or vocab.setdefault(text, number) != number:
            raise VocabularyError(f"the special token {text[:40]!r} is a duplicate")
    made = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                                                  pre_tokenizers.Split(Regex(_pattern(tree)), "isolated")])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    return made


def _pattern(node: Mapping[str, dict], depth: int = 0) -> str:
    """Regular expression of the words below a trie node that matches the longest: continuations before ends. Below a nesting limit, as in
    runs of spaces, words are alternatives, longest first."""
    if depth == DEEPEST:
        ways = sorted(_words(node), key=len, reverse=True)
        return f"(?:{'|'.join(''.join(map(_escaped, word)) for word in ways if word)})" + "?" * ("" in node)
    ends = [letter for letter, below in node.items() if letter and below.keys() == {""}]
    ways = []
    for letter, below in node.items():
        if letter and below.keys() != {""}:
            alone = len(below) == 1  # one way on, without a group
            ways.append(_escaped(letter) + _pattern(below, depth + (not alone)))
    if ends:
        ways.append(f"[{''.join(map(_escaped, ends))}]")
    joined = "|".join(ways)
    return f"(?:{joined})?" if "" in node else f"(?:{joined})" if len(ways) > 1 else joined


def _words(node: Mapping[str, dict]) -> Iterator[str]:
    for letter, below in node.items():
        if letter:
            yield from (letter + word for word in _words(below))
        else:
            yield ""


def _escaped(letter: str) -> str:
    return "\\" + letter if letter in SYNTAX else letter
