"""`sgl-graft`: one command per job, each imported only when it runs, so that `--help` answers at once."""

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(NamedTuple):
    module: str  # below sgl_graft.cli
    attribute: str  # a typer.Typer or a plain function
    help: str


COMMANDS = {
    "serve": LazyCommand("serve", "app", "Start the SGLang server with the embedded model and a draft."),
    "bench": LazyCommand("bench", "app", "Compare variants side by side: speed, accept length, same output."),
    "models": LazyCommand("models", "app", "Fetch, convert and locate the embedded models."),
    "train": LazyCommand("train", "app", "Train a draft for a target model."),
    "calibrate": LazyCommand("calibrate", "app", "Fit GRAFT's acceptance maps to a draft and its target."),
    "calibrate-load": LazyCommand(
        "calibrate_load", "calibrate_load", "Measure where GRAFT's load cap lies on this machine."
    ),
    "forget": LazyCommand("forget", "forget", "Delete a successor table that a server saved."),
    "doctor": LazyCommand("doctor", "doctor", "Check versions, patch set and entry points."),
}


def _load(name: str) -> Any:
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(f"sgl_graft.cli.{entry.module}"), entry.attribute)
    if not isinstance(target, typer.Typer):
        wrapper = typer.Typer(add_completion=False)
        wrapper.command(name)(target)
        target = wrapper
    command = typer.main.get_command(target)
    command.name = name
    return command


class LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(cmd_name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {known: self.get_command(ctx, known) for known in COMMANDS}  # for "did you mean"
        name, _placeholder, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """ValueError is how this project reports a user's mistake, and a server that does not start or answer
        says why in its error: show the message, not a traceback."""
        try:
            return super().invoke(ctx)
        except (ValueError, RuntimeError) as error:
            if ctx.params.get("traceback") or not _is_for_people(error):
                raise
            typer.secho(f"sgl-graft: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error


def _is_for_people(error: Exception) -> bool:
    """Importing the client takes longer than most commands; who raised its error has done so already."""
    client = sys.modules.get("sgl_graft.bench.client")
    return isinstance(error, ValueError) or (client is not None and isinstance(error, client.ServerError))


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding in stock SGLang that drafts less and accepts more.",
)


@app.callback()
def root(
    traceback: Annotated[bool, typer.Option(help="Show the full traceback of a refused input.")] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
