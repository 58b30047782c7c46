"""Whole runs of a mixture larger than its budget, in processes of their own: memory, refusals, what is remembered, and failures."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from streamed_models import FABLE, differing, random_folder
from test_streamed_runs import HANGS, MIB, MINUTES, finish, peak, start

from effllm.offload.expert_pager import TRACE_TOKENS
from effllm.runtime.weights import expert_trace

LAYERS, EXPERTS, TOP = 6, 24, 2

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")


def large_mixture(folder: Path) -> Path:
    """A quarter of a gigabyte of experts with random weights in bf16, side by side, and the packaged model's tokenizer."""
    fable = json.loads((FABLE / "config.json").read_text())
    shape = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 512,
             "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": TOP, "norm_topk_prob": True,
             "max_position_embeddings": 2048, "vocab_size": fable["vocab_size"], "bos_token_id": fable.get("bos_token_id"),
             "eos_token_id": fable.get("eos_token_id"), "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return random_folder(folder, shape, differing(np.random.default_rng(5)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_mixture(tmp_path_factory.mktemp("models") / "mixture")


@pytest.fixture(autouse=True, scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory):
    """What these runs remember of routing is theirs; compiled kernels stay where they are."""
    from effllm.kernels.compile import cache_root

    own, before = tmp_path_factory.mktemp("cache"), os.environ.get("XDG_CACHE_HOME")
    (own / "effllm").mkdir()
    if (cache_root() / "kernels").is_dir():
        (own / "effllm" / "kernels").symlink_to(cache_root() / "kernels")
    os.environ["XDG_CACHE_HOME"] = str(own)
    yield own / "effllm" / "experts"
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


def answer(model: Path, *more: object, tokens: int = 40) -> tuple[object, ...]:
    return ("run", model, "--raw", "word " * 60, "-n", tokens, "--temp", 0, "--ignore-eos", "-c", 512, "--device", "cpu", "--json", *more)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict:
    return json.loads(finish(start(*answer(model)))[0])


@pytest.fixture(scope="module")
def refused(model: Path) -> str:
    out, err = finish(start(*answer(model, "--ram", "64M")), 4)
    assert json.loads(out)["code"] == 4
    return err


@pytest.fixture(scope="module")
def least(refused: str) -> int:
    return int(re.search(r"it takes --ram (\d+)Mi", refused).group(1))


def test_too_few_slots_are_refused_with_the_number(refused: str) -> None:
    assert f"of {LAYERS * EXPERTS} experts" in refused and f"it takes {2 * TOP * LAYERS}, {2 * TOP} a layer" in refused


@pytest.mark.parametrize("more", (8, pytest.param(60, marks=pytest.mark.slow)))
def test_a_run_keeps_to_its_budget_and_answers_the_same(model: Path, expected: dict, least: int, more: int) -> None:
    out, err = finish(start(*answer(model, "--ram", f"{least + more}Mi", "--stats")))
    found = json.loads(out)
    assert found["token_ids"] == expected["token_ids"] and found["text"] == expected["text"]
    assert peak(err) <= (least + more) * MIB, f"{peak(err) / MIB:.0f} MiB of {least + more} used"
    experts = found["placement"]["experts"]
    assert 2 * TOP * LAYERS <= experts["slots"] < experts["total"] == LAYERS * EXPERTS
    assert experts["needed"] == 39 * LAYERS * TOP and experts["found"] == round(experts["hit_rate"] * experts["needed"])
    assert 0 < experts["ready"] <= experts["found"] + experts["guesses_used"]
    assert re.search(rf"of {experts['needed']} needed \([\w-]+\), \d+% with prefetched ones; \d+ of \d+ prefetched experts were used", err)
    assert f"{experts['slots']} of {LAYERS * EXPERTS} experts stay in memory" in err
    assert found["io"]["disk_bytes_read"] > 0


