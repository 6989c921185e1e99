"""Stage times on a GPU. The host only queues work there, so its own clock would charge it to whoever waits next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dflow_trt.runtime.cuda import Event, Stream

HOST = "host"


@dataclass(frozen=True)
class Mark:
    """One call of a stage, between two events of the stream."""

    stage: str
    start: Event
    end: Event


class DeviceClock:
    """Events around calls. They are read later, when the device is through, and used again."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: list[Event] = []
        self._marks: list[Mark] = []

    @contextmanager
    def around(self, stage: str) -> Iterator[None]:
        """What is queued within belongs to this stage."""
        mark = Mark(stage, self._event(), self._event())
        mark.start.record(self._stream)
        yield
        mark.end.record(self._stream)
        self._marks.append(mark)

    def _event(self) -> Event:
        return self._free.pop() if self._free else Event(timing=True)

    def take(self) -> list[Mark]:
        """The marks since they were last taken."""
        taken, self._marks = self._marks, []
        return taken

    def milliseconds(self, marks: Sequence[Mark]) -> dict[str, float]:
        """By stage; waits for the device."""
        found: dict[str, float] = defaultdict(float)
        for mark in marks:
            mark.end.wait()
            found[mark.stage] += mark.end.milliseconds_since(mark.start)
            self._free += (mark.start, mark.end)
        return dict(found)

    def close(self) -> None:
        """Nothing is timed any more."""
        self.milliseconds(self.take())
        for event in self._free:
            event.close()
        self._free.clear()


def on_device(by_host: Mapping[str, float], by_device: Mapping[str, float]) -> dict[str, float]:
    """A step's stages with the device's times; what is left of the host's total is the host's own.

    Work that is still running when a step returns belongs to it all the same, hence never less than nothing.
    """
    total = sum(by_host.values())
    stages = {name: by_device.get(name, value) for name, value in by_host.items() if name != HOST}
    return stages | {HOST: max(0.0, total - sum(stages.values()))}
