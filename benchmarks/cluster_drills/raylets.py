"""Two raylets of this machine on loopback, with a token of their own; the second can be killed and started again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from afire.cluster.ray_engine import MODE, NICENESS, TOKEN, prepare


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

    def start_second(self) -> None:
        self._second = self._start()

    def _start(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


@contextmanager
def two_raylets() -> Iterator[Raylets]:
    """For the block; commands that are started meanwhile find the token in their environment."""
    os.environ |= {MODE: "token", TOKEN: secrets.token_hex(32), NICENESS: "0"}
    prepare("127.0.0.1:0")
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        yield Raylets(cluster)
    finally:
        cluster.shutdown()
