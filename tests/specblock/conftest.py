"""A tiny random SpecBlock draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from sgl_graft.draft_training import dialogues, eagle3_job
from sgl_graft.draft_training.dialogues import Dialogue
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.models import tiny
from sgl_graft.specblock.model import SpecBlockDraft


def tiny_config(**changes: Any) -> LlamaConfig:
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMSpecBlockShift"],
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "diffspec_draft_token_num": 4,
        "rank_classes": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**{**fields, **changes})


@pytest.fixture
def draft() -> SpecBlockDraft:
    torch.manual_seed(0)
    made = SpecBlockDraft(tiny_config())
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    return made


@pytest.fixture
def vocab() -> DraftVocab:
    return DraftVocab.of(torch.randperm(96, generator=torch.Generator().manual_seed(1))[:40], 96)


@pytest.fixture(scope="session")
def spec_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("target") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def spec_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues in which each token tells the next, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("dialogues")
    written = []
    for i in range(40):
        ids = [(7 * i + 3 * j) % 90 + 5 for j in range(30 + i % 7)]
        written.append(Dialogue(ids, [(6, 12), (15, len(ids))], "self", i))
    dialogues.save(folder / f"part{dialogues.SUFFIX}", written)
    return folder


@pytest.fixture(scope="session")
def spec_features(spec_target: Path, spec_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    eagle3_job.compute_features(spec_target, (spec_data,), folder)
    return folder
