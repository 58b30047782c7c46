"""The tokenizer against transformers, streaming against whole decoding, and the places that say where a turn ends."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from effllm import EffllmError, ModelNotFound
from effllm.runtime.config import read_config
from effllm.runtime.templates.template import TemplateError
from effllm.runtime.text import Tokenizer, TokenizerError

FABLE = Path(__file__).parents[1] / "models" / "fable"
CONFIG = read_config(FABLE)
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


def save(folder: Path, backend: Backend, **settings_of_tokenizer) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings_of_tokenizer}))
    return folder


def copy_of_fable(folder: Path, **changes) -> Path:
    """A model folder like fable's; `changes` edit its JSON files: file stem -> keys."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FABLE / name, folder / name)
    for stem, keys in changes.items():
        path = folder / f"{stem}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def sentencepiece_like() -> Backend:
    """Pieces with ▁ for spaces, single bytes as fallback, <s> in front: how llama 2 and mistral are written."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "▁a", "▁ab", "ab", "bc", "▁bc"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("b", "c"), ("▁", "bc")]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return backend


def byte_level(*added: AddedToken) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    return backend


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


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


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_streamed_text_is_the_text(text):
    fable = Tokenizer.load(FABLE, CONFIG)
    ids = fable.encode(text, add_special_tokens=False)
    pieces, rest = stream(fable, ids)
    assert "".join(pieces) + rest == fable.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, CONFIG.vocab_size - 1), max_size=30))
def test_streaming_any_tokens_is_decoding_them(ids):
    fable = Tokenizer.load(FABLE, CONFIG)
    pieces, rest = stream(fable, ids)
    assert "".join(pieces) + rest == fable.decode(ids)


@pytest.fixture(scope="module")
def pieces_and_bytes(tmp_path_factory):
    return Tokenizer.load(save(tmp_path_factory.mktemp("spm"), sentencepiece_like(), bos_token="<s>", eos_token="</s>"), CONFIG)


TOKENS = st.one_of(st.integers(0, 270), st.sampled_from([3 + byte for byte in "\né🦊".encode()]))


@settings(max_examples=120, deadline=None)
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
        before, stream.taken_back = before.removesuffix(stream.taken_back), ""
    pieces.append(stream.flush())
    return before.removesuffix(stream.taken_back) + "".join(pieces), pieces


@settings(max_examples=80, deadline=None)
@given(st.text("a 🦊é日\ufffd\n", max_size=8), st.data())
def test_an_answer_that_was_cut_in_a_character_goes_on(text, data):
    fable = Tokenizer.load(FABLE, CONFIG)
    ids = fable.encode(text, add_special_tokens=False)
    at = data.draw(st.integers(0, len(ids)))
    assert resumed(fable, ids, at)[0] == text


@settings(max_examples=80, deadline=None)
@given(st.lists(TOKENS, max_size=8), st.data())
def test_bytes_that_were_cut_go_on(pieces_and_bytes, ids, data):
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


# ---- reasoning ----------------------------------------------------------------------------------------------------------


def test_thinking_is_known_from_the_template_or_the_vocabulary(fable, tmp_path):
    assert not fable.thinks
    assert Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": "{{ '<think>' }}"}), CONFIG).thinks


def test_a_prompt_that_opens_the_reasoning(tmp_path):
    template = "{{ messages[0].content }}<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": template}), CONFIG)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.opens_thinking(tokenizer.encode_chat(chat)) and not tokenizer.opens_thinking(
        tokenizer.encode_chat(chat, enable_thinking=False)
    )


# ---- where a turn ends --------------------------------------------------------------------------------------------------


def test_stop_ids_of_fable(fable):
    assert fable.stop_ids == {0, 4}


@pytest.mark.parametrize("eos", [7, [7, 8], [7, 8, True, None, "x", -1]])
def test_stop_ids_from_generation_config(eos, tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, generation_config={"eos_token_id": eos}), replace(CONFIG, eos_token_ids=(9,)))
    assert tokenizer.stop_ids == {0, 4, 9, 7} | ({8} if isinstance(eos, list) else set())


def test_stop_ids_from_the_vocabulary_and_the_tokenizer_config(tmp_path):
    backend = byte_level(special("<s>"), special("<|stop-here|>"), special("<|eot_id|>"), special("<|im_end|>"), special("<|other|>"))
    tokenizer = Tokenizer.load(save(tmp_path, backend, eos_token={"content": "<|stop-here|>"}), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id(t) for t in ("<|stop-here|>", "<|eot_id|>", "<|im_end|>")}


@pytest.mark.parametrize("eos", [None, "<|stop-here|>"])
def test_a_tag_of_html_that_is_no_special_token_ends_a_turn_only_where_nothing_else_does(eos, tmp_path):
    backend = byte_level(special("<|stop-here|>"), AddedToken("</s>", special=False, normalized=False))
    tokenizer = Tokenizer.load(save(tmp_path, backend, **({} if eos is None else {"eos_token": eos})), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id(eos or "</s>")}


def test_end_closes_only_a_channel_where_there_are_channels(tmp_path):
    names = ["<|channel|>", "<|return|>", "<|call|>", "<|end|>"]
    backend = byte_level(*map(special, names))
    tokenizer = Tokenizer.load(save(tmp_path, backend), replace(CONFIG, eos_token_ids=()))
    assert tokenizer.stop_ids == {backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")}


# ---- templates and files ------------------------------------------------------------------------------------------------


def test_a_base_model_has_no_template_and_says_so(tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path, tokenizer_config={"chat_template": None}), CONFIG)
    assert tokenizer.template is None
    with pytest.raises(TemplateError, match="base model") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "--raw" in caught.value.hint


def test_special_tokens_from_the_older_file(tmp_path):
    copy_of_fable(
        tmp_path, tokenizer_config={"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ sep_token is defined }}", "bos_token": None}
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|system|>"}, "eos_token": "<|user|>"}))
    assert Tokenizer.load(tmp_path, CONFIG).render_chat([]) == "<|system|>|<|end|>|False"


def test_missing_tokenizer_names_the_file_and_the_next_step(tmp_path):
    with pytest.raises(ModelNotFound, match="tokenizer.json") as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert caught.value.exit_code == 3 and "copy tokenizer.json" in caught.value.hint
    (tmp_path / "vocab.json").write_bytes(b"x")
    with pytest.raises(ModelNotFound) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}}}', b"\xff\xfe", b"{" * 9000]
)
def test_a_broken_tokenizer_is_one_line(content, tmp_path):
    copy_of_fable(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(EffllmError) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert "tokenizer.json" in caught.value.message and "\n" not in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_companion_file_is_one_line(name, content, tmp_path):
    copy_of_fable(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    assert name in caught.value.message and "\n" not in caught.value.message


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    tokenizer = Tokenizer.load(copy_of_fable(tmp_path), replace(CONFIG, vocab_size=100))
    with pytest.raises(TokenizerError, match="100 embedding rows"):
        tokenizer.encode("Once upon a time there was a king")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_tokenizer(tmp_path):
    (copy_of_fable(tmp_path) / "tokenizer.json").chmod(0)
    with pytest.raises(ModelNotFound, match="cannot read"):
        Tokenizer.load(tmp_path, CONFIG)


def test_loading_stays_lean():
    program = (
        "import sys; from pathlib import Path; from effllm.runtime.text import Tokenizer; from effllm.runtime.config import read_config;"
        f"f = Path({str(FABLE)!r}); t = Tokenizer.load(f, read_config(f)); t.encode('x'); t.stop_ids;"
        "print([m for m in ('jinja2', 'transformers', 'huggingface_hub', 'torch', 'numba', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
