"""Codex and Claude Code as they are published, against real processes. Run by `make test-agents`.

The shard is a fake one with a script: it says what a good model would say, a call of one of the agent's own tools and
then a text. Everything else is real: the program, its prompt of tens of thousands of tokens, the HTTP side, the
scheduler with its prefix cache. The agent has to edit a file and to end by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.clients.scripted import called, scripted

PROGRAMS = Path(os.environ["LEGATO_AGENTS"]) / "node_modules" / ".bin"
# Seconds for an agent to end by itself.
PATIENCE = 120
TASK = "Change the greeting in greeting.txt to goodbye."
DONE = "The greeting is changed."


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greeting.txt").write_text("hello\n")
    return folder


def run(workplace: Path, words: list[str], **environ: str) -> str:
    """What the program says. It has a home of its own, and ends by itself."""
    home = workplace.parent / "home"
    home.mkdir(exist_ok=True)
    inherited = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    done = subprocess.run(
        words,
        cwd=workplace,
        env=inherited | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def codex(workplace: Path, url: str, *words: str, model: str = "legato") -> str:
    home = workplace.parent / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "legato"\n[model_providers.legato]\nname = "Legato"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LEGATO_KEY"\n'
    )
    program = [str(PROGRAMS / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return run(workplace, [*program, *words, TASK], CODEX_HOME=str(home), LEGATO_KEY="none")


def claude(workplace: Path, url: str) -> str:
    program = [str(PROGRAMS / "claude"), "-p", TASK, "--dangerously-skip-permissions"]
    return run(
        workplace,
        program,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="legato",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="legato-small",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )


def check_cache(url: str, num_turns: int) -> None:
    """Every turn but the first finds what came before in the prefix cache."""
    prompts, cached = (metric(url, name) for name in ("legato_prompt_tokens", "legato_prefix_hit_tokens"))
    print(f"\n{num_turns} turns: {prompts:.0f} tokens of prompts, {cached / prompts:.1%} from the prefix cache")
    assert cached / prompts >= 0.95 * (num_turns - 1) / num_turns


def test_codex_edits_a_file_with_its_shell(tmp_path: Path, workplace: Path) -> None:
    patch = "*** Begin Patch\n*** Update File: greeting.txt\n@@\n-hello\n+goodbye\n*** End Patch"
    command = f"apply_patch <<'EOF'\n{patch}\nEOF"
    script = [("<tool_response>.*(?i:success)", DONE), (TASK, called("exec_command", cmd=command))]
    with scripted(tmp_path, script) as url:
        assert DONE in codex(workplace, url)
        check_cache(url, 2)
    assert (workplace / "greeting.txt").read_text() == "goodbye\n"


def test_codex_edits_a_file_with_a_custom_tool(tmp_path: Path, workplace: Path) -> None:
    """Which it has for models that it knows by name."""
    patch = "*** Begin Patch\n*** Update File: greeting.txt\n@@\n-hello\n+goodbye\n*** End Patch\n"
    script = [("<tool_response>.*(?i:success)", DONE), (TASK, called("apply_patch", input=patch))]
    with scripted(tmp_path, script) as url:
        assert DONE in codex(workplace, url, model="gpt-5.5")
    assert (workplace / "greeting.txt").read_text() == "goodbye\n"


def test_claude_code_reads_and_edits_a_file(tmp_path: Path, workplace: Path) -> None:
    file = str(workplace / "greeting.txt")
    edit = called("Edit", file_path=file, old_string="hello", new_string="goodbye")
    script = [
        ("<tool_response>.*has been updated", DONE),
        ("<tool_response>.*hello", edit),
        (re.escape(TASK), called("Read", file_path=file)),
    ]
    with scripted(tmp_path, script) as url:
        assert DONE in claude(workplace, url)
        check_cache(url, 3)
    assert (workplace / "greeting.txt").read_text() == "goodbye\n"
