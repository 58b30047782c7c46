"""Writes a trained `fable` as a Hugging Face folder: bf16 safetensors, config, tokenizer with its chat template, and model card; and reads
such a folder to continue training.

Any engine that reads Llama reads this folder; nothing in it is specific to effllm. bf16 halves the file size and is what large models use.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from fable_data import Corpus
from fable_model import NORM_EPS, ROPE_THETA, Model, Shape, perplexity, recall_accuracy, sparsity

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Our name of a layer's tensor -> Hugging Face's.
LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}


def export(model: Model, tokenizer: Tokenizer, out: Path, card: str) -> None:
    """Write the folder; existing files of the same names are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in _hf_tensors(model).items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    end_of_text, end = (tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|end|>"))
    _write_json(out / "config.json", _config(model.shape, end_of_text, end))
    generation = dict(do_sample=True, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.2)
    _write_json(out / "generation_config.json", generation | dict(eos_token_id=[end_of_text, end], bos_token_id=end_of_text))
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|end|>",
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=model.shape.context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    (out / "README.md").write_text(card, encoding="utf-8")


def load(folder: Path, act: str | None = None) -> Model:
    """The model in a folder written by `export`, in float32; `act` replaces the activation of its FFN."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(vocab=config["vocab_size"], dim=config["hidden_size"], layers=config["num_hidden_layers"],
                  heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"],
                  ffn=config["intermediate_size"], context=config["max_position_embeddings"], act=act or config["hidden_act"])
    model = Model(shape)
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({ours: stored[theirs].float() for ours, theirs in _names(shape)}, strict=True)
    return model


def write_sparse_card(model: Model, base: Model, corpus: Corpus, name: str, seen: int, weight: float, device: str) -> str:
    """`write_card` for a model made sparse from `base`, called `name`; `weight` is the final weight of the sparsity loss."""
    shape = model.shape
    half = shape.context // 2
    before, after = (perplexity(checkpoint, corpus, half, 60, device) for checkpoint in (base, model))
    zeros = sparsity(model, corpus, half, 30, device)
    layers = " | ".join(str(layer) for layer in range(shape.layers))
    shares = " | ".join(f"{share:.1%}" for share in zeros)
    recalls = "\n".join(
        f"| {n} | {spread:.0%} | {recall_accuracy(model, corpus, n, spread, 20, device):.3f} |"
        for n in (half, shape.context)
        for spread in (0.3, 0.95)
    )
    return f"""# {name}-{shape.act}

`{name}` with {shape.act.upper()} in place of {base.shape.act} in its FFN, fine-tuned with `tools/train_fable.py --from` until most gates
are exactly zero: a real model for what leaves out inactive neurons (their rows of `up` and columns of `down` need not be read).
Everything else is `{name}`'s: shape, tokenizer, chat template, what it knows. Licence of the weights: Apache-2.0.

Only the MLPs learned, on {seen / 1e3:,.0f} thousand tokens of the same text, and what they learned was {name}'s own distribution.
The loss had a second term, the sum over layers of the mean over tokens of |gate|_1 / (sqrt({shape.ffn}) |gate|_2); its weight,
steered towards the share of zeros that was asked for, was {weight:.3g} at the end.

Held-out perplexity (the windows of `{name}`'s card): {after:.2f}, {name} {before:.2f} ({after / before - 1:+.1%}).
Share of gates that are zero, on held-out text: {sum(zeros) / len(zeros):.1%}; by layer:

| {layers} |
|{"---|" * shape.layers}
| {shares} |

Recall of stated numbers, share of digits right (chance 0.1):

| context | facts spread over | accuracy |
|---|---|---|
{recalls}
"""


def write_card(model: Model, corpus: Corpus, minutes: float, seen: int, device: str) -> str:
    """Measure the model and describe it; `seen` is the number of training tokens."""
    shape = model.shape
    half = shape.context // 2
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    heldout = perplexity(model, corpus, half, 60, device)
    rows = "\n".join(
        f"| {n} | {spread:.0%} | {recall_accuracy(model, corpus, n, spread, 40, device):.3f} |"
        for n in (half, shape.context)
        for spread in (0.3, 0.95)
    )
    return f"""# fable

A small real language model for tests, demonstrations and measurements: Llama architecture, {size:.1f}M parameters,
{shape.layers} layers, width {shape.dim}, {shape.heads} query and {shape.kv_heads} key-value heads of {shape.head_dim},
FFN {shape.ffn} ({shape.act}), context {shape.context:,}, {shape.vocab:,} tokens, tied embeddings, bfloat16.
Trained from scratch for {minutes:.0f} minutes ({seen / 1e6:.0f}M tokens) with `tools/train_fable.py` on public-domain books of
tales and on chat, copying and recall exercises made from them. It continues stories, answers "Tell me a story about the fox and the
king." in its own way, goes on when asked, and recalls numbers that were stated earlier.
It knows nothing else. Licence of the weights: Apache-2.0.

Held-out perplexity (three books it never saw, windows of {half:,} tokens): {heldout:.2f}.
Recall of stated numbers, share of digits right (chance 0.1):

| context | facts spread over | accuracy |
|---|---|---|
{rows}
"""


def _names(shape: Shape) -> Iterator[tuple[str, str]]:
    """Our name and Hugging Face's of every tensor."""
    yield "embed.weight", "model.embed_tokens.weight"
    yield "norm.weight", "model.norm.weight"
    for layer in range(shape.layers):
        for ours, theirs in LAYER_NAMES.items():
            yield f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"


def _hf_tensors(model: Model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {theirs: state[ours] for ours, theirs in _names(model.shape)}


def _config(shape: Shape, end_of_text: int, end: int) -> dict[str, object]:
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_act=shape.act,
        max_position_embeddings=shape.context,
        rms_norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, end],
        torch_dtype="bfloat16",
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
