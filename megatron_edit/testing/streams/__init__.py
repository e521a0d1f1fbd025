"""Finds races between streams, and places where the host waits for the device, on a CPU: see `watch.py`."""

from megatron_edit.testing.streams.places import HostWait, count_by_place
from megatron_edit.testing.streams.watch import StreamPlatform, StreamWatch

__all__ = ["HostWait", "StreamPlatform", "StreamWatch", "count_by_place"]
