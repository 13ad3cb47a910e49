"""`sgl-graft bench`: reads the command line; the work is in sgl_graft.bench."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, invoke_without_command=True, no_args_is_help=True)
prompts_app = typer.Typer(help="Make prompt files.", no_args_is_help=True)
app.add_typer(prompts_app, name="prompts")

Repeated = list[str]


@app.callback()
def bench(
    context: typer.Context,
    variants: Annotated[
        str, typer.Option(help="Algorithms, or NAME=ALGORITHM for a copy: none,EAGLE3,chain=EAGLE3.")
    ] = "none,EAGLE3",
    prompts: Annotated[str, typer.Option(help="JSONL files with `turns` or `prompt`, comma-separated.")] = "",
    output: Annotated[Path, typer.Option(help="Result file; journal, logs and plot lie beside it.")] = Path(
        "bench.json"
    ),
    target: Annotated[Path | None, typer.Option(help="Model folder (default: the embedded model).")] = None,
    draft: Annotated[Repeated, typer.Option(help="VARIANT=DIR (default: the draft that ships).")] = [],  # noqa: B006
    num_prompts: Annotated[int, typer.Option(min=1, help="Rows per file, first rows first.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1",
    temperature: Annotated[str, typer.Option(help="Temperatures, comma-separated.")] = "0",
    top_p: Annotated[float, typer.Option(help="At T > 0.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="At T > 0.")] = -1,
    min_p: Annotated[float, typer.Option(help="At T > 0.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Times every cell is measured.")] = 1,
    seed: Annotated[int, typer.Option(help="From which every prompt's own seed is derived.")] = 0,
    settings: Annotated[
        Repeated, typer.Option("--set", help="VARIANT.KEY=VALUE; keys: steps, topk, slots, config.")
    ] = [],  # noqa: B006
    server_arg: Annotated[
        Repeated, typer.Option(help="VARIANT=--flag=value for one server, --flag=value for all.")
    ] = [],  # noqa: B006
    url: Annotated[Repeated, typer.Option(help="VARIANT=URL of a server that already runs.")] = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda when present).")] = None,
    chat_template: Annotated[bool, typer.Option(help="Wrap each prompt as a user turn.")] = True,
    warm: Annotated[bool, typer.Option(help="Keep caches and everything learned between cells.")] = False,
    explain_differences: Annotated[
        bool, typer.Option(help="Ask the reference server how close its two best tokens were.")
    ] = False,
    resident_servers: Annotated[
        int | None, typer.Option(min=1, help="Most servers up at once (default: as memory allows).")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Forget the journal of an earlier run.")] = False,
    start_timeout: Annotated[float, typer.Option(help="Seconds a server may take to start.")] = 600.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may be silent.")] = 600.0,
) -> None:
    """Measure variants side by side over HTTP. The same command again continues where it stopped."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from sgl_graft.bench import plan
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer, read_rows
    from sgl_graft.bench.runner import BenchOptions
    from sgl_graft.cli.serve import embedded_target

    files = tuple(Path(part.strip()) for part in prompts.split(",") if part.strip())
    if not files:
        raise ValueError("--prompts is empty: name at least one JSONL file")
    for file in files:
        read_rows(file, num_prompts)
    if target is not None and not (target / "config.json").is_file():
        raise ValueError(f"--target {target}: no model there (no config.json)")
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: name a .json file")
    parsed = plan.parse_variants(
        variants,
        drafts=draft,
        settings=settings,
        server_args=[item for item in server_arg if not item.startswith("-")],
        urls=url,
    )
    temperatures = plan.parse_numbers("--temperature", temperature, float, 0.0)
    concurrencies = plan.parse_numbers("--concurrency", concurrency, int, 1)
    folder = target or embedded_target()
    datasets = load_datasets(
        files, num_prompts, load_tokenizer(folder), chat_template=chat_template, base_seed=seed
    )
    options = BenchOptions(
        target=folder,
        embedded=target is None,
        variants=parsed,
        datasets=datasets,
        sampling=plan.Sampling(max_new_tokens, top_p, top_k, min_p),
        temperatures=temperatures,
        concurrencies=concurrencies,
        repeats=repeats,
        output=output,
        dtype=dtype,
        device=device,
        server_args=tuple(item for item in server_arg if item.startswith("-")),
        warm=warm,
        fresh=fresh,
        explain=explain_differences,
        max_resident=resident_servers,
        start_timeout_s=start_timeout,
        request_timeout_s=request_timeout,
    )
    run(options, Console())


