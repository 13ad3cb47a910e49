"""An EAGLE-3 draft of a tiny target, trained on what that target writes, by the product's own recipe."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM

from sgl_graft.draft_training import dialogues, eagle3_job
from sgl_graft.draft_training.eagle3_recipe import Eagle3Settings
from sgl_graft.draft_training.generate import Generate, Generator, Script, Text
from sgl_graft.draft_training.loop import TrainSettings

from . import markov

DIALOGUES = 128
PROMPT_TOKENS = 24
ANSWER_TOKENS = 96
STEPS = 80


def train_draft(target: Path, folder: Path) -> Path:
    """Write dialogues of the tiny `target` and a draft trained on them below `folder`; return the draft."""
    data, run = folder / "data", folder / "run"
    dialogues.save(data / f"written{dialogues.SUFFIX}", _dialogues(target), {"target": target.name})
    job = eagle3_job.Eagle3Job(
        target=target,
        data=(data,),
        run=run,
        draft_vocab_size=markov.DRAFT_VOCAB,
        batch_targets=512,
        train=TrainSettings(
            steps=STEPS, lr=2e-3, warmup=10, decay_steps=30, eval_every=STEPS, save_every=STEPS, threads=1
        ),
        eagle3=Eagle3Settings(steps=3, bf16=False),
    )
    threads = torch.get_num_threads()
    try:
        eagle3_job.compute_features(target, job.data, run / "features")
        eagle3_job.make_trainer(job).run()
    finally:
        torch.set_num_threads(threads)
    return run / "export"


def _dialogues(target: Path) -> list[dialogues.Dialogue]:
    """The target continues pieces of the Python manual, half of them greedily."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    pick = random.Random(0)
    scripts = []
    for index in range(DIALOGUES):
        start = pick.randrange(len(text) - PROMPT_TOKENS)
        prompt = Text(tuple(text[start : start + PROMPT_TOKENS]))
        answer = Generate(ANSWER_TOKENS, temperature=float(index % 2), answer=True)
        scripts.append(Script((prompt, answer), "manual", index))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = Generator(
        model, end_of_turn=markov.EOS, slots=DIALOGUES, max_len=PROMPT_TOKENS + ANSWER_TOKENS
    )
    return list(generator.run(scripts))
