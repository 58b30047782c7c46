"""A model that generates what a test scripted: a regular folder, read, run and sampled like any other, whose output is determined by the
last token of its prompt. Its chat template selects that token by a condition on the messages, so it can call a tool, and say something else
once it has the result."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, END = 64, "<|end|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WRITTEN = ('{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}'
           '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
           "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}")
LAST, AFTER = "messages[-1].content", "messages[-1].role == 'tool'"


def calls(*named: tuple[str, Mapping[str, object]]) -> str:
    """Tool calls in the template's format."""
    return "\n".join(f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>' for name, arguments in named)


def scripted(folder: Path, script: Mapping[str, str], context: int = 2048, written: str = WRITTEN) -> Path:
    """A model in `folder` that generates the text of the first condition, in Jinja, that holds."""
    folder.mkdir(parents=True)
    asks = [f"<|ask {number}|>" for number in range(len(script))]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *asks])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(script.values())])
    tokenizer.save(str(folder / "tokenizer.json"))
    chosen = "".join(f"{{% {'if' if not number else 'elif'} {condition} %}}{asks[number]}" for number, condition in enumerate(script))
    template = f"{written}{{% if add_generation_prompt %}}{chosen}{{% endif %}}{{% endif %}}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))

    rows, number_of = tokenizer.get_vocab_size(), tokenizer.token_to_id
    embedding, head = np.zeros((rows, HIDDEN), np.float32), np.zeros((rows, HIDDEN), np.float32)
    embedding[:, 0] = 1  # any other token: nothing is likelier than anything else behind it
    for place, (ask, text) in enumerate(zip(asks, script.values(), strict=True), 2):
        embedding[number_of(ask)] = np.eye(HIDDEN)[place]
        embedding[number_of(text)] = np.eye(HIDDEN)[1]
        head[number_of(text), place] = 20
    head[number_of(END), 1] = 20
    layer = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN),
             "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, HIDDEN), "mlp.up_proj": (HIDDEN, HIDDEN),
             "mlp.down_proj": (HIDDEN, HIDDEN)}
    tensors = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()}
    tensors |= {f"model.layers.0.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {"model.norm.weight": np.ones(HIDDEN, np.float32), "model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": rows, "max_position_embeddings": context,
        "rms_norm_eps": 1e-6, "torch_dtype": "float32", "tie_word_embeddings": False, "eos_token_id": number_of(END)}))
    return folder
