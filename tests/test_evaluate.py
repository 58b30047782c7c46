"""Perplexity and KL divergence against transformers and against arithmetic; the bookkeeping of speed measurements."""

from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import EffllmError, UsageError
from effllm.offload import hardware
from effllm.offload.hardware import CpuTime
from effllm.runtime.engine import open_engine, open_prepared
from effllm.runtime.events import Notice
from effllm.runtime.measuring.bench import BenchOptions, BenchRow, bench, context_for, prepare_synthetic
from effllm.runtime.measuring.evaluate import kld, log_softmax, perplexity, windows
from effllm.runtime.measuring.recall import recall
from effllm.runtime.measuring.synthetic import SHAPES, SyntheticStore, synthetic_config
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
TEXT = ("The king of the wood said to the fox: you have stolen my bread, and you shall give me three wishes for it. "
        "The fox bowed low, and asked to be allowed to think until the morning.\n\n") * 12


@pytest.fixture(scope="module")
def engines():
    pair = [list(open_engine(FABLE, EngineOptions(device="cpu", kv=kv, exact=True)))[-1] for kv in ("16bit", "32bit")]
    yield pair
    for engine in pair:
        engine.close()


@pytest.fixture(scope="module")
def tokenizer(engines):
    return Tokenizer.load(FABLE, engines[0].config)


def test_perplexity_is_transformers(engines, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    result = list(perplexity(engines[1], tokenizer, TEXT, 200))[-1]
    model = AutoModelForCausalLM.from_pretrained(FABLE, dtype=torch.float32)
    losses = []
    for window in windows(tokenizer, TEXT, 200):
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none"))
    losses = torch.cat(losses)
    assert result.tokens == len(losses)
    assert result.ppl == pytest.approx(losses.mean().exp().item(), rel=1e-5)


def test_kld_of_the_16_bit_cache_is_tiny_and_of_itself_zero(engines, tokenizer):
    half, full = engines
    result = list(kld(half, full, tokenizer, TEXT, 400))[-1]
    assert 0 < result.kld_mean < 1e-6 and result.same_top > 0.995 and result.ppl == pytest.approx(result.ppl_ref, rel=1e-3)
    assert result.kld_median <= result.kld_p99 <= result.kld_p999 and abs(result.floor_kld_mean) < 1e-9
    assert result.weight_bits_per_value == 16 and result.packed_bits == 17.0 and result.kv_bits_per_value > 16
    same = list(kld(full, full, tokenizer, TEXT[:600], 400))[-1]
    assert abs(same.kld_mean) < 1e-12 and same.same_top == 1


def test_windows_cut_the_text_and_refuse_too_little(tokenizer):
    cut = windows(tokenizer, TEXT, 100)
    assert sum(map(len, cut)) in (len(tokenizer.encode(TEXT)), len(tokenizer.encode(TEXT)) - 1) and max(map(len, cut)) == 100
    with pytest.raises(UsageError, match="nothing to score"):
        windows(tokenizer, "a", 100)


class Begins:
    """A tokenizer that begins each text with token 7, as those of Llama do: a token per character else."""

    bos_id = 7

    def encode(self, text):
        return [7, *map(ord, text)]


def test_every_window_begins_as_a_text_does():
    """A window shares nothing with the one before, so the model must meet it as the beginning of a text."""
    cut = windows(Begins(), "abcdefghij", 4)
    assert cut == [[7, 97, 98, 99], [7, 100, 101, 102], [7, 103, 104, 105], [7, 106]]
    assert windows(Begins(), "abcd", 5) == [[7, 97, 98, 99, 100]]
    for text, ctx in (("", 4), ("abc", 1)):
        with pytest.raises(UsageError, match="story.txt has .* nothing to score"):
            windows(Begins(), text, ctx, "story.txt")


def test_log_softmax_sums_to_one():
    logits = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32) * 30
    assert np.allclose(np.exp(log_softmax(logits)).sum(-1), 1)


def test_bench_counts_what_it_ran():
    options = BenchOptions(prompt=(140,), gen=(4, 0), depth=(200, 0), repetitions=2)
    engine_options = context_for(EngineOptions(device="cpu"), options)
    engine = list(open_prepared(lambda: prepare_synthetic(str(FABLE / "config.json"), engine_options), ("raw",)))[-1]
    rows = [row for row in bench(engine, options, "fable") if isinstance(row, BenchRow)]
    engine.close()
    assert [row.test for row in rows] == ["pp140 @ d200", "tg4 @ d200", "pp140", "tg4"]
    for row in rows:
        assert len(row.samples_ts) == 2 and min(row.samples_ts) <= row.median_ts <= max(row.samples_ts) and row.avg_ts > 0
        assert row.model_size == 11_540_992 and row.model_n_params == 5_770_496 and row.type_k == "16bit"
    for row, held in ((rows[1], 204), (rows[3], 4)):
        writing = row.to_json()
        assert writing["bytes_per_pass"] == 11_540_992 + held * 2 * 2 * 6 * 128 and writing["roof_bandwidth"] > 1e9


