"""What 16-bit recurrent states cost: logits of token-by-token decoding against fp32 states.

python -m onebox.bench.state --model onebox/models/tiny --text docs/architecture.md docs/log.md --tokens 256
"""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.bench import values
from onebox.bench.quality import read_texts
from onebox.bench.record import append, environment, rounded
from onebox.model.load import load_model
from onebox.model.sequence import Sequences
from onebox.server.chat import Tokenizer

WINDOWS = 4


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--model", type=values.folder, required=True)
    parser.add_argument("--text", type=values.file, nargs="+", required=True)
    parser.add_argument(
        "--tokens", type=values.count, default=256, help="of each window, the state rounded after every one"
    )
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/quality.jsonl"))
    args = parser.parse_args()
    ids = Tokenizer.from_folder(args.model).encode("\n".join(text for path in args.text for text in read_texts(path)))
    if len(ids) < WINDOWS * args.tokens:
        parser.error(f"{WINDOWS} windows of {args.tokens} tokens need more text than {len(ids)} tokens")
    tokens = torch.tensor(ids[: WINDOWS * args.tokens]).view(WINDOWS, args.tokens)
    model = load_model(args.model).model
    runs = [Sequences(model, WINDOWS, args.tokens, state_dtype=d) for d in (torch.float32, torch.bfloat16)]
    kl, agreed, worst, total = 0.0, 0, 0.0, 0
    with torch.inference_mode():
        for i in range(args.tokens):
            step = tokens[:, i, None]
            exact, halved = (model.logits(run.forward(step).flatten(0, 1)).log_softmax(-1) for run in runs)
            each = (exact.exp() * (exact - halved)).sum(-1)
            kl, worst = kl + float(each.sum()), max(worst, float(each.max()))
            agreed += int((exact.argmax(-1) == halved.argmax(-1)).sum())
            total += len(each)
    record = {
        "bench": "state",
        "model": args.model.name,
        "state": "bf16",
        "reference": "fp32",
        "tokens": total,
        "kl": rounded(kl / total),
        "worst_kl": rounded(worst),
        "top1_agreement": rounded(agreed / total),
    }
    print(record, flush=True)
    append(args.out, record | environment(torch.device("cpu"), args.commit))


if __name__ == "__main__":
    main()
