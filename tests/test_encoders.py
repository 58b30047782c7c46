"""Encoders against transformers in float64, on small random models of each family: vectors and scores, texts of mixed lengths in a
batch."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import transformers
from encoder_models import MODULES, POOLING, WORDS, made_encoder, random_model, states_of, unit
from safetensors.torch import save_file

from effllm import ContextOverflow, DoesNotFit, EffllmError, UsageError
from effllm.offload.checkpoint import TensorStore
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.config_reader import ConfigError, read_json
from effllm.runtime.encoders import ENCODERS, is_encoder, is_encoder_config
from effllm.runtime.encoders.encoder import Encoder, EncoderOptions, open_encoder, plan_encoder, tokenizer_of
from effllm.runtime.encoders.encoder_config import ACTIVATION_NAMES, family_of, read_encoder_config
from effllm.runtime.encoders.weights import FolderTensors, Tensors
from effllm.runtime.events import Embedded, Progress, Ranked
from effllm.runtime.generation.served_encoder import ServedEncoder
from effllm.runtime.images.tower_ops import ACTIVATIONS

Result = TypeVar("Result")
# The class of transformers' and what a config of it says beside the usual sizes.
KINDS = {"bert": ("Bert", {}), "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
         "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "gelu_new"}),
         "camembert": ("Camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
         "deberta-v2": ("DebertaV2", {"relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
                                      "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}),
         "distilbert": ("DistilBert", {"hidden_dim": 80, "intermediate_size": None}),
         "electra": ("Electra", {"embedding_size": 24}), "ernie": ("Ernie", {"use_task_id": True}),
         "eurobert": ("EuroBert", {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4}),
         "gte": ("Gte", {"pad_token_id": 1}),
         "jina_embeddings_v3": ("JinaEmbeddingsV3", {"pad_token_id": 1, "type_vocab_size": 1}),
         "mpnet": ("MPNet", {"pad_token_id": 1}), "nomic_bert": ("NomicBert", {}),
         "modernbert": ("ModernBert", {"num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0, "bos_token_id": 2,
                                       "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3})}
LENGTHS = (1, 7, 7, 2, 130, 7, 390, 40)  # several alike, some longer than a piece of attention
TEXTS = ["The fox is king.", "who rules all beasts?", "the sea was calm, the fox was king of all beasts"]


def opened(folder: Path, **options: object) -> Encoder:
    plan = plan_encoder(folder, EncoderOptions(**options))
    *_, made = open_encoder(plan, tokenizer_of(folder, plan.config))
    return made


def returned(steps: Iterator[object]) -> object:
    """What a generator returns, once it has ended."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def never() -> bool:
    return False


def rows_of(lengths: tuple[int, ...] = LENGTHS, least: int = 5) -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [[int(each) for each in draw.integers(least, len(WORDS), length)] for length in lengths]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_encoder(tmp_path_factory.mktemp("bert") / "model", random_model("Bert"), longest=256)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    name, more = KINDS[kind]
    model = random_model(name, **more)
    encoder = opened(made_encoder(tmp_path / "m", model), threads=2)
    rows = [row for row in rows_of() if len(row) <= encoder.n_ctx]
    made = returned(encoder.vectors(rows, never))
    for row, own in zip(rows, made, strict=True):
        np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


