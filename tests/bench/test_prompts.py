import json
from pathlib import Path

import pytest

from sgl_graft.bench.prompts import load_datasets, load_tokenizer, prompt_seed


def test_first_rows_first_turn_in_the_template(target: Path, prompt_file: Path) -> None:
    (dataset,) = load_datasets([prompt_file], 2, load_tokenizer(target))
    assert dataset.name == "words"
    assert [p.input_ids for p in dataset.prompts] == [(51, 1, 0, 52), (51, 1, 1, 52)]
    assert dataset.prompts[1].seed == prompt_seed(0, "words", 1) != prompt_seed(1, "words", 1)


def test_raw_rows_and_switch_skip_the_template(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"prompt": "w3 w4", "raw": true}\n\n{"prompt": "w3 w4"}\n')
    tokenizer = load_tokenizer(target)
    (dataset,) = load_datasets([file], 9, tokenizer)
    assert [p.input_ids for p in dataset.prompts] == [(3, 4), (51, 3, 4, 52)]
    (bare,) = load_datasets([file], 9, tokenizer, chat_template=False)
    assert [p.input_ids for p in bare.prompts] == [(3, 4), (3, 4)]


def test_a_target_without_template_is_refused(target: Path, prompt_file: Path) -> None:
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="--no-chat-template"):
        load_datasets([prompt_file], 1, load_tokenizer(target))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("{}\n", "needs `turns`"),
        ('{"turns": []}\n', "needs `turns`"),
        ("{\n", ":1: not JSON"),
    ],
)
def test_bad_files_are_refused(content: str, message: str, target: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_datasets([file], 1, load_tokenizer(target))


def test_two_files_of_one_name_are_refused(target: Path) -> None:
    with pytest.raises(ValueError, match="share a stem"):
        load_datasets([Path("a/x.jsonl"), Path("b/x.jsonl")], 1, None)
