"""The sparse reference model: what its card says, and that skipping inactive neurons changes no bit of an answer."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from bundle_models import bundled, resident, windowed

from effllm.offload.neuron_pager import MOST_TOKENS
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.engine import Engine
from effllm.runtime.sparse import sparsity
from effllm.runtime.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parent.parent / "models" / "fable-relu"


@pytest.fixture(scope="module")
def neurons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("neurons") / "fable-relu"
    bundled(MODEL, out)
    return out


def story(engine: Engine, count: int = 200) -> np.ndarray:
    """Logits of a text: most of it as a prompt, the rest token by token."""
    ids = Tokenizer.load(MODEL, engine.config).encode(built_in_text())[:count]
    try:
        engine.reset()
        rows = [found.copy() for _, found in engine.score(ids[:140])]
        return np.concatenate(rows + [engine.forward_logits([token]).copy() for token in ids[140:]])
    finally:
        engine.close()


@pytest.mark.parametrize("share", (pytest.param(0.07, marks=pytest.mark.slow), 0.25, pytest.param(0.6, marks=pytest.mark.slow)))
def test_a_window_of_any_size_gives_the_bits_of_the_model_in_memory(share: float, neurons: Path) -> None:
    engine = windowed(neurons, round(share * 192))  # 192 blocks of four neurons a layer
    made = story(engine)
    used = engine.model.pager.stats
    assert 0 < used.missed < used.used
    assert np.array_equal(made, story(resident(MODEL)))
    assert all(len(layer._window.tokens) <= MOST_TOKENS for layer in engine.model.pager.layers)


def test_the_card_says_what_the_model_is() -> None:
    card, config = (MODEL / "README.md").read_text(encoding="utf-8"), json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["hidden_act"] == "relu" and "`tools/train_fable.py --from`" in card
    said = float(re.search(r"gates that are zero, on held-out text: ([\d.]+)%", card).group(1)) / 100
    engine = resident(MODEL, kv="32bit")
    *_, trace = sparsity.record(engine, Tokenizer.load(MODEL, engine.config).encode(built_in_text())[:2048])
    engine.close()
    # The built-in text is of other kinds than tales.
    assert 1 - np.mean(trace.shares()) == pytest.approx(said, abs=0.1)
    layers = [float(share) / 100 for share in re.findall(r"([\d.]+)%", card.split("by layer:")[1].split("Recall")[0])]
    assert len(layers) == config["num_hidden_layers"] and np.mean(layers) == pytest.approx(said, abs=0.001)
