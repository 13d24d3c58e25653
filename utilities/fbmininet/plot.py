"""Plots a table of rates over time.

usage: plot.py TABLE.csv PICTURE.png

The first column is the time in s, the others are rates in Mbit/s, named NAME_mbit_s.  Runs in
the project's Python environment, which has matplotlib.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(table: Path, picture: Path) -> None:
    """Plot `table` to `picture`."""
    with table.open(newline="") as file:
        names, *rows = list(csv.reader(file))
    times, *columns = ([float(row[i]) for row in rows] for i in range(len(names)))
    colours = {"red": "tab:red", "blue": "tab:blue"}
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, column in zip(names[1:], columns, strict=True):
        name = name.removesuffix("_mbit_s")
        axes.plot(times, column, label=name, color=colours.get(name))
    axes.set(xlabel="s", ylabel="Mbit/s of frames", xlim=(0, times[-1]), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
