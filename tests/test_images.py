"""Images in a prompt: their rows are where transformers puts them, and prefix comparison tells different images apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_models import assert_close
from vision_language_models import CASE, IMAGE, IMAGE_ID, TorchSight, picture, written_with_words

from effllm import ContextOverflow, EffllmError, UsageError
from effllm.runtime.engine import open_engine
from effllm.runtime.events import Notice, Progress, TextDelta
from effllm.runtime.images import ROW_PLACEHOLDER, EncodedMedia
from effllm.runtime.images import media as albums
from effllm.runtime.images.media import FIRST_MEDIA_ID, MediaCache
from effllm.runtime.images.media_markers import MediaGone, media_marker
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.sessions.saved_sessions import SavedSessions
from effllm.runtime.sessions.session_store import SessionStore
from effllm.runtime.speculation.drafts import SuffixMatch
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

GREEDY = SamplerSettings(temperature=0)
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)
ASKED = "What do you see in this one?"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    return folder, written_with_words(CASE, folder)


@pytest.fixture(scope="module")
def opened(made):
    engine = list(open_engine(made[0], OPTIONS))[-1]
    yield engine
    engine.close()


@pytest.fixture
def engine(made, opened):
    opened.reset()
    opened.media = MediaCache({IMAGE_INPUT: TorchSight(made[1])})
    return opened


@pytest.fixture
def tokenizer(made, engine):
    return Tokenizer.load(made[0], engine.config)


@pytest.fixture
def session(engine, tokenizer):
    return Session(engine, tokenizer, GREEDY, max_tokens=12, ignore_eos=True)


def said(events) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def ids_of(session, text, *points) -> list[int]:
    """The prompt of a question; its images are the conversation's."""
    prompts = PromptBuilder(session.tokenizer, media=session.engine.media)
    content = "\n".join([*(media_marker(session.add_media(each).digest) for each in points), text])
    prompt = prompts.render([{"role": "user", "content": content}], None)
    list(prompts.encode_media(prompt, session.engine, lambda: False))
    return prompts.tokenize(prompt)


def told_to_transformers(sight, ids, points) -> dict:
    return {"input_ids": torch.tensor([[IMAGE_ID if token >= FIRST_MEDIA_ID else token for token in ids]]),
            "pixel_values": torch.cat([sight.values(each) for each in points])}


def logits_of(model, sight, ids, points) -> np.ndarray:
    told = told_to_transformers(sight, ids, points)
    model.to(torch.float64)
    with torch.inference_mode():
        found = model(**{**told, "pixel_values": told["pixel_values"].double()}, use_cache=False).logits[0].numpy()
    model.to(torch.float32)
    return found


def test_rows_stand_where_transformers_puts_them(made, session):
    """Also where a text is read in chunks that end inside an image."""
    engine, shown = session.engine, [picture(1), picture(2, 40, 40)]
    ids = ids_of(session, ASKED, *shown)
    ids = [*np.random.default_rng(1).integers(10, 4000, 116).tolist(), *ids]
    assert FIRST_MEDIA_ID <= min(ids[127:129]), "the first lies across the border of two pages"
    expected = logits_of(made[1], engine.media.encoders[IMAGE_INPUT], ids, shown)
    whole = np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    assert_close(whole, expected)
    assert_close(np.concatenate([logits.copy() for _, logits in engine.score(ids, pages=1)]), expected)
    assert_close(np.concatenate([logits.copy() for _, logits in engine.score(ids[:60], by_token=True)]), expected[:60])


