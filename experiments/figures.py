"""Figures. The only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]


def by_length(series: Mapping[str, Mapping[str, Points]], path: Path) -> None:
    """One panel for each quantity, against the length, both axes logarithmic.

    Args:
        series: quantity (its name and unit) -> line -> (length, value).
        path: a PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(series), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (quantity, lines) in enumerate(series.items(), 1):
        axes = figure.add_subplot(1, len(series), number)
        for index, (name, points) in enumerate(sorted(lines.items())):
            if points:
                style = ("-", "--", ":")[index // 10 % 3]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linestyle=style, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("length")
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(path, dpi=110)
