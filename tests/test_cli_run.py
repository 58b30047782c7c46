"""`effllm run` and the reporting commands with the packaged model: pipes, files, JSON, signals.

Real processes where the process is the point, calls of `main` in this one elsewhere.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CliRun

import effllm
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.offload.size import parse_size

EFFLLM = (sys.executable, "-P", "-m", "effllm")
MINUTE = 60
STORY = "Tell me a story about the fox and the king."
FABLE = Path(effllm.__path__[0]) / "models" / "fable"


def shell(line: str) -> subprocess.CompletedProcess:
    line = line.replace("EFFLLM", " ".join((f'"{EFFLLM[0]}"', *EFFLLM[1:])))
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=MINUTE, check=False)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Kernels are compiled once, so that no test below sees the progress of it."""
    assert main(["run", "fable", "hi", "-n", "1"], Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)) == 0


def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    ran = shell(f'EFFLLM run fable "{STORY}" --temp 0 -n 30 2>/dev/null | cat')
    assert len(ran.stdout.split()) > 10 and ran.stdout.endswith("\n")
    assert not any(ord(c) < 32 and c != "\n" for c in ran.stdout)
    assert CliRun("run", "fable", STORY, "--temp", "0", "-n", "30").out == ran.stdout, "the same words, whoever listens"


def test_a_reader_that_leaves_is_no_failure() -> None:
    ran = shell(f'EFFLLM run fable "{STORY}" --temp 0 --ignore-eos | head -c 5; echo "|${{PIPESTATUS[0]}}"')
    assert ran.stdout.endswith("|0\n") and len(ran.stdout) == len("12345|0\n")
    assert "Traceback" not in ran.stderr and "Broken" not in ran.stderr


def test_a_full_disk_is_one_line() -> None:
    ran = shell("EFFLLM run fable hi -n 3 > /dev/full")
    assert ran.returncode == 4 and ran.stderr.splitlines() == ["effllm: the output cannot be written: No space left on device",
                                                               "hint: free some space, or send the output elsewhere"]
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