def test_answers_are_those_of_transformers(made, session):
    sight, model, points = session.engine.media.encoders[IMAGE_INPUT], made[1], picture(3)
    events = list(session.ask(ASKED, [session.add_media(points)]))
    ids = ids_of(session, ASKED, points)
    with torch.inference_mode():
        wanted = model.generate(**told_to_transformers(sight, ids, [points]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert list(session.stats.token_ids) == wanted[0][len(ids) :].tolist()
    assert any(isinstance(event, Progress) and "encoding the image" in event.phase for event in events)
    assert any(isinstance(event, Notice) and event.text == "image of 64 × 48: 16 tokens" for event in events)


def test_a_second_question_about_an_image_reads_and_sees_nothing_again(session):
    engine, points = session.engine, picture(3)
    first = said(session.ask(ASKED, [session.add_media(points)]))
    held = len(engine.tokens)
    second = said(session.ask("And what else?"))
    assert engine.media.encoders[IMAGE_INPUT].seen == 1 and engine.num_cached_tokens >= held - 1
    logits = engine._logits.copy()
    ids = [*engine.tokens]
    engine.reset()
    list(engine.prefill(ids))
    assert np.allclose(engine._logits, logits, atol=1e-4 * np.abs(logits).max())
    session.clear()
    assert said(session.ask(ASKED, [session.add_media(points)])) == first
    assert said(session.ask("And what else?")) == second and engine.media.encoders[IMAGE_INPUT].seen == 1


def test_of_the_smallest_images_not_more_are_kept_than_there_is_room_for(monkeypatch):
    """Each is looked up and let go at the same cost, however many came before."""
    monkeypatch.setattr(albums, "MAX_RETAINED_NBYTES", 100 * albums.ITEM_OVERHEAD_NBYTES)
    media = MediaCache({})
    points = [np.array([[[number % 256, number // 256, 7]]], np.uint8) for number in range(500)]
    held = media.add(points[0])
    for each in points:
        media.add(each)
    assert media.add(points[0]) is held and media.pending_nbytes() == 3 * len(media._by_digest)
    assert 90 < len(media._by_digest) <= 101
    for each in points:
        media.add(each)
    assert len(media._by_digest) <= 101 and media._retained_nbytes == sum(counted for _, counted in media._retained.values())


def test_the_same_prompt_comes_with_the_same_bits(session):
    engine = session.engine
    ids = ids_of(session, "It is so, " * 30 + ASKED, picture(4))
    list(engine.prefill(ids))
    whole = engine._logits.copy()
    list(engine.prefill(ids))
    assert engine.num_cached_tokens > 60 and np.array_equal(engine._logits, whole)


def test_another_image_is_not_taken_for_the_one_that_was_read(session):
    engine = session.engine
    one, other = (ids_of(session, ASKED, picture(seed)) for seed in (5, 6))
    assert len(one) == len(other) and one != other
    list(engine.prefill(one))
    before = engine._logits.copy()
    list(engine.prefill(other))
    assert engine.num_cached_tokens == next(place for place, token in enumerate(one) if token >= FIRST_MEDIA_ID)
    assert not np.allclose(engine._logits, before)
    texts = [said(session.ask(ASKED, [session.add_media(picture(seed))])) for seed in (5, 6) if session.messages.clear() is None]
    assert texts[0] != texts[1], "the same words about another picture"


def test_no_media_id_is_a_token(session):
    engine, tokenizer = session.engine, session.tokenizer
    ids = ids_of(session, ASKED, picture(7))
    assert tokenizer.decode(ids) == tokenizer.decode([token for token in ids if token < FIRST_MEDIA_ID])
    tokenizer.stream(ids).push(ids[-1])
    logits = np.zeros(engine.config.vocab_size, np.float32)
    settings = replace(GREEDY, repetition_penalty=1.3, presence_penalty=1.0, dry_multiplier=1.0)
    for sampler in (Sampler(settings, engine.config.vocab_size), Sampler(replace(settings, temperature=1.0), engine.config.vocab_size)):
        assert 0 <= sampler.sample(logits.copy(), ids * 2) < engine.config.vocab_size
    match = SuffixMatch()
    first = next(place for place, token in enumerate(ids) if token >= FIRST_MEDIA_ID)
    match.follow([*ids, *ids[:first]], 0)
    assert match.match()[0] >= 2 and match.propose(7) is None, "what followed is an image"


def test_speculation_changes_nothing_of_an_answer_about_an_image(made, session):
    whole = said(session.ask(ASKED, [session.add_media(picture(8))]))
    drafting = list(open_engine(made[0], replace(OPTIONS, spec="lookup")))[-1]
    try:
        drafting.media = session.engine.media
        other = Session(drafting, session.tokenizer, GREEDY, max_tokens=12, ignore_eos=True)
        assert said(other.ask(ASKED, [other.add_media(picture(8))])) == whole
    finally:
        drafting.close()


def test_a_saved_conversation_continues_without_its_image_at_hand(made, session, tmp_path):
    engine = session.engine
    list(session.ask(ASKED, [session.add_media(picture(9))]))
    sessions = SavedSessions(SessionStore(tmp_path), "llava", 1 << 30)
    list(sessions.save(session, "seen"))
    assert session.engine.media.encoders[IMAGE_INPUT].seen == 1
    whole = said(session.ask("And what else?"))
    sight = TorchSight(made[1])
    engine.reset()
    engine.media = MediaCache({IMAGE_INPUT: sight})  # as another process has it
    later = Session(engine, session.tokenizer, GREEDY, max_tokens=12, ignore_eos=True)
    list(sessions.load(later, "seen"))
    assert said(later.ask("And what else?")) == whole and sight.seen == 0
    assert "[image " in sessions.store.read("seen").begins
    later.system = "Be brief."  # now all has to be read again
    with pytest.raises(MediaGone, match="no longer in memory"):
        list(later.ask("And now?"))
    again = later.add_media(picture(9))
    assert said(later.ask("And now?", [])) and again.encoded is not None, "given once more it is known"


def test_an_image_that_does_not_fit_is_not_encoded(session):
    sight = session.engine.media.encoders[IMAGE_INPUT]
    with pytest.raises(ContextOverflow, match="512"):
        list(session.ask("word " * 520, [session.add_media(picture(10))]))
    assert sight.seen == 0 and not session.messages


def test_rows_are_kept_while_somebody_holds_their_image(monkeypatch, made):
    sight = TorchSight(made[1])
    media = MediaCache({IMAGE_INPUT: sight})
    monkeypatch.setattr(albums, "MAX_RETAINED_NBYTES", 1)
    held = media.add(picture(1))
    list(media.encode([held]))
    list(media.encode([media.add(picture(seed)) for seed in (2, 3)]))
    ids = held.ids()
    assert media.add(picture(1)) is held and media.embeddings([7, *ids])[0] == [7, *[0] * 16]
    assert np.array_equal(media.embeddings([7, *ids])[1].rows, held.encoded.rows)
    gone = media.add(picture(2))
    assert gone.encoded is None, "nobody held it, and there were newer ones"


def test_what_an_image_becomes_must_be_whole(made):
    class Short(TorchSight):
        def encode(self, points, work):
            return EncodedMedia(np.zeros((3, 64), np.float32), (ROW_PLACEHOLDER,) * 4)

    with pytest.raises(UsageError, match="takes 4 tokens"):
        list((media := MediaCache({IMAGE_INPUT: Short(made[1])})).encode([media.add(picture(1))]))


def test_a_model_that_takes_none_says_so(engine, tokenizer):
    engine.media = None
    session = Session(engine, tokenizer, GREEDY)
    with pytest.raises(UsageError, match="does not support image input"):
        session.add_media(picture(1))
    session.restore([{"role": "user", "content": media_marker("0" * 32)}, {"role": "assistant", "content": "A fox."}], None)
    with pytest.raises(EffllmError, match="this conversation contains images"):
        list(session.ask("Which?"))
    engine.media = MediaCache({IMAGE_INPUT: UsageError("its images are cut in a way that is not known", "none")})
    with pytest.raises(UsageError, match="not known"):
        session.add_media(picture(1))


def test_a_text_that_has_the_word_for_images_is_refused_beside_one(session):
    with pytest.raises(UsageError, match=f"contains {IMAGE}"):
        list(session.ask(f"What is {IMAGE}?", [session.add_media(picture(1))]))
