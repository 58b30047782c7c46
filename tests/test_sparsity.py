"""Which neurons a model activates: thresholds that skip some, traces and their replay, what is stored, and which models are refused."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_models import RELU, bundled, folders, found, resident, windowed
from command_line import CliRun
from conversions import options as conversion
from conversions import run as convert_run
from family_models import Case
from saved_models import saved
from streamed_models import FABLE, long_context_mixture, random_model, streams

from effllm import UsageError
from effllm.cli import calibrate_sparsity
from effllm.offload.disk_probe import Disk, DiskRead
from effllm.runtime import families
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.config import read_config
from effllm.runtime.conversion import bundle_ffn
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.planning import forecast
from effllm.runtime.planning.roofs import DiskRoofs, MachineRoofs, Roofs
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sparse import sparsity, sparsity_file
from effllm.runtime.sparse.neuron_bundles import NeuronWindows, bundle_places
from effllm.runtime.sparse.sparsity_file import Sparsity
from effllm.runtime.tensors import check_tensors
from effllm.runtime.tokenizer import Tokenizer

__all__ = ["folders"]  # a fixture

# -- thresholds --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The packaged model, bundled with half of its gates left out."""
    out = tmp_path_factory.mktemp("lossy") / "half"
    made, said = bundled(FABLE, out, gate_sparsity=0.5)
    assert any("changes answers" in line for line in said) and made.folder == out
    return FABLE, out


def test_thresholds_leave_out_the_share_that_was_asked_for(lossy: tuple[Path, Path]) -> None:
    engine = resident(lossy[1])
    ids = Tokenizer.load(FABLE, engine.config).encode(built_in_text())[:1024]
    *_, trace = sparsity.record(engine, ids)
    engine.close()
    assert all(0.4 < share < 0.6 for share in trace.shares())


def test_a_run_with_thresholds_has_the_same_bits_on_every_tier_and_answers_near_the_original(lossy: tuple[Path, Path]) -> None:
    plain, half = found(resident(lossy[0])), found(resident(lossy[1]))
    assert np.array_equal(found(windowed(lossy[1], 60)), half)
    assert not np.array_equal(half, plain)
    assert np.mean(half.argmax(axis=1) == plain.argmax(axis=1)) > 0.6


