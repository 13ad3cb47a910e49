import json
from pathlib import Path

import pytest

from sgl_graft.bench.code_prompts import write_code_prompts


class Words:
    """A tokenizer of whitespace-separated words: fast, and its lengths add up."""

    def encode(self, text: str) -> list[str]:
        return text.split()


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_same_cuts_at_every_length_and_same_bytes_every_time(tmp_path: Path) -> None:
    files = write_code_prompts(tmp_path / "a", Words(), [256, 1024], 14)
    again = write_code_prompts(tmp_path / "b", Words(), [256, 1024], 14)
    assert [file.name for file in files] == ["code_0.25k.jsonl", "code_1k.jsonl"]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]

    short, long = read(files[0]), read(files[1])
    for low, high in zip(short, long, strict=True):
        assert low["module"] == high["module"]
        assert low["reference"] == high["reference"]
        assert str(high["prompt"]).endswith(str(low["prompt"]))
        assert 256 * 0.9 <= int(str(low["context_tokens"])) <= 256
        assert 1024 * 0.9 <= int(str(high["context_tokens"])) <= 1024
        assert low["raw"] is True
    assert len({str(row["module"]).rpartition("/")[0] for row in long}) >= 13  # every package takes its turn
    assert len({str(row["module"]) for row in long}) == 14

    (other,) = write_code_prompts(tmp_path / "c", Words(), [256], 14, seed=1)
    assert other.read_bytes() != files[0].read_bytes()


def test_more_rows_than_the_library_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rows 1000000: the standard library .* has \d+ places"):
        write_code_prompts(tmp_path, Words(), [256], 1_000_000)
