"""Runs a benchmark from its options to its files."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sgl_graft.bench import client, identity, report
from sgl_graft.bench.machine import CpuClock, folder_fingerprint, machine, versions
from sgl_graft.bench.metrics import accept_length
from sgl_graft.bench.plan import Cell, Sampling, Variant, digest, order_cells, reference_variant
from sgl_graft.bench.plot import plot_result
from sgl_graft.bench.pool import PoolOptions, ServerPool
from sgl_graft.bench.prompts import Dataset
from sgl_graft.bench.records import CellRecord, Journal, MachineUse
from sgl_graft.cli.serve import default_server_args, embedded_draft, has_cuda

# An idle SGLang scheduler polls without pause and takes a whole core from the server under test; with this
# flag it blocks on its sockets.
SLEEP_FLAG = "--sleep-on-idle"
IDLE_CORES_WARNING = 0.05


@dataclass(frozen=True)
class BenchOptions:
    target: Path
    embedded: bool  # the target is the embedded model, whose drafts ship with the package
    variants: tuple[Variant, ...]
    datasets: tuple[Dataset, ...]
    sampling: Sampling
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    repeats: int
    output: Path
    dtype: str | None = None
    device: str | None = None
    server_args: tuple[str, ...] = ()
    warm: bool = False
    fresh: bool = False
    explain: bool = False
    max_resident: int | None = None
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    server_command: tuple[str, ...] | None = None  # in place of SGLang's launcher

    @property
    def journal(self) -> Path:
        return self.output.with_name(self.output.name + ".journal.jsonl")

    @property
    def logs(self) -> Path:
        return self.output.with_name(self.output.stem + "-logs")


def server_args_of(variant: Variant, options: BenchOptions) -> list[str]:
    """The full command line of a variant's server, host and port apart."""
    draft = variant.draft
    if draft is None and options.embedded and variant.speculates and variant.algorithm != "NGRAM":
        draft = embedded_draft(variant.algorithm)
    args = default_server_args(
        variant.algorithm,
        target=options.target,
        draft=draft,
        tree=variant.tree,
        dtype=options.dtype,
        device=options.device,
    )
    return [*args, SLEEP_FLAG, *options.server_args, *variant.server_args]


