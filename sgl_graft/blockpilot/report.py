"""From collected runs to a recommendation: train, judge on held-out prompts, write policy and report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .analysis import Verdict, judge, label_statistics, majority_choice, split_by_prompt
from .costs import CostTable
from .labels import Scores, best_sizes, soft_targets
from .policy_file import WEIGHTS_NAME, PolicyDocument, head_fingerprint
from .predictor import Head, Predictor
from .training import Recipe, choose, columns_within, features, shuffled, targets_of, train


@dataclass(frozen=True)
class Evidence:
    """Everything a policy is trained on and judged by.

    Attributes:
        scores: accept length of every prompt at every size.
        hidden: last hidden state of every prompt, in the order of ``scores.prompts``. [prompts, hidden]
        groups: data set of every prompt.
        head: the target's LM head.
        default: the default size.
        costs: cost table; None judges by accept length alone.
    """

    scores: Scores
    hidden: Tensor
    groups: tuple[str, ...]
    head: Head
    default: int
    costs: CostTable | None

    def restricted(self, k: int) -> Evidence:
        """Only the candidates within ``k`` of the default."""
        columns = columns_within(self.scores.sizes, self.default, k)
        scores = Scores(
            self.scores.prompts,
            tuple(self.scores.sizes[c] for c in columns),
            self.scores.accept[:, columns],
        )
        return Evidence(scores, self.hidden, self.groups, self.head, self.default, self.costs)

    def value(self, rule: str, batch: int) -> Tensor:
        """What a label maximises. [prompts, sizes]"""
        return self.scores.speed(self.costs if rule == "time" else None, batch)


def fit_and_judge(
    evidence: Evidence, recipe: Recipe, rule: str, batch: int, seed: int = 0, permute: bool = False
) -> tuple[Predictor, Verdict]:
    """Train on two thirds of the prompts and judge on the others.

    Args:
        permute: control: learn from, and choose by, other prompts' features.
    """
    sizes, value = evidence.scores.sizes, evidence.value(rule, batch)
    rows, held = split_by_prompt(evidence.scores.prompts, 1 / 3, seed)
    labels = best_sizes(
        value, sizes, evidence.default, ties="first" if not recipe.soft and rule == "accept" else "default"
    )
    soft = soft_targets(value)
    x = features(evidence.hidden, evidence.head, recipe.inputs)
    if permute:
        x = shuffled(x, seed)
    predictor = train(x[rows], targets_of(labels, soft, recipe)[rows], recipe, seed)
    return predictor, judge(value[held], choose(predictor, x[held]), sizes, seed)


def baselines(evidence: Evidence, rule: str, batch: int, seed: int = 0) -> dict[str, Verdict]:
    """Default everywhere, and the commonest best size of each data set, on the same held-out prompts."""
    sizes, value = evidence.scores.sizes, evidence.value(rule, batch)
    rows, held = split_by_prompt(evidence.scores.prompts, 1 / 3, seed)
    labels = best_sizes(value, sizes, evidence.default)
    majority = majority_choice(
        labels[rows], [evidence.groups[i] for i in rows], [evidence.groups[i] for i in held]
    )
    default = torch.full((len(held),), sizes.index(evidence.default))
    return {
        "default": judge(value[held], default, sizes, seed),
        "majority label": judge(value[held], majority, sizes, seed),
    }


def full_report(
    evidence: Evidence,
    recipe: Recipe,
    rule: str,
    batches: Sequence[int] = (1, 8),
    ablations: dict[str, Recipe] | None = None,
    k: int = 2,
    seed: int = 0,
) -> tuple[dict[str, Any], Predictor]:
    """Every figure of a policy's report, and the predictor of the first batch size.

    The report holds label statistics over all sizes that were run, verdicts for the candidates within ``k``,
    and ablations over k and over the recipe.
    """
    near = evidence.restricted(k)
    report: dict[str, Any] = {
        "prompts": len(evidence.scores.prompts),
        "sizes": list(evidence.scores.sizes),
        "candidates": list(near.scores.sizes),
        "default": evidence.default,
        "rule": rule,
        "recipe": asdict(recipe),
        "accept_length_by_size": dict(
            zip(map(str, evidence.scores.sizes), evidence.scores.accept.mean(0).tolist(), strict=True)
        ),
    }
    predictor: Predictor | None = None
    for batch in batches:
        value = evidence.value(rule, batch)
        labels = best_sizes(value, evidence.scores.sizes, evidence.default)
        fitted, verdict = fit_and_judge(near, recipe, rule, batch, seed)
        _, control = fit_and_judge(near, recipe, rule, batch, seed, permute=True)
        predictor = predictor or fitted
        report[f"batch {batch}"] = {
            "labels": asdict(label_statistics(value, labels, evidence.scores.sizes, evidence.default)),
            "predictor": verdict.as_dict(),
            "shuffled inputs": control.as_dict(),
            **{name: each.as_dict() for name, each in baselines(near, rule, batch, seed).items()},
        }
    report["ablations"] = {
        **{
            f"k = {other}": fit_and_judge(evidence.restricted(other), recipe, rule, batches[0], seed)[
                1
            ].as_dict()
            for other in (1, 2, 3)
        },
        **{
            name: fit_and_judge(near, other, rule, batches[0], seed)[1].as_dict()
            for name, other in (ablations or {}).items()
        },
    }
    assert predictor is not None
    return report, predictor


def recommend(
    evidence: Evidence, report: dict[str, Any], temperatures: tuple[float, float], k: int = 2
) -> PolicyDocument:
    """The policy to ship: the predictor only where its gain is above 0 at the interval's lower end.

    Otherwise ``fixed``, at the size with the best mean at batch 1, but the default when that is no worse
    within the prompts' noise.
    """
    first = next(value for name, value in report.items() if name.startswith("batch "))
    vocab_size = evidence.head.vocab_size
    common: dict[str, Any] = {
        "candidates": evidence.restricted(k).scores.sizes,
        "temperatures": temperatures,
        "vocab_size": vocab_size,
        "head": head_fingerprint(evidence.head.weight, vocab_size),
        "report": json.loads(json.dumps(report)),  # as it will be read back
    }
    if first["predictor"]["recommended"]:
        return PolicyDocument(policy="mlp", default=evidence.default, weights=WEIGHTS_NAME, **common)
    value = evidence.restricted(k).value(report["rule"], 1)
    sizes = evidence.restricted(k).scores.sizes
    best = int(value.mean(0).argmax())
    lower = _paired_lower(value[:, best], value[:, sizes.index(evidence.default)])
    better = sizes[best] != evidence.default and lower > 0
    return PolicyDocument(policy="fixed", default=sizes[best] if better else evidence.default, **common)


def _paired_lower(ours: Tensor, theirs: Tensor) -> float:
    """Lower end of the 95 % interval of the relative difference of two means over the same prompts."""
    from .analysis import bootstrap_rows

    rows = bootstrap_rows(len(ours))
    ratio = ours[rows].mean(1) / theirs[rows].mean(1) - 1.0
    return float(torch.quantile(ratio, 0.025))


def as_markdown(report: dict[str, Any], document: PolicyDocument) -> str:
    """The report as a page for people."""
    lines = [
        f"# BlockPilot policy: `{document.policy}`, default {document.default}",
        "",
        f"{report['prompts']} prompts, all of sizes {report['sizes']} really run; labels by "
        f"{report['rule']}; temperatures {document.temperatures[0]:g} to {document.temperatures[1]:g}.",
        "",
        "| size | " + " | ".join(report["accept_length_by_size"]) + " |",
        "|---|" + "---|" * len(report["accept_length_by_size"]),
        "| accept length | "
        + " | ".join(f"{value:.3f}" for value in report["accept_length_by_size"].values())
        + " |",
    ]
    for name, section in report.items():
        if not name.startswith("batch "):
            continue
        labels = section["labels"]
        lines += [
            "",
            f"## {name}",
            "",
            f"Best sizes {labels['histogram']}; within 1, 2, 3 of the default: "
            + ", ".join(f"{share:.0%}" for share in labels["within"].values())
            + "; mean loss by distance from the best: "
            + ", ".join(f"{d}: {loss:.1%}" for d, loss in labels["loss_by_distance"].items())
            + ".",
            "",
            *_table({key: value for key, value in section.items() if key != "labels"}),
        ]
    lines += ["", "## ablations", "", *_table(report["ablations"])]
    return "\n".join(lines) + "\n"


def _table(verdicts: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        "| choice | best fixed | gain over it, 95 % | oracle's gain | share of the oracle's, 95 % |",
        "|---|---|---|---|---|",
    ]
    for name, verdict in verdicts.items():
        gain, share = verdict["gain"], verdict["fraction"]
        rows.append(
            f"| {name} | {verdict['best_fixed']} | {gain['mean']:+.2%} ({gain['low']:+.2%} to "
            f"{gain['high']:+.2%}) | {verdict['oracle_gain']:+.2%} | {share['mean']:.2f} "
            f"({share['low']:.2f} to {share['high']:.2f}) |"
        )
    return rows
