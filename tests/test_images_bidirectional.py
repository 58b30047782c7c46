"""Gemma 3: bidirectional attention among an image's tokens, so a pass holds a whole image; other tokens attend causally."""

import numpy as np
import pytest
import torch
from family_models import TOLERANCE
from family_sizes import Case
from vision_language_models import picture, written_with_words

from effllm import UsageError
from effllm.runtime.engine import open_engine
from effllm.runtime.generation.batching import open_sequences
from effllm.runtime.images import ROW_PLACEHOLDER, EncodedMedia
from effllm.runtime.images.media import FIRST_MEDIA_ID, MediaCache
from effllm.runtime.images.modality import IMAGE_INPUT
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

CASE = Case("gemma3_text", {
    "vocab_size": 4100, "eos_token_id": 4, "bos_token_id": 0, "max_position_embeddings": 1024, "initializer_range": 0.2, "head_dim": 32,
    "sliding_window": 100, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, images=True)
ROWS = 70


class DrawnSight:
    """Random rows, seeded by an image's pixels."""

    placeholder = placeholder_text = "<image>"
    joint_attention = shares_border = False

    def encode(self, points: np.ndarray, work: object) -> EncodedMedia:
        draw = np.random.default_rng(int(points[:4].sum()))
        return EncodedMedia(draw.normal(size=(ROWS, 64)).astype(np.float32), (ROW_PLACEHOLDER,) * ROWS, bidirectional=True)

    def token_count(self, height: int, width: int) -> int:
        return ROWS

    def bytes_needed(self) -> int:
        return 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    return folder, written_with_words(CASE, folder)


def opened(folder, **options):
    chosen = EngineOptions(**{"kv": "32bit", "device": "cpu", "ctx": 512, "exact": True, "chunk": 128, **options})
    engine = list(open_engine(folder, chosen))[-1]
    engine.media = MediaCache({IMAGE_INPUT: DrawnSight()})
    return engine


@pytest.fixture(scope="module")
def engine(made):
    engine = opened(made[0])
    yield engine
    engine.close()


def prompt_of(engine, *parts) -> list[int]:
    """Random text tokens, as many as each part says, and images."""
    ids, draw = [], np.random.default_rng(2)
    for part in parts:
        if isinstance(part, int):
            ids += draw.integers(10, 4000, part).tolist()
        else:
            list(engine.media.encode([taken := engine.media.add(part)]))
            ids += taken.ids()
    return ids


def expected(model, engine, ids) -> np.ndarray:
    """Logits of transformers, in float64."""
    plain, shown = engine.media.embeddings(ids)
    model.double()
    try:
        with torch.inference_mode():
            states = model.get_input_embeddings()(torch.tensor([plain]))
            states[0, shown.positions] = torch.from_numpy(shown.rows).double()
            kinds = torch.tensor([[int(token >= FIRST_MEDIA_ID) for token in ids]])
            return model(inputs_embeds=states, token_type_ids=kinds, use_cache=False).logits[0].numpy()
    finally:
        model.float()


@pytest.mark.parametrize("parts", [(5, 1, 3), (100, 1, 60), (30, 1, 5, 2, 3, 2, 40), (120, 1, 1, 2, 150), (130, 1, 9)])
def test_logits_are_those_of_transformers(made, engine, parts):
    """With images across chunk and page boundaries, near the window's edge, and alone in the middle of a long text."""
    one, two = picture(1), picture(2)
    parts = [parts[0], one, *(two if each == 2 else each for each in parts[2:])]
    ids = prompt_of(engine, *parts)
    wanted = expected(made[1], engine, ids)
    engine.reset()
    list(engine.prefill(ids))
    assert np.abs(engine._logits - wanted[-1]).max() < TOLERANCE * np.abs(wanted).max()
    whole = engine._logits.copy()
    list(engine.prefill([*ids, 77, 78]))
    assert engine.num_cached_tokens >= len(ids) - 20, "what was read of an image is gone on from"
    list(engine.prefill(ids))
    assert np.array_equal(engine._logits, whole) or np.abs(engine._logits - whole).max() < TOLERANCE * np.abs(whole).max()


def test_answers_in_every_way_of_running_are_alike(made):
    folder = made[0]
    answers = []
    for options in ({}, {"chunk": 512}, {"kv": "16bit", "exact": False}, {"spec": "off"}):
        other = opened(folder, **options)
        try:
            session = Session(other, Tokenizer.load(folder, other.config), SamplerSettings(temperature=0), max_tokens=8, ignore_eos=True)
            list(session.ask("It is so. " * 12 + "What is it?", [session.add_media(picture(3)), session.add_media(picture(4))]))
            answers.append(session.stats.token_ids)
        finally:
            other.close()
    assert len(set(answers[:2] + answers[3:])) == 1 and len(answers[2]) == 8


def test_passes_are_not_cut_inside_an_image_beside_others(engine):
    ids = prompt_of(engine, 100, picture(5), 20)
    engine.reset()
    list(engine.prefill(ids))
    alone = engine._logits.copy()
    engines, _ = open_sequences(engine, 2)
    try:
        engine.reset()
        list(engine.prefill(ids))
        assert np.array_equal(engine._logits, alone)
    finally:
        engine.batched_passes = None
        engines[1].cache.close()


def test_caches_that_see_no_token_behind_say_so(made):
    engine = opened(made[0], kv="4bit")
    try:
        with pytest.raises(UsageError, match="--kv 4bit does not support"):
            list(engine.prefill(prompt_of(engine, 5, picture(1), 3)))
    finally:
        engine.close()


def test_an_image_that_no_pass_holds_is_refused(made):
    class Large(DrawnSight):
        def encode(self, points: np.ndarray, work: object) -> EncodedMedia:
            return EncodedMedia(np.zeros((200, 64), np.float32), (ROW_PLACEHOLDER,) * 200, bidirectional=True)

    engine = opened(made[0])
    engine.media = MediaCache({IMAGE_INPUT: Large()})
    try:
        with pytest.raises(UsageError, match="one batch holds 128"):
            list(engine.prefill(prompt_of(engine, 5, picture(6), 3)))
    finally:
        engine.close()
