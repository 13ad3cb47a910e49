"""One PNG per benchmark: throughput by requests in flight, and accept length by file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_graft.bench.metrics import ALL_FILES

# Okabe and Ito's palette: told apart by every common kind of colour blindness; hatches tell it in print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
GROUP_WIDTH = 0.8


def plot_result(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary = result["summary"]
    temperatures = _distinct(summary, "temperature")
    figure, grid = pyplot.subplots(
        len(temperatures), 2, figsize=(13, 4.2 * len(temperatures)), squeeze=False, layout="constrained"
    )
    variants = _distinct(summary, "variant")
    for (left, right), temperature in zip(grid, temperatures, strict=True):
        rows = [row for row in summary if row["temperature"] == temperature]
        _speed_panel(left, _overall(rows), variants)
        _accept_panel(right, rows, variants)
        left.set_title(f"Throughput, T = {temperature:g}")
        right.set_title(f"Accept length, bonus included, T = {temperature:g}")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _overall(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    means = [row for row in rows if row["dataset"] == ALL_FILES]
    return means or list(rows)


def _speed_panel(axes: Any, rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> None:
    groups = _distinct(rows, "concurrency")
    _bars(axes, rows, variants, "concurrency", groups, "tokens_per_s", "{:.0f}")
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tokens / s (median of repeats)")
    axes.legend(fontsize=9)


def _accept_panel(axes: Any, rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> None:
    lowest = min(row["concurrency"] for row in rows)
    shown = [row for row in rows if row["concurrency"] == lowest and row["accept_length"] is not None]
    axes.set_ylabel("tokens committed per verify")
    if not shown:
        axes.text(0.5, 0.5, "no variant speculates", ha="center", va="center", transform=axes.transAxes)
        return
    speculating = [name for name in variants if any(row["variant"] == name for row in shown)]
    _bars(
        axes, shown, variants, "dataset", _distinct(shown, "dataset"), "accept_length", "{:.2f}", speculating
    )
    axes.axhline(1.0, color="#666666", linewidth=0.8, linestyle=":")
    axes.tick_params(axis="x", labelrotation=20)


def _bars(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    variants: Sequence[str],
    key: str,
    groups: Sequence[Any],
    value: str,
    label: str,
    shown: Sequence[str] | None = None,
) -> None:
    names = shown or variants
    width = GROUP_WIDTH / len(names)
    for offset, name in enumerate(names):
        # Colour follows the variant, not its place among the bars shown: both panels agree.
        style = list(variants).index(name)
        by_group = {row[key]: row[value] for row in rows if row["variant"] == name}
        xs = [
            i - GROUP_WIDTH / 2 + (offset + 0.5) * width
            for i, group in enumerate(groups)
            if group in by_group
        ]
        heights = [by_group[group] for group in groups if group in by_group]
        bars = axes.bar(
            xs,
            heights,
            width,
            label=name,
            color=COLOURS[style % len(COLOURS)],
            hatch=HATCHES[style % len(HATCHES)],
            edgecolor="white",
        )
        if len(names) * len(groups) <= 24:
            axes.bar_label(
                bars,
                [label.format(height) for height in heights],
                fontsize=7 if len(names) * len(groups) > 12 else 8,
                padding=2,
            )
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)


def _distinct(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
