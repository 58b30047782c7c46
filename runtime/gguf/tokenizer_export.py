"""Exports a model folder's tokenizer as GGUF metadata, and verifies it by reading it back.

GGUF names the pre-tokenizer of a byte-level vocabulary instead of stating its pattern, so the folder's patterns are looked up among the
known ones; an unknown pattern is refused. A SentencePiece vocabulary becomes scores: the rank of the merge that makes a token. RWKV's
becomes byte strings, matched longest first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ...offload.gguf_header import GgufHeader, Value
from ..tokenizer import Tokenizer as ModelTokenizer
from ..tokenizer import TokenizerError
from ..tokens.token_bytes import byte_to_unicode
from .pre_tokenizers import SPLITTERS, WORDS, same_pattern
from .tokenizer import BYTE, CONTROL, NORMAL, ROLES, UNKNOWN, UNUSED, USER, WORLD, backend, read_vocabulary

FOLDER_HINT = "use the model folder, which transformers and effllm read"
SAMPLES = ("Hello World's 12345 words,  two spaces\n\n\tand (tabs)!",
           "naïve Äpfel 中文かな 한국어 … 🙂", " leading", "x=y+1; // C++\r\n", "ab")


def tokenizer_metadata(path: Path, tokenizer: ModelTokenizer, rows: int) -> dict[str, Value]:
    """The `tokenizer.*` keys of the tokenizer in folder `path`, with `rows` tokens. Raises TokenizerError for what GGUF cannot express."""
    text = tokenizer.to_json()
    raw, hf_tokenizer = json.loads(text), Tokenizer.from_str(text)
    if _is_world(raw):
        return _world(raw, hf_tokenizer, tokenizer, rows, path)
    if raw["model"].get("type") != "BPE":
        raise TokenizerError(f"{path} has a tokenizer of kind {raw['model'].get('type')}, GGUF export supports BPE merges", FOLDER_HINT)
    tokens, kinds = _tokens(raw, hf_tokenizer, rows, path)
    sentence_piece = bool(raw["model"].get("byte_fallback"))
    out: dict[str, Value] = {"tokenizer.ggml.model": "llama" if sentence_piece else "gpt2",
                             "tokenizer.ggml.pre": "default" if sentence_piece else _pre_tokenizer_name(raw, path)}
    out |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if sentence_piece:
        out |= {"tokenizer.ggml.scores": _scores(raw, tokens), "tokenizer.ggml.add_space_prefix": _adds_space_prefix(raw)}
    else:
        out["tokenizer.ggml.merges"] = [" ".join(_pair(merge)) for merge in raw["model"]["merges"]]
    out |= _special(tokenizer, hf_tokenizer, len(tokens))
    if tokenizer.template is not None:
        out["tokenizer.chat_template"] = tokenizer.template.source
    _check_round_trip(out, hf_tokenizer, path)
    return out


def _is_world(raw: Mapping) -> bool:
    """Whether it is RWKV's tokenizer: byte strings, matched longest first (`tokens/rwkv_vocabulary.py`)."""
    steps = (raw.get("pre_tokenizer") or {}).get("pretokenizers", ())
    return raw["model"].get("type") == "WordLevel" and [step["type"] for step in steps] == ["ByteLevel", "Split"]


