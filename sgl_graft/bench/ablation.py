"""The ablation of GRAFT: what each part is worth, replayed on one recording, in one table and one plot."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sgl_graft.bench.compare import ratio_of_sums
from sgl_graft.bench.recording import Answer, Recording
from sgl_graft.bench.replay import Calibrated, Replayed, Setting, loops, replay
from sgl_graft.bench.warm_up_cost import warm_up_cost
from sgl_graft.cuda_graph.value_rule import ValueMaps

BASE = "EAGLE3"
WARM_UPS = (1, 5, 25, 50)
TEMPLATE_SIZES = (2, 4, 8, 10, 12)


def settings(slots: int) -> tuple[Setting, ...]:
    """Every line of the table at one number of slots; `value` and `staged` are the two rules as served.

    Names are words that `bench --variants` takes, so that a real run can be held against any line.
    """
    value = Setting("value", "value", slots)
    staged = Setting("staged", "staged", slots)
    lines = [
        Setting(BASE, "eagle", slots),
        Setting("prune-only", "prune", slots),
        Setting("retrieval-only", "table", slots),
        Setting("fixed-split", "split", slots),
        staged,
        replace(staged, name="staged-entropy-gate", gate="entropy"),
        replace(staged, name="staged-every-depth", checkpoints="every"),
        replace(staged, name="staged-root-only", checkpoints="root"),
        value,
    ]
    lines.append(replace(value, name="value-uncalibrated", calibrated=False))
    for rule in (staged, value):
        lines += [
            replace(rule, name=f"{rule.name}-request", scope="request"),
            replace(rule, name=f"{rule.name}-no-context", context_rows=0),
            replace(rule, name=f"{rule.name}-order2", context_len=2),
            replace(rule, name=f"{rule.name}-no-seeding", seed_prompts=False),
            replace(rule, name=f"{rule.name}-k4", row_width=4),
        ]
    lines += [replace(value, name=f"value-warm-{count}", warm_up=count) for count in WARM_UPS]
    lines += [
        replace(value, name=f"value-width-{width}", template_width=width, row_width=max(8, width))
        for width in TEMPLATE_SIZES
    ]
    lines += [replace(value, name=f"value-depth-{depth}", depth=depth) for depth in TEMPLATE_SIZES]
    return tuple(lines)


def choose_settings(
    sizes: Sequence[int], only: str, recording: Recording, warm_up: Recording | None
) -> list[Setting]:
    """The settings asked for; without names, all that the recordings can serve."""
    everything = [setting for size in sizes for setting in settings(size)]
    pool = recording.answers[0].pool_tokens.shape[1]
    if too_large := [size for size in sizes if size - 1 > pool]:
        raise ValueError(f"--slots {too_large[0]}: the recorded draft has {pool} nodes; record a larger topk")
    have = 0 if warm_up is None else len(warm_up.answers)
    if not only:
        return [setting for setting in everything if setting.warm_up <= have]
    names = [part.strip() for part in only.split(",")]
    known = {setting.name for setting in everything}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return [setting for setting in everything if setting.name in names]


def read_calibration(path: Path | None) -> Calibrated:
    """The file that `sgl-graft calibrate` writes."""
    if path is None:
        return Calibrated.none()
    from sgl_graft.graft.calibration import Calibration

    fitted = Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    maps: ValueMaps = fitted.value_maps()
    return Calibrated(maps, dict(fitted.thresholds))


def run_ablation(
    recording: Recording,
    chosen: Sequence[Setting],
    calibrated: Calibrated,
    output: Path,
    warm_up: Recording | None = None,
    on_done: Callable[[Setting], Any] = lambda setting: None,
) -> dict[str, Any]:
    """Replay every setting; finished ones are kept in `output` and not replayed again."""
    key = _digest(recording, calibrated)
    identities = {setting: _identity(setting, warm_up) for setting in chosen}
    replays = _read_finished(output, key)
    output.parent.mkdir(parents=True, exist_ok=True)
    for setting, identity in identities.items():
        if identity not in replays:
            start = time.monotonic()
            rows = replay(setting, recording, calibrated, warm_up)
            replays[identity] = {
                "seconds": round(time.monotonic() - start, 2),
                "answers": [[r.dataset, r.index, r.num_tokens, r.num_rounds] for r in rows],
            }
            if setting.warm_up and warm_up is not None:
                replays[identity]["warm_up"] = warm_up_cost(setting, warm_up, calibrated)
            _write(output, {"recording": key, "replays": replays})
        on_done(setting)
    result = _result(recording, identities, replays) | {"recording": key, "replays": replays}
    _write(output, result)
    return result


def _write(output: Path, content: dict[str, Any]) -> None:
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _identity(setting: Setting, warm_up: Recording | None) -> str:
    """Everything that decides a setting's replay, beside what all settings share."""
    identity = json.dumps(asdict(setting), sort_keys=True)
    if setting.warm_up and warm_up is not None:
        met = hashlib.sha256(b"".join(_content(a) for a in warm_up.answers[: setting.warm_up]))
        identity += f" after {met.hexdigest()[:16]}"
    return identity


