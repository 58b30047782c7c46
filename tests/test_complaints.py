"""Complaints about other tools, and the test that covers each here.

A complaint that an older test covers stands in COVERED, which a test compares with the functions that there are; the others are tests of
this file, named after the thread. Left out is what needs a server (quodeq#1122, tinycode#210, maya#31, vllm#40362), a GPU or an operating
system of another kind (mlx#883, mlx-lm#1047, omlx#28), images or heads that draft (llama.cpp#18111, #23472), the hub's own
storage by chunks, which is not used (xet-core#883, #715, hub#4508, #4520, #4085), a compiler (ktransformers#1537, #1753), or a
comparison of speeds (ollama#8667).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub
from hub_user import FABLE, MINUTE, HubUser, sharded
from safetensors.numpy import save_file

from effllm.runtime.engine import open_engine
from effllm.runtime.events import Done, Progress
from effllm.runtime.planning import devices
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sampler import SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.tokenizer import Tokenizer

TESTS = Path(__file__).parent
REPO = "org/name"
STORY = "Tell me a story about the fox and the king."

# Thread -> the tests that hold it.
COVERED = {
    # A. the context is cut silently
    "ollama#3839, #6026, #11283": ("test_cli_run.py::test_a_prompt_beyond_the_context_names_both_numbers",
                                   "test_cli_run.py::test_a_full_context_ends_the_answer_and_says_so"),
    "llama.cpp#17284 (shorten it, where a person asks for that)": ("test_engine.py::test_the_context_ends_an_answer_or_shifts",),
    # B. the memory is estimated wrongly, or too late
    "ollama#10920, #8192; lms#499, lmstudio#1631 (and a way to load it anyway)": (
        "test_pull.py::test_ollama_10920_hours_of_download_for_a_model_that_cannot_run",),
    "ollama#8707, #9988, #12692, #13556, #6918; llama.cpp#22592, #18097, #21801; lms#1544, #1225; unsloth#10489, #11043": (
        "test_plan_against_process.py::test_a_run_stays_below_its_plan",
        "test_plan_against_process.py::test_a_plan_and_a_run_ask_for_the_same_memory",
        "test_plan.py::test_a_plan_is_kept_and_a_refusal_is_true"),
    "ollama#15650 (the page cache is no used memory)": ("test_hardware.py::test_memory_v2",),
    "lmstudio#2295 (shown as a crash)": ("test_cli_errors.py::test_memory_files_and_interrupts",),
    # C. a budget in bytes
    "ollama#12353, #14342, #9002, #8316; llama.cpp#8113, #24626, #21690; mlx-lm#1666, #948; omlx#947, #1372": (
        "test_engine.py::test_a_budget_that_is_too_small_is_refused_with_the_numbers",
        "test_plan.py::test_refusal_names_the_numbers_and_what_fits"),
    # D. killed in a container
    "psutil#2100, vllm#47372, ComfyUI#14938, #15272, #15788; facet#111": (
        "test_complaints_memory.py::test_psutil_2100_a_plan_follows_the_container_not_its_host",
        "test_hardware.py::test_the_tightest_of_all_levels_and_the_machine"),
    # E. disks and downloads
    "ollama#14255, #12093, #11045, #9152, #15547, #15218": ("test_pull.py::test_ollama_14255_disk_space_is_looked_at_first",),
    "ollama#6727": ("test_pull_disk.py::test_ollama_6727_a_disk_that_fills_midway_says_how_much_is_missing_and_the_pull_resumes",),
    "ollama#8484, #8406, #1736": ("test_pull_resume.py::test_ollama_8484_progress_never_runs_backwards",),
    "ollama#8280": ("test_pull_resume.py::test_ollama_8280_the_rate_is_that_of_late_and_the_time_left_follows_from_it",),
    "huggingface_hub#4196, #4306; unsloth#9602; ds4#1048": (
        "test_pull_resume.py::test_huggingface_hub_4196_a_killed_download_continues_in_the_next_process",),
    "huggingface_hub#3960 (killed for its memory)": (
        "test_complaints_memory.py::test_huggingface_hub_3960_a_large_file_does_not_pass_through_memory",),
    "huggingface_hub#4349 (no second try)": ("test_pull.py::test_server_errors_and_cuts_are_tried_again",),
    # F. where does it run
    "llama.cpp#28455, #28456, #27109, #24485; lmstudio#2246 (a packed cache changes the device)": (
        "test_complaints_caches.py::test_llamacpp_28455_a_packed_cache_stays_where_the_layers_are_and_in_its_kernels",),
    # G. quantized caches
    "mlx-lm#1573, #1583, #968, #1074, #1353, #1476 (sliding windows crash)": (
        "test_families.py::test_logits_of_prompts", "test_families.py::test_greedy_tokens"),
    "minimal-ai#18; FreeToken#268; lmstudio#1740 (what is far back is lost)": (
        "test_complaints_caches.py::test_minimal_ai_18_a_packed_cache_finds_what_was_said_far_back",
        "test_evaluate.py::test_recall_counts_what_both_caches_find", "test_evaluate.py::test_a_model_that_forgets_is_counted"),
    "ollama#10794, #16245, #16723, #5091 (keys and values apart, a setting for one model)": (
        "test_complaints_caches.py::test_ollama_10794_keys_and_values_have_widths_of_their_own",
        "test_kv_profile_files.py::test_auto_takes_the_fewest_bits_that_keep_the_answers"),
    "mlx-lm#1555 (a setting that breaks the model)": (
        "test_kv_profile_files.py::test_bits_that_break_the_model_are_refused_with_the_number",),
    # H. larger than memory
    "airllm#186, #325, #324 (what fits stays in memory)": ("test_placement.py::test_what_fits_is_pinned_to_the_last_byte",
                                                          "test_plan_streamed.py::test_what_fits_does_not_stream"),
    "airllm#44 (a GPU's memory lies idle)": ("test_gpu_tier.py::test_as_many_layers_as_the_gpu_holds",),
    "llama.cpp#27766, #5207 (faults of a mapped file)": (
        "test_complaints_memory.py::test_llamacpp_27766_weights_from_the_disk_are_read_not_faulted_in",),
    "llama.cpp#25257, #19825; ds4#202 (experts from the disk)": (
        "test_paged_runs.py::test_a_run_keeps_to_its_budget_and_answers_the_same",
        "test_expert_pager.py::test_whatever_is_needed_in_whatever_order"),
    "ollm#15, #41; exllamav3#28; exllama#52, #177; exllamav2#225; vllm#3563 (weights from the disk at all)": (
        "test_streamed_runs.py::test_a_run_keeps_to_its_budget_and_answers_the_same",
        "test_streamed.py::test_everything_on_the_disk_gives_the_same_bits"),
    # I. a cold start, silence
    "llm#732, #848, #949, #1282; openai-python#2819": ("test_starting.py::test_import_and_help_load_nothing_heavy",
                                                      "test_completion.py::test_names_for_the_shell_come_without_heavy_imports"),
    "RNAlysis#127, ttim#39, dealias#13, numba#8085 (compiling)": ("test_threads.py::test_two_cold_starts_at_once_share_one_compilation",),
    "omlx#706; ollama#3499, #2431; IntelOwl#3855 (how long it took, and what of it was loading)": (
        "test_cli_run.py::test_json_is_one_object_with_the_promised_keys",),
    # J. templates and ends
    "lmstudio#1143; mistral.rs#1012, #1147; ik_llama#339; unsloth#468": (
        "test_gguf_tokenizer.py::test_lmstudio_1143_an_answer_ends_at_the_mark_of_its_template",
        "test_tokenizer_files.py::test_stop_ids_from_generation_config",
        "test_tokenizer_files.py::test_stop_ids_from_the_vocabulary_and_the_tokenizer_config"),
    "tabbyAPI#281; llama.cpp#11402; jan#6123": ("test_template.py::test_renders_as_transformers",),
    "lm-eval#2109": ("test_session.py::test_a_template_without_a_system_role_gets_it_in_front_of_the_first_message",),
    "vllm#3574, TGI#1254, SwiftLM#126, #132, mlx-knife#68": ("test_stream_filters.py::test_a_stop_string_over_three_tokens",
                                                      "test_stream_filters.py::test_stop_strings_do_not_depend_on_the_pieces"),
    "llama.cpp#9867 (the last text is lost)": ("test_stream_filters.py::test_flush_gives_back_what_could_have_become_a_stop",),
    "mlx-lm, chat.py (the system prompt again in every turn)": ("test_session.py::test_the_next_turn_prefills_only_what_is_new",),
    # K. Ctrl-C, pipes
    "llm#472, #1224; opencode#45162": ("test_cli_chat.py::test_ctrl_c_stops_an_answer_and_keeps_what_was_written",
                                       "test_cli_run.py::test_an_interrupt_keeps_what_was_written_and_ends_with_130"),
    "ollama#14571, #6120, #4686, #16859 (codes for a terminal that is none)": (
        "test_cli_streams.py::test_a_stream_that_is_no_terminal_gets_no_codes",),
    "llm#606": ("test_cli_run.py::test_chat_into_a_pipe_answers_once",),
    "ollama#8528, #15629, #18221, #10492 (thinking in the answer)": (
        "test_cli_screen.py::test_thinking_goes_to_stderr_dim_on_a_terminal_plain_in_a_pipe",),
    # L. sessions
    "ollama#8288, #5961; textgen#7072 (a chat comes back)": ("test_cli_chat.py::test_saved_chats_come_back",),
    "llama.cpp#17107, #12437; mlx-lm#372; llama-cpp-turboquant#223 (and what it has read comes back with it)": (
        "test_cli_session.py::test_runs_that_end_say_what_one_that_continues_says",
        "test_saved_cache.py::test_every_logit_afterwards_has_the_same_bits",),
    # M. defaults, and the same again
    "ollama#11725; minimal-ai#17; mlx-lm#1669": ("test_sampler.py::test_generation_config_supplies_defaults",),
    "ollama#586, #5274, #1749; llama.cpp#2838": ("test_cli_run.py::test_the_same_seed_writes_the_same_text",),
    "llama.cpp#19981 (what is remembered changes the answer)": (
        "test_session.py::test_history_and_fresh_cache_agree",
        "test_saved_prefix.py::test_over_an_unpacked_cache_every_logit_has_the_bits_of_a_prompt_read_whole",),
    # N. others
    "ollama#925, #1653, #4444, #11844": ("test_completion.py::test_ollama_925_the_shell_completes_commands_and_models",),
    "mlx-lm#818, #841": ("test_cli_chat.py::test_history_is_private_and_comes_back",),
    "localGPT#799, sglang#387, stormtrooper#5": ("test_pull.py::test_localgpt_799_a_gated_repository_is_not_reported_as_missing",),
    "ktransformers#507, #289, #520, #495, #1715 (illegal instruction)": (
        "test_target_check.py::test_a_child_that_is_ended_by_a_signal_is_a_no",
        "test_instruction_sets.py::test_loops_are_right_and_of_the_instructions_of"),
}


def test_every_test_of_the_table_is_there() -> None:
    known = {}
    for place in {place for places in COVERED.values() for place in places}:
        file, _, name = place.partition("::")
        if file not in known:
            body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
            known[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert name in known[file], place


# -- A. the context is cut silently ------------------------------------------------------------------------------------------------


def test_ollama_17889_a_prompt_is_read_whole_or_refused(user: HubUser) -> None:
    """Around the limit, one token at a time: never a part of it. The last place is left for a token of the answer."""
    tokenizer = Tokenizer.load(FABLE, prepare(FABLE, EngineOptions()).config)
    text = "a"
    while len(tokenizer.encode(text)) < 124:
        text += " king"
    codes = []
    for _ in range(8):
        count = len(tokenizer.encode(text))
        ran = user.run("run", "fable", text, "--raw", "-c", "128", "-n", "1", "--json")
        codes.append(ran.code)
        if ran.code == 0:
            assert ran.json["usage"]["prompt_tokens"] == count and ran.json["truncated"] is False
        else:
            said = ran.refused(5)
            assert f"{count}" in said and "128" in said
        text += " king"
    assert codes == sorted(codes) and {0, 5} == set(codes)


def test_ollama_17427_the_whole_context_can_be_used(user: HubUser) -> None:
    """Not half of it: a prompt of all tokens but one is read and answered."""
    tokenizer = Tokenizer.load(FABLE, prepare(FABLE, EngineOptions()).config)
    text = "a"
    while len(tokenizer.encode(text)) < 127:
        text += " a"
    ran = user.run("run", "fable", text, "--raw", "-c", "128", "-n", "1", "--json").json
    assert (ran["usage"]["prompt_tokens"], ran["usage"]["completion_tokens"], ran["truncated"]) == (127, 1, False)


def test_ollama_18399_a_shift_is_asked_for_and_reported(user: HubUser) -> None:
    words = ("run", "fable", "the king " * 200, "--raw", "-c", "128", "-n", "3")
    assert "--overflow shift" in user.run(*words).refused(5)
    shifted = user.run(*words, "--overflow", "shift", "--json")
    assert shifted.json["truncated"] is True and "dropped" in shifted.err


@pytest.mark.slow
def test_lmstudio_2191_another_context_than_the_asked_one_is_never_loaded(user: HubUser) -> None:
    """The refusal names a budget that will do; within it the context of our choice is smaller, and said."""

    def typed(*words: str) -> tuple[int, str]:
        process = user.start("run", "fable", STORY, "-n", "1", *words)
        return process.communicate(timeout=MINUTE)[1], process.returncode

    said, code = typed("--ram", "60M")
    least = int(re.search(r"it takes --ram (\d+)Mi", said)[1])
    assert code == 4
    said, code = typed("--ram", f"{least}Mi", "-c", "2048")
    assert code == 4 and "for 2048 tokens" in said, said
    said, code = typed("--ram", f"{least}Mi")
    found = re.search(r"context (of )?(\d+)", said)
    assert code == 0 and found and 128 <= int(found[2]) < 2048, said


# -- B, C. memory ------------------------------------------------------------------------------------------------------------------


def test_ollama_5754_a_budget_in_a_variable_or_a_file_holds(user: HubUser) -> None:
    def typed(*words: str, **variables: str) -> str:
        process = user.start(*words, **variables)
        said = process.communicate(timeout=MINUTE)
        assert process.returncode == (0 if "--json" in words else 4), said
        return "".join(said)

    assert all("57.22 MiB" in typed(*words, EFFLLM_RAM="60M") for words in (("run", "fable", STORY), ("plan", "fable")))
    assert json.loads(typed("plan", "fable", "--json", "--no-probe", EFFLLM_RAM="3G"))["ram_bytes"] == 3_000_000_000
    (user.home / "config" / "effllm").mkdir(parents=True)
    (user.home / "config" / "effllm" / "config.toml").write_text('ram = "60M"\n')
    assert "57.22 MiB" in typed("run", "fable", STORY)


# -- E. downloads ------------------------------------------------------------------------------------------------------------------


def test_ollama_2463_nobody_throws_away_what_has_come(hub: Hub, user: HubUser) -> None:
    """(#6711, #14254) Other commands, other pulls and a later start leave an unfinished download alone."""
    hub.add(REPO, files=sharded(FABLE))
    hub.add("org/other", FABLE)
    hub.swap["model-00003-of-00003.safetensors"] = b"x" * len(hub.repos[REPO].files["model-00003-of-00003.safetensors"])
    assert user.run("pull", REPO).code == 6
    held = {name: path.stat().st_size for name, path in user.blobs(REPO).items()}
    assert sum(held.values()) > 5_000_000
    for words in (("list",), ("pull", "org/other"), ("run", "org/other", "Hi", "-n", "1"), ("rm", "org/other", "-y"), ("run", REPO, "Hi"),
                  ("verify", REPO), ("show", REPO), ("doctor", "--json", "--no-probe")):
        user.run(*words)
        assert {name: path.stat().st_size for name, path in user.blobs(REPO).items()} == held, words
    hub.swap.clear()
    hub.forget()
    assert user.run("pull", REPO).code == 0
    assert not any(hub.served[name] for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"))


# -- F. where does it run ----------------------------------------------------------------------------------------------------------


def test_ollama_9704_no_device_is_taken_silently(user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """(#7323, #12141, #9517, #10381, #14461) One that was asked for and is not there ends the run; what was not asked for is told; --json
    names every layer's."""
    if not Path("/dev/nvidiactl").exists():
        assert "cuda" in user.run("run", "fable", STORY, "--device", "cuda", "-n", "1").refused(2)
    ran = user.run("run", "fable", STORY, "--device", "cpu", "-n", "1", "--json").json
    assert json.dumps(ran["placement"]).count("cpu") >= 1 and "cuda" not in json.dumps(ran["placement"])
    notices: list[str] = []
    monkeypatch.setattr(devices, "DRIVER", Path("/dev/null"))
    monkeypatch.setattr(devices, "detect_gpu", lambda: None)
    assert devices.gpu(EngineOptions(), notices) is None and "CPU" in notices[0]


# -- G. caches ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["32bit", "16bit", "8bit", "4bit", "2bit", "k8v4"])
@pytest.mark.parametrize("head_dim", [72, 80, 96])
def test_ollama_7983_heads_that_no_block_divides_do_not_crash(user: HubUser, tmp_path: Path, head_dim: int, kv: str) -> None:
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 2 * head_dim, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = user.run("bench", "--synthetic", tmp_path / "config.json", "--kv", kv, "-p", "200", "-n", "3", "-r", "1", "-o", "json")
    if head_dim % 16 and kv not in ("32bit", "16bit"):
        assert ran.code == 2 and f"this model has {head_dim}" in ran.err and "--kv 16bit" in ran.err
    else:
        assert ran.code == 0 and len(json.loads(ran.out)) == 2, ran.err


# -- H, I. waiting -----------------------------------------------------------------------------------------------------------------


def test_qwisp_99_a_long_prompt_is_not_read_in_silence() -> None:
    """And neither is a load (airllm#364)."""
    items = list(open_engine(FABLE, EngineOptions(device="cpu", ctx=2048, chunk=128)))
    loads = [item for item in items if isinstance(item, Progress) and item.phase == "loading"]
    assert len(loads) > 3 and loads[-1].done == loads[-1].total
    engine = items[-1]
    try:
        session = Session(engine, Tokenizer.load(FABLE, engine.config), SamplerSettings(seed=1), max_tokens=1)
        events = list(session.complete("The king and the fox. " * 250))
    finally:
        engine.close()
    read = [event for event in events if isinstance(event, Progress) and event.phase == "reading the prompt"]
    assert len(read) >= 8 and [event.done for event in read] == sorted(event.done for event in read)
    assert {event.total for event in read} == {events[-1].stats.prompt_tokens} and isinstance(events[-1], Done)


def test_pygama_348_what_was_compiled_from_other_sources_is_not_used(tmp_path: Path) -> None:
    """A changed line in any file of kernels/ is another folder of compiled code."""
    shutil.copytree(TESTS.parent / "kernels", tmp_path / "effllm" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TESTS.parent / "__init__.py", tmp_path / "effllm" / "__init__.py")

    def key() -> str:
        code = "from effllm.kernels.compile import cache_key; print(cache_key())"
        return subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
                              capture_output=True, text=True, check=True).stdout

    before = key()
    with (tmp_path / "effllm" / "kernels" / "cpu" / "row_ops.py").open("a") as file:
        file.write("# changed\n")
    assert len(before) == 17 and key() != before


# -- K. pipes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llamacpp_27214_nothing_waits_for_a_user_who_is_not_there(user: HubUser) -> None:
    """(#18200) With nothing on standard input, every command ends by itself."""
    for words, code in ((("run", "fable", STORY, "-n", "1"), 0), (("run", "fable"), 2), (("chat", "fable"), 2), (("chat",), 2),
                        (("run", "tinyllama", "Hi"), 3), (("rm", "fable"), 2)):
        process = user.start(*words)
        out, err = process.communicate(timeout=MINUTE)
        assert process.returncode == code and "Traceback" not in err, (words, process.returncode, err)


# -- M. defaults -------------------------------------------------------------------------------------------------------------------


def test_ollama_17679_nothing_is_penalised_unasked() -> None:
    settings = SamplerSettings()
    assert (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty) == (1.0, 0.0, 0.0)


def test_mlx_lm_818_an_answer_that_was_cut_says_so(user: HubUser) -> None:
    assert "stopped after 4 tokens (-n)" in user.run("run", "fable", STORY, "-n", "4").err
    assert user.run("run", "fable", STORY, "-n", "4", "--json").json["finish_reason"] == "length"


# -- N. quantizing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llamacpp_5156_quantizing_needs_a_part_of_the_model_in_memory(tmp_path: Path) -> None:
    """(#7428; BitNet#120) A process of its own reports the most that it held, above what it held before the work."""
    width, ffn, layers = 512, 16_384, 6
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((64, width)), "model.norm.weight": np.ones(width)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": np.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}self_attn.{name}_proj.weight": rng.standard_normal((width, width)) for name in "qkvo"}
        tensors |= {f"{at}mlp.{name}_proj.weight": rng.standard_normal((ffn, width)) for name in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = rng.standard_normal((width, ffn))
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, tmp_path / "model.safetensors")
    nbytes = (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 64, "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": 4, "tie_word_embeddings": True, "torch_dtype": "float32"}))
    script = ("import resource, sys\nfrom pathlib import Path\nfrom effllm.runtime.convert import ConvertOptions, convert, recipe_of\n"
              "before = None\n"
              "options = ConvertOptions(recipe_of('4bit', (), 'rtn'), '4bit', threads=1)\n"
              "for item in convert(Path(sys.argv[1]), Path(sys.argv[2]), options):\n"
              "    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n")
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(tmp_path / "out")], capture_output=True, text=True,
                         timeout=5 * MINUTE, check=False, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    assert nbytes > 400e6 and int(ran.stdout) < nbytes / 4, f"{int(ran.stdout) / 1e6:.0f} MB more for a model of {nbytes / 1e6:.0f} MB"
