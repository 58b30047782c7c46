"""Models with bidirectional attention: transformers' embeddings, from folders, quantized folders and GGUF files; and what they refuse."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from bidirectional_models import INNER, WIDTH, as_gguf, both_ways, mean_of, turned_both_ways
from gguf_samples import add_fable_tokenizer, write_model
from hub_user import HubUser
from packaged_embedder import FABLE
from safetensors.numpy import load_file

from effllm import EffllmError, UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.generation.embedding import MEAN, embed_text, read_dense_layers, read_pooling_mode

LENGTHS = (1, 2, 9, 10, 40, 300, 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return both_ways(tmp_path_factory.mktemp("models") / "both")


@pytest.fixture(scope="module")
def engine(model: Path):
    *_, engine = open_engine(model, EngineOptions(ctx=512))
    yield engine
    engine.close()


def ids_of(count: int) -> list[int]:
    return [1 + (7 * each + 3 * (each // 11)) % 300 for each in range(count)]


def made(engine: Engine, ids: list[int], dense: tuple = ()) -> np.ndarray:
    steps = embed_text(engine, ids, MEAN, lambda: False, dense)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def through_dense(folder: Path, mean: np.ndarray) -> np.ndarray:
    for name in ("2_Dense", "3_Dense"):
        mean = load_file(folder / name / "model.safetensors")["linear.weight"].astype(np.float64) @ mean
    return mean / np.linalg.norm(mean)


def test_vectors_are_those_of_transformers(model: Path, engine: Engine) -> None:
    """With windows of an odd and an even width, shorter and longer texts than they, of more tokens than a pass of other models takes."""
    dense = read_dense_layers(model, WIDTH)
    assert read_pooling_mode(model) == MEAN and [each.matrix.shape for each in dense] == [(INNER, WIDTH), (WIDTH, INNER)]
    for count in LENGTHS:
        own, theirs = made(engine, ids_of(count), dense), through_dense(model, mean_of(model, ids_of(count)))
        assert np.abs(own - theirs).max() < 1e-4 * np.abs(theirs).max(), count


def test_a_text_does_not_depend_on_the_one_before(engine: Engine) -> None:
    first = made(engine, ids_of(40))
    made(engine, ids_of(300)[::-1])
    assert np.array_equal(made(engine, ids_of(40)), first) and engine.tokens == []


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 16, 17, 128])
def test_windows_of_every_width(tmp_path: Path, window: int) -> None:
    folder = both_ways(tmp_path / "model", window)
    *_, engine = open_engine(folder, EngineOptions())
    assert engine.n_ctx == 1024 and {*engine.config.windows} == {None, window // 2 + 1}
    for count in (33, 129, 1024):
        own, theirs = made(engine, ids_of(count)), mean_of(folder, ids_of(count))
        assert np.abs(own - theirs / np.linalg.norm(theirs)).max() < 1e-4 * np.abs(own).max()
    engine.close()


def test_it_writes_no_text_and_is_not_scored(engine: Engine) -> None:
    for run in (lambda: list(engine.prefill([5, 6])), lambda: list(engine.score([5, 6]))):
        with pytest.raises(UsageError, match="embedding model, which does not generate text") as refused:
            run()
        assert "effllm embed" in refused.value.hint


@pytest.mark.parametrize("options", [{"kv": "4bit"}, {"kv_ram": "1M"}, {"device": "cuda"}, {"gpu_layers": 2}])
def test_what_such_a_pass_cannot_do(model: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="uses bidirectional attention"):
        list(open_engine(model, EngineOptions(**options)))
    if "kv" in options:
        *_, engine = open_engine(model, EngineOptions(ctx=128, from_settings=frozenset(options), **options))
        assert not engine.cache.is_packed and engine.options.kv == "32bit"
        engine.close()


def test_matrices_go_along_where_a_model_is_made_smaller(model: Path, tmp_path: Path) -> None:
    user = HubUser(tmp_path, "http://127.0.0.1:9")
    out = tmp_path / "b"
    assert user.run("quantize", model, "-o", out, "--bits", "8", "--no-kv-profile").code == 0
    assert user.run("verify", out).code == 0
    for own, whole in zip(read_dense_layers(out, WIDTH), read_dense_layers(model, WIDTH), strict=True):
        assert np.array_equal(own.matrix, whole.matrix)
    *_, small = open_engine(out, EngineOptions(ctx=128))
    own, theirs = made(small, ids_of(60), read_dense_layers(out, WIDTH)), through_dense(model, mean_of(model, ids_of(60)))
    small.close()
    assert own @ theirs > 0.99


def test_gguf_files_hold_them_too(tmp_path: Path) -> None:
    """Every sixth layer has full attention, which such files do not state."""
    folder = both_ways(tmp_path / "model", num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"],
                       query_pre_attn_scalar=32)
    for kind, near in (("F32", 1e-4), ("Q8_0", 0.2)):
        path = as_gguf(folder, tmp_path / f"{kind}.gguf", kind)
        *_, engine = open_engine(path, EngineOptions(ctx=128))
        assert read_pooling_mode(path) == MEAN and engine.config.bidirectional and engine.config.windows == (9,) * 5 + (None,)
        own, theirs = made(engine, ids_of(60), read_dense_layers(path, WIDTH)), through_dense(folder, mean_of(folder, ids_of(60)))
        engine.close()
        assert np.abs(own - theirs).max() < near * np.abs(theirs).max(), kind
    assert read_dense_layers(as_gguf(folder, tmp_path / "bare.gguf", dense=False), WIDTH) == ()


@pytest.mark.parametrize(("change", "said"), [
    (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "has no 2_Dense/model.safetensors"),
    (lambda folder: (folder / "3_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.ELU"})), "'ELU'"),
    (lambda folder: (folder / "3_Dense" / "model.safetensors").write_bytes((folder / "2_Dense" / "model.safetensors").read_bytes()),
     "has the shape")])
def test_matrices_that_do_not_run(tmp_path: Path, change: object, said: str) -> None:
    folder = both_ways(tmp_path / "model")
    change(folder)
    with pytest.raises(EffllmError, match=said) as refused:
        read_dense_layers(folder, WIDTH)
    assert refused.value.hint


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_decoders_that_were_made_to_see_both_ways(tmp_path: Path, kind: str) -> None:
    """As is_causal says it, or the type of its own that NVIDIA's have; what such a config says beside is known."""
    model = turned_both_ways(tmp_path / "model", kind)
    assert not read_config(model, strict=True).warnings
    *_, engine = open_engine(model, EngineOptions(ctx=256))
    assert engine.config.bidirectional
    for count in (1, 9, 40, 250):
        theirs = mean_of(model, ids_of(count))
        own = made(engine, ids_of(count))
        assert np.abs(own - theirs / np.linalg.norm(theirs)).max() < 1e-4 * np.abs(own).max(), count
    engine.close()
    config = model / "config.json"
    stated = json.loads(config.read_text())
    if kind == "llama":
        config.write_text(json.dumps({**{key: each for key, each in stated.items() if key != "is_causal"}, "model_type": "llama_bidirec",
                                      "architectures": ["LlamaBidirectionalModel"], "pooling": "avg", "temperature": 0.02,
                                      "auto_map": {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}}))
        assert read_config(model, strict=True).bidirectional


