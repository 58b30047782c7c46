"""Predictors of active neurons: what they find, what is stored, and runs with them with the same bits as without."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bundle_models import bundled, logits, resident, windowed
from streamed_models import FABLE

from effllm import UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.events import Progress
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sparse import activation_predictors, sparsity, sparsity_file
from effllm.runtime.sparse.sparsity_file import PredictorRates, Sparsity
from effllm.runtime.tokenizer import Tokenizer

RELU = FABLE.parent / "fable-relu"


def test_activity_that_is_linear_is_found() -> None:
    """Neurons that fire on directions of a small space: on unseen tokens as many are found as was asked for, and few others named."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1600, 6), np.float32) @ rng.standard_normal((6, 48), np.float32)
    active = activation_predictors.scaled(x) @ rng.standard_normal((48, 96), np.float32) > 8
    trace = sparsity.Trace(96, (np.packbits(active, axis=1),))
    *progress, (made, rates) = activation_predictors.train(trace, [x.astype(np.float16)], rank=6)
    assert all(isinstance(event, Progress) for event in progress) and rates.rank == 6
    assert 0.9 < rates.recall[0] < 1 and rates.named[0] < 3 * active.mean()
    named = made.layers[0].active(x[-1:])
    assert set(np.flatnonzero(active[-1])) & set(named.tolist()) or not active[-1].any()
    less = list(activation_predictors.train(trace, [x], rank=1))[-1][1]
    assert less.named[0] > rates.named[0], "what is asked for is found at any rank, by naming more"


