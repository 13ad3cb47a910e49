"""The policy a training run recommends: a JSON document, with the predictor's weights beside it.

A policy belongs to one target, vocabulary and draft, and to the temperatures it was trained at. A file that
the user named and that is missing or damaged is refused at start; a request outside the temperatures, or a
server with another vocabulary or target, gets the default size, with one warning and a count in the status.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..files import write_whole
from .predictor import Head, Predictor, fold, load_published, parameters_of, predictor_from_tensors

FILE_NAME = "blockpilot_policy.json"
WEIGHTS_NAME = "blockpilot_policy.safetensors"
FORMAT = 1
PUBLISHED_CANDIDATES = (14, 15, 16, 17, 18)  # class c of a released model.pt is block size 14 + c
PUBLISHED_DEFAULT = 16


class PolicyDocument(BaseModel):
    """What was decided.

    Attributes:
        format: version of this document.
        policy: what is recommended. The tool writes ``mlp`` or ``fixed``; ``ewma`` is named by hand.
        default: size of a request the policy says nothing about.
        candidates: class i of the predictor stands for candidates[i].
        temperatures: lowest and highest sampling temperature it was trained for; 0 is greedy.
        vocab_size: the target's vocabulary.
        head: fingerprint of the target's LM head (:func:`head_fingerprint`); empty when not known.
        weights: file of the folded predictor, beside this document; for ``mlp``.
        report: figures of the held-out evaluation, for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    policy: Literal["fixed", "mlp", "ewma"]
    default: int
    candidates: tuple[int, ...]
    temperatures: tuple[float, float] = (0.0, 0.0)
    vocab_size: int | None = None
    head: str = ""
    weights: str = ""
    report: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> PolicyDocument:
        if self.format != FORMAT:
            raise ValueError(f"policy format {self.format}, this release reads {FORMAT}: train again")
        if self.default not in self.candidates:
            raise ValueError(f"candidates {list(self.candidates)} lack the default {self.default}")
        if min(self.candidates) < 1 or list(self.candidates) != sorted(set(self.candidates)):
            raise ValueError(f"candidates {list(self.candidates)} must be rising sizes of at least 1")
        if self.temperatures[0] > self.temperatures[1] or self.temperatures[0] < 0:
            raise ValueError(f"temperatures {self.temperatures} are no range")
        if (self.policy == "mlp") != bool(self.weights):
            raise ValueError("weights belong to policy mlp, and only to it")
        if Path(self.weights).name != self.weights:
            raise ValueError(f"weights {self.weights!r} must lie beside the document")
        return self


def head_fingerprint(weight: torch.Tensor, vocab_size: int) -> str:
    """Identity of a target's LM head: a digest of 64 of its rows, rounded to bfloat16.

    Args:
        weight: [rows, hidden], whole or at least its first ``vocab_size`` rows.
    """
    rows = torch.linspace(0, vocab_size - 1, min(64, vocab_size)).long()
    sample = weight[rows.to(weight.device)].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def read_policy(path: Path) -> tuple[PolicyDocument, Predictor | None, bool]:
    """Read a policy document with its weights, or a released ``model.pt``.

    Returns:
        the document, the predictor (None for ``fixed``), and whether it reads raw logits and so must be
        folded onto the target's head.

    Raises:
        ValueError: missing, damaged, of another format, or not consistent.
    """
    remedy = "train one with `sgl-graft train blockpilot`, or leave blockpilot.policy_file out"
    if path.suffix in (".pt", ".pth", ".bin"):
        predictor = load_published(path)
        if predictor.fc_out.out_features != len(PUBLISHED_CANDIDATES):
            raise ValueError(
                f"policy file {path} has {predictor.fc_out.out_features} classes, a released predictor has "
                f"{len(PUBLISHED_CANDIDATES)}; {remedy}"
            )
        document = PolicyDocument(
            policy="mlp",
            default=PUBLISHED_DEFAULT,
            candidates=PUBLISHED_CANDIDATES,
            vocab_size=predictor.inputs,
            weights=path.name,
        )
        return document, predictor, True
    try:
        document = PolicyDocument.model_validate_json(path.read_text())
        if document.policy != "mlp":
            return document, None, False
        tensors = load_file(path.parent / document.weights)
        predictor = predictor_from_tensors(tensors, str(path.parent / document.weights))
    except (OSError, ValidationError, SafetensorError, ValueError) as error:
        raise ValueError(f"policy file {path} cannot be used: {error}; {remedy}") from error
    if predictor.fc_out.out_features != len(document.candidates):
        raise ValueError(
            f"policy file {path}: {predictor.fc_out.out_features} classes for "
            f"{len(document.candidates)} candidates; {remedy}"
        )
    return document, predictor, False


def write_policy(folder: Path, document: PolicyDocument, predictor: Predictor | None = None) -> Path:
    """Write the document, and the weights before it; a half-written policy is never found."""
    folder.mkdir(parents=True, exist_ok=True)
    if predictor is not None:
        save_file(dict(parameters_of(predictor)), folder / document.weights)
    path = folder / FILE_NAME
    write_whole(path, json.dumps(document.model_dump(), indent=1) + "\n")
    return path


def misfit(document: PolicyDocument, vocab_size: int, fingerprint: str, b_max: int) -> str | None:
    """Why a policy is not for this server, or None. Such a policy leaves every request at the default."""
    if document.vocab_size not in (None, vocab_size):
        return f"it was trained for a vocabulary of {document.vocab_size}, the target has {vocab_size}"
    if document.head and document.head != fingerprint:
        return f"it was trained for a target with LM head {document.head}, this one has {fingerprint}"
    if document.candidates[-1] > b_max:
        return f"its largest size {document.candidates[-1]} is above the server's {b_max} slots"
    return None


def usable(predictor: Predictor, reads_logits: bool, head: Head, all_reduce: Any) -> Predictor:
    """The predictor that reads hidden states: folded when it was published over raw logits.

    Raises:
        ValueError: the target's head cannot be folded, or the predictor reads another hidden size.
    """
    if reads_logits:
        return fold(predictor, head, all_reduce)
    if predictor.inputs != head.weight.shape[1]:
        raise ValueError(
            f"the predictor reads hidden states of {predictor.inputs} numbers, the target makes "
            f"{head.weight.shape[1]}; it was trained for another target"
        )
    return predictor.to(head.weight.device).float().eval()
