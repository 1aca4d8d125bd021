"""How much of the machine other processes used; a load average would include the benchmark itself."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.15  # cores that others may use before the page warns


@dataclass(frozen=True)
class Moment:
    """Seconds since some start: wall-clock time, busy time of all cores, CPU time of our processes."""

    wall: float
    machine: float | None
    ours: float

    @classmethod
    def now(cls) -> Moment:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        ours = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        return cls(time.monotonic(), _cores_at_work(), ours)


def others_since(before: Moment) -> float | None:
    """Cores that other processes kept busy on average since then; None where the system does not report it."""
    now = Moment.now()
    if now.machine is None or before.machine is None or now.wall <= before.wall:
        return None
    used = (now.machine - before.machine) - (now.ours - before.ours)
    return round(max(0.0, used / (now.wall - before.wall)), 2)


def _cores_at_work() -> float | None:
    """Seconds of user, nice, system, interrupts and stolen time of all cores; waiting for disks is idle."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
