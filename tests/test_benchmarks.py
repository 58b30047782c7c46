"""Benchmark scripts, beyond their output: the depths at which rows start, and names of results."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from family_models import Case
from gpu_runs import card_here, simulated
from saved_models import saved

import effllm
from effllm.kernels.compile import cache_root

ROOT = Path(__file__).resolve().parent.parent
FABLE = Path(effllm.__path__[0]) / "models" / "fable"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    """Scripts by their names; they import one another from their folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_every_row_of_two_checkouts_begins_at_the_depth_asked_for(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each began where the one before had ended: the eight-token row of a result was measured a thousand tokens deeper than it said."""
    two: ModuleType = script("compare_checkouts")
    published: list[object] = []

    class Side:
        """As deep as a real one would be."""

        def __init__(self, checkout: Path, model: Path, threads: int, depth: int, ctx: int, kv: str) -> None:
            self.depth, self.ctx, self.held = depth, ctx, -1

        def begin(self) -> None:
            self.held = self.depth

        def seconds(self, tokens: int) -> tuple[float, int]:
            before, self.held = self.held, self.held + two.PASSES_PER_ROUND * tokens
            assert self.depth <= before and self.held <= self.ctx
            return 1.0, before

        def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr(two, "Side", Side)
    other = tmp_path / "effllm"
    other.mkdir()
    (other / "pyproject.toml").touch()
    monkeypatch.setattr(two, "HERE", other / "benchmarks")
    monkeypatch.setattr(two, "publish", lambda name, title, intro, figures, keep: published.extend(figures))
    monkeypatch.setattr(two.subprocess, "run", lambda *_, **__: type("Ran", (), {"stdout": "abc\n"})())
    monkeypatch.setattr(sys, "argv", ["compare_checkouts.py", str(other), "--depth", "100", "--tokens", "1", "2", "8", "--rounds", "3",
                                      "--no-results"])
    two.main()
    said = {figure.key: figure.conditions for figure in published}
    for tokens in (1, 2, 8):  # the first of four turns wakes the threads and is not counted
        assert f"at depths of {100 + 8 * tokens} to {100 + 4 * 8 * tokens} tokens" in said[f"ratio_{tokens}"]


@pytest.mark.slow
def test_a_side_of_two_checkouts_holds_the_depth_and_nothing_behind_it(script) -> None:
    two: ModuleType = script("compare_checkouts")
    side = two.Side(ROOT, FABLE, 1, 100, 400, "16bit")
    try:
        found = []
        for tokens in (1, 3):
            side.begin()
            found += [side.seconds(tokens)[1] for _ in range(2)]
        assert found == [100, 108, 100, 124]
    finally:
        side.close()


def test_figures_of_another_shape_take_no_other_place(script) -> None:
    sides: ModuleType = script("benchmark_processes")
    assert sides.result_name("kv-depth-4096", sides.SHAPE) == "kv-depth-4096"
    assert sides.result_name("kv-depth-4096", "llama3-8b") == "kv-depth-4096-llama3-8b"
    assert "llama3-8b" in script("kv_depth").INTRO.format(shape="llama3-8b")


def test_random_weights_are_quantized_once_and_a_folder_without_its_end_again(
        script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sides: ModuleType = script("benchmark_processes")
    made: list[Path] = []

    def quantize(folder: Path, target: Path, bits: str, extra: tuple[str, ...]) -> None:
        made.append(target)
        target.mkdir(exist_ok=True)
        (target / "effllm.json").write_text("{}")

    monkeypatch.setattr(sides, "quantize_effllm", quantize)
    (tmp_path / "own-4bit").mkdir()
    for _ in range(2):
        assert sides.quantized_folder(tmp_path, "4", 2) == tmp_path / "own-4bit"
    assert made == [tmp_path / "own-4bit"]


def test_a_gpu_is_measured_alternately_with_the_cpu(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    gpu: ModuleType = script("gpu_decode")
    gpu.PROMPT, gpu.TOKENS, gpu.CTX, gpu.GIB = 12, 2, 64, 1 << 20
    saved(Case("llama", {"hidden_size": 32, "intermediate_size": 48}, dtype="bfloat16"), tmp_path)
    words = ["--shape", str(tmp_path / "config.json"), "--bits", "4bit", "--rounds", "1", "--no-results"]
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", *words])
    with card_here(simulated()):
        gpu.main()
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["figures"]
    assert {f"4bit_{of}_{side}_tps" for of in ("prompt", "token") for side in ("card", "torch", "cpu")} < said.keys()
    assert min(said.values()) > 0


def test_the_page_of_results_says_what_the_results_say(script) -> None:
    index = script("index")
    assert (index.RESULTS / index.PAGE).read_text(encoding="utf-8") == index.page(), "python benchmarks/index.py"
    linked = {line.partition("](")[2].partition(")")[0] for line in index.page().splitlines() if "](" in line}
    assert {path.name for path in index.RESULTS.glob("*.md")} - {index.PAGE} <= linked


def test_a_result_without_a_table_is_listed_and_one_without_a_line_is_none(script, tmp_path: Path) -> None:
    index = script("index")
    line = {"benchmark": "of-its-own", "date": "2026-01-02 03:04 UTC", "machine": "X (znver4), 2 cores", "commit": "c0ffee", "figures": {}}
    (tmp_path / "of-its-own-x.md").write_text(f"# A title\n\n```json\n{json.dumps(line)}\n```\n")
    (tmp_path / "words.md").write_text("# No figures\n")
    assert "| A title | of-its-own | Zen 4 | [2026-01-02](of-its-own-x.md) |" in index.page(tmp_path)
    assert "words.md" not in index.page(tmp_path) and "## A 1.1B shape" not in index.page(tmp_path)


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "apart"))
def test_a_model_in_another_basis_computes_the_same_without_a_grid(script, tied: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:
                values += 0.3 * torch.randn(values.shape)
            else:  # blocks of 32 on a grid of their own, as a file of few bits has them
                blocks = values.view(-1, 32)
                scale = blocks.abs().amax(1, keepdim=True) / 7
                values.copy_(((blocks / scale).round() * scale).view(values.shape))
    ids = torch.arange(24)[None] * 5 % 64
    before = {name: values.clone() for name, values in model.named_parameters()}
    with torch.inference_mode():
        wanted = model(ids).logits
    script("dequantized_gguf").spread(model, 3)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    for name, values in model.named_parameters():
        assert not torch.equal(values, before[name]), name
        if values.ndim == 2:  # more numbers in a block than the grid has
            most = max(len(block.abs().mul(1e5).round().unique()) for block in values.detach().reshape(-1, 32))
            assert most > 8, name


@pytest.mark.slow
def test_predictions_are_held_against_what_runs(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """The machine is measured anew, and each test's prediction stands beside its measurement."""
    predictions = script("predictions")
    (tmp_path / "effllm").mkdir()
    (tmp_path / "effllm" / "kernels").symlink_to(cache_root() / "kernels")  # the child finds them compiled, and measures for itself
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["predictions.py", "--only", "fable", "--repetitions", "1", "--threads", "1", "--no-results"])
    predictions.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {"fable, bf16 pp512", "fable, bf16 tg32", "median prompts"} <= set(figures)
    assert all(0.05 < ratio < 20 for ratio in figures.values())
    names = [case.name for case in predictions.cases(tmp_path)]
    assert len(names) == len(set(names)) > 8 and not list(tmp_path.glob("random-*")), "nothing is made before it is measured"
