"""What a benchmark is: its variants, its cells and the order in which they are measured."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sgl_graft.cli.serve import ALGORITHMS, TreeSettings

TREE_KEYS = ("steps", "topk", "slots")
SETTING_KEYS = (*TREE_KEYS, "config")


@dataclass(frozen=True)
class Variant:
    """One server under test: an algorithm under a name of its own."""

    name: str
    algorithm: str
    tree: TreeSettings = field(default_factory=TreeSettings)
    draft: Path | None = None
    server_args: tuple[str, ...] = ()
    url: str | None = None  # a server that already runs; nothing else applies then

    @property
    def speculates(self) -> bool:
        return self.algorithm != "none"


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False

    def params(self, temperature: float, seed: int) -> dict[str, Any]:
        """`sampling_params` of one request; the seed makes T > 0 comparable between variants."""
        params: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": temperature}
        if self.ignore_eos:
            params["ignore_eos"] = True
        if temperature > 0:
            params |= {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "sampling_seed": seed}
        return params


class Cell(NamedTuple):
    """One measurement: all prompts of one data set, once."""

    variant: str
    dataset: str
    temperature: float
    concurrency: int
    repeat: int


def parse_variants(
    spec: str,
    *,
    drafts: Iterable[str] = (),
    settings: Iterable[str] = (),
    server_args: Iterable[str] = (),
    urls: Iterable[str] = (),
) -> tuple[Variant, ...]:
    """Read `none,EAGLE3,chain=EAGLE3` and the NAME=..., NAME.key=... options that refine it."""
    algorithms: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, algorithm = item.partition("=")
        algorithm = algorithm or name
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"--variants: unknown algorithm {algorithm!r}: choose from {', '.join(ALGORITHMS)}"
            )
        if name in algorithms:
            raise ValueError(
                f"--variants: {name!r} appears twice; give the copy a name, as in copy={algorithm}"
            )
        algorithms[name] = algorithm
    if not algorithms:
        raise ValueError("--variants is empty: name at least one, for instance none,EAGLE3")

    draft_of = {name: Path(value) for name, value in _assignments("--draft", drafts, algorithms)}
    for name, folder in draft_of.items():
        if not (folder / "config.json").is_file():
            raise ValueError(f"--draft {name}: no checkpoint at {folder} (no config.json there)")
    url_of = dict(_assignments("--url", urls, algorithms))
    args_of: dict[str, list[str]] = {name: [] for name in algorithms}
    for name, value in _assignments("--server-arg", server_args, algorithms):
        args_of[name].append(value)
    tree_of = _tree_settings(settings, algorithms)
    return tuple(
        Variant(
            name=name,
            algorithm=algorithm,
            tree=tree_of.get(name, TreeSettings()),
            draft=draft_of.get(name),
            server_args=tuple(args_of[name]),
            url=url_of.get(name),
        )
        for name, algorithm in algorithms.items()
    )


def _assignments(option: str, items: Iterable[str], known: Mapping[str, str]) -> list[tuple[str, str]]:
    pairs = []
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not value:
            raise ValueError(f"{option} {item!r}: write VARIANT=VALUE")
        _require_known(option, name, known)
        pairs.append((name, value))
    return pairs


def _require_known(option: str, name: str, known: Mapping[str, str]) -> None:
    if name not in known:
        raise ValueError(f"{option}: no variant named {name!r}; --variants has {', '.join(known)}")


def _tree_settings(items: Iterable[str], known: Mapping[str, str]) -> dict[str, TreeSettings]:
    values: dict[str, dict[str, Any]] = {}
    for item in items:
        path, separator, value = item.partition("=")
        name, dot, key = path.rpartition(".")
        if not separator or not dot:
            raise ValueError(f"--set {item!r}: write VARIANT.KEY=VALUE, for instance EAGLE3.slots=16")
        _require_known("--set", name, known)
        if key not in SETTING_KEYS:
            raise ValueError(f"--set {item!r}: unknown key {key!r}: choose from {', '.join(SETTING_KEYS)}")
        if key in TREE_KEYS and not (value.isdigit() and int(value) > 0):
            raise ValueError(f"--set {item!r}: {key} must be a positive whole number")
        if key == "config" and not Path(value).is_file():
            raise ValueError(f"--set {item!r}: no such file")
        values.setdefault(name, {})[key] = int(value) if key in TREE_KEYS else Path(value)
    return {name: TreeSettings(**keys) for name, keys in values.items()}


def parse_numbers(option: str, text: str, kind: type, minimum: float) -> tuple[Any, ...]:
    """Read `1,8` or `0,0.7`, in order and without repetition."""
    try:
        numbers = tuple(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"{option} {text!r}: write numbers separated by commas, for instance 1,8") from None
    if not numbers or min(numbers) < minimum:
        raise ValueError(f"{option} {text!r}: at least one number, none below {minimum:g}")
    return numbers


def reference_variant(variants: Sequence[Variant]) -> str | None:
    """Whose output every other output is held against: `none`, or the first that does not speculate."""
    plain = [variant.name for variant in variants if not variant.speculates]
    return "none" if "none" in plain else next(iter(plain), None)


def order_cells(
    variants: Sequence[str],
    datasets: Sequence[str],
    temperatures: Sequence[float],
    concurrencies: Sequence[int],
    repeats: int,
    *,
    together: bool,
) -> list[Cell]:
    """Repeats outermost, so that a slow spell of the machine never hits one variant alone.

    With all servers up (`together`) variants alternate cell by cell; otherwise each server measures
    everything before the next one starts. The order of variants turns round with every repeat, which cancels
    a steady drift.
    """
    cells = []
    for repeat in range(repeats):
        ordered = list(variants) if repeat % 2 == 0 else list(reversed(variants))
        settings = [(d, t, c) for t in temperatures for d in datasets for c in concurrencies]
        if together:
            cells += [Cell(v, d, t, c, repeat) for d, t, c in settings for v in ordered]
        else:
            cells += [Cell(v, d, t, c, repeat) for v in ordered for d, t, c in settings]
    return cells


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
