"""Two raylets of this machine on loopback, with a token of their own; the second can be killed and started again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afire.cluster.engine import MODE, NICENESS, TOKEN, prepare

# By Ray's defaults a minute passes until a raylet that is gone is missed, of which a drill would be most.
_NOTICES_SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "5000"}


class Raylets:
    """A head and a second machine, as far as Ray can tell, each with one core."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._second = self._start()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_second(self) -> None:
        """As when its machine loses power: the raylet and with it all its workers, without a word."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def is_on_second(self, pid: int) -> bool:
        """Whether a process is a worker of the second raylet."""
        raylet = self._second.all_processes["raylet"][0].process.pid
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return int(fields[1]) == int(raylet)

    def start_second(self) -> None:
        self._second = self._start()

    def _start(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


@contextmanager
def two_raylets() -> Iterator[Raylets]:
    """For the block; commands that are started meanwhile find the token in their environment."""
    os.environ |= {MODE: "token", TOKEN: secrets.token_hex(32), NICENESS: "0", **_NOTICES_SOON}
    prepare("127.0.0.1:0")
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        yield Raylets(cluster)
    finally:
        cluster.shutdown()
