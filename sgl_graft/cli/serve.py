"""`sgl-graft serve`: SGLang's own launcher with the embedded model and defaults that suit the machine."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from sgl_graft.embedded import EMBEDDED_MODEL
from sgl_graft.graft.shape import CPU_TREE, DEFAULT_TREE
from sgl_graft.serving.secrets import masked

app = typer.Typer(add_completion=False)

# Pool of KV tokens on a CPU, where SGLang cannot derive one from free device memory: 46 KB a token for the
# embedded model in fp32, so 1.5 GB; room for 16 requests of 2K tokens.
CPU_MAX_TOTAL_TOKENS = 32768


@dataclass(frozen=True)
class AlgorithmDefaults:
    """What `--speculative-algorithm NAME` needs beside the name."""

    needs_draft: bool = True
    embedded_draft: str | None = None  # kind of the draft shipped for the embedded model
    steps: int | None = None
    topk: int | None = None
    slots: int | None = None


_EAGLE = AlgorithmDefaults(True, "eagle3", *DEFAULT_TREE)
ALGORITHMS = {
    "none": AlgorithmDefaults(needs_draft=False),
    "EAGLE": AlgorithmDefaults(steps=5, topk=4, slots=16),
    "EAGLE3": _EAGLE,
    "GRAFT": _EAGLE,
    "STANDALONE": AlgorithmDefaults(steps=3, topk=2, slots=8),
    "NGRAM": AlgorithmDefaults(needs_draft=False, slots=16),
    "DFLASH": AlgorithmDefaults(embedded_draft="dflash"),
    "BLOCKPILOT": AlgorithmDefaults(embedded_draft="dflash"),
    "SPECBLOCK": AlgorithmDefaults(embedded_draft="specblock"),
}
NAMES = ", ".join(ALGORITHMS)


@dataclass(frozen=True)
class TreeSettings:
    """A variant's tree; None keeps the algorithm's default."""

    steps: int | None = None
    topk: int | None = None
    slots: int | None = None
    config: Path | None = None  # --graft-config


# What `sgl-graft serve` builds on a CPU unless told otherwise. A bench compares algorithms at equal shapes
# and does not look here.
CPU_TREES = {"GRAFT": TreeSettings(*CPU_TREE)}


def tree_to_serve(algorithm: str, given: TreeSettings, device: str) -> TreeSettings:
    """The tree that was asked for, else what suits the machine."""
    asked = any(value is not None for value in (given.steps, given.topk, given.slots))
    if asked or device != "cpu" or algorithm not in CPU_TREES:
        return given
    return replace(CPU_TREES[algorithm], config=given.config)


def algorithm_defaults(algorithm: str) -> AlgorithmDefaults:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm]


def embedded_target() -> Path:
    from sgl_graft import models

    return Path(models.get(EMBEDDED_MODEL))


def embedded_draft(algorithm: str) -> Path:
    """The draft that ships for the embedded model, by the kind that the algorithm needs."""
    import sgl_graft

    kind = algorithm_defaults(algorithm).embedded_draft
    remedy = f"name one with --draft, or train it with `sgl-graft train {kind or algorithm.lower()}`"
    if kind is None:
        raise ValueError(f"no draft ships for {algorithm}: {remedy}")
    folder = Path(sgl_graft.__file__).parent / "drafts" / f"{EMBEDDED_MODEL}-{kind}"
    if not (folder / "config.json").is_file():
        raise ValueError(f"the draft for {algorithm} is not at {folder}: {remedy}")
    return folder


def target_and_draft(algorithm: str, target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """The pair that was named, or the embedded one.

    Raises:
        ValueError: a target was named and no draft, or nothing ships for the algorithm.
    """
    if draft is None and target is not None:
        raise ValueError(f"{algorithm} needs a draft trained for {target}: name it with --draft")
    return target or embedded_target(), draft or embedded_draft(algorithm)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def default_server_args(
    algorithm: str,
    *,
    target: Path | None = None,
    draft: Path | None = None,
    tree: TreeSettings | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> list[str]:
    """Arguments of `python -m sglang.launch_server` for one algorithm, everything but host and port."""
    defaults = algorithm_defaults(algorithm)
    tree = tree or TreeSettings()
    device = device or ("cuda" if has_cuda() else "cpu")
    args = ["--model-path", str(target or embedded_target()), "--device", device]
    if device == "cpu":
        args += ["--dtype", dtype or "float32", "--max-total-tokens", str(CPU_MAX_TOTAL_TOKENS)]
    elif dtype:
        args += ["--dtype", dtype]
    if algorithm != "none":
        args += ["--speculative-algorithm", algorithm]
        if defaults.needs_draft:
            _, draft = target_and_draft(algorithm, target, draft)
            args += ["--speculative-draft-model-path", str(draft)]
        args += _tree_args(defaults, tree)
    if tree.config is not None:
        args += ["--graft-config", str(tree.config)]
    return args


def _tree_args(defaults: AlgorithmDefaults, tree: TreeSettings) -> list[str]:
    steps = defaults.steps if tree.steps is None else tree.steps
    topk = defaults.topk if tree.topk is None else tree.topk
    slots = defaults.slots if tree.slots is None else tree.slots
    if topk == 1 and steps is not None:
        # A chain has exactly one slot per step and the root; SGLang warns and rewrites anything else.
        slots = steps + 1
        if tree.slots not in (None, slots):
            raise ValueError(f"topk 1 with {steps} steps is a chain of {slots} slots, not {tree.slots}")
    flags = {
        "--speculative-num-steps": steps,
        "--speculative-eagle-topk": topk,
        "--speculative-num-draft-tokens": slots,
    }
    return [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    algorithm: Annotated[
        str, typer.Option(help=f"One of {', '.join(ALGORITHMS)}; NGRAM needs a GPU.")
    ] = "GRAFT",
    target: Annotated[Path | None, typer.Option(help="Model folder (default: the embedded model).")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft folder (default: the one that ships).")] = None,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    steps: Annotated[int | None, typer.Option(help="Draft steps.")] = None,
    topk: Annotated[int | None, typer.Option(help="Branches per step; 1 is a chain.")] = None,
    slots: Annotated[int | None, typer.Option(help="Tree slots verified per round.")] = None,
    graft_config: Annotated[Path | None, typer.Option(help="YAML or JSON for GRAFT and friends.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda when present).")] = None,
) -> None:
    """Start the server. What follows `--` goes to SGLang as it is."""
    device = device or ("cuda" if has_cuda() else "cpu")
    args = default_server_args(
        algorithm,
        target=target,
        draft=draft,
        tree=tree_to_serve(algorithm, TreeSettings(steps, topk, slots, graft_config), device),
        dtype=dtype,
        device=device,
    )
    command = launch_command([*args, "--host", host, "--port", str(port), *context.args])
    typer.secho(shlex.join(masked(command)), fg=typer.colors.CYAN, err=True)
    os.execv(command[0], command)


def launch_command(args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", *args]
