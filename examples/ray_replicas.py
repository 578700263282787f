"""Two replicas of the bundled test model behind one endpoint of Ray Serve, on this machine's CPU.

    pip install 'onebox[ray]'
    python examples/ray_replicas.py

Sends prompts with shared beginnings and prints how many of their tokens came from the prefix cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import ray
from ray import serve

from onebox.config import quiet_ray
from onebox.integrations.ray_serve import Options, build

PORT = 8018
URL = f"http://127.0.0.1:{PORT}"
STORY = "The lighthouse of Varrow was kept by Ines Okafor. Ships came by every day and every night of the year. " * 8


def ask(number: int) -> tuple[str, int, int]:
    """The replica, prompt tokens, and those of them found in its cache."""
    body = {
        "messages": [
            {"role": "system", "content": f"{number % 4} {STORY}"},
            {"role": "user", "content": f"Say {number}."},
        ],
        "max_tokens": 4,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-onebox-replica"], usage["prompt_tokens"], cached


def main(n: int = 40) -> None:
    quiet_ray()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"port": PORT}, logging_config={"log_level": "ERROR"})
        serve.run(build(Options(replicas=2, gpus=0)), name="onebox")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, range(n)))
    finally:
        serve.shutdown()
        ray.shutdown()
    share = sum(cached for _, _, cached in found) / sum(tokens for _, tokens, _ in found)
    shares = Counter(replica for replica, _, _ in found)
    print(f"{n} answers, {' and '.join(map(str, shares.values()))} by each replica")
    print(f"{share:.0%} of the prompt tokens came from the prefix caches")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