def test_a_disk_that_fills_up_in_mid_answer_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: what fitted stays, and the end is said."""
    ran = shell(f'ulimit -f 1; trap "" XFSZ; EFFLLM run fable "{STORY}" --temp 1 --seed 1 --ignore-eos > {tmp_path}/answer.txt')
    assert ran.returncode == 4 and len(ran.stderr.splitlines()) == 2, ran.stderr
    assert ran.stderr.startswith("effllm: the output cannot be written: File too large\nhint: free some space, or send the output")
    assert (tmp_path / "answer.txt").stat().st_size == 1024


def test_a_closed_output_is_reported_before_the_model_is_read() -> None:
    ran = shell(f'EFFLLM run fable "{STORY}" -n 3 >&-')
    assert ran.returncode == 1 and ran.stderr.splitlines() == ["effllm: standard output is closed: the answer has nowhere to go",
                                                               "hint: leave it open, or write to a file: > answer.txt"]


def test_standard_input_file_and_argument_are_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("A fox met a king.\n")
    flags = ("--raw", "--temp", "0", "-n", "8")
    whole = CliRun("run", "fable", "A fox met a king.\n\nThe king said", *flags)
    assert whole.code == 0 and whole.out.strip()
    assert CliRun("run", "fable", "The king said", "-f", str(path), *flags).out == whole.out
    assert CliRun("run", "fable", "The king said", "-f", "-", *flags, stdin="A fox met a king.\n").out == whole.out
    assert CliRun("run", "fable", *flags, stdin="A fox met a king.\n\nThe king said").out == whole.out
    piped = shell(f'cat {path} | EFFLLM run fable "The king said" {" ".join(flags)}')
    assert piped.stdout == whole.out, piped.stderr


def test_chat_into_a_pipe_answers_once() -> None:
    flags = ("--temp", "0", "-n", "12", "--markdown")  # which a pipe is spared
    assert CliRun("chat", "fable", *flags, stdin=STORY + "\n").out == CliRun("run", "fable", STORY, *flags).out


def test_json_is_one_object_with_the_promised_keys() -> None:
    ran = CliRun("run", "fable", STORY, "--seed", "7", "-n", "20", "--json")
    figures = json.loads(ran.out)
    assert ran.code == 0 and ran.out.count("\n") == 1
    shape = {"text": str, "token_ids": list, "finish_reason": str, "seed": int, "usage": {"prompt_tokens": int, "completion_tokens": int},
             "timings": {"load_s": float, "ttft_s": float, "prefill_tps": float, "decode_tps": float},
             "memory": {"peak_rss_bytes": int, "weights_bytes": int, "kv_bytes": int, "kv_bits_per_value": float, "packed_bits": float},
             "io": {"disk_bytes_read": int, "disk_wait_s": float}, "placement": dict, "truncated": bool}
    for key, kind in shape.items():
        if isinstance(kind, dict):
            for inner, inner_kind in kind.items():
                assert isinstance(figures[key][inner], inner_kind | int if inner_kind is float else inner_kind), (key, inner)
        else:
            assert isinstance(figures[key], kind), key
    assert figures["seed"] == 7 and figures["finish_reason"] == "length" and figures["usage"]["completion_tokens"] == 20
    assert len(figures["token_ids"]) == 20 and figures["text"].strip()
    assert figures["memory"]["planned_bytes"] > 100 << 20
    assert figures["memory"]["peak_rss_bytes"] > figures["memory"]["weights_bytes"] > 10 << 20


def test_the_same_seed_writes_the_same_text() -> None:
    one, two, other = (CliRun("run", "fable", STORY, "--seed", seed, "-n", "25").out for seed in ("11", "11", "12"))
    assert one == two != other


def test_a_seed_of_minus_one_is_a_random_one_as_in_other_tools() -> None:
    seeds = {json.loads(CliRun("run", "fable", STORY, "--seed", "-1", "-n", "1", "--json").out)["seed"] for _ in range(2)}
    assert len(seeds) == 2 and min(seeds) >= 0


def test_no_tokens_evaluates_the_prompt_and_writes_nothing() -> None:
    ran = CliRun("run", "fable", STORY, "-n", "0")
    assert (ran.code, ran.out) == (0, "") and "stopped after 0 tokens" in ran.err
    figures = json.loads(CliRun("run", "fable", STORY, "-n", "0", "--json").out)
    assert (figures["text"], figures["finish_reason"]) == ("", "length") and figures["usage"]["prompt_tokens"] > 10


def test_a_stop_string_ends_the_answer_before_it() -> None:
    whole = CliRun("run", "fable", STORY, "--temp", "0", "-n", "30").out
    word = whole.split()[6]
    cut = CliRun("run", "fable", STORY, "--temp", "0", "-n", "30", "--stop", word)
    assert cut.code == 0 and cut.out.strip() == whole[: whole.index(word)].strip()
    assert "stopped" not in cut.err


def test_a_prompt_beyond_the_context_names_both_numbers() -> None:
    ran = CliRun("run", "fable", "--raw", "word " * 400, "-c", "256")
    assert ran.code == 5 and ran.out == ""
    line = ran.err.splitlines()[-2]
    assert " 256" in line and any(int(number) > 256 for number in line.split() if number.isdigit()), ran.err
    assert CliRun("run", "fable", "--raw", "word " * 400, "-c", "256", "--overflow", "shift", "-n", "3").code == 0


def test_a_full_context_ends_the_answer_and_says_so() -> None:
    ran = CliRun("run", "fable", STORY, "-c", "128", "--ignore-eos", "--temp", "0")
    assert ran.code == 0 and ran.out.strip()
    assert "context of 128 tokens is full" in ran.err and "(-n)" not in ran.err


def test_stats_are_on_stderr() -> None:
    ran = CliRun("run", "fable", STORY, "-n", "5", "--seed", "3", "--stats")
    for said in ("prompt ", "answer 5 tokens", "first token", "seed 3", "memory", "weights 11.01 MiB", "context ", "of 2048 tokens"):
        assert said in ran.err, said
    assert "seed" not in ran.out


def test_stats_say_what_of_the_cache_is_packed() -> None:
    """A cache of 16 bits packs nothing ever, one of few bits nothing yet."""
    def cache(*words: str) -> str:
        ran = CliRun("run", "fable", *words, "-n", "3", "--temp", "0", "--stats")
        return next(line for line in ran.err.splitlines() if line.startswith("context "))

    long = "word " * 400
    assert "packed" not in cache("--raw", long) and " bits per value overall" in cache("--raw", long)
    assert "none quantized yet, 19 exact" in cache(STORY, "--kv", "4bit")
    assert "128 packed at 4.53 bits per value and" in cache("--raw", long, "--kv", "4bit")


def test_raw_and_template_differ_and_a_system_prompt_is_read() -> None:
    flags = ("--temp", "0", "-n", "12")
    chat, raw = CliRun("run", "fable", STORY, *flags).out, CliRun("run", "fable", STORY, "--raw", *flags).out
    assert chat != raw
    longer = json.loads(CliRun("run", "fable", STORY, "-s", "Speak of the sea.", "-n", "0", "--json").out)["usage"]["prompt_tokens"]
    assert longer > json.loads(CliRun("run", "fable", STORY, "-n", "0", "--json").out)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("flags", [("--kv", "32bit"), ("--load", "mmap"), ("-t", "1"), ("--kv-sink", "0")], ids=" ".join)
def test_ways_to_run_give_the_same_words(flags: tuple[str, ...]) -> None:
    command = ("run", "fable", STORY, "--temp", "0", "-n", "10")
    assert CliRun(*command, *flags).out == CliRun(*command).out


def test_an_interrupt_keeps_what_was_written_and_ends_with_130() -> None:
    endless = ("--ignore-eos", "--overflow", "shift", "--temp", "1", "--seed", "1")  # a full context is half a second away
    process = subprocess.Popen([*EFFLLM, "run", "fable", STORY, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               stdin=subprocess.DEVNULL)
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=MINUTE)
    assert process.returncode == 130 and len(first) == 20 and rest.endswith("\n")
    assert "stopped by Ctrl-C after" in err and "Traceback" not in err


def test_an_interrupt_before_the_answer_is_quiet() -> None:
    process = subprocess.Popen([*EFFLLM, "run", "fable", STORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert "waiting for more of the prompt" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=MINUTE)
    assert (process.returncode, out, err) == (130, "", "")


def test_an_interrupt_while_the_program_itself_is_imported_is_quiet() -> None:
    """The first tenth of a second, in which nothing of ours runs yet; the interrupt comes as the import of the command line's library."""
    script = """
import sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
from effllm.__main__ import main
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-P", "-c", script, "list"], capture_output=True, text=True, timeout=MINUTE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_folder_without_a_tokenizer_is_reported_before_the_weights_are_read(tmp_path: Path) -> None:
    import effllm

    packaged = Path(effllm.__file__).parent / "models" / "fable"
    for name in ("config.json", "model.safetensors"):
        os.link(packaged / name, tmp_path / name) if os.stat(packaged).st_dev == os.stat(tmp_path).st_dev else (
            (tmp_path / name).write_bytes((packaged / name).read_bytes()))
    ran = CliRun("run", str(tmp_path), STORY)
    assert ran.code == 3 and "tokenizer.json" in ran.err and ran.out == ""


def test_a_broken_generation_config_is_one_line(tmp_path: Path) -> None:
    import effllm

    packaged = Path(effllm.__file__).parent / "models" / "fable"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(packaged / name)
    (tmp_path / "generation_config.json").write_text("[1, 2")
    ran = CliRun("run", str(tmp_path), STORY, "-n", "2")
    assert ran.code == 1 and "generation_config.json" in ran.err and len(ran.err.splitlines()) == 2
    (tmp_path / "generation_config.json").unlink()
    assert CliRun("run", str(tmp_path), STORY, "-n", "2").code == 0


@pytest.mark.parametrize(("content", "said"), [
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'"), ({"temperature": [0.5]}, "temperature must be a number"),
    ({"top_k": {}}, "top_k must be a whole number"), ({"top_p": 7}, "top_p must be above 0"),
    ({"do_sample": "yes"}, "do_sample must be true"),
    ({"repetition_penalty": True}, "repetition_penalty must be a number"), ({"min_p": 10**400}, "min_p"),
    ({"top_k": None}, ""),
    ({"temperature": float("nan")}, "temperature must be a number"), ({"eos_token_id": ["x", None, 4]}, ""), ({"top_k": -1}, "")], ids=str)
def test_an_irregular_generation_config_is_a_remark(tmp_path: Path, content: dict, said: str) -> None:
    import effllm

    packaged = Path(effllm.__file__).parent / "models" / "fable"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(packaged / name)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    ran = CliRun("run", str(tmp_path), STORY, "-n", "2", "--seed", "1")
    lines = [line for line in ran.err.splitlines() if "generation_config.json" in line]
    assert ran.code == 0 and len(lines) == bool(said) and "Traceback" not in ran.err, ran.err
    assert not said or (said in lines[0] and len(lines[0]) < 240)


# ---- the other commands


def test_list_and_show_know_the_packaged_model() -> None:
    listed = json.loads(CliRun("list", "--json").out)
    fable = next(model for model in listed["models"] if model["name"] == "fable")
    assert fable["family"] == "llama" and fable["licence"] == "Apache-2.0"
    assert "fable" in CliRun("list").out and "llama3" in CliRun("list", "--all").out
    shown = json.loads(CliRun("show", "fable", "--json").out)
    assert shown["context"] == 2048 and shown["parameters"] == fable["parameters"] and shown["chat_template"] is True
    assert "2048 tokens" in CliRun("show", "fable").out and "not in the template" in CliRun("show", "fable").out and shown["tools"] is None


def test_show_says_how_a_model_calls_tools(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FABLE, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template, line in (("{{ messages[0].content }}{{ tools | tojson }} in <tool_call></tool_call>", "calls in the format of Hermes"),
                           (None, ""), ("{% if %}", "not in the template")):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        ran = CliRun("show", str(folder))
        assert ran.code == 0 and line in ran.out and ("tools " in ran.out) == bool(line), ran.out


def test_plan_adds_up_and_reads_no_weights() -> None:
    plan = json.loads(CliRun("plan", "fable", "--json", "-c", "512").out)
    parts = plan["weights_bytes"] + plan["kv_bytes"] + plan["workspace_bytes"] + plan["baseline_bytes"]
    assert plan["ctx"] == 512 and parts < plan["total_bytes"] < 1.2 * parts
    assert "cache" in CliRun("plan", "fable").out
    refused = CliRun("plan", "fable", "--ram", "60M")
    assert refused.code == 4 and refused.out == "" and "57.22 MiB" in refused.err


def test_bench_speaks_markdown_json_and_csv() -> None:
    flags = ("fable", "-p", "32", "-n", "4", "-r", "2")
    rows = json.loads(CliRun("bench", *flags, "-o", "json").out)
    assert [row["test"] for row in rows] == ["pp32", "tg4"] and all(row["avg_ts"] > 0 and len(row["samples_ts"]) == 2 for row in rows)
    table = CliRun("bench", *flags).out.splitlines()
    assert len(table) == 4 and len({len(line) for line in table}) == 1 and "tg4" in table[3]
    assert table[0].split("|")[-2].strip() == "memory" and parse_size(table[3].split("|")[-2].replace(" ", "")) > rows[1]["model_size"]
    assert "columns" not in table[0] and "ngl" not in table[0]
    heading, _, *measured = CliRun("bench", "fable", "-p", "0", "-n", "4", "-r", "1", "--columns", "2").out.splitlines()
    assert [cell.strip() for cell in heading.split("|")][6] == "columns" and [line.split("|")[6].strip() for line in measured] == ["2"]
    header, *lines = CliRun("bench", *flags, "-o", "csv").out.splitlines()
    assert len(lines) == 2 and header.split(",")[:9] == ["build_commit", "build_number", "cpu_info", "gpu_info", "backends",
                                                         "model_filename", "model_type", "model_size", "model_n_params"]
    refused = CliRun("bench", *flags, "-o", "csv", "--json")
    assert refused.code == 2 and refused.err == "effllm: --json and -o csv are different formats\nhint: give one of them\n"


def test_eval_measures_a_text(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a fox who lived in a wood near the castle of an old king. " * 12)
    scored = json.loads(CliRun("eval", "ppl", "fable", "--text", str(text), "-c", "128", "--json").out)
    assert scored["tokens"] > 100 and 1 < scored["ppl"] < 1000
    compared = json.loads(CliRun("eval", "kld", "fable", "--text", str(text), "-c", "128", "--json").out)
    assert 0 <= compared["kld_mean"] < 1e-3 and compared["same_top"] > 0.99 and compared["ppl"] == pytest.approx(scored["ppl"], rel=1e-3)
    assert "perplexity" in CliRun("eval", "ppl", "fable", "--text", str(text), "-c", "128").out


def test_a_text_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.txt").write_text("a")
    for name, said in (("absent.txt", "No such file"), ("empty.txt", "is empty"), ("latin.txt", "is not UTF-8"),
                       ("a.txt", "nothing to score")):
        for command in ("ppl", "kld"):
            ran = CliRun("eval", command, "fable", "--text", str(tmp_path / name))
            lines = ran.err.splitlines()
            assert ran.code == 2 and ran.out == "" and len(lines) == 2, ran.err
            assert str(tmp_path / name) in lines[0] and said in lines[0] and "-f" not in ran.err, ran.err


def test_doctor_names_the_machine_and_tries_a_model() -> None:
    report = json.loads(CliRun("doctor", "--no-probe", "--json").out)
    assert report["trial"]["ok"], report["trial"]
    assert report["machine"]["threads"] >= 1 and report["cold"] is False
    assert {"f32", "f16", "bf16", "codebook4:16", "symmetric8:32"} <= {choice["stored"] for choice in report["kernels"]}
