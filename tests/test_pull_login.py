"""Access to a gated model as the message and the documentation describe it, followed to the end against a gating hub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from hub_server import Hub
from hub_user import HubUser, on_disk, tiny

ROOT = Path(__file__).resolve().parent.parent
GATED, TOKEN = "meta-llama/Llama-3.1-8B-Instruct", "hf_good"
WHO = {"type": "user", "name": "me", "auth": {"type": "access_token", "accessToken": {"displayName": "mine", "role": "read"}}}


def test_hf_auth_login_is_the_step_that_opens_a_gated_model(hub: Hub, user: HubUser) -> None:
    """Nothing but the commands of the page about models and of the error: the tool they name writes the token that effllm then finds."""
    repo = hub.add(GATED, files=tiny(), gate=TOKEN)
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "`hf auth login`" in page and "`HF_TOKEN`" in page
    known = 200, {"Content-Type": "application/json"}, json.dumps(WHO).encode()
    hub.disturb = lambda request: known if "whoami" in request.path else None
    for words in (("pull", "llama3"), ("pull", "llama3:4bit"), ("pull", "llama3", "--bits", "4", "--dry-run"), ("plan", "llama3")):
        said = user.run(*words).refused(3)
        assert "is gated" in said and "then hf auth login" in said, words
    absent = user.run("run", "llama3", "hi").refused(3)
    assert "hf auth login, then: effllm pull llama3 (without a gate: qwen3-8b)" in absent
    tool = Path(sys.executable).with_name("hf")
    subprocess.run([tool, *re.search(r"then hf( auth login)", said)[1].split(), "--token", TOKEN], check=True, capture_output=True,
                   env={"PATH": os.environ["PATH"], **user.env})
    assert user.run("pull", "llama3").code == 0
    assert on_disk(user.snapshot(GATED, repo.commit)) == repo.files