def test_a_layer_that_never_fires_names_nothing() -> None:
    x = np.random.default_rng(2).standard_normal((400, 16), np.float32)
    trace = sparsity.Trace(32, (np.zeros((400, 4), np.uint8),))
    *_, (made, rates) = activation_predictors.train(trace, [x], 4)
    assert rates.named == (0.0,) and not len(made.layers[0].active(x[:3]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, activation_predictors.Predictors, PredictorRates]:
    """fable-relu in bundles, with predictors of it beside its weights."""
    out = tmp_path_factory.mktemp("predicted") / "neurons"
    bundled(RELU, out)
    engine, inputs = resident(out), []
    ids = Tokenizer.load(out, engine.config).encode(built_in_text())[:1024]
    *_, trace = sparsity.record(engine, ids, inputs)
    engine.close()
    assert [each.shape for each in inputs] == [(trace.tokens, engine.config.hidden_size)] * 6
    *_, (made, rates) = activation_predictors.train(trace, inputs)
    made.save(out)
    return out, made, rates


def test_predictors_of_a_real_model(trained: tuple[Path, activation_predictors.Predictors, PredictorRates]) -> None:
    _, _, rates = trained
    assert rates.missed < 0.4 and np.mean(rates.named) < 0.5  # of 1,024 tokens; 2,048 miss a tenth
    assert len(rates.recall) == len(rates.named) == 6


@pytest.mark.parametrize("slots", [8, *(pytest.param(slots, marks=pytest.mark.slow) for slots in (40, 100))])
def test_reading_ahead_changes_no_bit(trained: tuple[Path, activation_predictors.Predictors, PredictorRates], slots: int) -> None:
    """Whatever is guessed, however small the window; and some of what was guessed need not be waited for."""
    folder, made, _ = trained
    want, plain = logits(resident(folder)), windowed(folder, slots)
    assert np.array_equal(logits(plain), want)
    guessing = windowed(folder, slots)
    guessing.model.predictors = made
    assert np.array_equal(logits(guessing), want)
    assert plain.model.pager.stats.expected == 0 < guessing.model.pager.stats.expected
    if slots == 100:
        assert guessing.model.pager.stats.missed < plain.model.pager.stats.missed
    for engine in (plain, guessing):
        engine.close()


@pytest.mark.parametrize("guess", [lambda rng, count: np.arange(count), lambda rng, count: rng.permutation(count)[: count // 3],
                                   lambda rng, count: np.zeros(0, np.int64)])
def test_wrong_guesses_change_no_bit(trained: tuple[Path, activation_predictors.Predictors, PredictorRates], guess: Callable) -> None:
    folder, rng = trained[0], np.random.default_rng(5)

    class Wrong:
        """Names what it likes."""

        def active(self, x: np.ndarray) -> np.ndarray:
            return guess(rng, 768)

    engine = windowed(folder, 30)
    engine.model.predictors = activation_predictors.Predictors((Wrong(),) * 6)
    assert np.array_equal(logits(engine), logits(resident(folder)))
    engine.close()


def test_what_is_kept_is_read_without_trust(trained: tuple[Path, activation_predictors.Predictors, PredictorRates], tmp_path: Path) -> None:
    folder, made, rates = trained
    found = activation_predictors.load(folder, 6, 256, 768)
    assert found.nbytes == made.nbytes and all(np.array_equal(a.out, b.out) for a, b in zip(found.layers, made.layers))
    assert activation_predictors.load(folder, 6, 256, 767) is None and activation_predictors.load(tmp_path, 6, 256, 768) is None
    content = (folder / activation_predictors.FILE).read_bytes()
    for damage in (b"", content[:1000], b"PK" + content[40:]):
        (tmp_path / activation_predictors.FILE).write_bytes(damage)
        assert activation_predictors.load(tmp_path, 6, 256, 768) is None
    heads = [f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}"
             for kind, shape in (("'<f4'", (0, 99999999999999999999)), ((), (1,)), (("<f4",), (1,)))]
    for head in (*heads, "{'descr': (", "[" * 900, "'" * 3):
        text = head.encode().ljust(1000) + b"\n"
        array = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        with zipfile.ZipFile(tmp_path / activation_predictors.FILE, "w") as archive:
            for name in ("into.npy", "out.npy", "thresholds.npy"):
                archive.writestr(name, array)
        assert activation_predictors.load(tmp_path, 6, 256, 768) is None
    (tmp_path / activation_predictors.FILE).unlink()
    os.mkfifo(tmp_path / activation_predictors.FILE)
    assert activation_predictors.load(tmp_path, 6, 256, 768) is None, "nobody waits for a pipe"
    kept = Sparsity(1024, (0.1,) * 6, {0.5: (0.01,) * 6}, rates)
    sparsity_file.save(kept, tmp_path)
    assert sparsity_file.load(tmp_path, 6).predictor == PredictorRates(
        rates.rank, tuple(round(own, 5) for own in rates.recall), tuple(round(own, 5) for own in rates.named))
    assert sparsity_file.load(tmp_path, 5) is None


def test_on_the_command_line(trained: tuple[Path, activation_predictors.Predictors, PredictorRates], tmp_path: Path) -> None:
    def typed(*argv: object) -> tuple[int, str, str]:
        environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        return main([str(each) for each in argv], environment), environment.stdout.getvalue(), environment.stderr.getvalue()

    folder = tmp_path / "neurons"
    shutil.copytree(trained[0], folder, ignore=shutil.ignore_patterns(activation_predictors.FILE, sparsity_file.FILE))
    with pytest.raises(UsageError, match="nothing in .* predicts"):
        prepare(folder, EngineOptions(device="cpu", predict_neurons=True))
    code, out, err = typed("calibrate-sparsity", folder, "--tokens", 300, "--predictor", 16, "--json")
    assert code == 0, err
    rates = json.loads(out)["predictor"]
    assert rates["rank"] == 16 and 0 < rates["missed"] < 0.5 and len(rates["recall"]) == 6
    assert json.loads((folder / sparsity_file.FILE).read_text())["predictor"] == rates
    code, out, err = typed("calibrate-sparsity", folder, "--tokens", 300, "--predictor", 8)
    assert code == 0 and "rank 8 misses" in out + err
    code, out, err = typed("run", folder, "Once", "-n", 3, "--predict-neurons", "--device", "cpu")
    assert code == 0 and "has no effect: no neurons come from the disk" in err
    assert typed("calibrate-sparsity", folder, "--predictor", 0)[0] == 2
