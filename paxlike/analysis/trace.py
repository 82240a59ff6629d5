"""The simulated step as a picture: a trace for ui.perfetto.dev, and a PNG of its lanes.

One lane for the compute stream and one for each link. Of each loop the first trip is drawn, and one
bar for the others.
"""

import json
from pathlib import Path

from paxlike.analysis.timeline import PICOSECONDS, Event, Timeline
from paxlike.workdir import write_atomically

MICROSECOND = PICOSECONDS // 1_000_000


def chrome_trace(timeline: Timeline, title: str) -> dict[str, object]:
    """The step in the JSON object form of the Chrome trace event format; times in microseconds."""
    lanes = {stream: lane for lane, stream in enumerate(_streams(timeline))}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    ]
    for stream, lane in lanes.items():
        named = {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": stream}}
        order = {"ph": "M", "pid": 0, "tid": lane, "name": "thread_sort_index"}
        events += [named, order | {"args": {"sort_index": lane}}]
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[event.stream],
                "name": event.name,
                "cat": str(event.details.get("kind", "loop")),
                "ts": event.begin / MICROSECOND,
                "dur": event.ticks / MICROSECOND,
                "args": {key: value for key, value in event.details.items() if value},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write(timeline: Timeline, title: str, path: Path) -> None:
    """Write the trace to a JSON file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(chrome_trace(timeline, title)) + "\n")


def plot(timeline: Timeline, title: str, path: Path) -> None:
    """Draw the lanes: work, waits, transfers, and the bars that stand for a loop's other trips."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = _streams(timeline)
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for lane, stream in enumerate(lanes):
        for colour in _COLOURS.values():
            bars = [
                (event.begin / PICOSECONDS * 1e3, event.ticks / PICOSECONDS * 1e3)
                for event in timeline.events
                if event.stream == stream and _colour(event) == colour
            ]
            if bars:
                axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    handles = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    axes.legend(handles=handles, loc="upper right", fontsize="small", ncols=len(handles))
    figure.savefig(path, dpi=110)


_COLOURS = {"work": "#4878a8", "wait": "#c44e52", "transfer": "#55a868", "other trips": "#cccccc"}


def _colour(event: Event) -> str:
    if "trips" in event.details:
        return _COLOURS["other trips"]
    if event.stream != "compute":
        return _COLOURS["transfer"]
    return _COLOURS["wait" if event.details.get("wait") else "work"]


def _streams(timeline: Timeline) -> list[str]:
    """Compute first, then the links by name."""
    links = sorted({event.stream for event in timeline.events} - {"compute"})
    return ["compute", *links]