@pytest.mark.parametrize(("taken", "said"), [
    (CpuTime(10, 2, 7, 0.5), ""), (CpuTime(10, 1, 4, 1), "other programs had 40% of the cores' time meanwhile"),
    (CpuTime(10, 1, 4, 4), "this virtual machine's host, for others, had 40% of the cores' time meanwhile")])
def test_bench_says_who_else_had_the_cores(engines, monkeypatch, taken, said):
    looks = iter([CpuTime(1, 1, 1, 1), CpuTime(1 + taken.all, 1 + taken.idle, 1 + taken.own, 1 + taken.stolen)])
    monkeypatch.setattr(hardware, "cpu_time", lambda: next(looks))
    notes = [each.text for each in bench(engines[0], BenchOptions((), (1,), repetitions=1), "fable") if isinstance(each, Notice)]
    told = [each for each in notes if "meanwhile" in each]
    assert told == ([f"{said}: a machine that does nothing else is faster"] if said else [])


def test_bench_measures_what_its_contract_says_unasked():
    assert (BenchOptions().prompt, BenchOptions().gen, BenchOptions().depth, BenchOptions().repetitions) == ((512,), (64,), (0,), 3)


def test_bench_refuses_nonsense():
    for bad in ({"prompt": (0,), "gen": (0,)}, {"repetitions": 0}, {"depth": (0, -1)}, {"columns": 0}, {"columns": 40}):
        with pytest.raises(UsageError):
            BenchOptions(**bad)