def test_every_family_is_compared() -> None:
    assert KINDS.keys() | {"new", "jina_bert", "xlm_roberta_flash"} == ENCODERS.keys() and {*ACTIVATION_NAMES} <= ACTIVATIONS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_read(kind: str, tmp_path: Path) -> None:
    """But for the pooler, which pooling of other kinds does not ask."""
    name, more = KINDS[kind]
    folder = made_encoder(tmp_path / "m", random_model(name, **more))
    config = read_encoder_config(folder, strict=True)
    assert not config.warnings, "what transformers writes is known"
    with TensorStore.open(folder) as store:
        tensors = Tensors(FolderTensors(store, family_of(config.family).PREFIXES))
        family_of(config.family).load(config, tensors)
        assert tensors.read == {each for each in store.tensors if "pooler" not in each}


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_gte_as_it_is_published(tmp_path: Path, head: str) -> None:
    """`new`: other keys, the prefix new., no table of types."""
    from safetensors.torch import load_file, save_file

    rope = {"rope_type": "default", "rope_theta": 20000.0}
    model = random_model("Gte", head, type_vocab_size=0, pad_token_id=0, num_labels=1, rope_parameters=rope)
    folder = made_encoder(tmp_path / "m", model)
    raw = read_json(folder / "config.json")
    del raw["rope_parameters"]
    raw |= {"model_type": "new", "architectures": [f"New{head}"], "rope_theta": 20000, "rope_scaling": None,
            "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True, "logn_attention_scale": False,
            "logn_attention_clip1": False, "unpad_inputs": False, "use_memory_efficient_attention": False}
    (folder / "config.json").write_text(json.dumps(raw))
    stored = load_file(folder / "model.safetensors")
    renamed = {name if name.startswith("classifier") else f"new.{name.removeprefix('gte.')}": each for name, each in stored.items()}
    save_file(renamed, folder / "model.safetensors")
    assert not read_encoder_config(folder, strict=True).warnings
    encoder, row = opened(folder), rows_of((30,))[0]
    if encoder.config.ranks:
        *_, ranked = ServedEncoder(encoder).rank(TEXTS[1], [TEXTS[0]])
        ids, _ = ServedEncoder(encoder).tokenizer.encode_pair(TEXTS[1], TEXTS[0])
        with torch.no_grad():
            logit = model.double()(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0, 0]
        assert ranked.scores[0] == pytest.approx(float(torch.sigmoid(logit)), abs=2e-6)
        return
    (own,) = returned(encoder.vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)
    (folder / "config.json").write_text(json.dumps({**raw, "rope_scaling": {"type": "ntk", "factor": 2.0}}))
    (stretched,) = returned(opened(folder).vectors([row], never))
    places = torch.arange(0, 12, 2, dtype=torch.float64) / 12  # transformers has no such scaling: its frequencies are put there
    model.rotary_emb.inv_freq = (20000.0 * 2.0) ** -places / 2.0 ** (2 / 12)
    np.testing.assert_allclose(unit(stretched), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)
    assert np.abs(unit(stretched) - unit(own)).max() > 1e-3
    (folder / "config.json").write_text(json.dumps(
        {name: each for name, each in raw.items() if name not in ("max_position_embeddings", "rope_theta")}))
    unsaid = read_encoder_config(folder)
    assert (unsaid.context_length, unsaid.rope_thetas[0]) == (2048, 10000.0)
    for changed, said in (({"pack_qkv": False}, "pack_qkv = False"),
                          ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'"),
                          ({"rope_scaling": {"type": "ntk", "factor": 0.5}}, "a number above 1"),
                          ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "mixed_b = 0.5"),
                          ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'")):
        (folder / "config.json").write_text(json.dumps({**raw, **changed}))
        with pytest.raises(ConfigError, match=said):
            read_encoder_config(folder)


@pytest.mark.parametrize(("pooling", "expected"), [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda states: states[0]),
    ({"pooling_mode_max_tokens": True}, lambda states: states.max(0)), ({"pooling_mode": "lasttoken"}, lambda states: states[-1]),
    ({"pooling_mode": "cls"}, lambda states: states[0]), ({"pooling_mode_mean_sqrt_len_tokens": True}, lambda states: states.sum(0)),
    ({"pooling_mode_weightedmean_tokens": True}, lambda states: (states * np.arange(1, len(states) + 1)[:, None]).sum(0))])
