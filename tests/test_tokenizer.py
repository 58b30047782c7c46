"""The tokenizer against transformers, and streaming against decoding at once."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_tokenizers import CONFIG, FABLE, byte_level, save, sentencepiece_like, special
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from effllm.runtime.tokenizer import Tokenizer

TEXTS = [
    "",
    "Once upon a time",
    " The fox 🦊 and the 王 said: “naïve café” 👩‍👩‍👧‍👦",
    "12345\n\n\tx",
    "<|user|>\nhi<|end|>",
    "e\u0301 ﬁ \u200b�",
    "a" * 500,
]


@pytest.fixture(scope="module")
def fable():
    return Tokenizer.load(FABLE, CONFIG)


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FABLE)


# ---- encode and decode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(text, fable, oracle):
    for with_special in (True, False):
        assert fable.encode(text, add_special_tokens=with_special) == oracle.encode(text, add_special_tokens=with_special)
    ids = fable.encode(text)
    for skip in (True, False):
        assert fable.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_a_chat_is_that_of_transformers(fable, oracle):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A story, 🦊!"}]
    assert fable.encode_chat(chat) == oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert fable.encode_chat(chat, add_generation_prompt=False) == oracle.apply_chat_template(chat, return_dict=False)


def test_vocabulary(fable, oracle):
    assert fable.vocab_size == len(oracle) == CONFIG.vocab_size


def test_a_lone_surrogate_is_not_an_accident(fable):
    assert fable.decode(fable.encode("a\ud83eb")) == "a?b"


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    backend = Backend.from_file(str(FABLE / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "a long text that goes on and on"
    assert Tokenizer.load(save(tmp_path, backend), CONFIG).encode(text) == Tokenizer.load(FABLE, CONFIG).encode(text)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_post_processor_decides_on_the_beginning_of_text(flag, adds_bos, tmp_path):
    from transformers import AutoTokenizer

    backend = sentencepiece_like()
    if not adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    settings_of_tokenizer = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if flag is None else {"add_bos_token": flag})
    ours, theirs = Tokenizer.load(save(tmp_path, backend, **settings_of_tokenizer), CONFIG), AutoTokenizer.from_pretrained(tmp_path)
    for with_special in (True, False):
        assert ours.encode("ab c", add_special_tokens=with_special) == theirs.encode("ab c", add_special_tokens=with_special)
    assert (ours.encode("ab c")[0] == 1) == adds_bos
    assert ours.encode("<s>ab").count(1) == 1, "typed and added: still one"


def test_without_a_post_processor_the_flag_decides(tmp_path):
    for flag in (True, False):
        tokenizer = Tokenizer.load(save(tmp_path, byte_level(special("<s>")), bos_token="<s>", add_bos_token=flag), CONFIG)
        assert (tokenizer.encode("ab")[0] == tokenizer.bos_id) == flag
        assert tokenizer.encode("<s>ab").count(tokenizer.bos_id) == 1 and tokenizer.bos_id not in tokenizer.encode(
            "ab", add_special_tokens=False
        )


def test_a_chat_gets_no_second_beginning_of_text(tmp_path):
    folder = save(
        tmp_path,
        sentencepiece_like(),
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    assert Tokenizer.load(folder, CONFIG).encode_chat([{"role": "user", "content": "ab"}]).count(1) == 1


# ---- streaming ----------------------------------------------------------------------------------------------------------


def stream(tokenizer, ids, context=()):
    text = tokenizer.stream(context)
    return [text.push(i) for i in ids], text.flush()


def test_an_emoji_appears_whole(fable):
    ids = fable.encode("fox 🦊!")
    pieces, rest = stream(fable, ids)
    assert len(fable.encode("🦊")) > 1, "the test needs a character of several tokens"
    assert "".join(pieces) == "fox 🦊!" and rest == "" and not any("\ufffd" in p for p in pieces) and "" in pieces


def test_an_unfinished_character_comes_out_at_the_end(fable):
    ids = fable.encode("x🦊")[:-1]
    pieces, rest = stream(fable, ids)
    assert "".join(pieces) == "x" and rest and set(rest) == {"\ufffd"} and "".join(pieces) + rest == fable.decode(ids)


@given(st.text(max_size=30))
def test_streamed_text_is_the_text(text):
    fable = Tokenizer.load(FABLE, CONFIG)
    ids = fable.encode(text, add_special_tokens=False)
    pieces, rest = stream(fable, ids)
    assert "".join(pieces) + rest == fable.decode(ids)


@given(st.lists(st.integers(0, CONFIG.vocab_size - 1), max_size=30))
def test_streaming_any_tokens_is_decoding_them(ids):
    fable = Tokenizer.load(FABLE, CONFIG)
    pieces, rest = stream(fable, ids)
    assert "".join(pieces) + rest == fable.decode(ids)


@pytest.fixture(scope="module")
def pieces_and_bytes(tmp_path_factory):
    return Tokenizer.load(save(tmp_path_factory.mktemp("spm"), sentencepiece_like(), bos_token="<s>", eos_token="</s>"), CONFIG)


TOKENS = st.one_of(st.integers(0, 270), st.sampled_from([3 + byte for byte in "\né🦊".encode()]))


@given(st.lists(TOKENS, max_size=12))
def test_bytes_that_make_no_character_spoil_nothing(pieces_and_bytes, ids):
    """The library reads a run of bytes as a whole and raises where one spoils what it has shown."""
    pieces, rest = stream(pieces_and_bytes, ids)
    assert "".join(pieces) + rest == pieces_and_bytes.decode(ids)


def test_a_byte_that_makes_no_character_is_one_sign(pieces_and_bytes):
    token = pieces_and_bytes.vocabulary().__getitem__
    ids = [token("▁a"), token("<0x0A>"), token("<0xE2>"), token("▁a"), *(token(f"<0x{byte:02X}>") for byte in "🦊".encode()), token("▁bc")]
    assert stream(pieces_and_bytes, ids) == (["a", "\n", "", "\ufffd a", "", "", "", "🦊", " bc"], "")


def resumed(tokenizer, ids, at):
    """What a reader has who saw `ids` up to `at` end, and then go on: text, and the pieces of the second part."""
    before = tokenizer.decode(ids[:at])
    stream, pieces = tokenizer.stream(ids[:at]), []
    for token in ids[at:]:
        pieces.append(stream.push(token))
        before, stream.retracted = before.removesuffix(stream.retracted), ""
    pieces.append(stream.flush())
    return before.removesuffix(stream.retracted) + "".join(pieces), pieces


@given(st.text("a 🦊é日\ufffd\n", max_size=8), st.data())
def test_an_answer_that_was_cut_in_a_character_continues(text, data):
    fable = Tokenizer.load(FABLE, CONFIG)
    ids = fable.encode(text, add_special_tokens=False)
    at = data.draw(st.integers(0, len(ids)))
    assert resumed(fable, ids, at)[0] == text


@given(st.lists(TOKENS, max_size=8), st.data())
def test_bytes_that_were_cut_continue(pieces_and_bytes, ids, data):
    at = data.draw(st.integers(0, len(ids)))
    whole, (first, *_) = pieces_and_bytes.decode(ids), resumed(pieces_and_bytes, ids, at)
    if pieces_and_bytes.decode(ids[:at]):  # behind nothing the first space is not there, as at any beginning
        assert first == whole


def test_a_context_that_ends_in_no_character_is_not_said_again(fable):
    for text in ("caf\ufffd and", "caf\ufffd🦊"):
        ids = fable.encode(text, add_special_tokens=False)
        at = len(fable.encode("caf\ufffd", add_special_tokens=False))
        assert fable.decode(ids[:at]) == "caf\ufffd"
        assert "".join(resumed(fable, ids, at)[1]) == text[4:]


def test_byte_fallback_and_leading_space(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, sentencepiece_like(), bos_token="<s>", eos_token="</s>"), CONFIG)
    ids = tokenizer.encode("ab 🦊 bc", add_special_tokens=False)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) == "ab 🦊 bc" and rest == "" and not any("\ufffd" in p for p in pieces)
    context, more = ids[:-1], ids[-1:]
    assert stream(tokenizer, more)[0] == ["bc"], "an answer begins without the space of its first piece"
    assert stream(tokenizer, more, context)[0] == [" bc"], "a continuation begins with it"


def test_special_tokens_are_silent(fable):
    ids = fable.encode("<|user|>hi<|end|>")
    assert "".join(stream(fable, ids)[0]) == "hi" and fable.decode(ids) == "hi"


def test_think_tags_are_heard_even_where_they_are_special(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(special("<think>"), special("</think>"), special("<|im_end|>"))), CONFIG)
    ids = tokenizer.encode("<think>é</think>ok<|im_end|>")
    assert tokenizer.thinks and tokenizer.decode(ids) == "<think>é</think>ok"
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == "<think>é</think>ok"
    broken, rest = stream(tokenizer, [ids[1], ids[-1], ids[0], *tokenizer.encode("x")])
    assert "".join(broken) + rest == "\ufffd<think>x", "a cut character stays before the tag that follows it"


def test_loading_stays_lean():
    program = (
        "import sys; from pathlib import Path; from effllm.runtime.tokenizer import Tokenizer; "
            "from effllm.runtime.config import read_config;"
        f"f = Path({str(FABLE)!r}); t = Tokenizer.load(f, read_config(f)); t.encode('x'); t.stop_ids;"
        "print([m for m in ('jinja2', 'transformers', 'huggingface_hub', 'torch', 'numba', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
