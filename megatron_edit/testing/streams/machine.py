"""The machine as the host sees it: streams, events, threads, and what each of them has waited for."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from megatron_edit.platform import cpu
from megatron_edit.testing.streams.happens_before import Timeline
from megatron_edit.testing.streams.operations import DEVICE
from megatron_edit.testing.streams.places import HostWait, places_now, show


class Machine:
    """`current`: the current stream. `waits`: where the host has waited for the device."""

    def __init__(self) -> None:
        self.waits: list[HostWait] = []
        self._numbers = itertools.count(1)
        self._lines: list[Timeline] = []  # of the device
        self._hosts = threading.local()
        self._first_host = Timeline("the host")
        self.default = self.current = Stream(self, "the default stream")

    @property
    def host(self) -> Timeline:
        """This thread."""
        return getattr(self._hosts, "line", self._first_host)

    def begin_thread(self, line: Timeline) -> None:
        """This thread is `line` from now on."""
        self._hosts.line = line

    def new_line(self, name: str = "") -> Timeline:
        """A timeline of the device."""
        line = Timeline(name or f"stream {next(self._numbers)}")
        self._lines.append(line)
        return line

    def launch(self, line: Timeline | None = None) -> Timeline:
        """`line` (None: of the current stream); what it is given now begins after all that this thread has done."""
        line = line or self.current.timeline
        line.wait(self.host.clock)
        return line

    def host_waits(self, why: str, line: Timeline) -> None:
        """The host goes on when `line` is done."""
        self.host.wait(line.now())
        self.waits.append(HostWait(why, show(places_now())))

    def synchronize(self, device: Any = None) -> None:
        """The host goes on when everything is done."""
        for line in self._lines:
            self.host.wait(line.now())
        self.waits.append(HostWait("synchronize", show(places_now())))


class Stream:
    """`torch.cuda.Stream`."""

    device = DEVICE
    cuda_stream = 0

    def __init__(self, machine: Machine, name: str = "") -> None:
        self._machine = machine
        self.timeline = machine.new_line(name)

    def wait_stream(self, stream: Stream) -> None:
        self.timeline.wait(stream.timeline.now())

    def wait_event(self, event: Event) -> None:
        self.timeline.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._machine.host_waits("synchronize", self.timeline)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._before = self._machine.current
        self._machine.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self._machine.current = self._before


class Event(cpu.Event):
    """`torch.cuda.Event`."""

    def __init__(self, machine: Machine, *_: Any, **__: Any) -> None:
        super().__init__()
        self._machine = machine
        self.clock: dict[Timeline, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        super().record()
        self.clock = self._machine.launch((stream or self._machine.current).timeline).now()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._machine.current).wait_event(self)

    def synchronize(self) -> None:
        self._machine.host.wait(self.clock)