def run(options: Any, console: Any) -> None:
    from sgl_graft.bench import report
    from sgl_graft.bench.client import ServerError
    from sgl_graft.bench.runner import Bench

    # A plain kill would skip the `finally` that ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: _raise_exit(143))
    try:
        result = Bench(options, console).run()
    except ServerError as error:
        typer.secho(f"sgl-graft: {error}", fg=typer.colors.RED, err=True)
        typer.echo(f"Finished cells are kept in {options.journal}; the same command continues.", err=True)
        raise typer.Exit(1) from error
    console.print(report.summary_table(result))
    if (comparisons := report.comparison_table(result)) is not None:
        console.print(comparisons)
    for line in report.difference_lines(result):
        console.print(line, markup=False)
    console.print(f"{options.output}, plot {options.output.with_suffix('.png')}")


def _raise_exit(code: int) -> None:
    raise SystemExit(code)


@prompts_app.command("code")
def code_prompts(
    output: Annotated[Path, typer.Option(help="Folder for the files, one per context length.")],
    target: Annotated[Path | None, typer.Option(help="Whose tokens to count (default: embedded).")] = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,2048,4096",
    rows: Annotated[int, typer.Option(min=1, help="Prompts per file.")] = 10,
    seed: Annotated[int, typer.Option(help="Another seed cuts elsewhere.")] = 0,
) -> None:
    """Code completion on the Python standard library's own source, at several prompt lengths."""
    from sgl_graft.bench.code_prompts import write_code_prompts
    from sgl_graft.bench.plan import parse_numbers
    from sgl_graft.bench.prompts import load_tokenizer
    from sgl_graft.cli.serve import embedded_target

    lengths = parse_numbers("--contexts", contexts, int, 64)
    for file in write_code_prompts(output, load_tokenizer(target or embedded_target()), lengths, rows, seed):
        typer.echo(file)


