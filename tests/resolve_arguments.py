"""Resolves server arguments as SGLang's launcher does, one case per line of standard input, up to the model.

Importing SGLang takes longer than everything else, so one process imports it and forks for each case.
Case and answer are JSON objects: ``{"argv": [...], "env": {...}}`` in; ``{"code", "message", "algorithm",
"warnings"}`` out. A code of None means that the server would have gone on to load the model.

``{"argvs": [[...], ...], "fields": [...]}`` only parses, all in one fork: the answer is a list of ``{"code",
"stderr", "parsed"}``, the last with the named arguments.
"""

import contextlib
import io
import json
import logging
import os
import sys
import traceback
from typing import Any

from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args


def resolve(argv: list[str]) -> dict[str, Any]:
    errors = io.StringIO()
    logging.basicConfig(stream=errors, level=logging.WARNING)
    answer: dict[str, Any] = {"code": None, "message": "", "algorithm": None}
    with contextlib.redirect_stderr(errors):
        try:
            load_plugins()
            args = prepare_server_args(argv)
            args.resolve_once()
            args.resolve_once()  # the launcher and the HTTP server both ask
            from sglang.srt.arg_groups.overrides import resolved_view

            answer["algorithm"] = resolved_view(args).speculative_algorithm
            answer["graft"] = os.environ.get("SGLGRAFT_ALGORITHM")
        except SystemExit as stop:
            is_text = isinstance(stop.code, str)
            answer |= {"code": 1 if is_text else stop.code, "message": stop.code if is_text else ""}
        except Exception as error:
            answer |= {"code": 1, "message": str(error), "traceback": traceback.format_exc()}
    hooks = HookRegistry._hooks.items()
    ours = [name for name, found in hooks if any(source.dist_name == "sgl-graft" for _, _, source in found)]
    answer["patched"] = sorted(set(ours) & HookRegistry._patched)
    answer["platform"] = type(current_platform).__module__
    answer["stderr"] = errors.getvalue()
    return answer


def parse_all(argvs: list[list[str]], fields: list[str]) -> list[dict[str, Any]]:
    load_plugins()
    answers = []
    for argv in argvs:
        os.environ.pop("SGLGRAFT_CONFIG", None)  # left by the flag's action of the case before
        errors, answer = io.StringIO(), {"code": None}
        with contextlib.redirect_stderr(errors):
            try:
                args = prepare_server_args(argv)
                answer["parsed"] = {name: getattr(args, name) for name in fields}
            except SystemExit as stop:
                answer["code"] = stop.code
        answers.append(answer | {"stderr": errors.getvalue()})
    return answers


def main() -> None:
    assert current_platform.device_name  # chosen before the fork
    for line in sys.stdin:
        case = json.loads(line)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            os.environ.update(case.get("env", {}))
            with os.fdopen(writer, "w") as out:
                if "argvs" in case:
                    json.dump(parse_all(case["argvs"], case["fields"]), out)
                else:
                    sys.argv[1:] = case["argv"]
                    json.dump(resolve(case["argv"]), out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            print(answer.read(), flush=True)
        os.wait()


if __name__ == "__main__":
    main()
