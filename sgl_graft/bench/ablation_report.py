"""The ablation as people read it: tables and plot for docs/, and how far replay and real server agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ANCHOR_TOLERANCE = 0.02


def check_anchors(result: dict[str, Any], served: dict[str, Any], slots: int) -> list[dict[str, Any]]:
    """Replayed accept lengths beside those of a real bench whose variants carry the same names."""
    real: dict[tuple[str, str], list[float]] = {}
    for row in served["runs"]:
        if row["temperature"] == 0 and row["accept_length"] is not None:
            real.setdefault((row["variant"], row["dataset"]), []).append(row["accept_length"])
    anchors = []
    for line in result["lines"]:
        shared = [name for name in line["by_file"] if (line["name"], name) in real]
        if line["slots"] != slots or not shared or _served_slots(served, line["name"]) not in (None, slots):
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


def _served_slots(served: dict[str, Any], name: str) -> int | None:
    """Slots of a variant's server, None for one that somebody else started."""
    variants = served.get("settings", {}).get("variants", {})
    args: list[str] = variants.get(name, {}).get("server_args", [])
    flag = "--speculative-num-draft-tokens"
    return int(args[args.index(flag) + 1]) if flag in args else None


def anchor_markdown(result: dict[str, Any], served: dict[str, Any], sizes: Sequence[int]) -> str:
    """Replay beside real server, for every setting that was served under its name."""
    lines = ["| slots | setting | concurrency | replayed | served | difference | within 2% |"]
    lines.append("|" + "---|" * 7)
    concurrency = ", ".join(sorted({str(row["concurrency"]) for row in served["runs"]}))
    for size in sizes:
        for anchor in check_anchors(result, served, size):
            cells = [size, anchor["name"], concurrency, f"{anchor['replayed']:.3f}"]
            cells += [f"{anchor['served']:.3f}", f"{anchor['difference']:+.1%}"]
            cells.append("yes" if anchor["agrees"] else "no")
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


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


def warm_up_markdown(result: dict[str, Any]) -> str:
    """What a warmed-up table costs on disk and at start, and what it brings; empty without such lines."""
    rows = [line for line in result["lines"] if "warm_up" in line]
    if not rows:
        return ""
    lines = [
        "| slots | answers met before | mean | rows in use | their bytes | file bytes | seconds to load |"
    ]
    lines.append("|" + "---|" * 7)
    for line in rows:
        cost = line["warm_up"]
        cells = [line["slots"], cost["answers"], _two(line["accept_length"]), cost["rows"]]
        cells += [cost["row_bytes"], cost["file_bytes"], f"{cost['load_s']:.3f}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
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
        axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
