"""Plots of a run and of a comparison, as PNG files.

Figures are built without pyplot, so no global state is shared between threads. Colours are Okabe and Ito's, which
readers with colour blindness can tell apart. An entry is a line of the run's journal: its `metrics`, its cumulative
`budget`, and its `ledger` lines (kind, source, tokens, weight).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

Entry = Mapping[str, Any]
Bar = tuple[float, float, float]
"""Estimate, and the lower and upper end of its interval."""
Curve = tuple[Sequence[float], Sequence[float]]
"""Budget of rollouts, and success."""
Floats = npt.NDArray[np.float64]

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C",
)  # fmt: skip
SOURCE_COLOURS = {
    "reward": BLUE,
    "teacher": ORANGE,
    "peer": GREEN,
    "advisor": PURPLE,
    "critic": SKY,
    "experience": VERMILION,
    "reference": GREY,
}
KIND_COLOURS = {"all_fail": VERMILION, "mixed": BLUE, "all_pass": GREEN}
ARM_COLOURS = (GREY, BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY)
STACKED_BINS = 60
"""More steps than this are averaged in bins, so that a stack stays readable."""


def learning_plot(entries: Sequence[Entry], path: Path, *, title: str = "") -> None:
    """Success and the share of all-fail groups, by step and by rollouts; validation points with their intervals.

    Faint lines are single steps, strong ones a moving average over a twentieth of the run.

    Args:
        entries: in order of steps; metrics success/mean, groups/all_fail and validation/{success, low, high} are drawn
            where they exist.
    """
    steps = np.arange(1, len(entries) + 1, dtype=np.float64)
    rollouts = np.array([float(entry["budget"].get("rollouts", 0)) for entry in entries])
    success, all_fail = _metric(entries, "success/mean"), _metric(entries, "groups/all_fail")
    validation, low, high = (_metric(entries, f"validation/{name}") for name in ("success", "low", "high"))

    figure = _figure(10, 4)
    by_step, by_rollouts = figure.subplots(1, 2, sharey=True)
    # A step is validated before it is taken: its point lies where the step begins.
    for axes, x, label in ((by_step, steps, "steps"), (by_rollouts, rollouts, "sampled rollouts")):
        before = np.concatenate([[0.0], x[:-1]])
        _smooth_line(axes, x, success, BLUE, "success in training")
        _smooth_line(axes, x, all_fail, VERMILION, "share of all-fail groups")
        found = np.isfinite(validation)
        if found.any():
            below, above = np.nan_to_num(validation - low), np.nan_to_num(high - validation)
            axes.errorbar(
                before[found],
                validation[found],
                yerr=np.clip(np.stack([below, above])[:, found], 0, None),
                fmt="o",
                color=GREEN,
                markersize=4,
                capsize=2,
                linewidth=1,
                label="success in validation, 95 % interval",
                clip_on=False,
                zorder=3,
            )
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        _percent(axes)
    by_step.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_rollouts.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_step.set_ylabel("share")
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    _save(figure, path, title)


def ledger_plot(entries: Sequence[Entry], path: Path, *, title: str = "") -> None:
    """Who moved the policy: tokens with a gradient by source, and the gradient's weight by kind of group.

    The dashed line is signal/recovered: the share of all-fail groups that moved the policy (0 for GRPO).
    """
    lines = [line for entry in entries for line in entry["ledger"]]
    sources = [source for source in SOURCE_COLOURS if any(line["source"] == source for line in lines)]
    sources += sorted({line["source"] for line in lines} - set(SOURCE_COLOURS))
    tokens = {source: _ledger(entries, "source", source, "tokens") for source in sources}
    weights = {kind: _ledger(entries, "kind", kind, "weight") for kind in KIND_COLOURS}
    total = np.sum(list(weights.values()), axis=0)
    shares = {
        kind: np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
        for kind, weight in weights.items()
    }

    figure = _figure(10, 4)
    by_source, by_kind = figure.subplots(1, 2)
    _stack(by_source, tokens, SOURCE_COLOURS)
    by_source.set_ylabel("tokens with a gradient, per step")
    by_source.yaxis.set_major_formatter(EngFormatter(sep=""))
    by_source.set_ylim(bottom=0)
    _stack(by_kind, {kind.replace("_", "-"): share for kind, share in shares.items()}, {
        kind.replace("_", "-"): colour for kind, colour in KIND_COLOURS.items()
    })  # fmt: skip
    edges = _bins(len(entries))
    by_kind.plot(
        (edges[:-1] + edges[1:]) / 2,
        _binned(_metric(entries, "signal/recovered")),
        color="black",
        linestyle="--",
        linewidth=1.5,
        label="recovered all-fail groups",
    )
    by_kind.set_ylabel("share of the gradient's weight")
    _percent(by_kind)
    for axes, heading in ((by_source, "by source"), (by_kind, "by kind of group")):
        axes.set_xlabel("steps")
        axes.set_xlim(0, len(entries))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not axes.get_legend_handles_labels()[0]:
            continue
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8,
            title=heading, title_fontsize=9, columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip
    _save(figure, path, title)


def before_after_plot(bars: Mapping[str, tuple[Bar, Bar]], path: Path, *, title: str = "") -> None:
    """Test success before and after training, with 95 % intervals; one pair of bars a run."""
    figure = _figure(max(4.5, 2.0 + 1.8 * len(bars)), 4)
    axes = figure.subplots()
    places = np.arange(len(bars), dtype=np.float64)
    for shift, index, colour, label in ((-0.19, 0, GREY, "before"), (0.19, 1, BLUE, "after")):
        estimates, lows, highs = (
            np.array([pair[index][part] for pair in bars.values()]) for part in range(3)
        )
        axes.bar(places + shift, estimates, width=0.36, color=colour, label=label)
        axes.errorbar(
            places + shift,
            estimates,
            yerr=np.clip(np.stack([estimates - lows, highs - estimates]), 0, None),
            fmt="none",
            ecolor="black",
            capsize=4,
            linewidth=1.2,
        )
        for place, estimate, high in zip(places + shift, estimates, highs, strict=True):
            axes.annotate(
                f"{estimate:.1%}",
                (place, high),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    axes.set_xticks(places, list(bars))
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylabel("test success, 95 % interval")
    _percent(axes)
    axes.set_ylim(0, 1.08)
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    _save(figure, path, title)


ARMS_WITH_BANDS = 4


def compare_plot(curves: Mapping[str, Sequence[Curve]], path: Path, *, title: str = "") -> None:
    """Validation success by rollouts: an arm's mean over seeds; of few arms, in a band from its lowest to its highest
    seed. Bands of many arms would hide each other.

    Seeds that were evaluated at different budgets are interpolated, up to the smallest budget that all of them reached.
    """
    figure = _figure(9, 4.4)
    axes = figure.subplots()
    bands = len(curves) <= ARMS_WITH_BANDS
    for index, (arm, members) in enumerate(curves.items()):
        known = [
            (np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)) for x, y in members if len(x)
        ]
        if not known:
            continue
        colour = ARM_COLOURS[index % len(ARM_COLOURS)]
        line = ("-", "--", ":")[index // len(ARM_COLOURS) % 3]
        end = min(x[-1] for x, _ in known)
        grid = np.unique(np.concatenate([x[x <= end] for x, _ in known]))
        success_SN = np.stack([np.interp(grid, x, y) for x, y in known])
        label = f"{arm} ({len(known)} seeds)" if len(known) > 1 else arm
        axes.plot(
            grid,
            success_SN.mean(axis=0),
            color=colour,
            linestyle=line,
            linewidth=2,
            marker="o",
            markersize=3,
            label=label,
        )
        if bands and len(known) > 1:
            axes.fill_between(
                grid, success_SN.min(axis=0), success_SN.max(axis=0), color=colour, alpha=0.18, linewidth=0
            )
    axes.set_xlabel("sampled rollouts")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("validation success")
    axes.set_xlim(left=0)
    _percent(axes)
    if axes.get_legend_handles_labels()[0]:
        legend = "mean; band: lowest to highest seed" if bands else "mean over seeds"
        # At the side: below, more than a few arms would be cut off.
        figure.legend(loc="outside right upper", frameon=False, title=legend, title_fontsize=9)
    _save(figure, path, title)


def contrast_plot(differences: Mapping[str, Sequence[Bar]], path: Path, *, title: str = "") -> None:
    """Paired differences with their intervals, one line a contrast: final success, and area under the curve.

    Args:
        differences: per contrast, (estimate, low, high) of the final success and of the area.
    """
    figure = _figure(9, 1.4 + 0.45 * len(differences))
    both = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(differences), dtype=np.float64)[::-1]
    for part, (axes, label) in enumerate(zip(both, ("final success", "area under the curve"), strict=True)):
        bars = np.array([found[part] for found in differences.values()], dtype=np.float64).reshape(-1, 3)
        _intervals(axes, bars, places, horizontal=True)
        axes.axvline(0, color="black", linewidth=1)
        axes.set_xlabel(f"difference in {label}, 95 % interval")
        axes.grid(axis="x", alpha=0.25)
    both[0].set_yticks(places, list(differences))
    both[0].set_ylim(-0.6, len(differences) - 0.4)
    _save(figure, path, title)


def gap_plot(points: Mapping[str, tuple[float, Bar]], path: Path, *, title: str = "") -> None:
    """What guidance gained, by the gap between teacher and student at the start.

    Args:
        points: per pair, its gap, and (estimate, low, high) of the gain in final success.
    """
    figure = _figure(7, 4.4)
    axes = figure.subplots()
    gaps = np.array([gap for gap, _ in points.values()], dtype=np.float64)
    bars = np.array([bar for _, bar in points.values()], dtype=np.float64).reshape(-1, 3)
    _intervals(axes, bars, gaps, horizontal=False)
    for name, gap, bar in zip(points, gaps, bars, strict=True):
        axes.annotate(name, (gap, bar[0]), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=1)
    axes.axvline(0, color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel("gap before training: the teacher's success minus the student's")
    axes.set_ylabel("gain in final success, 95 % interval")
    _save(figure, path, title)


# --------------------------------------------------------------------------------------------------- parts


def value_plot(
    values_N: Sequence[float],
    truths_N: Sequence[float],
    positions_N: Sequence[float],
    path: Path,
    *,
    title: str = "",
) -> None:
    """A critic's values against Monte-Carlo values, coloured by where in its rollout each place lies."""
    figure = _figure(5.6, 4.4)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    points = axes.scatter(truths_N, values_N, c=positions_N, cmap="viridis", vmin=0, vmax=1, s=14, alpha=0.8)
    figure.colorbar(points, ax=axes, label="place in the rollout")
    axes.set_xlabel("mean reward of continuations")
    axes.set_ylabel("the critic's value")
    _save(figure, path, title)


