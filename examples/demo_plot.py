"""What the demo draws: curves in the terminal and as a PNG, and a table."""

import itertools

MARKS = "o*"
WIDTH, HEIGHT = 72, 14


def _grid(points, x_range, y_range):
    """Lines of text; points is {mark: [(x, y)]}, later marks lie over earlier ones."""
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, pairs in points.items():
        for x, y in pairs:
            column = int((x - x_range[0]) / max(x_range[1] - x_range[0], 1e-9) * (WIDTH - 1))
            row = int((y_range[1] - y) / max(y_range[1] - y_range[0], 1e-9) * (HEIGHT - 1))
            cells[min(max(row, 0), HEIGHT - 1)][min(max(column, 0), WIDTH - 1)] = mark
    lines = []
    for i, row in enumerate(cells):
        label = y_range[1] - i * (y_range[1] - y_range[0]) / (HEIGHT - 1)
        lines.append(f"{label:6.2f} |{''.join(row).rstrip()}")
    return [*lines, f"{'':6} +{'-' * WIDTH}"]


def terminal(curves):
    """Loss by step, where the curves lie on each other, and by seconds, where they do not."""
    losses = [loss for values, _ in curves.values() for loss in values]
    y_range = (min(losses), max(losses))
    steps, clocks = {}, {}
    for mark, (values, seconds) in zip(MARKS, curves.values(), strict=True):
        steps[mark] = list(enumerate(values, 1))
        clocks[mark] = list(zip(itertools.accumulate(seconds), values, strict=True))
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=True))
    count = len(steps[MARKS[0]])
    longest = max(pairs[-1][0] for pairs in clocks.values())
    last = f"{count} steps"
    first = [f"loss by step ({legend})", *_grid(steps, (1, count), y_range), f"{'1':>9}{last:>{WIDTH - 1}}"]
    last = f"{longest:.0f} s"
    second = [f"loss by time ({legend})", *_grid(clocks, (0, longest), y_range), f"{'0':>9}{last:>{WIDTH - 1}}"]
    return "\n".join([*first, "", *second])


def png(curves, path):
    """The same two plots as a picture. None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for (name, (losses, seconds)), style in zip(curves.items(), ("-", "--"), strict=True):
        left.plot(range(1, len(losses) + 1), losses, style, label=name)
        right.plot(list(itertools.accumulate(seconds)), losses, style, label=name)
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="the same curve")
    right.set(xlabel="seconds of training", title="in different time")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def table(header, rows):
    """Prints rows of (name, theirs, ours, ratio, difference)."""
    cells = [header, *((name, a, b, f"{ratio:.1f}x", d) for name, a, b, ratio, d in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        first, *rest = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join([f"{row[0]:<{widths[0]}}", *rest]))
