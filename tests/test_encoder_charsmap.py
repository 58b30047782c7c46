"""Unigram tokenizers with SentencePiece's own character map, as BGE M3's and those of multilingual E5 in GGUF files: the tokens of
SentencePiece and llama.cpp."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from encoder_gguf_files import write_encoder
from encoder_models import made_encoder, random_model
from test_encoders import opened
from tokenizers import models, processors

pytestmark = [pytest.mark.peer, pytest.mark.slow]
LINES = ["The fox is king of all beasts, and the sea was calm.",
         "\ufb01n \u00bd caf\u00e9 \uff21\uff22\uff23 \u6771\u4eac \u2122 \u2026 \u00e0",
         "who rules the forest? a boat came in the night", "\u4e2d\u6587 \u0434\u043e\u043c \u00fc\u00df 12 345"]
TEXTS = [*LINES, "  the  fox\n is 3\t ", "a\u00a0b\u200bc\ufeffd", "\x01y", "e\u0301 cafe\u0301", "   ", "\uff41\u3000\uff42",
         "\U0001f600 hi", "\u0130 \u01c5", "a " * 5]
MARKS = ("<s>", "<pad>", "</s>", "<unk>")


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the fields of a protobuf message that have a length; numbers are passed over."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, data[at : at + length]
            at += length
        elif key & 7 == 0:
            varint()
        else:
            at += 4 if key & 7 == 5 else 8


def test_a_text_is_cut_as_sentencepiece_cuts_it(tmp_path: Path) -> None:
    pieces_of, llama_cpp = pytest.importorskip("sentencepiece"), pytest.importorskip("llama_cpp")
    made = io.BytesIO()
    pieces_of.SentencePieceTrainer.train(sentence_iterator=iter(LINES * 30), model_writer=made, vocab_size=150, model_type="unigram",
                                         normalization_rule_name="nmt_nfkc", hard_vocab_limit=False, minloglevel=2)
    theirs = pieces_of.SentencePieceProcessor(model_proto=made.getvalue())
    normalizer = dict(fields(made.getvalue()))[3]
    charsmap = dict(fields(normalizer))[2]
    assert len(charsmap) > 100_000
    pieces = [*((mark, 0.0) for mark in MARKS),  # XLM-RoBERTa's order, in which the pieces stand one later
              *((theirs.id_to_piece(at), theirs.get_score(at)) for at in range(3, theirs.get_piece_size()))]

    def cut() -> tokenizers.Tokenizer:
        """What is not asked here: the file's is."""
        made = tokenizers.Tokenizer(models.Unigram(pieces, 3, False))
        made.add_special_tokens([*MARKS])
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
                                                            special_tokens=[("<s>", 0), ("</s>", 2)])
        return made

    model = random_model("XLMRoberta", pad_token_id=1, type_vocab_size=1, vocab_size=len(pieces))
    file = write_encoder(made_encoder(tmp_path / "m", model, cut=cut), tmp_path / "m.gguf", charsmap=charsmap)
    own = opened(file).tokenizer
    peer = llama_cpp.Llama(str(file), embedding=True, verbose=False, n_ctx=128, n_batch=128, n_threads=2)
    for text in TEXTS:
        expected = [3 if token == 0 else token + 1 for token in theirs.encode(text)]
        assert own.encode(text, False) == expected == peer.tokenize(text.encode(), add_bos=False, special=False), text
