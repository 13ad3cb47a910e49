import pytest

from sgl_graft.bench.metrics import ALL_FILES, accept_length, inter_token_ms, percentiles, run_row, summarise
from sgl_graft.bench.plan import Cell
from sgl_graft.bench.records import CellRecord, MachineUse, RequestRecord


def request(
    num_tokens: int, verifies: int | None, arrivals: tuple[tuple[float, int], ...] = ((10.0, 1),)
) -> RequestRecord:
    return RequestRecord(0, tuple(range(num_tokens)), arrivals, verifies, "length", 4, 0)


def record(
    variant: str, dataset: str, requests: list[RequestRecord], repeat: int = 0, wall_s: float = 2.0
) -> CellRecord:
    use = MachineUse(3.0, 0.0, 0.0, 0.0, 0.0)
    return CellRecord(Cell(variant, dataset, 0.0, 1, repeat), "d", "now", wall_s, False, tuple(requests), use)


def test_accept_length_leaves_the_prefill_token_out() -> None:
    # 9 tokens, one of them the prefill's: 8 committed by 4 verifies.
    assert accept_length([request(9, 4)]) == 2.0
    # Tokens over verifies of the whole file, not a mean of means: (8 + 30) / (4 + 10).
    assert accept_length([request(9, 4), request(31, 10)]) == pytest.approx(38 / 14)
    assert accept_length([request(9, None), request(1, 0)]) is None
    # An answer that ended with the prefill's token has no verify and must not count.
    assert accept_length([request(9, 4), request(1, 0)]) == 2.0


def test_tokens_of_one_chunk_share_its_wait() -> None:
    arrivals = ((50.0, 1), (80.0, 3), (90.0, 1))
    assert inter_token_ms(request(5, 2, arrivals)) == [10.0, 10.0, 10.0, 10.0]
    assert inter_token_ms(request(1, 0)) == []


def test_percentiles() -> None:
    assert percentiles(list(range(101))) == {"p50": 50.0, "p99": 99.0}
    assert percentiles([]) == {"p50": None, "p99": None}


def test_row_has_the_promised_fields() -> None:
    row = run_row(record("EAGLE3", "qa", [request(9, 4), request(11, 5)]), 2, 2)
    assert list(row)[:13] == [
        "variant",
        "dataset",
        "temperature",
        "concurrency",
        "repeat",
        "num_requests",
        "output_tokens",
        "tokens_per_s",
        "accept_length",
        "ttft_ms",
        "itl_ms",
        "identical",
        "compared",
    ]
    assert (row["output_tokens"], row["tokens_per_s"], row["accept_length"]) == (20, 10.0, 2.0)
    assert row["server_cpu_s_per_token"] == 0.15


def test_summary_is_median_of_repeats_then_mean_of_files() -> None:
    rows = [
        run_row(record("E", dataset, [request(tokens, 4)], repeat), 1, 1)
        for dataset, counts in (("a", (9, 9, 41)), ("b", (17, 17, 17)))
        for repeat, tokens in enumerate(counts)
    ]
    summary = {entry["dataset"]: entry for entry in summarise(rows)}
    assert summary["a"]["accept_length"] == 2.0  # the outlier repeat does not move the median
    assert summary["b"]["accept_length"] == 4.0
    assert summary[ALL_FILES]["accept_length"] == 3.0
    assert summary[ALL_FILES]["identical"] == 6