class Bench:
    def __init__(self, options: BenchOptions, console: Console) -> None:
        self.options = options
        self.console = console
        self.versions = versions()
        self.server_args = {v.name: server_args_of(v, options) for v in options.variants if v.url is None}
        self._digests = self._all_digests()
        if options.fresh:
            options.journal.unlink(missing_ok=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(options.journal)
        self._prompts = {dataset.name: dataset.prompts for dataset in options.datasets}

    def run(self) -> dict[str, Any]:
        with self._progress() as progress, self._pool() as pool:
            cells = self._cells(together=True)
            pending = [cell for cell in cells if self._known(cell) is None]
            stale = self.journal.num_stale((cell, self._digest(cell)) for cell in cells)
            if len(pending) < len(cells):
                self._say(f"{len(cells) - len(pending)} of {len(cells)} cells are in {self.journal.path}")
            if stale:
                self._say(f"{stale} cells there belong to other settings or other code: measured again")
            waiting = list(dict.fromkeys(cell.variant for cell in pending))
            if not pool.holds_all(waiting):
                unmeasured = set(pending)
                pending = [cell for cell in self._cells(together=False) if cell in unmeasured]
            try:
                self._measure_all(pending, pool, progress)
            except BaseException:
                self._write(complete=False)
                raise
            differences = report.find_differences(self._records(), self._reference)
            if self.options.explain and differences:
                differences = self._explain(differences, pool)
        return self._write(complete=True, differences=differences)

    @property
    def _reference(self) -> str | None:
        return reference_variant(self.options.variants)

    def _cells(self, *, together: bool) -> list[Cell]:
        options = self.options
        names = [variant.name for variant in options.variants]
        datasets = [dataset.name for dataset in options.datasets]
        return order_cells(
            names, datasets, options.temperatures, options.concurrencies, options.repeats, together=together
        )

    def _known(self, cell: Cell) -> CellRecord | None:
        return self.journal.get(cell, self._digest(cell))

    def _records(self) -> list[CellRecord]:
        """Finished cells in the order of the options, whatever the order of measuring was."""
        found = [record for cell in self._cells(together=False) if (record := self._known(cell)) is not None]
        place = {variant.name: i for i, variant in enumerate(self.options.variants)}
        return sorted(found, key=lambda record: (place[record.cell.variant], record.cell.repeat))

    def _all_digests(self) -> dict[tuple[str, str], str]:
        """Per variant and data set: everything that decides what a cell measures, beside the cell's key."""
        options = self.options
        common = {
            "sampling": vars(options.sampling),
            "warm": options.warm,
            "versions": self.versions,
            "target": folder_fingerprint(options.target),
        }
        return {
            (variant.name, dataset.name): digest({**common, "server": server, "prompts": dataset.prompts})
            for variant in options.variants
            for server in [self._server_identity(variant)]
            for dataset in options.datasets
        }

    def _digest(self, cell: Cell) -> str:
        return self._digests[cell.variant, cell.dataset]

    def _server_identity(self, variant: Variant) -> dict[str, Any]:
        if variant.url is not None:
            info = client.server_info(variant.url.rstrip("/"))
            algorithm = info.get("speculative_algorithm")
            if bool(algorithm) != variant.speculates:
                raise ValueError(
                    f"--url {variant.name}: the server runs {algorithm or 'no speculation'}, "
                    f"but the variant is declared as {variant.algorithm}"
                )
            kept = {
                k: v
                for k, v in info.items()
                if k.startswith("speculative") or k in ("model_path", "version", "dtype")
            }
            return {"url": variant.url, "info": kept}
        args = self.server_args[variant.name]
        folders = [Path(arg) for arg in args if Path(arg).is_dir()]
        return {"args": args, "folders": [folder_fingerprint(folder) for folder in folders]}

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _pool(self) -> ServerPool:
        options = self.options
        resident = options.max_resident
        if resident is None and (options.device or "cuda") != "cpu" and has_cuda():
            resident = 1  # each server takes most of the device's memory
        pool_options = PoolOptions(
            logs=options.logs,
            start_timeout_s=options.start_timeout_s,
            warm_up_concurrency=max(options.concurrencies),
            request_timeout_s=options.request_timeout_s,
            max_resident=resident,
            command=options.server_command,
        )
        return ServerPool(options.variants, self.server_args, pool_options, self._say)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )

    def _measure_all(self, pending: Sequence[Cell], pool: ServerPool, progress: Progress) -> None:
        total = sum(len(self._prompts[cell.dataset]) for cell in pending)
        task = progress.add_task("bench", total=total)
        for cell in pending:
            progress.update(task, description=f"{cell.variant} {cell.dataset} in flight {cell.concurrency}")
            record = self._measure(cell, pool, lambda: progress.advance(task))
            self.journal.add(record)
            self._say(_cell_line(record))
            if record.use.idle_servers_cpu_s > IDLE_CORES_WARNING * record.wall_s:
                self._say("  idle servers took CPU time meanwhile: use --resident-servers 1")

    def _measure(self, cell: Cell, pool: ServerPool, on_done: Callable[[], Any]) -> CellRecord:
        options = self.options
        url = pool.url(cell.variant)
        try:
            if not options.warm:
                client.clear_learned(url)
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            load_before, clock = os.getloadavg()[0], CpuClock.now()
            active_before, idle_before = pool.cpu_seconds(cell.variant), pool.idle_cpu_seconds(cell.variant)
            requests, wall_s = client.run_requests(
                url,
                self._prompts[cell.dataset],
                options.sampling,
                temperature=cell.temperature,
                concurrency=cell.concurrency,
                timeout_s=options.request_timeout_s,
                on_done=on_done,
            )
            active_after, idle_after = pool.cpu_seconds(cell.variant), pool.idle_cpu_seconds(cell.variant)
        except client.ServerError as error:
            raise client.ServerError(f"{error}\n{pool.log_tail(cell.variant)}") from error
        active_s = None if active_before is None or active_after is None else active_after - active_before
        idle_s = max(0.0, idle_after - idle_before)
        foreign = clock.foreign_cores(CpuClock.now(), (active_s or 0.0) + idle_s)
        use = MachineUse(active_s, idle_s, foreign, load_before, os.getloadavg()[0])
        return CellRecord(cell, self._digest(cell), started, wall_s, options.warm, requests, use)

    def _explain(self, differences: list[identity.Difference], pool: ServerPool) -> list[identity.Difference]:
        assert self._reference is not None
        url = pool.url(self._reference)

        def top_gap(dataset: str, index: int, position: int) -> float:
            prompt = next(p for p in self._prompts[dataset] if p.index == index)
            return client.top_gap(url, prompt, position, self.options.request_timeout_s)

        return identity.explain(differences, top_gap)

    def _write(
        self, *, complete: bool, differences: Sequence[identity.Difference] | None = None
    ) -> dict[str, Any]:
        options, records = self.options, self._records()
        if differences is None:
            differences = report.find_differences(records, self._reference)
        context = {
            "complete": complete,
            "settings": {
                "target": str(options.target),
                "variants": {v.name: self._variant_settings(v) for v in options.variants},
                "reference": self._reference,
                "sampling": vars(options.sampling),
                "warm": options.warm,
            },
            "machine": machine(),
            "versions": self.versions,
        }
        names = [variant.name for variant in options.variants]
        result = report.build_result(records, names, self._reference, differences, context)
        report.write_json(options.output, result)
        if records:
            plot_result(result, options.output.with_suffix(".png"))
        return result

    def _variant_settings(self, variant: Variant) -> dict[str, Any]:
        where = {"url": variant.url} if variant.url else {"server_args": self.server_args[variant.name]}
        return {"algorithm": variant.algorithm, **where}


def _cell_line(record: CellRecord) -> str:
    cell, use = record.cell, record.use
    length = accept_length(record.requests)
    accept = "" if length is None else f", accept length {length:.2f}"
    return (
        f"{cell.variant} {cell.dataset} T={cell.temperature:g} in flight {cell.concurrency} "
        f"repeat {cell.repeat}: {record.output_tokens / record.wall_s:.1f} tokens/s{accept}, "
        f"other load {use.foreign_cores:.1f} cores"
    )