def test_loss_that_costs_time_is_refused(lossy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(lossy[1], EngineOptions(device="cpu"))
    at = bundle_places(check_tensors(prepared.config, prepared.store, prepared.container), prepared.store)
    made = replace(prepared, streaming=replace(streams(lossy[1], EngineOptions(device="cpu")), windows=NeuronWindows(at, (48,) * len(at))))

    def machine(small: float) -> Roofs:
        reads = (DiskRead(4096, 8, small), DiskRead(2 << 20, 4, 1e9))
        return Roofs(MachineRoofs("A CPU", 2, "2026-01-01 12:00", 2e10, 2e10, 1e-4, 1e-5, {}, {}),
                     DiskRoofs(Disk("", "", True, reads), "2026-01-01 12:00", 1 << 30))

    monkeypatch.setattr(forecast, "roofs_known", lambda wanted: machine(1e8))
    with pytest.raises(UsageError, match="is slower here"):
        forecast.refuse_slower(made)
    monkeypatch.setattr(forecast, "roofs_known", lambda wanted: machine(9e8))
    forecast.refuse_slower(made)
    monkeypatch.setattr(forecast, "roofs_known", lambda wanted: Roofs(None, None))
    forecast.refuse_slower(made)
    prepared.store.close()


@pytest.mark.parametrize("act, share, said", (("relu", 0.5, "skips neurons already"), ("silu", 1.5, "not a fraction of gates")))
def test_thresholds_that_make_no_sense_are_refused(act: str, share: float, said: str, tmp_path: Path) -> None:
    saved(Case("llama", {**RELU, "hidden_act": act}), tmp_path / "model")
    with pytest.raises(UsageError, match=said):
        list(bundle(tmp_path / "model", tmp_path / "out", gate_sparsity=share))


def test_every_family_whose_block_has_a_way_of_its_own_with_its_mlp_takes_bundles_or_says_that_it_does_not() -> None:
    own = {name for name in families.FAMILIES if "ops.gated_mlp(" in (source := (Path(families.__file__).parent / f"{name}.py").read_text())
           and "ops.bundled_mlp(" not in source}
    assert own <= set(bundle_ffn.WHOLE) and all(name in families.FAMILIES for name in bundle_ffn.WHOLE)


@pytest.mark.parametrize("family", bundle_ffn.WHOLE)
def test_families_that_multiply_their_mlps_as_a_whole_are_refused(family: str) -> None:
    config = replace(read_config(FABLE), family=family)
    with pytest.raises(UsageError, match=f"MLPs of the {family} family are read as a whole"):
        bundle_ffn._check(config, 0.5)


def test_what_headers_tell_is_refused_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(Case("llama", {**RELU, "hidden_act": "silu"}, dtype="bfloat16"), tmp_path / "model")
    convert_run(tmp_path / "model", tmp_path / "low", conversion("4bit"))
    saved(Case("opt", {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "activation_function": "gelu"}), tmp_path / "flat")
    monkeypatch.setattr(bundle_ffn, "gate_thresholds", lambda *given: pytest.fail("the model was run first"))
    for name, said in (("low", "neurons can be read individually only"), ("flat", "needs an MLP with a gate, opt has none")):
        with pytest.raises(UsageError, match=said):
            list(bundle(tmp_path / name, tmp_path / "out", gate_sparsity=0.5))


# -- traces ------------------------------------------------------------------------------------------------------------------------


def test_a_trace_is_what_ran_and_its_replay_what_a_window_read(tmp_path: Path, folders) -> None:
    model, out = folders("llama, bf16")
    ids = np.random.default_rng(3).integers(0, 300, 400).tolist()
    engine = resident(model, kv="32bit")
    *_, trace = sparsity.record(engine, ids)
    engine.close()
    trace.save(tmp_path / "trace.npz")
    again = sparsity.Trace.load(tmp_path / "trace.npz")
    assert again.neurons == trace.neurons == 192 and all(map(np.array_equal, again.layers, trace.layers))
    assert trace.tokens == 400 and all(0.2 < share < 0.8 for share in trace.shares())
    engine = windowed(out, 6, kv="32bit")
    for at in range(250):
        engine.forward_logits(ids[at : at + 1])
    missed = engine.model.pager.stats.missed
    engine.close()
    assert missed > 0
    expected = sum(sparsity.missed_units(replace_tokens(trace, 250), layer, 6, 16).sum() for layer in range(len(trace.layers)))
    assert abs(missed - expected) <= 0.02 * missed  # prompts and tokens round differently now and then


def replace_tokens(trace: sparsity.Trace, tokens: int) -> sparsity.Trace:
    return sparsity.Trace(trace.neurons, tuple(bits[:tokens] for bits in trace.layers))


def test_what_was_measured_is_read_back_and_nonsense_is_not(tmp_path: Path) -> None:
    made = Sparsity(2048, (0.1, 0.2), {0.25: (0.02, 0.04), 0.5: (0.01, 0.0)})
    sparsity_file.save(made, tmp_path)
    assert sparsity_file.load(tmp_path, 2) == made
    assert made.missed_at(0.25) == pytest.approx(0.03) and made.missed_at(1.0) == 0.0
    assert 0.005 < made.missed_at(0.375) < 0.03
    assert sparsity_file.load(tmp_path, 3) is None
    for wrong in ("{}", "[1]", "nothing", json.dumps({**made.to_json(), "missed": {"2": [0.1, 0.1]}}),
                  json.dumps({**made.to_json(), "active": [0.1, "x"]}),
                  *(json.dumps({**made.to_json(), "predictor": rates}) for rates in ({}, [], 0, False, "", "x", 5))):
        (tmp_path / sparsity_file.FILE).write_text(wrong)
        assert sparsity_file.load(tmp_path, 2) is None


def test_a_model_that_leaves_nothing_out_has_no_trace() -> None:
    engine = resident(FABLE)
    with pytest.raises(UsageError, match="never exactly zero"):
        next(sparsity.record(engine, list(range(300))))
    engine.close()


def test_what_cannot_be_recorded_or_kept_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_sparsity, "open_with_progress", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UsageError, match="never exactly zero"):
        sparsity.require_sparse_folder(FABLE)
    mixture = long_context_mixture(tmp_path / "mixture")
    with pytest.raises(UsageError, match="whole experts"):
        sparsity.require_sparse_folder(mixture)
    assert CliRun("calibrate-sparsity", mixture).code == 2
    relu = random_model(tmp_path / "relu", hidden_act="relu")
    sparsity.require_sparse_folder(relu)
    assert not [path for path in relu.iterdir() if "sparsity" in path.name]
    there = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))
                        if str(path).endswith(".partial") else there(path, *more, **named))
    ran = CliRun("calibrate-sparsity", relu)
    assert ran.code == 1 and "sparsity.json cannot be written: Read-only file system" in ran.err


