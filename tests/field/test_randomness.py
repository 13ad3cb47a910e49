"""Seeded answers depend on seed and position alone: nothing that serves draws from a global generator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING_ROOMS = (
    "cuda_graph",
    *(f"sgl_graft/{room}" for room in ("graft", "blockpilot", "specblock", "cpu", "serving")),
)
DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "rand_like", "randn_like"}
DRAWS |= {"normal_", "uniform_", "exponential_", "random_", "bernoulli_", "shuffle", "choice", "sample"}
# Files that make test cases or train; they are not part of a server's round.
NOT_SERVING = {
    "check_cases.py",
    "check.py",
    "timing.py",
    "training.py",
    "report.py",
    "analysis.py",
    "collect.py",
}


def unseeded_draws(source: str) -> list[str]:
    """Calls that draw numbers without being handed a generator or a seeded ``random.Random``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr not in DRAWS or any(word.arg == "generator" for word in node.keywords):
            continue
        if owner in ("torch", "random", "np.random", "numpy.random") or node.func.attr.endswith("_"):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize("room", SERVING_ROOMS)
def test_no_room_draws_from_a_global_generator(room: str) -> None:
    files = [file for file in sorted((ROOT / room).rglob("*.py")) if file.name not in NOT_SERVING]
    assert len(files) > 3
    found = {str(file.relative_to(ROOT)): unseeded_draws(file.read_text()) for file in files}
    assert not {name: draws for name, draws in found.items() if draws}


def test_the_scan_finds_draws() -> None:
    assert len(unseeded_draws("torch.rand(3)\nrandom.choice(a)\nx.normal_()\n")) == 3
    assert not unseeded_draws("torch.rand(3, generator=g)\nself.rng.choice(a)\ntorch.zeros(3)\n")
