"""Audio input of Gemma 3n: mel bands and rows are those of transformers, padded to a fixed length, and so are the logits."""

import json

import numpy as np
import pytest
import torch
from audio_models import as_wav, sound
from command_line import CliRun
from family_models import assert_close
from family_sizes import GEMMA_3N
from omni_models import TEMPLATE
from transformers import Gemma3nAudioFeatureExtractor, Gemma3nConfig, Gemma3nForConditionalGeneration
from transformers.models.gemma3n import modeling_gemma3n
from vision_models import FABLE, FIRST

from effllm import UsageError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.images import EncodingJob, encoder_of, encoders_of
from effllm.runtime.images.media import open_media
from effllm.runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

# Words of the text model, of what sees and of what hears, one behind the other; an audio clip ends with one of the latter.
SEEN, HEARD, WORDS = FIRST + 4, FIRST + 8, 16
ADDED = {0: "<start_of_audio>", 8: "<end_of_audio>", 9: "<audio_soft_token>"}
PLACES = 10
TEXT = {**GEMMA_3N, "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "vocab_size": HEARD + WORDS, "vocab_size_per_layer_input": SEEN}
EARS = {"input_feat_size": 16, "hidden_size": 48, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 4,
        "conf_attention_chunk_size": 4, "conf_attention_context_left": 5, "conf_attention_context_right": 2,
        "sscp_conv_channel_size": [8, 6], "vocab_size": WORDS, "vocab_offset": HEARD}
EXTRACTOR = Gemma3nAudioFeatureExtractor(feature_size=16)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Without the vision tower, which transformers takes from a library of its own."""
    folder, usual = tmp_path_factory.mktemp("gemma3n"), modeling_gemma3n.AutoModel
    config = Gemma3nConfig(text_config=TEXT, audio_config=EARS, vision_config={"hidden_size": 48, "vocab_size": 4, "vocab_offset": SEEN},
                           audio_soft_tokens_per_image=PLACES, audio_token_id=FIRST + 9, boa_token_id=FIRST, eoa_token_id=FIRST + 8)

    class Deaf:
        @staticmethod
        def from_config(config, **more):
            return torch.nn.Identity() if config.model_type == "gemma3n_vision" else usual.from_config(config, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n, "AutoModel", Deaf)
        torch.manual_seed(3)
        model = Gemma3nForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    model.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {
        key: value for key, value in EXTRACTOR.to_dict().items() if isinstance(value, int | float | str | None)}}))
    (folder / "generation_config.json").write_text((FABLE / "generation_config.json").read_text())
    settings = json.loads((FABLE / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE.replace(
        "'<|' + p['type'] + '|>'", "'<audio_soft_token>'")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    like = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**like, "id": FIRST + at, "content": ADDED.get(at, f"<unused{at}>")} for at in range(10)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder, model


@pytest.mark.parametrize("samples", [640, 799, 3200, 12_800, 16_001, 20_000])
def test_bands_and_rows_are_those_of_transformers(gemma, samples):
    folder, model = gemma
    ears, taken = encoder_of(folder, read_config(folder), AUDIO_INPUT), sound(samples / 16_000)
    given = EXTRACTOR([taken], return_tensors="pt", return_attention_mask=True)
    assert given["input_features_mask"].all()
    assert_close(ears.values(taken), given["input_features"][0].numpy())
    with torch.inference_mode():
        wanted = model.model.get_audio_features(given["input_features"], ~given["input_features_mask"]).pooler_output[0].numpy()
    found = ears.encode(taken, EncodingJob())
    assert len(found.rows) == PLACES + 1 and len(found.tokens) == ears.token_count(samples) > len(found.rows)
    assert_close(found.rows[: len(wanted)], wanted)
    with pytest.raises(UsageError, match="too short for this model"):
        ears.token_count(512)


def test_logits_after_audio_are_those_of_transformers(gemma):
    folder, model = gemma
    engine = list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=512, strict=True, exact=True)))[-1]
    try:
        engine.media = open_media(folder, engine.config)
        samples = sound(0.8)
        heard = engine.media.add(samples)
        prompts = PromptBuilder(Tokenizer.load(folder, engine.config), media=engine.media)
        prompt = f"Once {heard.marker} was a fox."
        list(prompts.encode_media(prompt, engine, lambda: False))
        told = prompts.tokenize(prompt)
        ours = np.concatenate([logits.copy() for _, logits in engine.score(told)])
    finally:
        engine.close()
    rows = [place for place, token in enumerate(told) if token >= 1 << 40]
    for place in rows:
        told[place] = FIRST + 9
    told[rows[-1]] = FIRST + 8
    given = EXTRACTOR([samples], return_tensors="pt", return_attention_mask=True)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([told]), **given, use_cache=False).logits[0].numpy()
    assert told[rows[0] - 1] == FIRST and len(rows) == PLACES + 1
    assert_close(ours, wanted)


def test_an_image_is_refused_by_itself(gemma, tmp_path):
    folder, wave, image = gemma[0], tmp_path / "1.wav", tmp_path / "1.png"
    found = encoders_of(folder, read_config(folder))
    assert isinstance(found[IMAGE_INPUT], UsageError) and "describes the image preprocessing" in found[IMAGE_INPUT].message
    wave.write_bytes(as_wav(sound(0.8)))
    image.write_bytes(b"")
    ran = CliRun("run", str(folder), "Who?", "--audio", str(wave), "--temp", "0", "-n", "4", "-c", "512")
    assert ran.code == 0 and "audio clip of 0.8 s" in ran.err, ran.err
    ran = CliRun("run", str(folder), "Who?", "--image", str(image))
    assert ran.code == 2 and "describes the image preprocessing" in ran.err
