"""What both training tools measure and fit: AUC, and logistic regression."""

from __future__ import annotations

import numpy as np
import torch


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Chance that an attack scores above an ordinary text, ties half; None for one label only."""
    attacks, others = scores[labels == 1], np.sort(scores[labels == 0])
    if not len(attacks) or not len(others):
        return None
    below = np.searchsorted(others, attacks, "left") + np.searchsorted(others, attacks, "right")
    return float(below.mean() / 2 / len(others))


def fit(x: np.ndarray, y: np.ndarray, weight: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """Logistic regression on standardised columns; gives weights and bias for the columns as they come."""
    mean, scale = x.mean(0), x.std(0) + 1e-6
    rows = torch.tensor((x - mean) / scale, dtype=torch.float32)
    labels = torch.tensor(y, dtype=torch.float32)
    share = torch.tensor(weight / weight.sum(), dtype=torch.float32)
    w, b = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([w, b], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(rows @ w + b, labels, reduction="none")
        value = (share * losses).sum() + penalty * (w**2).sum()
        value.backward()
        return value

    optimiser.step(loss)
    flat = w.detach().numpy() / scale
    return flat.astype(np.float32), float(b.detach()) - float((flat * mean).sum())
