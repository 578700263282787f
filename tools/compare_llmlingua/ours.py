"""Our compressor behind a pipe: one JSON line in, one out.

    python -m tools.compare_llmlingua.ours MODEL DTYPE THREADS

MODEL "none" leaves the methods that need a model out.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from onebox.prompt import Bm25Ranker, CausalScorer, Compressor, Scorer


def compressors(scorer: Scorer | None) -> dict[str, Compressor]:
    found = {"auto": Compressor()}
    if scorer is not None:
        found["llmlingua"] = Compressor("llmlingua", scorer=scorer)
        found["longllmlingua"] = Compressor("longllmlingua", scorer=scorer)
        found["longllmlingua, BM25"] = Compressor("longllmlingua", scorer=scorer, ranker=Bm25Ranker())
    return found


def main() -> None:
    model, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    versions: dict[str, Any] = {"python": platform.python_version()}
    scorer, tokenizer = None, None
    if model != "none":
        import torch
        import transformers
        from tokenizers import Tokenizer

        torch.set_num_threads(threads)
        versions |= {"transformers": transformers.__version__, "torch": torch.__version__}
        scorer = CausalScorer.from_pretrained(model)
        scorer.model.to(getattr(torch, dtype))
        tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    methods = compressors(scorer)
    print(json.dumps({"ready": True, "versions": versions}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            found = methods[job["method"]].compress(
                documents=job["documents"],
                question=job["question"] or None,
                target_tokens=job["target"],
                tokenizer=tokenizer,
                append_question=False,
            )
            answer: dict[str, Any] = {"text": found.text}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answer |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
