"""`--kv-read sparse` on the real model: it reaches the engine, is reported with its loss, and is refused where it has no meaning."""

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from gpu_runs import card_here, simulated
from gpu_runs import opened as opened_beside
from hub_user import FABLE
from hybrid_models import MODELS
from saved_models import saved

from effllm import UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels.cpu.kv import selective
from effllm.offload.notes import Fallback
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions, prepare

MAMBA = MODELS["mamba"]
TIER = {"ctx": 2048, "kv_ram": "8M", "device": "cpu"}
FLAGS = ("-c", "2048", "--kv-ram", "8M", "--device", "cpu")
SPARSE = ("--kv-read", "sparse")
SAID = (r"--kv-read sparse: answers are not exact; of a layer's 16 pages on the disk a token reads at most 4 and estimates the others "
        r"\(effllm eval kld MODEL --kv-read sparse ... measures")


def ran(*argv: str, stdin: str = "", **variables: str) -> tuple[int, str, str]:
    environment = Environment(io.StringIO(stdin), io.StringIO(), io.StringIO(), {**os.environ, **variables})
    code = main(argv, environment)
    return code, environment.stdout.getvalue(), environment.stderr.getvalue()


def opened(folder: Path, **asked: object) -> tuple[Engine, list[str]]:
    said = []
    for item in open_engine(FABLE, EngineOptions(**TIER, spill_dir=str(folder), **asked)):
        said += [item.text] if isinstance(item, Notice) else []
    return item, said


def long_text(tokens: int) -> str:
    """About so many tokens of stories."""
    return built_in_text()[: 3 * tokens]


def answered(engine: Engine, prompt: int) -> np.ndarray:
    """Logits of single tokens up to the 800th, after a prompt; the engine is closed."""
    ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, 800).tolist()
    try:
        for _ in engine.prefill(ids[:prompt]):
            continue
        return np.concatenate([engine.forward_logits([token]).copy() for token in ids[prompt:]])
    finally:
        engine.close()


def test_a_run_picks_pages_and_says_so(tmp_path: Path) -> None:
    asked = ("run", "fable", "--raw", long_text(1500), "-n", "24", "--temp", "0", "--ignore-eos", *FLAGS, "--spill-dir", str(tmp_path))
    code, out, err = ran(*asked, *SPARSE, "--json")
    pages = json.loads(out)["placement"]["kv_read"]
    assert code == 0 and re.search(SAID, err)
    assert 0 < pages["found"] <= pages["asked"] < pages["among"]
    code, _, err = ran(*asked, *SPARSE, "--stats")
    assert code == 0 and f"KV cache on disk: {pages['asked']} of {pages['among']} pages selected (" in err
    assert re.search(r"no prediction: how many pages of the cache a token picks", err)
    code, out, err = ran(*asked, "--kv-read", "exact", "--json")
    assert code == 0 and "kv_read" not in json.loads(out)["placement"] and "--kv-read" not in err


def test_where_all_pages_are_read_the_numbers_are_the_exact_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """800 tokens seal no more pages than a token may read."""
    monkeypatch.setattr(selective, "LEFT", -1.0)
    sparse, said = opened(tmp_path, kv_read="sparse")
    exact, _ = opened(tmp_path)
    slots, traffic = sparse.cache.pool.stream.slots, sparse.cache.pool.traffic
    np.testing.assert_array_equal(answered(sparse, 700), answered(exact, 700))
    assert any(re.search(SAID, line) for line in said)
    assert traffic.nbytes > 0 and all(each.num_requested == each.num_candidates > 0 for each in slots)


def test_a_prompt_reads_all_pages_though_one_token_of_it_is_left(tmp_path: Path) -> None:
    """A prompt that is sent again, or that ends one token behind a chunk; answers between do not change it, nor it them."""
    ids = np.random.default_rng(4).integers(0, 2000, 1600).tolist()
    sparse, exact = (opened(tmp_path, kv_read=read, spec="off")[0] for read in ("sparse", "exact"))
    slots, logits = sparse.cache.pool.stream.slots, []
    for engine in (sparse, exact):
        for end in (1473, 1473, 1600, 1600):
            for _ in engine.prefill(ids[:end]):
                continue
            logits.append(engine._logits.copy())
    assert np.array_equal(logits[:4], logits[4:]) and not any(each.num_requested for each in slots)
    again = [sparse.forward_logits([token])[0].copy() for token in (7, 8)]
    assert sum(each.num_requested for each in slots) > 0, "a token of an answer picks"
    for _ in sparse.prefill(ids):
        continue
    assert np.array_equal(sparse._logits, logits[3])
    assert np.array_equal(again, [sparse.forward_logits([token])[0].copy() for token in (7, 8)])
    for engine in (sparse, exact):
        engine.close()