def test_synthetic_weights_are_sane_and_shapes_are_real():
    config = synthetic_config("tinyllama-1.1b")
    store = SyntheticStore(config)
    assert sum(info.nbytes for info in store.tensors.values()) == 2 * 1_100_048_384
    info = store.tensors["model.layers.3.mlp.up_proj.weight"]
    values = (store.read(info).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all() and 0.01 < values.std() < 0.03
    for name in SHAPES:
        assert synthetic_config(name).num_hidden_layers >= 16
    with pytest.raises(UsageError, match="no shape 'giraffe'"):
        synthetic_config("giraffe")


@pytest.mark.parametrize("content", ("[1, 2]", "3", "null", '"a"', "{", "[" * 100_000))
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    (tmp_path / "shape.json").write_text(content)
    with pytest.raises(UsageError, match="is not a config"):
        synthetic_config(str(tmp_path / "shape.json"))


@pytest.fixture(scope="module")
def packed():
    engine = list(open_engine(FABLE, EngineOptions(device="cpu", kv="4bit")))[-1]
    yield engine
    engine.close()


def sample_text() -> str:
    return (Path(effllm.__path__[0]) / "runtime" / "calibration.txt").read_text()


def test_a_packed_cache_is_scored_where_it_is_read(packed, engines, tokenizer):
    text = tokenizer.decode(tokenizer.encode(sample_text())[:1600])
    result = list(kld(packed, engines[1], tokenizer, text, 800))[-1]
    first = 64 + 128 + 128  # the first position that reads a packed page
    assert result.tokens == sum(len(window) - 1 - first for window in windows(tokenizer, text, 800) if len(window) > first + 1)
    assert 0 < result.kld_mean < 5e-3 and result.same_top > 0.97
    assert result.packed_bits == 4.53125 and 4.53125 < result.kv_bits_per_value < 16
    for ctx in (300, 321):
        with pytest.raises(UsageError, match=f"windows of {ctx} tokens: none reads a packed page, which needs 322") as refused:
            list(kld(packed, engines[1], tokenizer, text, ctx))
        assert refused.value.hint.startswith("a larger -c")
    with pytest.raises(UsageError, match="windows of 4 tokens: none reads") as refused:
        list(kld(packed, engines[1], tokenizer, tokenizer.decode(tokenizer.encode(text)[:4]), 800))
    assert refused.value.hint.startswith("a longer text")
    short = tokenizer.decode(tokenizer.encode(text)[:330])
    assert list(kld(packed, engines[1], tokenizer, short, 322))[-1].tokens == 1


@pytest.mark.slow
def test_an_answers_kernels_are_scored_token_by_token(packed, engines, tokenizer):
    """The same logits as steps of an answer give, not a prompt's; what they add to the loss of the cache is a fraction of it."""
    text = tokenizer.decode(tokenizer.encode(sample_text())[:800])
    by_page, by_token = (list(kld(packed, engines[1], tokenizer, text, 800, by_token=how))[-1] for how in (False, True))
    assert by_token.tokens == by_page.tokens and by_token.kld_mean != by_page.kld_mean
    assert by_token.kld_mean < 1.5 * by_page.kld_mean and by_token.same_top > 0.97
    ids = tokenizer.encode(sample_text())[:340]
    rows = np.concatenate([logits.copy() for _, logits in packed.score(ids, 1, by_token=True)])
    packed.reset()
    assert np.array_equal(rows, np.stack([packed.forward_logits([token])[0].copy() for token in ids]))


def test_recall_counts_what_both_caches_find(packed, engines, tokenizer):
    result = list(recall(packed, engines[1], tokenizer, sample_text(), 768, samples=2))[-1]
    assert [row.spread for row in result.rows] == [0.3, 0.95] and all(row.tokens > 20 for row in result.rows)
    assert all(row.right_exact > 0.9 and row.right == row.right_exact for row in result.rows)
    assert result.to_json()["rows"][0]["comparable"] == (result.rows[0].right_exact >= 0.99)


@pytest.mark.slow
def test_a_model_that_forgets_is_counted(engines, tokenizer):
    """Facts cut off from their questions cannot be found: the measure is not blind."""
    broken = list(open_engine(FABLE, EngineOptions(device="cpu", kv="32bit")))[-1]
    score = broken.score
    broken.score = lambda ids, pages=None: score([7] * (len(ids) // 2) + list(ids[len(ids) // 2 :]), pages)
    try:
        row = list(recall(broken, engines[1], tokenizer, sample_text(), 512, samples=2))[-1].rows[0]
    finally:
        broken.close()
    assert row.right < 0.7 < row.right_exact


def test_recall_wants_a_text_and_room(engines, tokenizer):
    with pytest.raises(UsageError, match="less than a context of 768"):
        list(recall(engines[0], engines[1], tokenizer, "a short one", 768))
    with pytest.raises(UsageError, match="no room for a fact and a question"):
        list(recall(engines[0], engines[1], tokenizer, sample_text(), 24))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """fable with one NaN in the weights of its last norm."""
    import json

    folder = tmp_path_factory.mktemp("damaged")
    for path in FABLE.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(weights[:8], "little")
    norm = json.loads(weights[8 : 8 + size])["model.norm.weight"]
    assert norm["dtype"] == "BF16"
    at = 8 + size + norm["data_offsets"][0] + 2 * 3
    weights[at : at + 2] = b"\xc0\x7f"
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize("words", [("ppl", "{damaged}"), ("kld", "{damaged}"), ("kld", str(FABLE), "--against", "{damaged}")])
def test_a_model_that_makes_no_numbers_has_no_perplexity(damaged, tmp_path, words, json):
    import io
    import os
    from json import loads

    from effllm.cli.app import main
    from effllm.cli.environment import Environment

    (tmp_path / "text.txt").write_text(TEXT)
    world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    words = [word.format(damaged=damaged) for word in words]
    code = main(["eval", *words, "--text", str(tmp_path / "text.txt"), "-c", "200", *json], world)
    lines = world.stderr.getvalue().splitlines()
    out = world.stdout.getvalue()
    assert code == 1 and (not out if not json else f"effllm: {loads(out)['error']}" == lines[-2]), lines
    assert lines[-2] == "effllm: tensor model.norm.weight holds NaN or infinity: the checkpoint is damaged"
    assert lines[-1].startswith("hint: ")


def test_logits_that_overflowed_and_a_loss_beyond_numbers_are_reported(engines, tokenizer, monkeypatch):
    usual = engines[0].model.logits

    def infinite(x):
        out = usual(x)
        out[0, 5] = np.inf
        return out

    monkeypatch.setattr(engines[0].model, "logits", infinite)
    with pytest.raises(EffllmError, match="the model produced infinite logits"):
        list(perplexity(engines[0], tokenizer, TEXT, 200))
    monkeypatch.setattr(engines[0].model, "logits", lambda x: usual(x) * np.float32(1e4))
    with pytest.raises(EffllmError, match=r"a loss of \d+ nats a token is beyond any perplexity"):
        list(perplexity(engines[0], tokenizer, TEXT, 200))
    with pytest.raises(EffllmError, match="beyond any perplexity"):
        list(kld(engines[0], engines[1], tokenizer, TEXT, 200))
