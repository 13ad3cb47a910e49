"""Results on screen and on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from sgl_graft.bench.compare import compare_variants
from sgl_graft.bench.identity import Difference, choose_reference, compare_cell
from sgl_graft.bench.metrics import ALL_FILES, run_row, summarise
from sgl_graft.bench.records import CellRecord


def find_differences(records: Sequence[CellRecord], reference_variant: str | None) -> list[Difference]:
    reference = choose_reference(records, reference_variant)
    return [difference for record in records for difference in compare_cell(record, reference)[2]]


def build_result(
    records: Sequence[CellRecord],
    variants: Sequence[str],
    reference_variant: str | None,
    differences: Sequence[Difference],
    context: dict[str, Any],
) -> dict[str, Any]:
    """The output file: `runs`, `machine` and `versions` (in `context`) are the stable interface."""
    reference = choose_reference(records, reference_variant)
    rows = [run_row(record, *compare_cell(record, reference)[:2]) for record in records]
    return {
        "runs": rows,
        "summary": summarise(rows),
        "comparisons": compare_variants(records, variants),
        "differences": [_difference_row(difference) for difference in differences],
        **context,
    }


def _difference_row(difference: Difference) -> dict[str, Any]:
    fields = asdict(difference)
    fields.pop("cell")
    return {**difference.cell._asdict(), **fields, "tie": difference.is_tie}


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def summary_table(result: dict[str, Any]) -> Table:
    title = "warm: nothing was cleared between cells" if result["settings"]["warm"] else None
    table = Table(title=title)
    table.add_column("variant")
    table.add_column("data set")
    for header in ("T", "in flight", "tokens/s", "accept length", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms"):
        table.add_column(header, justify="right")
    table.add_column("CPU ms/token", justify="right")
    table.add_column("identical", justify="right")
    for row in result["summary"]:
        cpu = row["server_cpu_s_per_token"]
        table.add_row(
            row["variant"],
            row["dataset"],
            f"{row['temperature']:g}",
            str(row["concurrency"]),
            _number(row["tokens_per_s"], 1),
            _number(row["accept_length"], 2),
            _number(row["ttft_ms_p50"], 0),
            _number(row["itl_ms_p50"], 1),
            _number(row["itl_ms_p99"], 1),
            _number(None if cpu is None else cpu * 1000, 1),
            f"{row['identical']}/{row['compared']}" if row["compared"] else "-",
            style="bold" if row["dataset"] == ALL_FILES else None,
        )
    return table


def comparison_table(result: dict[str, Any]) -> Table | None:
    rows = [row for row in result["comparisons"] if row["dataset"] == "all"]
    if not rows:
        return None
    table = Table(title="paired bootstrap over prompts, all files together")
    for header in ("variant", "over", "T", "in flight", "metric", "ratio", "95% interval", "within noise"):
        table.add_column(header, justify="left" if header in ("variant", "over", "metric") else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            row["over"],
            f"{row['temperature']:g}",
            str(row["concurrency"]),
            row["metric"],
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} .. {row['high']:.3f}",
            "yes" if row["within_noise"] else "no",
        )
    return table


def difference_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["differences"]:
        gap = "" if row["top_gap"] is None else f", top-2 gap {row['top_gap']:.2e}"
        verdict = {None: "", True: " (a tie)", False: " (NOT a tie)"}[row["tie"]]
        lines.append(
            f"{row['variant']} {row['dataset']}[{row['index']}] T={row['temperature']:g} "
            f"in flight {row['concurrency']} repeat {row['repeat']}: differs at token {row['position']} "
            f"({row['got']} instead of {row['expected']}){gap}{verdict}"
        )
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
