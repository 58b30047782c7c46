#!/usr/bin/env python3
"""Trains an EAGLE-3 head (arXiv:2503.01840) for a model of Llama's architecture, on the model's own output.

The model answers prompts by sampling from its full vocabulary. The head learns to predict, for every token of these answers, what the model
says next, and again from its own states instead of the model's, as many times as draft tokens are chained (the paper's training-time test).
It is initialized from the model's last layer, so that minutes on one core are enough for a small one:

    python tools/train_eagle3.py --model models/fable --out fable-eagle3 --minutes 5
    effllm run fable --draft ./fable-eagle3 "Tell me a story about the fox and the king."

Needs torch and transformers. Minutes are CPU time, so that a busy machine does not spoil the schedule, and for training alone; generating
the answers comes before that.
"""

import argparse
import itertools
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

WHO = ("fox king queen giant witch miller prince wolf bear raven fisherman tailor dragon cat mouse soldier shepherd princess goose "
       "dwarf bird boy girl woman man hen horse tree river castle").split()
PROMPTS = ("Tell me a story about the {} and the {}.", "What happened to the {} and the {}?", "Please write about the {} and the {}.")
GUESSES = 4  # that follow one another in training
RATE, WARM_UP = 2e-3, 20
CLIP = 1.0


class Head(nn.Module):
    """A layer over the embedding of the next token and a state combined from three of the model's, concatenated."""

    def __init__(self, model: nn.Module, layers: tuple[int, ...], said: Tensor) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        self.config, self.layers, width = config, layers, config.hidden_size
        self.head_dim = config.head_dim
        self.register_buffer("said", said, persistent=False)
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        self.input_norm, self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps), LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_norm, self.norm = LlamaRMSNorm(width, config.rms_norm_eps), LlamaRMSNorm(width, config.rms_norm_eps)
        attention = last.self_attn
        self.q, self.k, self.v = (nn.Linear(2 * width, projection.out_features, bias=False)
                                  for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
        self.o, self.mlp = nn.Linear(attention.o_proj.in_features, width, bias=False), LlamaMLP(config)
        self.lm_head, self.rotary = nn.Linear(width, len(said), bias=False), LlamaRotaryEmbedding(config)
        with torch.no_grad():
            self.fc.weight.normal_(0, 0.01)[:, -width:] += torch.eye(width)
            for mine, theirs in ((self.q, attention.q_proj), (self.k, attention.k_proj), (self.v, attention.v_proj)):
                mine.weight[:, :width].normal_(0, 0.02)
                mine.weight[:, width:] = theirs.weight
            self.o.load_state_dict(attention.o_proj.state_dict())
            self.mlp.load_state_dict(last.mlp.state_dict())
            for mine, theirs in ((self.hidden_norm, last.input_layernorm), (self.post_norm, last.post_attention_layernorm),
                                 (self.norm, model.model.norm)):
                mine.load_state_dict(theirs.state_dict())
            self.lm_head.weight.copy_(model.lm_head.weight[said])

    def said_behind(self, embedded: Tensor, states: Tensor) -> list[Tensor]:
        """Scores [B, T, N] of what follows each token [B, T, D], by the model's states [B, T, 3D], then by the head's own of one guess
        before, of two, and so on."""
        count = embedded.shape[1]
        angles = self.rotary(embedded, torch.arange(count)[None])
        x, cache, outputs = self.fc(states), [], []
        while len(outputs) < GUESSES:
            joined = torch.cat([self.input_norm(embedded), self.hidden_norm(x)], -1)
            q, k, v = (part(joined).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
            q, k = apply_rotary_pos_emb(q, k, *angles)
            groups = q.shape[1] // k.shape[1]
            cache.append((repeat_kv(k, groups), repeat_kv(v, groups)))
            x = x + self.o(self._attended(q, cache).transpose(1, 2).flatten(2))
            x = x + self.mlp(self.post_norm(x))
            outputs.append(self.lm_head(self.norm(x)))
            x = F.pad(x[:, :-1], (0, 0, 1, 0))  # a guess goes on from what was made one token before
        return outputs

    def _attended(self, q: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Of guess number g a token sees the model's states up to g tokens before it, and one row of each guess between."""
        guess, count, scale = len(cache) - 1, q.shape[2], self.head_dim**-0.5
        keys, values = cache[0]
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1 - guess)
        scores = [(q @ keys.transpose(2, 3) * scale).masked_fill(hidden, -1e9)]
        moved = [[F.pad(part, (0, 0, guess - at, 0))[:, :, :count] for part in cache[at]] for at in range(1, guess + 1)]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in moved]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :count] @ values
        return out + sum(weights[..., count + at, None] * v for at, (_, v) in enumerate(moved))

    def save(self, folder: Path) -> None:
        """In the format in which SpecForge publishes such heads."""
        names = {"fc": "fc", "norm": "norm", "lm_head": "lm_head", "hidden_norm": "midlayer.hidden_norm", "input_norm":
                 "midlayer.input_layernorm", "post_norm": "midlayer.post_attention_layernorm", "mlp.gate_proj": "midlayer.mlp.gate_proj",
                 "mlp.up_proj": "midlayer.mlp.up_proj", "mlp.down_proj": "midlayer.mlp.down_proj",
                 **{role: f"midlayer.self_attn.{role}_proj" for role in "qkvo"}}
        tensors = {f"{names[name.removesuffix('.weight')]}.weight": value.detach().to(torch.bfloat16).contiguous()
                   for name, value in self.state_dict().items()}
        tensors["d2t"] = self.said - torch.arange(len(self.said))
        tensors["t2d"] = torch.isin(torch.arange(self.config.vocab_size), self.said)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config_keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                       "hidden_act",
                       "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
                  **{key: getattr(self.config, key) for key in config_keys}, "tie_word_embeddings": False,
                  "rope_theta": self.config.rope_parameters["rope_theta"], "draft_vocab_size": len(self.said),
                  "eagle_aux_hidden_state_layer_ids": list(self.layers), "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def prompts(count: int) -> list[str]:
    """Prompts for tales, as fable was trained on them."""
    return [random.choice(PROMPTS).format(*random.sample(WHO, 2)) for _ in range(count)]


