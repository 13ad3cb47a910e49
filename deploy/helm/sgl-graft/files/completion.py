"""`helm test`: one chat completion, and that it was speculated. Standard library only."""

import json
import os
import sys
import urllib.request

SERIES = "sglang:spec_verify_calls_total"
# Each scrape reaches one of the replicas; one that answered nothing yet has no verify calls.
TRIES = 30


def get(url: str, body: dict | None = None) -> str:
    headers = {"Content-Type": "application/json"}
    if "API_KEY" in os.environ:
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return answer.read().decode()


def verify_calls(metrics: str) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(SERIES + "{")
    )


def main() -> None:
    message = {"role": "user", "content": "Count from one to twenty."}
    request = {"model": os.environ["MODEL"], "messages": [message], "max_tokens": 48, "temperature": 0}
    answer = json.loads(get(os.environ["CHAT_URL"] + "/v1/chat/completions", request))
    text = answer["choices"][0]["message"]["content"]
    print("answer:", text)
    if not text:
        sys.exit("the answer is empty")
    if "METRICS_URL" not in os.environ:
        return
    calls = max(verify_calls(get(os.environ["METRICS_URL"])) for _ in range(TRIES))
    print(SERIES, calls)
    if not calls:
        sys.exit("the server answered, but verified no draft: speculation is not running")


main()