@app.command("record")
def record(
    output: Annotated[Path, typer.Option(help="Recording to write (.safetensors).")],
    journal: Annotated[
        Path | None, typer.Option(help="Journal of a T = 0 bench with a `none` variant.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="The JSONL files of that bench, comma-separated.")] = "",
    dialogues: Annotated[
        Path | None, typer.Option(help="Instead: training dialogues (a file, or a folder of shards).")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Its target (default: embedded).")] = None,
    draft: Annotated[Path | None, typer.Option(help="EAGLE-3 draft (default: the one that ships).")] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Rows per file, as in that bench; dialogues in all.")
    ] = 10,
    variant: Annotated[str, typer.Option(help="Whose answers to record.")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="Draft steps.")] = 5,
    topk: Annotated[int, typer.Option(min=1, help="Branches per step.")] = 4,
    slots: Annotated[
        int,
        typer.Option(min=2, help="Slots of the stock tree whose nodes are looked up in the target."),
    ] = 16,
) -> None:
    """Record what a draft proposes along known greedy answers, for `bench ablation` to replay.

    The same command again continues where it stopped.
    """
    from rich.progress import track
    from transformers import AutoModelForCausalLM

    from sgl_graft.bench import recorder as work
    from sgl_graft.bench.answers import dialogue_answers, greedy_answers
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer
    from sgl_graft.bench.recording import Shape
    from sgl_graft.bench.records import read_records
    from sgl_graft.cli.serve import embedded_draft, embedded_target
    from sgl_graft.draft_training.dialogues import load_all
    from sgl_graft.draft_training.eagle3_recipe import load_eagle3

    if target is not None and draft is None:
        raise ValueError(f"--draft: name the EAGLE-3 draft trained for {target}")
    folder = target or embedded_target()
    if dialogues is not None:
        answers = dialogue_answers(load_all([dialogues]), num_prompts)
    elif journal is not None and prompts:
        files = [Path(part.strip()) for part in prompts.split(",") if part.strip()]
        datasets = load_datasets(files, num_prompts, load_tokenizer(folder))
        asked = {dataset.name: dataset.prompts for dataset in datasets}
        answers = greedy_answers(read_records(journal), variant, asked)
    else:
        raise ValueError("name the answers to record: --journal with --prompts, or --dialogues")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    pair = load_eagle3(draft or embedded_draft("EAGLE3"))
    recorder = work.Recorder(model, *pair, Shape(steps, topk, slots))
    progress = track(answers, "recording")
    work.record_all(recorder, progress, output, cut=dialogues is not None)
    typer.echo(output)


@app.command("ablation")
def ablation(
    recording: Annotated[str, typer.Option(help="What `bench record` wrote, comma-separated.")],
    output: Annotated[Path, typer.Option(help="Result (.json); table (.md) and plot (.png) lie beside it.")],
    slots: Annotated[str, typer.Option(help="Verify slots, comma-separated.")] = "16,60",
    only: Annotated[str, typer.Option(help="Names of settings, comma-separated (default: all).")] = "",
    warm_up: Annotated[str, typer.Option(help="Recordings of other prompts to warm up on.")] = "",
    calibration: Annotated[Path | None, typer.Option(help="What `sgl-graft calibrate` wrote.")] = None,
    anchors: Annotated[
        str, typer.Option(help="Real benches to hold equal names against, comma-separated.")
    ] = "",
    docs: Annotated[
        Path | None, typer.Option(help="Folder for table and plot (default: beside the result).")
    ] = None,
) -> None:
    """Replay every part of GRAFT on and off. The same command again continues where it stopped."""
    import json

    from rich.progress import Progress

    from sgl_graft.bench import ablation as work
    from sgl_graft.bench import ablation_report as report
    from sgl_graft.bench.plan import parse_numbers
    from sgl_graft.bench.recording import Recording
    from sgl_graft.cpu import tree_kernels

    if output.suffix != ".json":
        raise ValueError(f"--output {output}: name a .json file")
    tree_kernels.register()  # the same results as the references, in half the time
    recorded = Recording.load_all(recording)
    warm = Recording.load_all(warm_up) if warm_up else None
    sizes = parse_numbers("--slots", slots, int, 2)
    chosen = work.choose_settings(sizes, only, recorded, warm)
    with Progress() as progress:
        task = progress.add_task("replaying", total=len(chosen))
        result = work.run_ablation(
            recorded,
            chosen,
            work.read_calibration(calibration),
            output,
            warm,
            lambda setting: progress.update(task, advance=1, description=setting.name),
        )
    table = "\n".join(filter(None, (report.markdown(result), report.warm_up_markdown(result))))
    for file in filter(None, (part.strip() for part in anchors.split(","))):
        served = json.loads(Path(file).read_text(encoding="utf-8"))
        table += "\n" + report.anchor_markdown(result, served, sizes)
    place = (docs or output.parent) / output.stem
    place.with_suffix(".md").write_text(table, encoding="utf-8")
    report.plot_ablation(result, place.with_suffix(".png"))
    typer.echo(table)


@app.command("thresholds")
def thresholds(
    fit: Annotated[str, typer.Option(help="Recordings to fit on, comma-separated.")],
    recording: Annotated[str, typer.Option(help="Recordings to test on, comma-separated.")],
    output: Annotated[Path, typer.Option(help="Result (.json); its table (.md) lies beside it.")],
    rows: Annotated[str, typer.Option(help="Rows to fit on, counted from 1.")] = "11-40",
    slots: Annotated[int, typer.Option(min=2, help="Verify slots.")] = 16,
) -> None:
    """Fit gate thresholds on each prompt file and test them on the others. Nothing fitted is kept."""
    import json

    from sgl_graft.bench.recording import Recording
    from sgl_graft.bench.threshold_spread import markdown, threshold_spread

    first, _, last = rows.partition("-")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ValueError(f"--rows {rows}: write the first and the last, as in 11-40")
    fitted_on, tested_on = Recording.load_all(fit), Recording.load_all(recording)
    result = threshold_spread(fitted_on, tested_on, (int(first), int(last)), slots)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = markdown(result)
    output.with_suffix(".md").write_text(table, encoding="utf-8")
    typer.echo(table)
