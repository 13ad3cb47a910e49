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
from sgl_graft.bench.recording import Recording
from sgl_graft.bench.replay import Calibrated, Replayed, Setting, loops, replay
from sgl_graft.cuda_graph.value_rule import ValueMaps

BASE = "EAGLE3"
ANCHOR_TOLERANCE = 0.02
WARM_UPS = (1, 5, 25, 50)
WIDTHS = (2, 4, 8, 10, 12)


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
    for rule in (staged, value):
        lines += [
            replace(rule, name=f"{rule.name}-no-order2", order2_rows=0),
            replace(rule, name=f"{rule.name}-no-seeding", seed_prompts=False),
            replace(rule, name=f"{rule.name}-k4", row_width=4),
        ]
    lines += [replace(value, name=f"value-warm-{count}", warm_up=count) for count in WARM_UPS]
    lines += [
        replace(value, name=f"value-width-{width}", template_width=width, row_width=max(8, width))
        for width in WIDTHS
    ]
    lines += [replace(value, name=f"value-depth-{depth}", depth=depth) for depth in (6, 8, 12)]
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
    key = _digest(recording, calibrated, warm_up)
    known = _read_finished(output, key)
    finished: dict[str, list[Replayed]] = {}
    seconds: dict[str, float] = {}
    for setting in chosen:
        identity = json.dumps(asdict(setting), sort_keys=True)
        start = time.monotonic()
        if identity in known:
            finished[identity] = [Replayed(*row) for row in known[identity]["answers"]]
            seconds[identity] = known[identity]["seconds"]
        else:
            finished[identity] = replay(setting, recording, calibrated, warm_up)
            seconds[identity] = time.monotonic() - start
        result = _result(recording, chosen, finished, seconds, key)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        on_done(setting)
    return result


def _read_finished(output: Path, key: str) -> dict[str, Any]:
    if not output.is_file():
        return {}
    old = json.loads(output.read_text(encoding="utf-8"))
    return dict(old["replays"]) if old.get("recording") == key else {}


def _digest(recording: Recording, calibrated: Calibrated, warm_up: Recording | None) -> str:
    state = hashlib.sha256(repr((recording.shape, recording.names, calibrated.thresholds)).encode())
    for each in (recording, warm_up):
        for answer in each.answers if each else ():
            state.update(answer.tokens.numpy().tobytes() + answer.pool_scores.numpy().tobytes())
    state.update(calibrated.maps.y.numpy().tobytes())
    return state.hexdigest()[:16]


def _result(
    recording: Recording,
    chosen: Sequence[Setting],
    finished: dict[str, list[Replayed]],
    seconds: dict[str, float],
    key: str,
) -> dict[str, Any]:
    looping = {
        name
        for name, answer in zip(recording.names, recording.answers, strict=True)
        if loops(answer.tokens.tolist())
    }
    by_setting = {setting: finished.get(json.dumps(asdict(setting), sort_keys=True)) for setting in chosen}
    bases = {setting.slots: rows for setting, rows in by_setting.items() if setting.name == BASE and rows}
    return {
        "recording": key,
        "num_answers": len(recording.answers),
        "num_looping": len(looping),
        "lines": [
            _line(setting, rows, bases.get(setting.slots), looping)
            for setting, rows in by_setting.items()
            if rows is not None
        ],
        "replays": {
            identity: {
                "seconds": round(seconds[identity], 2),
                "answers": [[r.dataset, r.index, r.num_tokens, r.num_rounds] for r in rows],
            }
            for identity, rows in finished.items()
        },
    }


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


def check_anchors(result: dict[str, Any], served: dict[str, Any], slots: int) -> list[dict[str, Any]]:
    """Replayed accept lengths beside those of a real bench whose variants carry the same names."""
    real: dict[tuple[str, str], list[float]] = {}
    for row in served["runs"]:
        if row["temperature"] == 0 and row["accept_length"] is not None:
            real.setdefault((row["variant"], row["dataset"]), []).append(row["accept_length"])
    anchors = []
    for line in result["lines"]:
        shared = [name for name in line["by_file"] if (line["name"], name) in real]
        if line["slots"] != slots or not shared:
            continue
        replayed = float(np.mean([line["by_file"][name] for name in shared]))
        measured = float(np.mean([np.median(real[line["name"], name]) for name in shared]))
        difference = replayed / measured - 1
        anchors.append(
            {
                "name": line["name"],
                "files": len(shared),
                "replayed": round(replayed, 4),
                "served": round(measured, 4),
                "difference": round(difference, 4),
                "agrees": abs(difference) <= ANCHOR_TOLERANCE,
            }
        )
    return anchors


def markdown(result: dict[str, Any]) -> str:
    """The table as it stands in docs/."""
    files = list(result["lines"][0]["by_file"])
    head = ["slots", "setting", *files, "mean", "over EAGLE3 (95%)", "mean without loops"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for line in result["lines"]:
        over = (
            f"{line['over_base']:.2f} ({line['low']:.2f} to {line['high']:.2f})"
            if "over_base" in line
            else "-"
        )
        cells = [str(line["slots"]), line["name"], *(f"{line['by_file'][name]:.2f}" for name in files)]
        cells += [_two(line["accept_length"]), over, _two(line["accept_length_without_loops"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def plot_ablation(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from sgl_graft.bench.plot import COLOURS

    sizes = sorted({line["slots"] for line in result["lines"]})
    rows = max(sum(line["slots"] == size for line in result["lines"]) for size in sizes)
    figure, grid = pyplot.subplots(
        1, len(sizes), figsize=(7 * len(sizes), 1 + 0.3 * rows), squeeze=False, layout="constrained"
    )
    for axes, size in zip(grid[0], sizes, strict=True):
        lines = [line for line in result["lines"] if line["slots"] == size][::-1]
        whole = axes.barh(range(len(lines)), [line["accept_length"] for line in lines], color=COLOURS[0])
        straight = [line["accept_length_without_loops"] or 0.0 for line in lines]
        axes.plot(straight, range(len(lines)), "D", color=COLOURS[1], label="without looping answers")
        axes.bar_label(whole, [f"{line['accept_length']:.2f}" for line in lines], padding=6, fontsize=8)
        axes.set_yticks(range(len(lines)), [line["name"] for line in lines], fontsize=8)
        axes.set_title(f"{size} slots")
        axes.set_xlabel("tokens committed per verify, mean of files")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12, y=0.01)
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
