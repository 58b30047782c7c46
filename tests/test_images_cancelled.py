"""An image that takes long to encode: progress is reported, and cancelling the answer neither waits for it nor loses anything."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from vision_language_models import CASE, TorchSight, picture, written_with_words

from effllm.runtime.engine import open_engine
from effllm.runtime.events import Done, Progress, TextDelta
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.generation.scheduler import Scheduler
from effllm.runtime.generation.served_model import GenerationOptions, ServedModel
from effllm.runtime.images import EncodingJob
from effllm.runtime.images.media import MediaCache
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.images.tower_ops import WorkerPool
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

ASKED = "What do you see in this one?"
OPTIONS = EngineOptions(kv="32bit", device="cpu", ctx=512, exact=True)


class Slow(TorchSight):
    """Encodes its first image for as long as anybody waits for it."""

    waits = True

    def encode(self, points, work):
        work.total, work.done = 10, 4
        with WorkerPool(1, work) as crew:
            while self.waits:
                crew.all([lambda: threading.Event().wait(0.01)])
        return super().encode(points, work)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llava")
    return folder, written_with_words(CASE, folder)


def begun(made) -> Session:
    engine = list(open_engine(made[0], OPTIONS))[-1]
    engine.media = MediaCache({IMAGE_INPUT: Slow(made[1])})
    return Session(engine, Tokenizer.load(made[0], engine.config), SamplerSettings(temperature=0), max_tokens=8, ignore_eos=True)


def said(events) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_looking_ends_where_the_answer_is_stopped_and_is_taken_up_by_the_next_question(made) -> None:
    session, told = begun(made), []
    for event in session.ask(ASKED, [session.add_media(picture(1))]):
        told.append(event)
        if isinstance(event, Progress) and event.done:
            session.cancel()
    assert (told[0].phase, told[-2].done, told[-2].total, told[-2].unit) == ("encoding the image", 4, 10, "layers")
    assert isinstance(told[-1], Done) and told[-1].stats.finish_reason == "cancelled" and not said(told)
    assert session.engine.media.encoders[IMAGE_INPUT].seen == 0 and not session.messages
    session.engine.media.encoders[IMAGE_INPUT].waits = False
    after = said(session.ask(ASKED, [session.add_media(picture(1))]))
    assert session.engine.media.encoders[IMAGE_INPUT].seen == 1 and after
    again = begun(made)
    again.engine.media.encoders[IMAGE_INPUT].waits = False
    assert after == said(again.ask(ASKED, [again.add_media(picture(1))])), "nothing of what was left stayed behind"
    assert np.array_equal(again.engine._logits, session.engine._logits)


def test_others_are_answered_while_an_image_is_encoded_which_happens_once(made) -> None:
    """One finishes before the tower is done; a second question about the same image waits for the first one's rows."""
    engine = list(open_engine(made[0], replace(OPTIONS, parallel=3)))[-1]
    engine.media = MediaCache({IMAGE_INPUT: (sight := Slow(made[1]))})
    engines, _ = open_sequences(engine, 3)
    replies, rounds = ServedModel(engine, Tokenizer.load(made[0], engine.config), None, engines[1:]), Scheduler(engine.batched_passes)
    points, others = engine.media.add(picture(4)), engine.media.add(picture(5))
    wish = GenerationOptions(SamplerSettings(temperature=0), max_tokens=8, ignore_eos=True)
    asked = {"looks": f"{media_marker(points.digest)}{media_marker(others.digest)} Who?",
             "looks too": f"{media_marker(others.digest)} Who?", "writes": "Who?"}
    ends, seen = {}, {}
    for key, text in asked.items():
        rounds.begin(key, replies.reply([{"role": "user", "content": text}], wish))
    patience = threading.Timer(20, lambda: setattr(sight, "waits", False))
    patience.start()
    try:
        while len(rounds):
            for key, event in rounds.step():
                assert not isinstance(event, Exception), event
                if isinstance(event, Done):
                    ends[key], seen[key] = event.stats, sight.seen
            sight.waits = sight.waits and "writes" not in ends
    finally:
        patience.cancel()
        for each in engines[1:]:
            each.cache.close()
        engine.close()
    assert seen["writes"] == 0 and sight.seen == 2 and list(ends)[0] == "writes"
    assert {len(each.token_ids) for each in ends.values()} == {8}


def test_the_crew_leaves_its_work_amid_the_pieces() -> None:
    from effllm.runtime.images import EncodingCancelled

    work, done = EncodingJob(), []

    def piece() -> None:
        done.append(1)
        work.is_cancelled = len(done) == 3

    with WorkerPool(1, work) as crew, pytest.raises(EncodingCancelled):
        crew.all([piece] * 10)
    assert len(done) == 3
