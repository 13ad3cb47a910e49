"""Imitates what the bench uses of SGLang's HTTP server, in milliseconds instead of half a minute.

A "model" is a hash: the output is a function of the prompt, the seed and the temperature alone, so that all
variants agree unless `--fake-wrong-at` makes one lie.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

PER_VERIFY = 3  # tokens that each verify of a speculating fake commits
TOP_GAP = 0.25


def tokens(input_ids: list[int], count: int, seed: int | None) -> list[int]:
    made = []
    for position in range(count):
        text = f"{input_ids}/{seed}/{position}"
        made.append(int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) % 1000)
    return made


def create_app(
    *,
    algorithm: str | None = None,
    wrong_at: int | None = None,
    fail: bool = False,
    incremental: bool = False,
    table: bool = False,
    delay_s: float = 0.0,
) -> FastAPI:
    app = FastAPI()
    app.state.calls = []

    def generate(body: dict[str, Any]) -> tuple[list[int], list[int]]:
        sampling = body["sampling_params"]
        seed = sampling.get("sampling_seed") if sampling["temperature"] > 0 else None
        ids = tokens(body["input_ids"], sampling["max_new_tokens"], seed)
        if wrong_at is not None and wrong_at < len(ids):
            ids[wrong_at] += 1
        step = PER_VERIFY if algorithm else 1
        ends = [1, *range(1 + step, len(ids) + step, step)]
        return ids, [min(end, len(ids)) for end in ends]

    def meta(body: dict[str, Any], done: int, verifies: int, finished: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "completion_tokens": done,
            "finish_reason": {"type": "length", "length": done} if finished else None,
        }
        return info | ({"spec_verify_ct": verifies} if algorithm and verifies else {})

    @app.post("/generate")
    async def generate_route(request: Request) -> Response:
        body = await request.json()
        app.state.calls.append(("/generate", body))
        if fail:
            return JSONResponse({"error": {"message": "the fake fails on purpose"}}, status_code=400)
        ids, ends = generate(body)
        if not body.get("stream"):
            pairs = [[[-0.5, token, None], [-0.5 - TOP_GAP, token + 1, None]] for token in ids]
            info = meta(body, len(ids), 0, True) | {"output_top_logprobs": pairs}
            return JSONResponse({"output_ids": ids, "meta_info": info})

        def events() -> Iterator[str]:
            before = 0
            for verifies, end in enumerate(ends):
                time.sleep(delay_s)
                shown = ids[before:end] if incremental else ids[:end]
                event = {"output_ids": shown, "meta_info": meta(body, end, verifies, end == len(ids))}
                before = end
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/health_generate")
    def health() -> Response:
        return Response(status_code=200)

    @app.post("/flush_cache")
    def flush() -> Response:
        app.state.calls.append(("/flush_cache", None))
        return Response(status_code=200)

    if table:

        @app.post("/graft/table/clear")
        def clear() -> Response:
            app.state.calls.append(("/graft/table/clear", None))
            return Response(status_code=200)

    @app.get("/server_info")
    def info() -> dict[str, Any]:
        return {"speculative_algorithm": algorithm, "model_path": "fake", "version": "0"}

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--fake-wrong-at", type=int)
    parser.add_argument("--fake-die", action="store_true")
    parser.add_argument("--fake-fail", action="store_true")
    parser.add_argument("--fake-child", action="store_true")
    args, _ignored = parser.parse_known_args()
    if args.fake_die:
        print("the fake dies on purpose", flush=True)
        sys.exit(7)
    if args.fake_child and os.fork() == 0:
        time.sleep(600)
    app = create_app(
        algorithm=args.speculative_algorithm, wrong_at=args.fake_wrong_at, fail=args.fake_fail, delay_s=0.001
    )
    uvicorn.run(app, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