@pytest.mark.slow
def test_a_quantized_mixture_keeps_to_its_budget(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", options("4bit"))
    whole = json.loads(finish(start(*answer(tmp_path / "out")))[0])
    _, err = finish(start(*answer(tmp_path / "out", "--ram", "64M")), 4)
    budget = int(re.search(r"it takes --ram (\d+)Mi", err).group(1)) + 4
    out, err = finish(start(*answer(tmp_path / "out", "--ram", f"{budget}Mi")))
    assert json.loads(out)["token_ids"] == whole["token_ids"] and peak(err) <= budget * MIB


@pytest.mark.slow
def test_the_next_run_knows_how_tokens_were_routed(model: Path, least: int, traces: Path) -> None:
    """And says what it expects of its slots; another model's trace, or a damaged one, is nothing."""
    for path in traces.glob("*"):
        path.unlink()
    command = answer(model, "--ram", f"{least + 60}Mi", tokens=60)
    first = json.loads(finish(start(*command))[0])["placement"]["experts"]
    (kept,) = traces.glob("*.npy")
    assert np.load(kept).shape == (59, LAYERS, TOP) and not first["replayed"]
    out, err = finish(start(*command))
    second = json.loads(out)["placement"]["experts"]
    assert second["policy"] in second["replayed"] and second["expected_hit_rate"] == max(second["replayed"].values())
    assert "judging by its last tokens" in err and np.load(kept).shape == (118, LAYERS, TOP)
    planned = json.loads(finish(start("plan", model, "-c", 512, "--ram", f"{least + 60}Mi", "--device", "cpu", "--json", "--no-probe"))[0])
    assert abs(planned["experts"]["slots"] - second["slots"]) < 8 and planned["experts"]["expected_hit_rate"] > 0
    assert planned["tiers"]["disk"]["weights_bytes"] > 0 and planned["total_bytes"] <= (least + 60) * MIB
    for content in (b"", b"no array", kept.read_bytes()[:200]):
        kept.write_bytes(content)
        assert expert_trace.load_trace(kept.stem, LAYERS, TOP, EXPERTS) is None
    finish(start(*command))
    assert np.load(kept).shape == (59, LAYERS, TOP)


def test_traces_are_bounded_and_checked(traces: Path) -> None:
    some = np.arange(2 * TRACE_TOKENS * 6, dtype=np.uint16).reshape(-1, 3, 2) % 9
    expert_trace.save_trace("one", some)
    assert np.array_equal(expert_trace.load_trace("one", 3, 2, 9), some[-TRACE_TOKENS:])
    for layers, per_token, experts in ((2, 2, 9), (3, 1, 9), (3, 2, 8)):
        assert expert_trace.load_trace("one", layers, per_token, experts) is None
    assert expert_trace.load_trace("other", 3, 2, 9) is None
    for i in range(expert_trace.MOST_FILES + 3):
        expert_trace.save_trace(f"model{i}", some[:40])
    assert len(list(traces.glob("*"))) == expert_trace.MOST_FILES


def writing(model: Path, least: int, before: str = "") -> subprocess.Popen:
    """A run that writes an answer; it has begun when this returns."""
    child = start("run", model, "--raw", "word " * 60, "-n", 400, "--temp", 1.5, "--seed", 3, "--ignore-eos", "-c", 512, "--device", "cpu",
                  "--ram", f"{least + 4}Mi", before=before)
    assert child.stdout.read(1)
    return child


# The same where the system queues reads; and a system that does not.
QUEUE_HANGS = """
from effllm.offload.linux_aio import AioQueue
collect = AioQueue.collect
def hanging(queue, least=0, patience_s=0.0):
    if os.path.exists({file!r}) and least:
        print("hangs", file=sys.stderr, flush=True)
        threading.Event().wait(patience_s)
    return [] if os.path.exists({file!r}) else collect(queue, least, patience_s)
AioQueue.collect = hanging
"""
NO_QUEUE = """
from effllm.offload import async_reader
def without_queue(*more):
    raise OSError(38, "Function not implemented")
async_reader.AioQueue = without_queue
"""


@pytest.mark.slow
@pytest.mark.parametrize("hangs", (QUEUE_HANGS, NO_QUEUE + HANGS), ids=("queue", "threads"))
def test_ctrl_c_while_the_disk_hangs_keeps_what_was_written(model: Path, least: int, tmp_path: Path, hangs: str) -> None:
    child = writing(model, least, hangs.format(file=str(tmp_path / "hang")))
    (tmp_path / "hang").touch()
    while "hangs" not in child.stderr.readline():
        continue
    child.send_signal(signal.SIGINT)
    out, err = finish(child, 130)
    assert out.endswith("\n") and re.search(r"stopped by Ctrl-C after \d+ token", err)


@pytest.mark.slow
@pytest.mark.parametrize("damage", (lambda path: os.truncate(path, 20 * MIB), lambda path: os.utime(path, ns=(0, 0))),
                         ids=("cut", "rewritten"))
def test_weights_that_change_under_a_run_end_it_with_one_line(model: Path, least: int, tmp_path: Path, damage) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    child = writing(copy, least)
    damage(copy / "model.safetensors")
    out, err = finish(child, 1)
    errors = [line for line in err.splitlines() if line.startswith("effllm: ")]
    assert re.search("became shorter|changed while", errors[-1]) and "hint: " in err


@pytest.mark.slow
def test_weights_that_are_deleted_are_read_to_the_end(model: Path, least: int, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    child = writing(copy, least)
    (copy / "model.safetensors").unlink()
    for _ in range(20):
        assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=MINUTES)
    assert child.returncode == 130
