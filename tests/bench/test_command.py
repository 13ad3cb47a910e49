"""`sgl-graft bench` as it is typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sgl_graft.cli.main import app


def test_the_promised_command_line(
    start_fake: Callable[..., tuple[str, Any]], target: Path, prompt_file: Path, tmp_path: Path
) -> None:
    plain, calls = start_fake()
    tree, _ = start_fake(algorithm="EAGLE3", wrong_at=2)
    output = tmp_path / "out.json"
    command = (
        f"bench --target {target} --variants none,EAGLE3 --prompts {prompt_file} --num-prompts 3"
        f" --max-new-tokens 7 --concurrency 1,2 --temperature 0 --repeats 2 --output {output}"
        f" --url none={plain} --url EAGLE3={tree}"
    )
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    runs = json.loads(output.read_text())["runs"]
    assert len(runs) == 2 * 2 * 2
    assert {row["dataset"] for row in runs} == {"words"}
    assert {row["num_requests"] for row in runs} == {3}
    assert {(row["identical"], row["compared"]) for row in runs if row["variant"] == "EAGLE3"} == {(0, 3)}
    assert calls[-1][1]["sampling_params"] == {"max_new_tokens": 7, "temperature": 0.0}
    assert "differs at token 2" in result.output
    assert output.with_suffix(".png").is_file()


def test_an_unreachable_url_is_an_error_not_a_traceback(
    target: Path, prompt_file: Path, tmp_path: Path
) -> None:
    command = (
        f"bench --target {target} --variants none --prompts {prompt_file} --output {tmp_path / 'o.json'}"
        " --url none=http://127.0.0.1:9"
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.output
