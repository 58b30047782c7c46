"""Model names of other programs: each leads to the name here, or to how models are named."""

from contextlib import nullcontext

import pytest

from effllm import ModelNotFound, UsageError
from effllm.runtime.catalog import Absent, resolve


@pytest.mark.parametrize(("name", "meant"), [("qwen3:4b", "qwen3-4b"), ("llama3.2:1b", "llama3.2-1b"), ("llama3.1:8b", "llama3"),
                                             ("fable:latest", "fable"), ("deepseek-r1:1.5b", "deepseek-r1-1.5b"), ("phi3:mini", "phi3"),
                                             ("llama3:8b", "llama3"), ("qwen2.5:7b", "qwen2.5-7b"), ("gemma3:4b", "gemma3-4b"),
                                             ("mistral:instruct", "mistral"), ("mistral:7b-instruct-v0.3", "mistral"),
                                             ("deepseek-r1:8b", "deepseek-r1-8b"), ("phi4:14b", "phi4"), ("gpt-oss:20b", "gpt-oss-20b"),
                                             ("llama3.1:8b-instruct-q4_K_M", "llama3"), ("qwen3:30b", "qwen3-30b-a3b"),
                                             ("qwen2.5:7b-instruct-q4_K_M", "qwen2.5-7b"), ("gemma3n:e4b", "gemma3n-e4b"),
                                             ("mixtral:8x7b", "mixtral"), ("qwen3:8b-q4_K_M", "qwen3-8b"),
                                             ("gemma3:27b", "gemma3-27b"), ("mistral-small3.2:24b", "mistral-small3.2-24b"),
                                             ("mistral-small:24b", "mistral-small3.2-24b"), ("devstral:24b", "devstral-24b"),
                                             ("llama3.3:70b", "llama3.3-70b"), ("qwen2.5-coder:7b", "qwen2.5-coder-7b"),
                                             ("qwen2.5vl:7b", "qwen2.5-vl-7b"), ("qwen3-coder-next:latest", "qwen3-coder-next"),
                                             ("deepseek-r1:70b", "deepseek-r1-70b"), ("mxbai-embed-large:335m", "mxbai-embed-large"),
                                             ("nemotron-3-nano:30b", "nemotron-3-nano-30b-a3b"),
                                             ("nemotron-3-super:120b", "nemotron-3-super-120b-a12b"), ("qwq:32b-q8_0", "qwq-32b"),
                                             ("gemma3:270m-it-bf16", "gemma3-270m"), ("ollama.com/library/llama3.1:8b", "llama3")])
def test_a_tag_of_ollama_leads_to_the_name_here(name: str, meant: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(name, {"HOME": "/nowhere"})
    assert refused.value.hint == f"did you mean {meant}?"
    with pytest.raises(Absent) if meant != "fable" else nullcontext():  # it works when it is typed
        resolve(meant, {"HOME": "/nowhere"})


@pytest.mark.parametrize(("name", "meant"), [
    ("llama3.1", "llama3"), ("llama-3.1", "llama3"), ("llama3.1-8b", "llama3"), ("Meta-Llama-3.1-8B-Instruct-GGUF", "llama3"),
    ("library/llama3", "llama3"), ("qwen3-8b-instruct", "qwen3-8b"), ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("llama3.2", "llama3.2-1b or llama3.2-3b"), ("smollm2", "smollm2-135m or smollm2-360m or smollm2-1.7b"),
    ("gpt-oss", "gpt-oss-20b or gpt-oss-120b"), ("gemma3", "gemma3-270m or gemma3-1b or gemma3-4b or gemma3-12b or gemma3-27b"),
    ("qwen2.5vl", "qwen2.5-vl-7b"),
    ("mistral-small", "mistral-small3.2-24b"), ("devstral", "devstral-24b")])
def test_a_name_of_another_program_leads_to_its_family_here(name: str, meant: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(name, {"HOME": "/nowhere"})
    assert refused.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize("repo", ["unsloth/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-Coder-3B-Instruct", "google/gemma-3-27b-pt",
                                  "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-0.6B-Base"])
def test_a_repository_that_is_written_nearly_as_a_known_one_can_be_pulled(repo: str) -> None:
    """They were refused as slips of the hand, and `run` did not offer to get them."""
    with pytest.raises(Absent) as absent:
        resolve(repo, {"HOME": "/nowhere"})
    assert absent.value.hint == f"effllm pull {repo}" and absent.value.repo == repo


def test_a_precision_of_gguf_files_leads_to_the_same_bits_of_a_repository_without_them() -> None:
    with pytest.raises(Absent) as absent:
        resolve("qwen3-8b:Q6_K", {"HOME": "/nowhere"})
    assert absent.value.hint == "it holds no GGUF files: effllm pull qwen3-8b --bits 6; of others: org/repo:Q6_K"


def test_a_name_of_nothing_is_told_how_models_of_the_hub_are_called() -> None:
    for name in ("codellama", "command-r:35b", "codellama:latest", "vicuna:13b-v1.5-16k"):
        with pytest.raises(ModelNotFound) as refused:
            resolve(name, {"HOME": "/nowhere"})
        assert refused.value.message == f"there is no model '{name}'"
        assert refused.value.hint.endswith("effllm list --all shows what is here and some models of the hub; effllm search WORDS "
                                           "finds more, each named org/repo")


def test_a_tag_of_a_family_lists_its_sizes_and_of_nothing_the_formats() -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve("qwen2.5:72b", {"HOME": "/nowhere"})
    assert refused.value.hint == "did you mean qwen2.5-0.5b or qwen2.5-1.5b or qwen2.5-7b?"
    with pytest.raises(UsageError) as refused:
        resolve("nothing:scout", {"HOME": "/nowhere"})
    assert refused.value.hint.startswith("known: 8bit")
