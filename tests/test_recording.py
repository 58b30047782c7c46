"""The terminal recording in the README: text and image come from one terminal, and what was typed is what the README says to type."""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TEXT, PICTURE = ROOT / "docs" / "first-story.txt", ROOT / "docs" / "first-story.svg"


def typed() -> list[str]:
    """Commands behind a prompt, without the one that fetches the sources, whose address is everyone's own."""
    lines = [found[1] for line in TEXT.read_text(encoding="utf-8").splitlines() if (found := re.match(r"(?:\(\.venv\) )?\$ (.+)", line))]
    return [line for line in lines if not line.startswith("git clone")]


def test_the_picture_shows_the_text() -> None:
    raw = PICTURE.read_text(encoding="utf-8")
    assert len(raw) < 200_000 and ElementTree.fromstring(raw).tag.endswith("svg")
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", raw), "nothing is fetched to draw it"
    drawn = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", raw))
    drawn = re.sub(r"\s+", "", html.unescape(drawn))
    for line in TEXT.read_text(encoding="utf-8").splitlines():
        assert re.sub(r"\s+", "", line) in drawn, line


def test_it_is_nobodys_machine() -> None:
    for path in (TEXT, PICTURE):
        raw = path.read_text(encoding="utf-8")
        assert not re.search(r"/(root|tmp|work|mnt|opt|usr)\b", raw), path.name
        assert max(map(len, TEXT.read_text(encoding="utf-8").splitlines())) <= 80


def test_a_newcomer_types_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/first-story.svg" in readme and "docs/first-story.txt" in readme
    commands = typed()
    assert commands[:2] == ["cd effllm", "make demo"] and any(line.startswith("effllm run fable") for line in commands)
    for command in commands:
        assert re.search(rf"^    {re.escape(command)}( |$)", readme, re.MULTILINE), f"{command} is not in the README"


def test_it_ends_in_a_story() -> None:
    text = TEXT.read_text(encoding="utf-8")
    story = text.partition("$ make demo")[2]
    assert len(re.findall(r"[a-z]{2,}", story)) > 60 and "Error" not in text and "Traceback" not in text
