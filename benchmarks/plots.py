"""Plots that several benchmarks draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt


def bars(path: Path, cases: Sequence[str], heights: Mapping[str, Sequence[float]],
         xlabel: str, ylabel: str) -> None:
    """Draw a group of bars for each case: one for each key of `heights`."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    width = 0.8 / len(heights)
    for i, (label, values) in enumerate(heights.items()):
        axes.bar([x + width * (i - (len(heights) - 1) / 2) for x in range(len(cases))], values,
                 0.93 * width, label=label)
    axes.set_xticks(range(len(cases)), cases)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
