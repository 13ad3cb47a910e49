import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sgl_graft.cli.main import COMMANDS, app


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from sgl_graft.cli.main import app;"
        "result = CliRunner().invoke(app, ['--help']); print(result.output);"
        "print('HEAVY', [m for m in ('torch', 'sglang', 'transformers', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "HEAVY []" in output
    for name in COMMANDS:
        assert name in output


@pytest.mark.parametrize("args", [["serve", "--help"], ["bench", "--help"], ["bench", "prompts", "--help"]])
def test_own_commands_explain_themselves(args: Sequence[str]) -> None:
    result = invoke(*args)
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_mistyped_command_is_corrected() -> None:
    result = invoke("srve")
    assert result.exit_code == 2
    assert "Did you mean 'serve'" in result.output


def test_user_mistakes_end_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    given = ("bench", "--prompts", str(file))
    mistakes = {
        ("bench", "--variants", "none"): "--prompts is empty",
        ("bench", "--prompts", "/no/such.jsonl"): "no file /no/such.jsonl",
        (*given, "--variants", "none,EAGEL3"): "unknown algorithm 'EAGEL3'",
        (*given, "--draft", "EAGLE3=/no/such"): "no checkpoint at /no/such",
        (*given, "--target", "/no/such"): "no model there",
        (*given, "--concurrency", "0"): "--concurrency '0'",
        (*given, "--temperature", "warm"): "--temperature 'warm'",
        (*given, "--output", "x.txt"): "name a .json file",
        (*given, "--target", str(target)): "no tokenizer there",
        ("serve", "--algorithm", "EAGLE4"): "unknown algorithm 'EAGLE4'",
        ("serve", "--target", str(target)): "needs a draft trained for",
    }
    for args, message in mistakes.items():
        result = invoke(*args)
        assert result.exit_code == 2, (args, result.output)
        assert message in result.output, (args, result.output)
        assert "Traceback" not in result.output
    with pytest.raises(ValueError, match="--prompts is empty"):
        CliRunner().invoke(app, ["--traceback", "bench", "--variants", "none"], catch_exceptions=False)


def test_a_server_that_does_not_start_ends_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_graft.bench.client import ServerError
    from sgl_graft.cli import doctor

    def fail(*_: object) -> None:
        raise ServerError("the server ended while it started; see server.log")

    monkeypatch.setattr(doctor, "_environment", fail)
    result = invoke("doctor")
    assert result.exit_code == 2 and "see server.log" in result.output
    monkeypatch.setattr(doctor, "_environment", lambda: {}["a mistake of ours"])
    assert isinstance(invoke("doctor").exception, KeyError)
