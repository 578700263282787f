"""The reference package behind a pipe: one JSON line in, one out. Runs in an environment of its own and imports
nothing of this project.

    python tools/compare_llmlingua/reference.py MODEL DTYPE THREADS
"""

import json
import os
import sys
import time


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    import importlib.metadata

    import tiktoken
    import torch

    class Words:
        """Stands for a vocabulary that the package would fetch only to fill its report of tokens."""

        def encode(self, text, **_):
            return text.split()

    tiktoken.encoding_for_model = lambda name: Words()
    import llmlingua

    model, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    compressor = llmlingua.PromptCompressor(model, device_map="cpu", model_config={"trust_remote_code": False})
    if dtype == "bfloat16":  # its thresholds want logits in fp32; weights and matrix products are bf16, as on our side
        compressor.model.to(torch.bfloat16)
        forward = compressor.model.forward

        def forward_fp32(*args, **options):
            found = forward(*args, **options)
            found.logits = found.logits.float()
            return found

        compressor.model.forward = forward_fp32
    long = {
        "rank_method": "longllmlingua",
        "condition_in_question": "after_condition",
        "reorder_context": "sort",
        "dynamic_context_compression_ratio": 0.3,
        "condition_compare": True,
        "context_budget": "+100",
    }
    versions = {name: importlib.metadata.version(name) for name in ("llmlingua", "transformers", "torch")}
    print(json.dumps({"ready": True, "versions": versions}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            text = compressor.compress_prompt(
                list(job["documents"]),
                question=job["question"] or "",
                target_token=job["target"],
                concate_question=False,
                **(long if job["method"] == "longllmlingua" else {}),
            )["compressed_prompt"]
            answer = {"text": text}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answer |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
