"""benchmarks/over_http.py: a real server under a load that is made up, and what is told about both."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import over_http
from benchmarks.over_http import main

# Asks for one token and reports figures that can be recognised.
LOAD = """
import json, sys, urllib.request
flags = dict(word[2:].split("=") for word in sys.argv[1:])
body = json.dumps({"prompt": [int(flags["vocab"]) - 1], "max_tokens": 1, "model": "m"}).encode()
request = urllib.request.Request("http://127.0.0.1:" + flags["port"] + "/v1/completions", body)
request.add_header("Content-Type", "application/json")
assert json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"] == 1
times = {"p50": 1.5, "p95": 2.5, "p99": None}
print(json.dumps({"concurrency": int(flags["concurrency"]), "out_tok_s": 42.0, "ttft_ms": times, "gap_ms": times}))
"""


@pytest.mark.benchmarks
def test_every_run_has_prompts_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, out = tmp_path / "load.py", tmp_path / "out.json"
    load.write_text(LOAD)
    words = ["--load", str(load), "--model", "tiny", "--most", "1", "--repeat", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["over_http", *words])
    main()
    report = json.loads(out.read_text())
    assert [each["run"] for each in report["runs"]] == [1, 2]
    assert len({each["load"] for each in report["runs"]}) == 2
    assert report["cached_tokens"] == 0 and report["commit"]
    assert "|   2 |       1 |  42.0 |         1.5 | 2.5 |" in capsys.readouterr().out


def test_a_load_that_fails_ends_the_run_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = tmp_path / "load.py"
    load.write_text("import sys; sys.exit('nobody is there')")
    monkeypatch.setattr(over_http, "serving", lambda model: nullcontext(1))
    monkeypatch.setattr(sys, "argv", ["over_http", "--load", str(load), "--model", "tiny", "--most", "1"])
    with pytest.raises(SystemExit, match="nobody is there"):
        main()