def test_ways_of_pooling(bert: Path, tmp_path: Path, pooling: dict, expected: Callable[[np.ndarray], np.ndarray]) -> None:
    folder = shutil.copytree(bert, tmp_path / "m")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    row = rows_of((9,))[0]
    (own,) = returned(opened(folder).vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(expected(states_of(random_model("Bert"), row))), atol=2e-6, rtol=0)


DENSE = {"in_features": 48, "out_features": 24, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def with_dense(bert: Path, folder: Path, dense: torch.nn.Linear) -> Path:
    """The model with a matrix behind its mean."""
    shutil.copytree(bert, folder)
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": dense.weight.data, "linear.bias": dense.bias.data}, folder / "2_Dense" / "model.safetensors")
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE))
    layer = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*MODULES[:2], layer, MODULES[2]]))
    return folder


def test_a_layer_after_the_pooling(bert: Path, tmp_path: Path) -> None:
    dense = torch.nn.Linear(48, 24)
    folder = with_dense(bert, tmp_path / "m", dense)
    encoder, row = opened(folder), rows_of((9,))[0]
    (own,) = returned(encoder.vectors([row], never))
    mean = torch.tensor(states_of(random_model("Bert"), row).mean(0))
    assert encoder.width == 24
    np.testing.assert_allclose(own, torch.tanh(dense.double()(mean)).detach().numpy(), atol=5e-6, rtol=0)
    (folder / "2_Dense" / "config.json").write_text(json.dumps({**DENSE, "in_features": 40}))
    with pytest.raises(ConfigError, match="which takes 48 inputs"):
        opened(folder)


