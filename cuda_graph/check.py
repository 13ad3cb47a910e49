"""GPU check: every op against its reference, whole rounds in CUDA graphs, and times. Needs torch and Triton
only.

    python -m cuda_graph.check [--output check.json]

Exits 0 when everything agrees, or when there is no CUDA device (it then says "not run"); 1 when anything
differs. Missed time targets are reported, not failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .check_cases import Round, Shape, op_cases, random_round
from .check_compare import Comparison, compare_op
from .check_graphs import check_graph
from .check_times import CHAIN_TARGET_US, UPDATE_TARGET_READS, Times, copy_bandwidth, time_round

VOCAB = 151_936
BATCHES = (1, 4, 16, 64)
# Slots, the draft's topk and steps, the retrieval depth: SGLang's defaults, and the paper's tree at 60.
TREES = ((8, 4, 5, 8), (16, 4, 5, 8), (60, 10, 9, 9))
NOT_RUN = "not run: no CUDA device"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check from the command line."""
    parser = argparse.ArgumentParser(description="Check the Triton kernels and CUDA graphs on this GPU.")
    parser.add_argument("--output", type=Path, help="write the results here as JSON")
    args = parser.parse_args(argv)
    report = run_check() if torch.cuda.is_available() else {"status": NOT_RUN}
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(report["status"])
    return 1 if report["status"] == "failed" else 0


def run_check() -> dict[str, Any]:
    """Check and time every shape on the current CUDA device."""
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bandwidth(device)
    comparisons: list[Comparison] = []
    times: list[Times] = []
    for slots, topk, steps, max_depth in TREES:
        for batch in BATCHES:
            shape = Shape(batch, slots, topk, steps, max_depth, VOCAB)
            case = random_round(shape, device, seed=batch * slots)
            found = check_shape(case)
            comparisons += found
            times.append(time_round(case, bandwidth))
            print_shape(shape, found, times[-1])
            del case
            torch.cuda.empty_cache()
    failed = [comparison for comparison in comparisons if not comparison.passed]
    targets = met_targets(times)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s; {len(comparisons)} comparisons, {len(failed)} failed")
    for target in targets:
        print(f"{target['name']}: {target['value']:.2f} (target {target['target']}) {target['verdict']}")
    return {
        "status": "failed" if failed else "passed",
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "seconds": round(time.monotonic() - started, 1),
        "comparisons": [asdict(comparison) | {"passed": comparison.passed} for comparison in comparisons],
        "times_us": [asdict(entry) for entry in times],
        "targets": targets,
    }


def check_shape(case: Round) -> list[Comparison]:
    """All ops of one round, then the captured rounds of both rules."""
    shape = case.shape
    prefix = f"batch {shape.batch}, slots {shape.slots}: "
    found = [compare_op(prefix + name, op) for name, op in op_cases(case).items()]
    for rule in ("staged", "value"):
        found += check_graph(case, rule)
    return found


def met_targets(times: Sequence[Times]) -> list[dict[str, Any]]:
    """The issue's two targets, from the times at batch 16 and 16 slots."""
    entry = next((t for t in times if (t.batch, t.slots) == (16, 16)), None)
    if entry is None:
        return []
    values = {
        "chain staged, microseconds": (entry.micros["chain staged"], CHAIN_TARGET_US),
        "chain value, microseconds": (entry.micros["chain value"], CHAIN_TARGET_US),
        "table update, reads of the logits": (
            entry.micros["table update"] / entry.logits_read_us,
            UPDATE_TARGET_READS,
        ),
    }
    return [
        {"name": name, "value": value, "target": target, "verdict": "met" if value <= target else "missed"}
        for name, (value, target) in values.items()
    ]


def print_shape(shape: Shape, found: Sequence[Comparison], times: Times) -> None:
    """One block per shape: what differs, then the times."""
    failed = [comparison for comparison in found if not comparison.passed]
    print(f"batch {shape.batch}, slots {shape.slots}: {len(found) - len(failed)} of {len(found)} agree")
    for comparison in failed:
        print(f"  DIFFERS {comparison.name}: {comparison.mismatches} integers, {comparison.max_ulp} ulp")
    micros = ", ".join(f"{name} {value:.1f}" for name, value in times.micros.items())
    print(f"  microseconds: {micros}; one read of the logits {times.logits_read_us:.1f}")


if __name__ == "__main__":
    sys.exit(main())
