"""Prompt files: JSONL rows with `turns` or `prompt`, turned into token ids as the server's chat API would."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    index: int  # row in the file
    input_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Dataset:
    name: str  # the file's stem
    prompts: tuple[Prompt, ...]


def load_datasets(
    files: Sequence[Path], num_prompts: int, tokenizer: Any, *, chat_template: bool = True, base_seed: int = 0
) -> tuple[Dataset, ...]:
    """The first `num_prompts` rows of each file: first turn only, inside the chat template.

    A row with `"raw": true` (a text to continue, not a question) is sent without the template.
    """
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--prompts: two files share a stem in {', '.join(names)}; results are keyed by the stem"
        )
    return tuple(
        Dataset(
            file.stem,
            tuple(
                Prompt(
                    index,
                    _encode(row, tokenizer, chat_template, file),
                    prompt_seed(base_seed, file.stem, index),
                )
                for index, row in enumerate(read_rows(file, num_prompts))
            ),
        )
        for file in files
    )


def read_rows(file: Path, num_rows: int) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ValueError(f"--prompts: no file {file}")
    rows: list[dict[str, Any]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(rows) == num_rows:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: not JSON ({error})") from None
            if not isinstance(row, dict) or not (row.get("turns") or row.get("prompt")):
                raise ValueError(
                    f"{file}:{number}: a row needs `turns` (a list of texts) or `prompt` (a text)"
                )
            rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows


def prompt_seed(base_seed: int, dataset: str, index: int) -> int:
    """One seed per prompt, the same in every variant, run and machine."""
    text = f"{base_seed}/{dataset}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def load_tokenizer(target: Path) -> Any:
    if (target / "tokenizer.json").is_file():
        # Importing AutoTokenizer takes 12 s of CPU, this class 2 s, and both read the same file.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(target)
    if not (target / "tokenizer_config.json").is_file():
        raise ValueError(f"--target {target}: no tokenizer there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def _encode(row: dict[str, Any], tokenizer: Any, chat_template: bool, file: Path) -> tuple[int, ...]:
    text = row["turns"][0] if row.get("turns") else row["prompt"]
    if chat_template and not row.get("raw"):
        if not tokenizer.chat_template:
            raise ValueError(f"the target has no chat template for {file}: add --no-chat-template")
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return tuple(tokenizer.encode(text))
