"""A tiny target, dialogues it wrote, their features: built once for all tests of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_graft.draft_training import dialogues, features
from sgl_graft.draft_training.dialogues import Dialogue
from sgl_graft.models import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("target") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues of random tokens with two answers each (what the target would say does not matter here)."""
    folder = tmp_path_factory.mktemp("dialogues")
    generator = torch.Generator().manual_seed(0)
    written = []
    for i in range(40):
        ids = torch.randint(3, 100, (30 + i % 7,), generator=generator).tolist()
        written.append(Dialogue(ids, [(6, 12), (15, len(ids))], "self" if i % 2 else "math", i))
    for shard in range(2):
        dialogues.save(folder / f"part-{shard}{dialogues.SUFFIX}", written[shard * 20 : shard * 20 + 20])
    return folder


@pytest.fixture(scope="session")
def feature_folder(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    capture = features.FeatureCapture(model, features.default_layers(model.config.num_hidden_layers))
    for file in sorted(data.glob("*")):
        name = file.name.removesuffix(dialogues.SUFFIX) + features.SUFFIX
        features.compute(model, capture, dialogues.load(file).dialogues, folder / name)
    return folder