def _world(raw: Mapping, hf_tokenizer: Tokenizer, tokenizer: ModelTokenizer, rows: int, path: Path) -> dict[str, Value]:
    """The same of RWKV's vocabulary: bytes that do not print as Python writes them."""
    tokens, kinds = _tokens(raw, hf_tokenizer, rows, path)
    kinds[kinds == UNKNOWN] = NORMAL  # no text is unknown, as all bytes are tokens
    letters = {letter: byte for byte, letter in byte_to_unicode().items()}
    texts = [token if kind in (CONTROL, UNUSED) else repr(token.translate(letters).encode("latin-1"))[2:-1]
             for token, kind in zip(tokens, kinds, strict=True)]
    out: dict[str, Value] = {"tokenizer.ggml.model": WORLD, "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    out |= _special(tokenizer, hf_tokenizer, len(tokens))
    if tokenizer.template is not None:
        out["tokenizer.chat_template"] = tokenizer.template.source
    _check_round_trip(out, hf_tokenizer, path)
    return out


def _tokens(raw: Mapping, hf_tokenizer: Tokenizer, rows: int, path: Path) -> tuple[list[str], np.ndarray]:
    """Text and kind of every id; model rows beyond the vocabulary get placeholder names."""
    if hf_tokenizer.get_vocab_size() > rows:
        raise TokenizerError(f"{path} has {hf_tokenizer.get_vocab_size()} tokens for {rows} rows of the model", "the two do not match")
    added = {each["id"]: CONTROL if each.get("special") else USER for each in raw.get("added_tokens") or ()}
    unknown = raw["model"].get("unk_token")
    tokens, kinds = [], np.full(rows, NORMAL, np.int32)
    for number in range(rows):
        token = hf_tokenizer.id_to_token(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        kinds[number] = UNUSED if token is None else UNKNOWN if token == unknown else added.get(number, NORMAL)
        if raw["model"].get("byte_fallback") and len(tokens[-1]) == 6 and tokens[-1].startswith("<0x"):
            kinds[number] = BYTE
    return tokens, kinds


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _scores(raw: Mapping, tokens: list[str]) -> np.ndarray:
    """Scores: minus the rank of the first merge that produces a token; tokens that no merge produces come last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(raw["model"]["merges"]):
        ranks.setdefault("".join(_pair(merge)), rank)
    return np.array([-float(ranks.get(token, len(ranks))) for token in tokens], np.float32)


def _adds_space_prefix(raw: Mapping) -> bool:
    """Whether texts get a space prepended."""
    text = json.dumps([raw.get("normalizer"), raw.get("pre_tokenizer")], ensure_ascii=False)
    return '"Prepend"' in text or ('"Metaspace"' in text and '"prepend_scheme": "never"' not in text)


def _pre_tokenizer_name(raw: Mapping, path: Path) -> str:
    """The name that GGUF files use for the pre-tokenizer. Raises TokenizerError if there is none."""
    patterns = tuple(same_pattern(pattern) for pattern in _patterns(raw.get("pre_tokenizer"), path))
    ignore_merges = bool(raw["model"].get("ignore_merges"))
    known = {name: splitter for name, splitter in SPLITTERS.items() if tuple(map(same_pattern, splitter.patterns)) == patterns}
    # In a vocabulary of ranks, merges lead to every piece that is a token, so ignoring them changes nothing; samples of text are compared.
    names = [name for name, splitter in known.items() if splitter.ignore_merges == ignore_merges] or list(known) * ignore_merges
    if not names:
        raise _unnamed_pre_tokenizer(path)
    return names[0]


def _unnamed_pre_tokenizer(path: Path) -> TokenizerError:
    return TokenizerError(f"{path} has a pre-tokenizer that GGUF has no name for", FOLDER_HINT)


def _patterns(step: Mapping | None, path: Path) -> Iterator[str]:
    kind = None if step is None else step["type"]
    if kind == "Sequence":
        for each in step["pretokenizers"]:
            yield from _patterns(each, path)
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        if step.get("use_regex", True):
            yield WORDS
    elif kind == "Digits":
        yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    elif kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert") and "Regex" in step["pattern"]:
        yield step["pattern"]["Regex"]
    else:
        raise _unnamed_pre_tokenizer(path)


def _special(tokenizer: ModelTokenizer, hf_tokenizer: Tokenizer, count: int) -> dict[str, Value]:
    """Ids of roles, and whether texts begin with the begin token."""
    out: dict[str, Value] = {}
    for role, (name, *_) in ROLES.items():
        number = hf_tokenizer.token_to_id(tokenizer.special_tokens.get(role, ""))
        if number is not None and number < count:
            out[f"tokenizer.ggml.{name}_token_id"] = number
    if tokenizer.bos_id is not None and 0 <= tokenizer.bos_id < count:
        out["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    ends = [number for number in sorted(tokenizer.stop_ids) if number < count]
    if ends:
        eos = out.setdefault("tokenizer.ggml.eos_token_id", ends[0])
        if turn := [number for number in ends if number not in (eos, out.get("tokenizer.ggml.bos_token_id"))]:
            out["tokenizer.ggml.eot_token_id"] = turn[0]
    first = tokenizer.encode("ab")[:1]
    out["tokenizer.ggml.add_bos_token"] = tokenizer.bos_id is not None and first == [tokenizer.bos_id]
    return out


def _check_round_trip(metadata: Mapping[str, Value], hf_tokenizer: Tokenizer, path: Path) -> None:
    """Read the metadata back; raises TokenizerError if it splits the samples differently from the folder's tokenizer."""
    read_back = backend(read_vocabulary(GgufHeader(path, metadata, {})))
    for text in SAMPLES:
        if read_back.encode(text, add_special_tokens=False).ids != hf_tokenizer.encode(text, add_special_tokens=False).ids:
            raise TokenizerError(f"{path} has a tokenizer that would split text differently in a GGUF file ({text!r})", FOLDER_HINT)