@pytest.mark.parametrize(("kind", "window", "said"), [
    ("mistral", 16, {}), ("mistral", 1, {}), ("ministral3", 33, {}), ("qwen2", 128, {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", 9, {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]})])
def test_windows_of_such_decoders(tmp_path: Path, kind: str, window: int, said: dict[str, object]) -> None:
    """As many tokens on either side as the config says; texts shorter and longer than that, and than a page."""
    model = turned_both_ways(tmp_path / "model", kind, sliding_window=window, **said)
    config = read_config(model, strict=True)
    assert not config.warnings and {*config.windows} - {None} == {window + 1}
    *_, engine = open_engine(model, EngineOptions(ctx=384))
    for count in (1, window, window + 1, window + 2, 40, 300):
        own, theirs = made(engine, ids_of(count)), mean_of(model, ids_of(count))
        assert np.abs(own - theirs / np.linalg.norm(theirs)).max() < 1e-4 * np.abs(own).max(), count
    engine.close()


@pytest.mark.parametrize("arch", ["llama", "llama-embed"])
def test_a_gguf_file_says_it_too(tmp_path: Path, arch: str) -> None:
    """By attention.causal, as of a causal model made for embeddings by what it has learned since, or by an architecture of its own."""
    folder, file = tmp_path / "model", tmp_path / "m.gguf"
    shutil.copytree(FABLE, folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "is_causal": False}))

    def said(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        if arch == "llama":
            writer.add_causal_attention(False)

    write_model(FABLE, file, "F32", arch, said)
    *_, engine = open_engine(file, EngineOptions(ctx=128))
    theirs = mean_of(folder, ids_of(60))
    own = made(engine, ids_of(60))
    engine.close()
    assert np.abs(own - theirs / np.linalg.norm(theirs)).max() < 1e-4 * np.abs(own).max()