def _read_finished(output: Path, key: str) -> dict[str, Any]:
    if not output.is_file():
        return {}
    old = json.loads(output.read_text(encoding="utf-8"))
    return dict(old["replays"]) if old.get("recording") == key else {}


def _digest(recording: Recording, calibrated: Calibrated) -> str:
    state = hashlib.sha256(repr((recording.shape, recording.names, calibrated.thresholds)).encode())
    for answer in recording.answers:
        state.update(_content(answer))
    state.update(calibrated.maps.y.numpy().tobytes())
    return state.hexdigest()[:16]


def _content(answer: Answer) -> bytes:
    return bytes(answer.tokens.numpy().tobytes() + answer.pool_scores.numpy().tobytes())


def _result(recording: Recording, identities: dict[Setting, str], replays: dict[str, Any]) -> dict[str, Any]:
    looping = {
        name
        for name, answer in zip(recording.names, recording.answers, strict=True)
        if loops(answer.tokens.tolist())
    }
    by_setting = {
        setting: [Replayed(*row) for row in replays[identity]["answers"]]
        for setting, identity in identities.items()
    }
    bases = {setting.slots: rows for setting, rows in by_setting.items() if setting.name == BASE}
    lines = []
    for setting, rows in by_setting.items():
        line = _line(setting, rows, bases.get(setting.slots), looping)
        if cost := replays[identities[setting]].get("warm_up"):
            line["warm_up"] = cost
        lines.append(line)
    return {"num_answers": len(recording.answers), "num_looping": len(looping), "lines": lines}


def _line(
    setting: Setting, rows: Sequence[Replayed], base: Sequence[Replayed] | None, looping: set[tuple[str, int]]
) -> dict[str, Any]:
    straight = [row for row in rows if (row.dataset, row.index) not in looping]
    line: dict[str, Any] = {
        "name": setting.name,
        "slots": setting.slots,
        "by_file": {name: round(length, 4) for name, length in _by_file(rows).items()},
        "accept_length": _mean(rows),
        "accept_length_without_loops": _mean(straight),
    }
    if base is not None:
        columns = [
            (np.array([b.num_tokens for b in side], float), np.array([b.num_rounds for b in side], float))
            for side in (base, rows)
        ]
        ratio = ratio_of_sums((columns[0][0], columns[1][0]), (columns[0][1], columns[1][1]))
        line |= {
            "over_base": round(ratio.value, 4),
            "low": round(ratio.low, 4),
            "high": round(ratio.high, 4),
        }
    return line


def _by_file(rows: Sequence[Replayed]) -> dict[str, float]:
    totals: dict[str, list[int]] = {}
    for row in rows:
        total = totals.setdefault(row.dataset, [0, 0])
        total[0] += row.num_tokens
        total[1] += row.num_rounds
    return {name: tokens / rounds for name, (tokens, rounds) in totals.items()}


def _mean(rows: Sequence[Replayed]) -> float | None:
    files = _by_file(rows).values()
    return round(sum(files) / len(files), 4) if files else None
