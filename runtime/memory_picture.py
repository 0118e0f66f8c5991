"""A picture of a memory report: the pool as a grid of blocks, and block tables as a textbook draws them.

Needs matplotlib, which the extra `plots` installs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.memory_report import MemoryReport, RequestMemory, TableEntry, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch
    from matplotlib.text import Text

Box = tuple[float, float, float, float]  # left, bottom, width, height
Owners = Mapping[int, Mapping[str, TableEntry]]  # block id -> colour of a sequence -> its entry for the block

# Okabe and Ito's palette (2008), which most colour-blind people tell apart, without its yellow, black and grey.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_GREYS = ("#6b7a8f", "#8f9bac", "#4f5b6b")  # of all further sequences, in turn
_CACHED, _NULL, _COPIED, _FREE, _EDGE = "#f3dfa8", "#333333", "#9e8fb2", "#ffffff", "#c4c9d1"
_WASTED, _RESERVED = "26", "80"  # alpha of a sequence's colour where its slots are not written
_MOST_CELLS, _MOST_LABELLED, _MOST_TABLES, _MOST_ROWS, _MOST_LETTERS = 10_000, 160, 3, 8, 24


def draw(report: MemoryReport, path: str | Path) -> None:
    """Write the picture of a report to `path`, in the format that its suffix names (.png, .svg, .pdf, ...).

    Side effects: the file; no global state of matplotlib. Raises ImportError without matplotlib, and ValueError for a
    format that matplotlib does not write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(13, 7.5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    canvas = FigureCanvasAgg(figure)
    grid, tables = figure.subplots(1, 2, width_ratios=(3, 2))
    sequences = [request for request in report.requests if request.table]
    colours = list(islice(chain(_COLOURS, cycle(_GREYS)), len(sequences)))
    figure.suptitle(_headline(report), fontsize=11)
    _draw_grid(grid, report, _owners(sequences, colours))
    _draw_tables(tables, sequences, colours, report.pool.block_size)
    figure.legend(handles=_legend(report, sequences), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    canvas.print_figure(path, dpi=150)


def _headline(report: MemoryReport) -> str:
    owners = {"weights": report.weights, "activations (estimate)": report.activations, "graphs": report.graphs}
    owners |= {"pool": report.pool.nbytes, "swap": report.swap}
    return ",  ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in owners.items() if nbytes != 0)


def _owners(sequences: Sequence[RequestMemory], colours: Sequence[str]) -> Owners:
    owners: dict[int, dict[str, TableEntry]] = {}
    for request, colour in zip(sequences, colours, strict=True):
        for entry in request.table:
            held = owners.setdefault(entry.block_id, {})
            held[colour] = max(entry, held.get(colour, entry), key=lambda one: one.num_tokens)  # greys are several's
    return owners


def _draw_grid(axes: Axes, report: MemoryReport, owners: Owners) -> None:
    """Draw the whole pool, block 0 at the top left; a cell of a very big pool holds several, one above another."""
    pool = report.pool
    per_cell = math.ceil(pool.num_blocks / _MOST_CELLS)
    num_cells = math.ceil(pool.num_blocks / per_cell)
    columns = math.ceil(math.sqrt(1.3 * num_cells))
    gap = 0.06 if num_cells <= _MOST_LABELLED else 0.04

    def place(block_id: int) -> Box:
        cell, layer = divmod(block_id, per_cell)
        row, column = divmod(cell, columns)
        height = (1 - 2 * gap) / per_cell
        return column + gap, -1 - row + gap + layer * height, 1 - 2 * gap, height

    pieces: list[tuple[Box, str]] = [(place(0), _NULL)]
    pieces += [(place(block_id), _CACHED) for block_id in pool.cached_block_ids]
    pieces += [(place(block_id), _COPIED) for block_id in pool.copied_block_ids]
    for block_id, entries in owners.items():
        pieces += _used_block(place(block_id), entries, pool.block_size)
    outlines = [((*place(cell * per_cell)[:3], 1 - 2 * gap), _FREE) for cell in range(num_cells)]
    _add_boxes(axes, outlines, edge=_EDGE, width=0.8 if num_cells <= _MOST_LABELLED else 0.3)
    _add_boxes(axes, pieces)
    if num_cells <= _MOST_LABELLED:
        _label_cells(axes, {block_id: place(block_id) for block_id in range(pool.num_blocks)}, report)
    axes.set(xlim=(0, columns), ylim=(-math.ceil(num_cells / columns), 0), aspect="equal", anchor="NW")
    axes.set_axis_off()
    several = f", {per_cell} of them in a cell" if per_cell > 1 else ""
    axes.set_title(
        f"pool: {pool.num_blocks} blocks of {pool.block_size} tokens{several}\n"
        f"{pool.num_used} used, {pool.num_free} free, {len(pool.cached_block_ids)} of them with a reusable prefix\n"
        f"wasted slots: {pool.wasted_slots}, blocks saved by sharing: {pool.num_saved}",
        loc="left",
        fontsize=10,
    )


def _used_block(box: Box, entries: Mapping[str, TableEntry], block_size: int) -> Iterator[tuple[Box, str]]:
    """One upright stripe for each colour that holds the block, filled from the bottom as far as tokens go."""
    left, bottom, width, height = box
    width /= len(entries)
    for index, (colour, entry) in enumerate(entries.items()):
        for level, tone in _levels(entry, colour, block_size):
            yield (left + index * width, bottom, width, height * level), tone


def _levels(entry: TableEntry, colour: str, block_size: int) -> list[tuple[float, str]]:
    """Shares of a block and the tone of each, to be laid one over the other."""
    written = [(entry.num_written / block_size, colour)]
    if entry.num_written == block_size:
        return written
    return [(1.0, colour + _WASTED), (entry.num_tokens / block_size, colour + _RESERVED), *written]


def _label_cells(axes: Axes, boxes: Mapping[int, Box], report: MemoryReport) -> None:
    """Write block ids, and mark what is in the prefix cache with a dot."""
    published = {entry.block_id for request in report.requests for entry in request.table if entry.published}
    published.update(report.pool.cached_block_ids)
    size = 11 if len(boxes) <= 48 else 7
    for block_id, (left, bottom, width, height) in boxes.items():
        middle = (left + width / 2, bottom + height / 2)
        label, colour = ("null", "white") if block_id == 0 else (str(block_id), "black")
        text = axes.text(*middle, label, ha="center", va="center", fontsize=size, color=colour)
        if block_id:
            _outline(text)
        if block_id in published:
            axes.plot(left + 0.87 * width, bottom + 0.87 * height, "o", color="black", markersize=size / 4)


def _draw_tables(axes: Axes, sequences: Sequence[RequestMemory], colours: Sequence[str], block_size: int) -> None:
    """Draw the tables of the first few sequences, one row an entry: logical block, physical block, its slots."""
    axes.set_axis_off()
    shown = list(zip(sequences, colours, strict=True))[:_MOST_TABLES]
    some = f" of {len(shown)} of {len(sequences)} sequences" if len(shown) < len(sequences) else ""
    title = f"block tables{some}: logical block → physical block" if shown else "no blocks in use"
    axes.set_title(title, loc="left", fontsize=10)
    y = 0.0
    for request, colour in shown:
        heading = f"{_plain(request.request_id)}: {request.num_tokens} tokens, {request.num_computed_tokens} computed"
        axes.text(0, y - 0.5, heading, va="center", fontsize=9, fontweight="bold", color=colour)
        y -= 1
        for index in _shown_rows(len(request.table)):
            if index is None:
                axes.text(0.55, y - 0.5, "⋮", va="center", ha="center", fontsize=9)
            else:
                _draw_row(axes, y, index, request.table[index], colour, block_size)
            y -= 1
        y -= 0.6
    axes.set(xlim=(0, 8), ylim=(min(y, -16), 0.2))


def _draw_row(axes: Axes, y: float, index: int, entry: TableEntry, colour: str, block_size: int) -> None:
    cell, block = (0.1, y - 0.9, 0.9, 0.8), (1.8, y - 0.9, 3.6, 0.8)
    _add_boxes(axes, [(cell, "#f1f3f5"), (block, _FREE)], edge=_EDGE, width=0.8)
    left, bottom, width, height = block
    levels = _levels(entry, colour, block_size)
    _add_boxes(axes, [((left, bottom, width * level, height), tone) for level, tone in levels])
    axes.text(0.55, y - 0.5, str(index), ha="center", va="center", fontsize=9)
    axes.text(1.4, y - 0.5, "→", ha="center", va="center", fontsize=11)
    _outline(axes.text(left + width / 2, y - 0.5, str(entry.block_id), ha="center", va="center", fontsize=9))
    notes = [f"{entry.num_written}/{block_size}", *["shared"] * entry.shared, *["•"] * entry.published]
    axes.text(left + width + 0.2, y - 0.5, " ".join(notes), va="center", fontsize=8)


def _shown_rows(count: int) -> list[int | None]:
    """The rows of a table to draw; None where some are left out."""
    if count <= _MOST_ROWS:
        return list(range(count))
    half = _MOST_ROWS // 2
    return [*range(half), None, *range(count - half, count)]


def _legend(report: MemoryReport, sequences: Sequence[RequestMemory]) -> list[Patch]:
    from matplotlib.patches import Patch

    named = list(zip(sequences, _COLOURS, strict=False))
    handles = [Patch(facecolor=colour, label=_plain(request.request_id)) for request, colour in named]
    if others := len(sequences) - len(named):
        handles.append(Patch(facecolor=_GREYS[0], label=f"{others} other sequences (greys)"))
    if sequences:
        colour = named[0][1]
        handles.append(Patch(facecolor=colour + _RESERVED, label="half tone: token known, not computed"))
        handles.append(Patch(facecolor=colour + _WASTED, label="pale: no token (wasted)"))
    if report.pool.num_saved:
        handles.append(
            Patch(facecolor="white", edgecolor=_GREYS[0], hatch="|||", label="stripes: shared, one an owner")
        )
    if report.pool.copied_block_ids:
        handles.append(Patch(facecolor=_COPIED, label="source of a copy"))
    handles.append(Patch(facecolor=_CACHED, edgecolor=_EDGE, label="free, holds a reusable prefix (•)"))
    handles.append(Patch(facecolor=_FREE, edgecolor=_EDGE, label="free"))
    handles.append(Patch(facecolor=_NULL, label="null block"))
    return handles


def _add_boxes(axes: Axes, boxes: Iterable[tuple[Box, str]], *, edge: str = "none", width: float = 0.0) -> None:
    """Draw filled boxes in one collection: thousands of single patches would take seconds."""
    from matplotlib.collections import PolyCollection

    corners, colours = [], []
    for (left, bottom, wide, high), colour in boxes:
        right, top = left + wide, bottom + high
        corners.append([(left, bottom), (right, bottom), (right, top), (left, top)])
        colours.append(colour)
    collection = PolyCollection(corners, facecolors=colours, edgecolors=edge, linewidths=width)
    collection.set_in_layout(False)  # inside the axes anyway, and slow to measure
    axes.add_collection(collection, autolim=False)


def _outline(text: Text) -> None:
    """Keep black text readable on any colour."""
    from matplotlib.patheffects import withStroke

    text.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _plain(request_id: str) -> str:
    """A user's id as text that matplotlib shows as it is: short, in letters that its font has, no formula."""
    short = request_id if len(request_id) <= _MOST_LETTERS else request_id[: _MOST_LETTERS - 1] + "…"
    return short.replace("$", r"\$")
