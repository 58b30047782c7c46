"""The plan against the process: what `effllm plan` says in one process, a run in another does not exceed."""

import json
import subprocess
import sys


def effllm(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "effllm", *arguments, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_a_run_stays_below_its_plan():
    planned = effllm("plan", "fable")
    words = "word " * 500
    ran = effllm("run", "fable", "--raw", words, "-n", "300", "--ignore-eos", "--seed", "1")
    assert ran["usage"]["prompt_tokens"] > 500 and ran["usage"]["completion_tokens"] == 300
    peak = ran["memory"]["peak_rss_bytes"]
    assert peak <= planned["total_bytes"], f"{peak / 2**20:.0f} MiB used, {planned['total_bytes'] / 2**20:.0f} MiB planned"
    assert ran["memory"]["weights_bytes"] == planned["weights_bytes"] and ran["memory"]["kv_bytes"] <= planned["kv_bytes"]
