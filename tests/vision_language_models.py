"""Tiny random models with image input for tests: transformers' own encoders, with the packaged model's tokenizer."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import written
from family_sizes import Case
from PIL import Image
from transformers import PreTrainedModel

import effllm
from effllm.runtime.images import ROW_PLACEHOLDER, EncodedMedia

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
IMAGE, IMAGE_ID = "<image>", 4096
TEMPLATE = ("{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
            "{% for part in m['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
            "{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")
CASE = Case("llama", {"vocab_size": 4100, "eos_token_id": 4, "bos_token_id": 0, "max_position_embeddings": 1024,
                      "initializer_range": 0.2}, inside="llava")


def written_with_words(case: Case, folder: Path, template: str = TEMPLATE, placeholder: str = IMAGE) -> PreTrainedModel:
    """A model in `folder`, with a tokenizer that has an image token and a template that writes it."""
    model = written(case, folder)
    model.config.image_token_id = IMAGE_ID
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_token_id": IMAGE_ID}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FABLE / name, folder / name)
    path = folder / "tokenizer.json"
    words = json.loads(path.read_text())
    words["added_tokens"].append({**words["added_tokens"][-1], "id": IMAGE_ID, "content": placeholder, "special": True})
    path.write_text(json.dumps(words))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that `patch_encoder.py`, run as a program, gives image input."""
    made = tmp_path_factory.mktemp("llava")
    written_with_words(CASE, made)
    (made / "patches").touch()
    return made


class TorchSight:
    """The output of transformers' encoder for an image resized to 32 x 32 pixels. `seen` counts images."""

    placeholder = placeholder_text = IMAGE
    joint_attention = shares_border = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.seen = model, 0

    def values(self, picture: np.ndarray) -> torch.Tensor:
        small = Image.fromarray(picture).resize((32, 32), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1)[None].float() / 127.5 - 1

    def encode(self, picture: np.ndarray, work: object) -> EncodedMedia:
        self.seen += 1
        with torch.inference_mode():
            found = self.model.model.get_image_features(pixel_values=self.values(picture))
        rows = found.pooler_output if hasattr(found, "pooler_output") else found
        rows = np.concatenate([each.reshape(-1, each.shape[-1]).numpy() for each in rows])
        return EncodedMedia(rows, (ROW_PLACEHOLDER,) * len(rows))

    def token_count(self, height: int, width: int) -> int:
        return 16

    def bytes_needed(self) -> int:
        return 1 << 20


def picture(seed: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def as_png(points: np.ndarray) -> bytes:
    from io import BytesIO

    file = BytesIO()
    Image.fromarray(points).save(file, "PNG")
    return file.getvalue()