def test_a_token_that_pads_has_no_place_in_roberta(tmp_path: Path) -> None:
    model = random_model("Roberta", pad_token_id=1, type_vocab_size=1)
    row = [5, 6, 1, 7, 1, 8]
    (own,) = returned(opened(made_encoder(tmp_path / "m", model)).vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model("Bert").to(dtype)
    row = rows_of((9,))[0]
    (own,) = returned(opened(made_encoder(tmp_path / "m", model)).vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


def test_norms_by_their_former_names(bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(bert, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    former = {f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
              for name, each in tensors.items()}
    save_file(former, folder / "model.safetensors")
    row = rows_of((9,))[0]
    own, other = (returned(opened(each).vectors([row], never))[0] for each in (folder, bert))
    assert (own == other).all()


HEADS = {**{kind: KINDS[kind] for kind in
            ("bert", "xlm-roberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "gte", "jina_embeddings_v3", "mpnet")},
         "eurobert-mean": ("EuroBert", {**KINDS["eurobert"][1], "classifier_pooling": "mean"}),
         "modernbert": ("ModernBert", {**KINDS["modernbert"][1], "classifier_pooling": "mean"})}


@pytest.mark.parametrize("kind", HEADS)
def test_scores_are_the_sigmoid_of_the_head(kind: str, tmp_path: Path) -> None:
    name, more = HEADS[kind]
    model = random_model(name, "ForSequenceClassification", num_labels=1, **more)
    encodings = ServedEncoder(opened(made_encoder(tmp_path / "m", model, pooling=None)))
    *_, ranked = encodings.rank(TEXTS[1], [TEXTS[0], TEXTS[2], "a [SEP] b"])
    assert isinstance(ranked, Ranked)
    model.double()
    for document, score in zip((TEXTS[0], TEXTS[2], None), ranked.scores, strict=True):
        if document is None:  # a mark in a document is letters, which this vocabulary has not
            continue
        ids, types = encodings.tokenizer.encode_pair(TEXTS[1], document)
        told = {"token_type_ids": torch.tensor([types])} if kind in ("bert", "electra", "ernie") else {}
        with torch.no_grad():
            logit = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **told).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=2e-6)
    ids, _ = encodings.tokenizer.without_special_tokens.encode_pair(TEXTS[1], "a [SEP] b")
    assert ids.count(WORDS.index("[SEP]")) == 2
    with pytest.raises(UsageError, match="does not take an instruction"):
        next(encodings.rank("a", ["b"], "Find boats."))
    with pytest.raises(UsageError, match="makes no embeddings"):
        next(encodings.embed(["a"]))


def test_texts_and_ids(bert: Path) -> None:
    encodings = ServedEncoder(opened(bert))
    *_, embedded = encodings.embed(TEXTS)
    assert isinstance(embedded, Embedded) and embedded.tokens == sum(len(encodings.tokenizer.encode(text)) for text in TEXTS)
    assert all(np.linalg.norm(each) == pytest.approx(1, abs=1e-6) for each in embedded.vectors)
    *_, by_ids = encodings.embed([encodings.tokenizer.encode(text) for text in TEXTS])
    assert all((own == other).all() for own, other in zip(embedded.vectors, by_ids.vectors, strict=True))
    assert encodings.tokenizer.encode(TEXTS[0])[::len(encodings.tokenizer.encode(TEXTS[0])) - 1] == [2, 3]
    with pytest.raises(ContextOverflow, match="a text has 302 tokens and the context holds 256"):
        [*encodings.embed(["fox " * 300])]
    *_, cut = encodings.embed(["fox " * 300], truncate=True)
    assert cut.tokens == 256
    with pytest.raises(UsageError, match="outside the vocabulary"):
        [*encodings.embed([[5, 4000]])]
    with pytest.raises(UsageError, match="no ranking head"):
        next(encodings.rank("a", ["b"]))
    assert not any(isinstance(each, Embedded) for each in encodings.embed(TEXTS, cancelled=lambda: True))


def test_what_nobody_waits_for_ends_amid_the_layers(bert: Path) -> None:
    asked = iter([False] * 3)
    assert returned(opened(bert).vectors(rows_of((30, 40)), lambda: next(asked, True))) is None


def test_many_texts_go_through_in_parts(bert: Path) -> None:
    encoder, rows = opened(bert), rows_of((200,) * 45)
    told = [each for each in encoder.vectors(rows, never) if isinstance(each, Progress)]
    assert [(each.done, each.total) for each in told] == [(20, 45), (40, 45)]


def test_what_is_not_one_of_them(bert: Path, tmp_path: Path) -> None:
    assert is_encoder(bert) and not is_encoder(tmp_path) and not is_encoder(tmp_path / "no.gguf")
    with pytest.raises(UsageError, match="an embedding model, which does not generate text"):
        read_config(bert)
    with pytest.raises(UsageError, match="reranker, which does not generate text"):
        parse_config({"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    with pytest.raises(EffllmError, match="not supported|not known|unknown"):
        parse_config({"model_type": "bert", "architectures": ["BertLMHeadModel"]})


@pytest.mark.parametrize(("changed", "said"), [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not supported"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"), ({"num_attention_heads": 5}, "is not a multiple"),
    ({"hidden_size": True}, "hidden_size is True"), ({"hidden_size": 96}, "but the config says"),
    ({"architectures": ["BertForTokenClassification"]}, "expected a ...Model"),
    ({"architectures": ["BertForSequenceClassification"]}, "a classification head with 2 labels is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported for encoders"),
    ({"num_hidden_layers": 4}, "holds no tensor encoder.layer.3")])
def test_what_does_not_run_is_named(bert: Path, tmp_path: Path, changed: dict, said: str) -> None:
    folder = shutil.copytree(bert, tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **changed}))
    with pytest.raises(EffllmError) as refused:
        opened(folder)
    assert said in refused.value.message and refused.value.hint


@pytest.mark.parametrize(("name", "content", "said"), [
    ("1_Pooling/config.json", {**POOLING, "pooling_mode_cls_token": True}, "cls and mean"),
    ("1_Pooling/config.json", {"pooling_mode": "sum"}, "'sum'"), ("1_Pooling/config.json", {}, "which is not supported"),
    ("modules.json", [*MODULES, {"type": "sentence_transformers.models.WordWeights", "path": "3"}], "wordweights"),
    ("modules.json", [{"type": 3}], "is not a list of modules"), ("modules.json", {"a": 1}, "is not a list of modules"),
    ("modules.json", [{"type": "a.Pooling", "path": "../1_Pooling"}], "outside of the model's folder")])
def test_ways_that_do_not_run_are_named(bert: Path, tmp_path: Path, name: str, content: object, said: str) -> None:
    folder = shutil.copytree(bert, tmp_path / "m")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(EffllmError) as refused:
        opened(folder)
    assert said in refused.value.message and refused.value.hint


def test_a_model_that_says_nothing_of_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this model's folder states no pooling"):
        opened(made_encoder(tmp_path / "m", random_model("Bert"), pooling=None))


def test_context_and_memory(bert: Path) -> None:
    assert plan_encoder(bert, EncoderOptions()).context == 256 and plan_encoder(bert, EncoderOptions(ctx=64)).context == 64
    with pytest.raises(UsageError, match="-c 300 is more than the 256"):
        plan_encoder(bert, EncoderOptions(ctx=300))
    given = plan_encoder(bert, EncoderOptions(ctx=300, caps_ctx=True))
    assert given.context == 256 and "ignored" in given.notices[-1]
    with pytest.raises(DoesNotFit, match="for weights"):
        plan_encoder(bert, EncoderOptions(ram="1Mi"))


def test_configs_of_nomic_as_they_were_published(tmp_path: Path) -> None:
    """Whose names of tensors transformers writes too."""
    model = random_model("NomicBert")
    folder, row = made_encoder(tmp_path / "m", model), rows_of((20,))[0]
    said = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4,
            "n_positions": 400, "vocab_size": len(WORDS) + 3, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12,
            "prenorm": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "type_vocab_size": 2}
    (folder / "config.json").write_text(json.dumps(said))
    (own,) = returned(opened(folder).vectors([row], never))
    np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)
    (folder / "config.json").write_text(json.dumps({**said, "num_shared_experts": 1}))
    with pytest.raises(ConfigError, match="num_shared_experts = 1 is not supported"):
        opened(folder)


def test_a_theta_of_nomic_may_stand_beside_its_section(tmp_path: Path) -> None:
    """As transformers reads it, for which a section without one says nothing."""
    folder = made_encoder(tmp_path / "m", random_model("NomicBert"))
    raw = read_json(folder / "config.json")
    raw.pop("rope_parameters")
    for said in ({}, {"rope_theta": 10_000.0}, {"rope_theta": 10_000.0, "rope_parameters": {"rope_type": "default"}},
                 {"rope_theta": 10_000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}):
        (folder / "config.json").write_text(json.dumps({**raw, **said}))
        theirs = transformers.AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"]
        assert set(read_encoder_config(folder).rope_thetas) == {theirs}


def test_values_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    model = random_model("Bert")
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[3] = float("nan")
    with pytest.raises(EffllmError, match="NaN or infinite numbers"):
        returned(opened(made_encoder(tmp_path / "m", model)).vectors(rows_of((4,)), never))


def test_values_that_are_not_finite_after_the_layers_are_reported(bert: Path, tmp_path: Path) -> None:
    folder = with_dense(bert, tmp_path / "m", torch.nn.Linear(48, 24))
    save_file({"linear.weight": torch.full((24, 48), torch.inf), "linear.bias": torch.zeros(24)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(EffllmError, match="NaN or infinite numbers"):
        returned(opened(folder).vectors(rows_of((4,)), never))


def test_a_list_of_modules_that_leads_nowhere_is_not_taken_for_none(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "m")
    (folder / "modules.json").unlink()
    (folder / "modules.json").symlink_to("gone")
    with pytest.raises(ConfigError, match="not a list of modules"):
        opened(folder)


def test_a_family_that_is_no_text_is_none() -> None:
    assert not is_encoder_config({"model_type": ["bert"]}) and not is_encoder_config({"model_type": {}})