@torch.inference_mode()
def answers(model: nn.Module, tokenizer: object, count: int, tokens: int, batch: int = 256) -> Tensor:
    """The model's answers to `count` prompts, int64 [count, tokens] including the prompts."""
    results = []
    for begin in range(0, count, batch):
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
                 for text in prompts(min(batch, count - begin))]
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in chats]
        shortest = min(map(len, ids))
        generated = model.generate(torch.tensor([text[-shortest:] for text in ids]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                   min_new_tokens=tokens - shortest, max_new_tokens=tokens - shortest, eos_token_id=None, pad_token_id=0)
        results.append(generated)
        print(f"answers: {begin + len(ids)} of {count}", flush=True)
    return torch.cat(results)


@torch.inference_mode()
def seen(model: nn.Module, layers: tuple[int, ...], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token but the last: the embedding of the one behind it, the states that come into some layers, and scores of what follows
    that one."""
    out = model(ids, output_hidden_states=True, use_cache=False)
    states = torch.cat([out.hidden_states[layer] for layer in layers], -1)
    return model.get_input_embeddings()(ids[:, 1:]), states[:, :-1], out.logits[:, 1:]


def trained(model: nn.Module, text: Tensor, minutes: float, layers: tuple[int, ...], scored: int, batch: int = 4) -> Head:
    """A head trained for this many minutes on the model's answers."""
    often = torch.bincount(text.flatten(), minlength=model.config.vocab_size)
    head = Head(model, layers, often.argsort(descending=True)[:scored].sort().values)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    began = time.process_time()
    for step in itertools.count():
        share = (time.process_time() - began) / (60 * minutes)
        if share >= 1:
            return head
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - share)
        embedded, states, logits = (tensor.clone() for tensor in seen(model, layers, text[torch.randint(len(text), (batch,))]))
        expected, predicted = logits[..., head.said].softmax(-1), head.said_behind(embedded, states)
        losses = [-(expected * tensor.log_softmax(-1)).sum(-1)[:, guess:].mean() for guess, tensor in enumerate(predicted)]
        sum(losses).backward()
        nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            likeliest = logits.argmax(-1)
            right = [(head.said[tensor.argmax(-1)] == likeliest)[:, guess:].float().mean().item() for guess, tensor in enumerate(predicted)]
            print(f"{share:4.0%} step {step}: loss {losses[0].item():.3f}, right {' '.join(f'{tensor:.2f}' for tensor in right)}",
                  flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--answers", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, with its prompt")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens that the head says, the most frequent ones")
    parser.add_argument("--layers", type=int, nargs="+", help="those before which states are read (a low one, one in the middle, the last)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of torch; matrices of a small model are not worth more")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count = model.config.num_hidden_layers
    layers = tuple(options.layers or (min(2, count - 1), count // 2, count - 1))
    text = answers(model, tokenizer, options.answers, options.tokens)
    trained(model, text, options.minutes, layers, options.vocabulary).save(options.out)


if __name__ == "__main__":
    main()
