"""A prompt that shares a prefix with a saved session reuses its pages: found by name, with the bits of computing them."""

import json

import numpy as np
import pytest
from session_engines import opened, read, save, tokens

from effllm.kernels.layout import PAGE
from effllm.runtime.engine import Engine
from effllm.runtime.prefill_chunks import FEW
from effllm.runtime.sessions import session_prefix, session_store
from effllm.runtime.sessions.saved_cache import identity
from effllm.runtime.sessions.session_format import parse_saved
from effllm.runtime.sessions.session_prefix import restore_prefix
from effllm.runtime.sessions.session_store import DamagedSession, SessionStore

SINKS, CTX = 64, 1536


@pytest.fixture(scope="module", params=["16bit", pytest.param("32bit", marks=pytest.mark.slow)])
def unpacked(request):
    engine = opened(ctx=CTX, kv=request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def packed():
    engine = opened(ctx=CTX, kv="4bit")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def one():
    engine = opened(ctx=CTX)
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def answer(engine: Engine, ids: list[int]) -> None:
    for token in ids:
        engine.forward_logits([token])


def restored(engine: Engine, store: SessionStore, ids: list[int], before: list[int] | None = None) -> list[str]:
    """Read a prompt, in a process that has read only `before`, with what the sessions of a folder lend."""
    engine.reset()
    if before:
        read(engine, before)
    own = identity(engine)
    engine.extend_prefix = lambda prompt, held: restore_prefix(engine, store, own, prompt, held)
    try:
        return read(engine, ids)
    finally:
        engine.extend_prefix = lambda prompt, held: (held, [])


def logits(engine: Engine) -> list[np.ndarray]:
    """Of the token that comes next, of an answer, and of a prompt behind it."""
    found = [engine._logits.copy(), *(engine.forward_logits([token])[0].copy() for token in tokens(3, 7))]
    read(engine, [*engine.tokens, *tokens(60, 8)])
    return [*found, engine._logits.copy()]


def assert_same(some: list[np.ndarray], others: list[np.ndarray]) -> None:
    for got, want in zip(some, others, strict=True):
        np.testing.assert_array_equal(got, want)


# Tokens in common, tokens behind them -> pages that are lent. The grid of chunks has boundaries at 448 and 960.
PROMPTS = {"a question behind a document": (900, 60, 6), "few tokens behind a chunk's end": (448, 5, 3),
           "few tokens in the midst of a chunk": (SINKS + 5 * PAGE, 5, 4), "just as many as make a chunk": (SINKS + 5 * PAGE, FEW + 1, 5),
           "a page and no more": (SINKS + PAGE + 3, 20, 1), "all of it": (1000, 0, 6), "a chunk more": (700, 600, 4)}


@pytest.mark.parametrize(("common", "rest", "pages"), PROMPTS.values(), ids=PROMPTS)
def test_over_an_unpacked_cache_every_logit_has_the_bits_of_a_prompt_read_whole(unpacked, store, common, rest, pages):
    engine, prompt = unpacked, tokens(1000)[:common] + tokens(rest, 1)
    engine.reset()
    read(engine, tokens(1000))
    answer(engine, tokens(3, 2))
    save(engine, store, "one")
    lent = SINKS + PAGE * pages
    assert restored(engine, store, prompt) == [f"{lent} tokens of the prompt restored from session one"]
    assert (engine.num_cached_tokens, engine.num_prefilled_tokens, engine.tokens) == (lent, len(prompt) - lent, prompt)
    got = logits(engine)
    engine.reset()
    assert read(engine, prompt) == [] and engine.num_cached_tokens == 0
    assert_same(got, logits(engine))


def test_what_was_lent_to_an_unpacked_cache_is_cut_back_as_what_was_read(one, store):
    """A page in the window is exact, whoever made it: the last token asked again is read alone."""
    prompt = [*tokens(900)[:459], 7]
    one.reset()
    read(one, tokens(900))
    save(one, store, "one")
    found = []
    for lent in (True, False):
        one.reset()
        _ = restored(one, store, prompt) if lent else read(one, prompt)
        state = one.cache.sealed, one.cache.exact_blocks()
        answer(one, tokens(12, 2))
        read(one, [*one.tokens[:-1], 99])
        assert (one.num_cached_tokens, one.num_prefilled_tokens) == (471, 1)
        found.append((state, one._logits.copy()))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_over_packed_pages_it_is_as_if_the_process_had_read_the_other_prompt_before(packed, store):
    prompt = tokens(1000)[:900] + tokens(60, 1)
    packed.reset()
    read(packed, tokens(1000))
    save(packed, store, "one")
    (said,) = restored(packed, store, prompt)
    lent, sealed = packed.num_cached_tokens, packed.cache.sealed
    assert said.startswith(f"{lent} tokens ") and lent == SINKS + 5 * PAGE  # 900 and not the window of 128
    got = logits(packed)
    packed.reset()
    read(packed, tokens(1000))
    read(packed, prompt)
    assert (packed.num_cached_tokens, packed.cache.sealed) == (lent, sealed)
    assert_same(got, logits(packed))


def test_over_packed_pages_exact_tokens_that_a_process_still_has_are_not_lent(packed, store):
    """Of 690 tokens no more pages are packed than of the 623 in common: a process goes on there, what is lent at the last page's end."""
    prompt = tokens(690)[:623] + tokens(67, 1)
    packed.reset()
    read(packed, tokens(690))
    save(packed, store, "one")
    read(packed, prompt)
    assert (packed.num_cached_tokens, packed.cache.sealed) == (623, 3)
    assert restored(packed, store, prompt) and (packed.num_cached_tokens, packed.cache.sealed) == (SINKS + 3 * PAGE, 3)


def test_an_answer_is_not_lent_because_reading_it_gives_other_bits(one, store):
    said = tokens(420, 3)
    one.reset()
    read(one, tokens(500))
    answer(one, said)
    session = save(one, store, "one")
    prompt = [*tokens(500), *said, *tokens(30, 4)]
    assert session.cache.sealed == 5 and session.cache.num_fresh_tokens == 500
    assert restored(one, store, prompt) == [f"{SINKS + 3 * PAGE} tokens of the prompt restored from session one"]
    got = logits(one)
    one.reset()
    read(one, prompt)
    assert_same(got, logits(one))


def test_what_is_lent_is_lent_on(one, store):
    """Also what was read behind it, and the pages lie on the disk once."""
    first, second = tokens(500), tokens(500)[:400] + tokens(500, 1)
    one.reset()
    read(one, first)
    save(one, store, "one")
    before = store.nbytes()
    assert restored(one, store, second)
    assert one.num_fresh_tokens == 900
    cache = save(one, store, "two").cache
    assert cache.pages[:2] == store.read("one").cache.pages[:2]
    assert store.nbytes() - before == sum(store._sizes()[file.name] for file in (*cache.pages[2:], cache.tail))
    assert restored(one, store, [*second, *tokens(40, 9)]) == [f"{SINKS + 5 * PAGE} tokens of the prompt restored from session two"]
    assert restored(one, store, [*first, 11]) == [f"{SINKS + 2 * PAGE} tokens of the prompt restored from session two"]  # both have these


def test_a_process_takes_what_is_more_than_it_holds(one, store):
    one.reset()
    read(one, tokens(800))
    save(one, store, "one")
    assert restored(one, store, tokens(800), before=tokens(790)) == [] and one.num_cached_tokens == 800 - FEW - 1
    assert len(restored(one, store, tokens(800), before=tokens(300))) == 1 and one.num_cached_tokens == SINKS + 4 * PAGE
    assert restored(one, store, tokens(800, 5), before=tokens(300)) == [] and one.num_cached_tokens == 0


# ---- who lends nothing


@pytest.mark.parametrize("part", ["model", "weights", "kv", "basis", "sink", "window", "positions", "exact", "pages"])
def test_a_session_of_something_else_lends_nothing(one, store, part):
    """Though its file names the very pages."""
    one.reset()
    read(one, tokens(500))
    save(one, store, "one", identity={**identity(one), part: "other"})
    assert restored(one, store, tokens(600)) == [] and one.num_cached_tokens == 0


def test_other_bits_of_the_cache_find_nothing(one, packed, store):
    one.reset()
    read(one, tokens(500))
    save(one, store, "one")
    assert restored(packed, store, tokens(600)) == [] and packed.num_cached_tokens == 0
    assert len(restored(one, store, tokens(600))) == 1


@pytest.mark.parametrize("changes", [{"kernel_identity": "another machine"}, {"num_fresh_tokens": 0},
                                     {"num_fresh_tokens": SINKS + PAGE - 1}, {"tokens": tuple(tokens(500, 9))}, {"sinks": None}],
                         ids=lambda changes: next(iter(changes)))
def test_pages_that_this_run_would_not_make_are_not_lent(one, store, changes):
    one.reset()
    read(one, tokens(500))
    save(one, store, "one", **changes)
    assert restored(one, store, tokens(600)) == [] and one.num_cached_tokens == 0


def test_pages_without_a_session_are_not_lent(one, store):
    one.reset()
    read(one, tokens(500))
    save(one, store, "one")
    store.path("one").unlink()
    assert restored(one, store, tokens(600)) == [] and one.num_cached_tokens == 0


def test_a_file_of_before_says_nothing_of_reading_and_lends_nothing(one, store):
    one.reset()
    read(one, tokens(500))
    session = save(one, store, "one")
    content = json.loads(session.to_json())
    assert content["cache"].pop("read") == [500, session.cache.kernel_identity]
    store.path("one").write_text(_summed(content))
    assert (store.read("one").cache.num_fresh_tokens, store.read("one").cache.kernel_identity) == (0, "")
    assert restored(one, store, tokens(600)) == [] and one.num_cached_tokens == 0
    for lie in ([501, ""], [-1, ""], [True, ""], [1], [1, 2], 3):
        content["cache"]["read"] = lie
        store.path("one").write_text(_summed(content))
        with pytest.raises(DamagedSession, match="lacks the tokens read"):
            store.read("one")


def _summed(content: dict) -> str:
    from effllm.runtime.sessions.session_format import _checksum

    return json.dumps({**content, "checksum": _checksum({key: value for key, value in content.items() if key != "checksum"})})


# ---- damage


@pytest.mark.parametrize("how", ["altered", "cut short", "gone"])
@pytest.mark.parametrize(("which", "pages"), [(2, 2), pytest.param(0, 0, marks=pytest.mark.slow), (-1, 0)],
                         ids=["a page behind others", "the first page", "the sinks"])
def test_a_damaged_page_is_read_as_part_of_the_prompt_and_told_in_one_line(one, store, which, pages, how):
    prompt = tokens(600)[:520] + tokens(30, 1)
    one.reset()
    read(one, prompt)
    want = logits(one)
    one.reset()
    read(one, tokens(600))
    cache = save(one, store, "the first").cache
    damage(store, cache.sinks if which < 0 else cache.pages[which], how)
    if how == "gone" and which >= 0:  # its name is not there, so nobody asks for it
        said = restored(one, store, prompt)
        assert said == [f"{SINKS + PAGE * pages} tokens of the prompt restored from session the first"] * bool(pages)
    else:
        warning, *rest = restored(one, store, prompt)
        assert warning.startswith("session the first is damaged: the ") and warning.endswith("(effllm session rm 'the first' --cache)")
        assert rest == [f"{SINKS + PAGE * pages} tokens of the prompt restored from session the first"] * bool(pages)
    assert one.num_cached_tokens == (SINKS + PAGE * pages if pages else 0)
    assert_same(logits(one), want)
    one.reset()
    read(one, tokens(600))
    save(one, store, "two")  # the same bits again: that page is whole now, for both
    assert restored(one, store, prompt) == [f"{SINKS + 3 * PAGE} tokens of the prompt restored from session two"]


def damage(store: SessionStore, file, how: str) -> None:
    path = store.pages / file.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "altered" else data[:-10])
    store._verified.clear()  # as in a process of its own