def _intervals(axes: Axes, bars: Floats, places: Floats, *, horizontal: bool) -> None:
    """Estimates (N, 3) with their intervals, on lines at `places`."""
    spread = np.clip(np.stack([bars[:, 0] - bars[:, 1], bars[:, 2] - bars[:, 0]]), 0, None)
    style: dict[str, Any] = {"fmt": "o", "color": BLUE, "ecolor": BLUE, "capsize": 3, "markersize": 5}
    if horizontal:
        axes.errorbar(bars[:, 0], places, xerr=spread, **style)
    else:
        axes.errorbar(places, bars[:, 0], yerr=spread, **style)


def _metric(entries: Sequence[Entry], name: str) -> Floats:
    """(N,), NaN where a step has no such metric."""
    return np.array([float(entry["metrics"].get(name, np.nan)) for entry in entries], dtype=np.float64)


def _ledger(entries: Sequence[Entry], column: str, value: str, figure: str) -> Floats:
    """(N,) sums over the ledger lines of a step whose `column` is `value`."""
    return np.array(
        [float(sum(line[figure] for line in entry["ledger"] if line[column] == value)) for entry in entries]
    )


def _smooth_line(axes: Axes, x: Floats, y: Floats, colour: str, label: str) -> None:
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if not len(y):
        return
    width = max(1, len(y) // 20)
    ones = np.ones(width)
    smooth = np.convolve(y, ones, "same") / np.convolve(np.ones(len(y)), ones, "same")
    axes.plot(x, y, color=colour, alpha=0.25, linewidth=1)
    axes.plot(x, smooth, color=colour, linewidth=2, label=label, marker="o" if len(y) == 1 else "")


def _bins(count: int) -> npt.NDArray[np.int64]:
    """Edges between at most STACKED_BINS runs of steps."""
    return np.linspace(0, count, min(count, STACKED_BINS) + 1).astype(np.int64)


def _binned(values: Floats) -> Floats:
    return np.array([np.nan_to_num(values[start:end]).mean() for start, end in pairwise(_bins(len(values)))])


def _stack(axes: Axes, series: Mapping[str, Floats], colours: Mapping[str, str]) -> None:
    shown = {name: values for name, values in series.items() if values.any()}
    if not shown:
        axes.text(0.5, 0.5, "no token had a gradient", ha="center", va="center", transform=axes.transAxes)
        return
    bottom = np.zeros(1)
    for name, values in shown.items():
        top = bottom + _binned(values)
        # One outline per source: bars side by side would leave hairlines between them.
        axes.stairs(
            top,
            _bins(len(values)),
            baseline=np.broadcast_to(bottom, top.shape),
            fill=True,
            color=colours.get(name, "#444444"),
            label=name,
        )
        bottom = top


def _percent(axes: Axes) -> None:
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _save(figure: Figure, path: Path, title: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    if title:
        figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
