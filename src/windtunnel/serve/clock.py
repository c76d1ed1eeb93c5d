"""Real time for the engine: a monotonic clock and an alarm finer than the event loop's timer.

The loop's own timers count whole milliseconds. On Linux the alarm is a timerfd with an absolute deadline on the same
clock, which wakes the loop within tens of microseconds; elsewhere it is the loop's timer.
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

now_ns = time.monotonic_ns


class Alarm(Protocol):
    def set(self, at_ns: int) -> None:
        """Call back once at this time (absolute, monotonic). Replaces an earlier setting."""
        ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("it_interval", _Timespec), ("it_value", _Timespec)]


_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1


class TimerfdAlarm:
    """Linux. Owns one file descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._callback = callback
        self._spec = _Itimerspec()
        self._pointer = ctypes.byref(self._spec)
        loop.add_reader(self._fd, self._fired)

    def set(self, at_ns: int) -> None:
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = divmod(max(at_ns, 1), 1_000_000_000)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def clear(self) -> None:
        value = self._spec.it_value
        value.tv_sec = value.tv_nsec = 0
        self._settime(self._fd, 0, self._pointer, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()


class LoopAlarm:
    """Any platform: the loop's timer, good to a millisecond or so."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        self.clear()
        self._handle = self._loop.call_later(max(at_ns - now_ns(), 0) / 1e9, self._callback)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.clear()


def make_alarm(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Alarm:
    """The finest alarm this platform has."""
    if sys.platform == "linux":
        return TimerfdAlarm(loop, callback)
    return LoopAlarm(loop, callback)