@pytest.mark.slow
def test_the_eval_reads_as_an_answer_does_and_finds_a_loss(tmp_path: Path) -> None:
    text = tmp_path / "tales.txt"
    text.write_text(long_text(1600))
    asked = ("eval", "kld", "fable", "--text", str(text), *FLAGS, "--spill-dir", str(tmp_path), "--json")
    (code, out, err), (same, whole, _) = ran(*asked, *SPARSE), ran(*asked, "--by-token")
    assert code == same == 0 and re.search(SAID, err)
    loss, none = json.loads(out), json.loads(whole)
    assert loss["tokens"] == none["tokens"] > 1000
    assert none["kld_mean"] < 1e-5 and 10 * none["kld_mean"] < loss["kld_mean"] < 0.005
    code, out, _ = ran("eval", "ppl", *asked[2:], *SPARSE)
    assert code == 0 and json.loads(out)["ppl"] == pytest.approx(loss["ppl"], rel=1e-9), "the same passes of one token"


@pytest.mark.parametrize("more", ((), ("--kv-ram", "1G"), ("--kv", "4bit+mikv")))
def test_a_cache_that_lies_in_memory_is_read_exactly(more: tuple[str, ...]) -> None:
    asked = (*more, *SPARSE, "--device", "cpu", "-c", "2048")
    for command in (("run", "fable", "hi", "-n", "2"), ("plan", "fable", "--no-probe")):
        code, _, err = ran(*command, *asked)
        assert code == 0 and "--kv-read sparse: the whole cache fits in memory and is read exactly; --kv-ram SIZE" in err
    code, out, err = ran("run", "fable", "hi", "-n", "2", *asked, "--strict")
    assert code == 2 and not out and "the whole cache fits in memory" in err


def test_a_model_that_sees_windows_alone_has_nothing_to_pick(tmp_path: Path) -> None:
    content = json.loads((FABLE / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 256,
                                                               "architectures": ["MistralForCausalLM"]}
    for file in FABLE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(content))
    code, _, err = ran("run", str(tmp_path), "hi", *FLAGS, *SPARSE)
    assert code == 2 and "every layer of this model has a sliding window" in err and "hint: no --kv-read" in err


def test_a_model_without_keys_and_values_is_told_so(tmp_path: Path) -> None:
    saved(MAMBA, tmp_path / "mamba")
    with pytest.raises(UsageError, match="this model has no keys and values"):
        prepare(tmp_path / "mamba", EngineOptions(device="cpu", kv_read="sparse"))


def test_all_layers_on_a_gpu_leave_nothing_to_pick() -> None:
    with card_here(simulated()), pytest.raises(UsageError, match="all layers have their cache on the GPU") as caught:
        prepare(FABLE, EngineOptions(ctx=2048, kv_read="sparse", device="cuda", kv_ram="8M"))
    assert "--device cpu" in caught.value.hint


def test_beneath_a_gpu_the_layers_of_the_host_pick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "LEFT", -1.0)
    asked = {"gpu_layers": 2, "ctx": 2048, "kv_ram": "5200k", "spill_dir": str(tmp_path)}
    exact, _ = opened_beside(FABLE, simulated(), **asked)
    sparse, _ = opened_beside(FABLE, simulated(), **asked, kv_read="sparse")
    slots = sparse.cache.pool.stream.slots
    np.testing.assert_array_equal(answered(sparse, 780), answered(exact, 780))
    assert len(slots) == 4 and all(each.num_requested == each.num_candidates > 0 for each in slots)


def test_a_setting_for_all_models_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(FABLE, EngineOptions(device="cpu", ctx=2048, kv_read="sparse", from_settings=frozenset({"kv_read"})))
    assert prepared.options.kv_read == "exact"
    assert any(isinstance(said, Fallback) and "read exactly" in said for said in prepared.notices)
    monkeypatch.chdir(tmp_path)
    Path("effllm.toml").write_text('kv-read = "sparse"\n')
    code, _, err = ran("run", "fable", "hi", "-n", "2", "--device", "cpu")
    assert code == 0 and "--kv-read sparse: the whole cache fits in memory" in err


def test_nothing_is_drafted() -> None:
    prepared = prepare(FABLE, EngineOptions(**TIER, kv_read="sparse", spec="lookup"))
    assert not prepared.speculation and any("picks pages for one token at a time" in said for said in prepared.notices)


def test_a_session_keeps_the_text_alone(tmp_path: Path) -> None:
    """Keys of later tokens depend on what was estimated before them: no exact run may take them up."""
    home = {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")}
    ask = ("run", "fable", "Tell me a story about a fox.", "-n", "8", "--temp", "0", "--session", "tale", *FLAGS)
    code, _, err = ran(*ask, *SPARSE, **home)
    assert code == 0 and "session tale: only the text is saved, since --kv-read sparse leaves an approximate cache" in err
    code, _, err = ran(*ask, **home)
    assert code == 0 and "2 messages, its text is recomputed" in err
    code, _, err = ran(*ask, *SPARSE, **home)
    assert code == 0 and re.search(r"4 messages, \d+ tokens restored", err), "what is exact may be taken up"
