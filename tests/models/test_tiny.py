from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_graft.models import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_family_loads_and_answers(family: str, tmp_path: Path) -> None:
    folder = tiny.build(tmp_path / family, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Grüße, 你好"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert "Grüße, 你好" in tokenizer.decode(ids[0]), "any text round-trips"
    logits = model(ids).logits[0].detach()  # [tokens, vocab]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.1, "greedy choices are clear"


def test_same_seed_same_weights(tmp_path: Path) -> None:
    one, two, other = (
        AutoModelForCausalLM.from_pretrained(tiny.build(tmp_path / name, "llama", seed=seed))
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match="qwen3_moe"):
        tiny.build(Path("unused"), "gpt")


def test_draft_matches_target(tmp_path: Path) -> None:
    target = tiny.build(tmp_path / "target", "qwen3")
    draft = tiny.build_draft(tmp_path / "draft", target, draft_vocab_size=128)
    config = json.loads((draft / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (tiny.VOCAB_SIZE, 128)
    with safe_open(draft / "model.safetensors", "pt") as tensors:
        mapped = tensors.get_tensor("d2t") + torch.arange(128)
        assert torch.equal(tensors.get_tensor("t2d").nonzero()[:, 0], mapped)