def test_a_damaged_session_stands_in_nobodys_way(one, store):
    one.reset()
    read(one, tokens(500))
    save(one, store, "one")
    save(one, store, "two")
    path = store.path("two")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert restored(one, store, tokens(600)) == [f"{SINKS + 2 * PAGE} tokens of the prompt restored from session one"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_stopped_while_it_is_restored_an_engine_holds_nothing(one, store, monkeypatch, raised):
    one.reset()
    read(one, tokens(600))
    want = one._logits.copy()
    save(one, store, "one")

    def stopped(*_):
        raise raised

    monkeypatch.setattr(session_prefix, "put_page", stopped)
    with pytest.raises(raised):
        restored(one, store, [*tokens(600), 11])
    assert (one.tokens, one.num_fresh_tokens, one.cache.n, one.cache.sealed) == ([], 0, 0, 0)
    read(one, tokens(600))
    np.testing.assert_array_equal(one._logits, want)


def test_a_folder_that_cannot_be_opened_lends_nothing(one, store, monkeypatch):
    one.reset()
    read(one, tokens(500))
    save(one, store, "one")

    def closed(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SessionStore, "reading", closed)
    assert restored(one, store, tokens(600), before=tokens(400)) == [] and one.num_cached_tokens == 400


# ---- what looking costs


def test_no_file_is_opened_for_a_prompt_that_nobody_began(one, store, monkeypatch):
    """And of many sessions only those are parsed that may lend."""
    one.reset()
    read(one, tokens(500))
    save(one, store, "one")
    for seed in range(1, 4):
        one.reset()
        read(one, tokens(400, seed))
        save(one, store, f"other{seed}")
    parsed, opened_files = [], []
    monkeypatch.setattr(session_store, "parse_saved", lambda data, name: parsed.append(name) or parse_saved(data, name))
    real = SessionStore.read
    monkeypatch.setattr(SessionStore, "read", lambda self, name, mentions="": opened_files.append(name) or real(self, name, mentions))
    assert restored(one, store, tokens(600, 50)) == [] and (parsed, opened_files) == ([], [])
    assert restored(one, store, tokens(100)) == [] and opened_files == []
    assert len(restored(one, store, tokens(600))) == 1 and parsed == ["one"]


# ---- what an engine knows of its own tokens


def test_an_engine_knows_what_it_holds_as_reading_leaves_it(one):
    one.reset()
    assert one.num_fresh_tokens == 0
    read(one, tokens(300))
    assert one.num_fresh_tokens == 300
    answer(one, [11, 12])
    assert one.num_fresh_tokens == 300
    read(one, [*tokens(300), 11, 12, *tokens(100, 1)])
    assert one.num_fresh_tokens == 300  # what was answered lies between
    read(one, [*tokens(200), *tokens(100, 2)])
    assert one.num_fresh_tokens == 300
    read(one, [*tokens(200), *tokens(100, 2), *tokens(FEW, 3)])
    assert one.num_fresh_tokens == 300 + FEW and one.num_prefilled_tokens == FEW + 1  # few tokens alone would go to another kernel
    read(one, tokens(448 + FEW))
    assert one.num_fresh_tokens == 448
    for _ in one.score(tokens(400), num_cached=200):
        continue
    assert one.num_fresh_tokens <= 200
    one.reset()
    assert one.num_fresh_tokens == 0


def test_of_packed_pages_only_whole_chunks_are_as_reading_leaves_them(packed):
    packed.reset()
    read(packed, tokens(1000))
    assert packed.num_fresh_tokens == 1000
    read(packed, [*tokens(1000)[:700], *tokens(300, 1)])  # sees packed what it would have seen exact
    assert packed.num_fresh_tokens == packed.num_cached_tokens < 700
    packed.reset()
    read(packed, tokens(700))
    read(packed, [*tokens(700), *tokens(200, 1)])  # goes on in the midst of a chunk
    assert packed.num_fresh_tokens == 700