def test_a_trace_takes_the_place_of_an_older_one_and_of_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user typed by mistake, such as the text itself or a file of the model, stays."""
    monkeypatch.setattr(calibrate_sparsity, "open_with_progress", lambda *_: pytest.fail("it was loaded"))
    relu, text = random_model(tmp_path / "relu", hidden_act="relu"), tmp_path / "story.txt"
    text.write_text("Once upon a time. " * 400)
    np.savez(tmp_path / "mine.npz", other=np.zeros(3))
    (tmp_path / "link").symlink_to(relu / "config.json")
    for place in (text, relu / "config.json", relu / "model.safetensors", tmp_path / "mine.npz", tmp_path / "link"):
        before = place.read_bytes()
        ran = CliRun("calibrate-sparsity", relu, "--text", text, "--trace", place)
        assert ran.code == 2 and f"--trace {place} is not a neuron trace" in ran.err and "hint: " in ran.err
        assert place.read_bytes() == before
    for place, said in ((tmp_path, "is a folder"), (tmp_path / "none" / "trace.npz", f"there is no folder {tmp_path / 'none'}")):
        ran = CliRun("calibrate-sparsity", relu, "--trace", place)
        assert ran.code == 2 and said in ran.err
    sparsity.Trace(8, (np.ones((2, 1), np.uint8),)).save(tmp_path / "trace.npz")
    for place in (tmp_path / "trace.npz", tmp_path / "new.npz", Path("/dev/null")):
        sparsity.require_trace_path(place)


# -- the commands ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_way_of_a_model_through_the_commands(tmp_path: Path) -> None:
    """The packaged model's weights behind ReLU: no good model, a real one."""
    shutil.copytree(FABLE, tmp_path / "relu")
    config = json.loads((FABLE / "config.json").read_text())
    (tmp_path / "relu" / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    made = CliRun("quantize", tmp_path / "relu", "-o", tmp_path / "out", "--bundle-ffn", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["bytes_before"] == json.loads(made.out)["bytes_after"]
    assert "4 neurons fill a block" in made.err
    asked = CliRun("calibrate-sparsity", tmp_path / "out", "--tokens", 512, "--trace", tmp_path / "trace.npz", "--json")
    assert asked.code == 0, asked.err
    told = json.loads(asked.out)
    assert told["tokens"] == 512 and told["together"] == 4 and len(told["active"]) == 6
    trace = sparsity.Trace.load(tmp_path / "trace.npz")
    assert trace.shares() == pytest.approx(told["active"], abs=1e-5)
    shown = CliRun("calibrate-sparsity", tmp_path / "relu", "--tokens", 512)
    assert shown.code == 0 and "read per token" in shown.out and "25% of up and down" in shown.out
    answers = [CliRun("run", tmp_path / name, "--raw", "Once upon a time", "-n", 12, "--temp", 0) for name in ("relu", "out")]
    assert answers[0].code == answers[1].code == 0 and answers[0].out == answers[1].out
    assert CliRun("show", tmp_path / "out").code == 0


@pytest.mark.parametrize("arguments, said", ((("--bundle-ffn",), "silu is never exactly zero"),
                                             (("--bundle-ffn", "--bits", 4), "as they are"),
                                             (("--bits", 4, "--gate-sparsity", 0.5), "needs --bundle-ffn")))
def test_commands_that_contradict_themselves_are_refused(arguments: tuple, said: str, tmp_path: Path) -> None:
    ran = CliRun("quantize", FABLE, "-o", tmp_path / "out", *arguments)
    assert ran.code == 2 and said in ran.err and "hint: " in ran.err
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_refused() -> None:
    ran = CliRun("calibrate-sparsity", "fable", "--tokens", 10)
    assert ran.code == 2 and "too few" in ran.err
    ran = CliRun("calibrate-sparsity", "fable")
    assert ran.code == 2 and "never exactly zero" in ran.err


def test_one_magnitude_for_a_tensor(tmp_path: Path, lossy: tuple[Path, Path]) -> None:
    """The other rule: the same share, one threshold a layer, and more damage than thresholds that know what a neuron weighs."""
    bundled(FABLE, tmp_path / "flat", gate_sparsity=0.5, gate_rule="magnitude")
    prepared = prepare(tmp_path / "flat", EngineOptions(device="cpu"))
    assert prepared.container.method["gate_rule"] == "magnitude"
    tensors = check_tensors(prepared.config, prepared.store, prepared.container)
    for layer in range(prepared.config.num_hidden_layers):
        values = prepared.store.read(tensors[layer]["thresholds"].info).view(np.float32)
        assert values[0] > 0 and np.all(values == values[0])
    prepared.store.close()
    flat, weighed = found(resident(tmp_path / "flat")), found(resident(lossy[1]))
    assert not np.array_equal(flat, weighed)
    assert np.array_equal(found(windowed(tmp_path / "flat", 60)), flat)
