"""Who computes shards: this process, one after another, or the machines of a Ray cluster.

On Ray it is one task a shard, or one actor a model that takes shard after shard, with Ray core alone. A task or an
actor that dies with its process, its machine or for lack of memory is tried again elsewhere; a shard that was whole by
then is skipped, because its writer looks first. What a user must know (a film that cannot be read, a full disk) is not
tried again: it ends the command with that message.

Anyone who can talk to a Ray cluster can run any code on it, so token authentication is required. A cluster that is
started here listens on loopback only and has a token of its own.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afire._version import __version__
from afire.cluster.shards import Do, Shard, Where, Work
from afire.errors import UserError
from afire.processes import usable_cores
from afire.progress import Progress, progress, silenced

RETRIES = 3  # of a shard whose process has died
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
NICENESS = "RAY_worker_niceness"
_LOOPBACK_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: nodes call themselves 127.0.0.1, and listen there alone
_OBJECT_STORE = 80 << 20  # nothing but numbers goes through it
_SECONDS_BETWEEN_WARNINGS = 60.0
logger = logging.getLogger("afire")


def do_shards(work: Work, shards: Sequence[Shard], where: Where | None = None) -> int:
    """Compute ``shards``; how many rows were computed, those of whole shards not counted."""
    where = where or Where()
    if where.engine == "ray":
        return do_on_ray(work, shards, where.address, where.processes)
    do = work.make(work.settings)
    if len(shards) == 1:  # which shows its films as it goes
        return do(shards[0], work.piece(shards[0]))
    rows = 0
    with progress(work.what, len(shards), "shards") as bar, silenced():
        for shard in shards:
            rows += do(shard, work.piece(shard))
            bar.advance()
    return rows


def do_on_ray(work: Work, shards: Sequence[Shard], address: str | None, processes: int | None) -> int:
    """Compute ``shards`` on the cluster at ``address``, or on one started for it; how many rows were computed."""
    with connected(address, processes) as ray, progress(work.what, len(shards), "shards") as bar:
        run = _on_actors if work.keeps else _as_tasks
        return run(ray, work, shards, processes, bar)


@contextmanager
def connected(address: str | None, processes: int | None = None) -> Iterator[Any]:
    """The module ``ray``, connected; without ``address`` to a cluster of this machine that ends with the block.

    Inside of another such block the same connection serves.
    """
    if find_spec("ray") is None:
        raise UserError('--engine ray needs Ray; run pip install "afire[ray]".')
    module = sys.modules.get("ray")
    if module is not None and module.is_initialized():  # the block that connected also disconnects
        yield module
        return
    prepare(address)
    import ray

    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        options |= {"address": "local", "num_cpus": processes or usable_cores(), "include_dashboard": False}
        options |= {"_node_ip_address": "127.0.0.1", "object_store_memory": _OBJECT_STORE}
    else:
        options |= {"address": address}
    try:
        ray.init(**options)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UserError(f"no Ray cluster answers at {address or 'this machine'} ({_first_line(error)}).") from None
    try:
        _check_nodes(ray, address)
        yield ray
    finally:
        ray.shutdown()


def prepare(address: str | None) -> None:
    """Switch token authentication on, before Ray is imported: it reads these variables then."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    mode = os.environ.get(MODE, "token").lower()
    if mode != "token":
        raise UserError(f"{MODE}={mode} switches Ray's authentication off; afire needs {MODE}=token (docs/cluster.md).")
    os.environ[MODE] = "token"
    if address is None:
        os.environ[TOKEN] = secrets.token_hex(32)  # known to the processes of this command only
        os.environ.setdefault(NICENESS, "0")  # Ray's default of 15 would give way to every other program
        os.environ[_LOOPBACK_NODES] = "0"
        return
    if is_loopback(address):
        os.environ[_LOOPBACK_NODES] = "0"
    token_file = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if not os.environ.get(TOKEN) and not token_file.is_file():
        raise UserError(
            f"there is no token for the Ray cluster at {address}: set {TOKEN_PATH} to the file with the token of that "
            "cluster, which was started with RAY_AUTH_MODE=token (docs/cluster.md)."
        )


def is_loopback(address: str) -> bool:
    """Whether ``HOST:PORT`` is of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_nodes(ray: Any, address: str | None) -> None:
    """The cluster asks for a token too, and has our version of afire."""
    try:
        mode, version = ray.get(ray.remote(_about).options(num_cpus=0, max_retries=RETRIES).remote())
    except ray.exceptions.RayError as error:
        raise UserError(
            f"the machines of the Ray cluster at {address} cannot run afire ({_first_line(error)}); install the same "
            "version of afire there."
        ) from None
    if mode != "token":
        raise UserError(
            f"the Ray cluster at {address} asks nobody for a token, so that whoever reaches it can run programs there; "
            "start it with RAY_AUTH_MODE=token (docs/cluster.md)."
        )
    _same_version(version)


def _about() -> tuple[str, str]:
    return os.environ.get(MODE, "").lower(), __version__


def _same_version(theirs: str) -> None:
    if theirs != __version__:
        raise UserError(f"a machine of the Ray cluster has afire {theirs}, this one {__version__}; install the same.")


def _do_once(version: str, work: Work, shard: Shard, piece: Any) -> int:
    """A task: everything for one shard."""
    _same_version(version)
    return work.make(work.settings)(shard, piece)


class _Holder:
    """An actor: opens weights and films once, then computes shard after shard."""

    def ready(self, version: str, work: Work) -> None:
        """Returns when everything is open. Not in the constructor: of its errors Ray keeps only the text."""
        _same_version(version)
        self._do: Do = work.make(work.settings)

    def do(self, shard: Shard, piece: Any) -> int:
        return self._do(shard, piece)


def _sent(work: Work) -> Work:
    """The work as other machines get it: without ``piece``, whose result is sent with each shard."""
    return Work(work.what, work.make, work.settings, keeps=work.keeps, gpus=work.gpus)


def _as_tasks(ray: Any, work: Work, shards: Sequence[Shard], processes: int | None, bar: Progress) -> int:
    task = ray.remote(_do_once).options(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)
    most = 2 * (processes or max(1, int(ray.cluster_resources().get("CPU", 1))))  # waiting: pieces are not small
    waiting, running, rows = deque(shards), dict[Any, Shard](), 0
    sent = _sent(work)
    while waiting or running:
        while waiting and len(running) < most:
            shard = waiting.popleft()
            running[task.remote(__version__, sent, shard, work.piece(shard))] = shard
        shard = running.pop(reference := _next(ray, running))
        try:
            rows += _result(ray, reference)
        except ray.exceptions.RayError as error:
            raise _died(shard, error) from None
        bar.advance()
    return rows


def _on_actors(ray: Any, work: Work, shards: Sequence[Shard], processes: int | None, bar: Progress) -> int:
    """An actor gets a shard when it is free. One that dies is replaced, and its shard waits again."""
    kind = ray.remote(_Holder).options(num_cpus=1, num_gpus=work.gpus, max_restarts=0)
    actors = min(len(shards), processes or _room(ray, work.gpus))
    waiting, tries, rows = deque(shards), Counter[Shard](), 0
    running: dict[Any, tuple[Any, Shard | None]] = {}
    sent, lost = _sent(work), 0

    def start() -> None:
        actor = kind.remote()
        running[actor.ready.remote(__version__, sent)] = actor, None

    for _ in range(actors):
        start()
    while waiting or any(shard is not None for _, shard in running.values()):
        actor, shard = running.pop(reference := _next(ray, running))
        try:
            result = _result(ray, reference)
        except ray.exceptions.RayError as error:
            lost += 1
            if shard is not None:
                tries[shard] += 1
                waiting.appendleft(shard)
            if lost > RETRIES * actors or (shard is not None and tries[shard] > RETRIES):
                raise _died(shard, error) from None
            logger.warning("a process of the cluster is gone (%s); another one takes over", type(error).__name__)
            start()
            continue
        if shard is not None:
            rows += result
            bar.advance()
        if waiting:
            following = waiting.popleft()
            running[actor.do.remote(following, work.piece(following))] = actor, following
        else:
            ray.kill(actor)
    return rows


def _room(ray: Any, gpus: int) -> int:
    resources: Mapping[str, float] = ray.cluster_resources()
    return max(1, int(resources.get("GPU", 0) // gpus if gpus else resources.get("CPU", 1)))


def _next(ray: Any, running: Mapping[Any, Any]) -> Any:
    """The reference of the task that finishes first."""
    while True:
        finished, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_WARNINGS)
        if finished:
            return finished[0]
        free = ray.available_resources()
        if not ray.nodes() or not ray.cluster_resources().get("CPU"):
            logger.warning("the cluster has no machine with a core to offer (free: %s); waiting for one", free)


def _result(ray: Any, reference: Any) -> Any:
    """An error of a shard is raised here as it was there; a process that died remains an error of Ray."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError | OSError):
            raise cause from None
        raise RuntimeError(f"on a machine of the cluster: {error}") from None  # a defect of ours, with its traceback


def _died(shard: Shard | None, error: BaseException) -> UserError:
    where = f"shard {shard}" if shard is not None else "the start"
    return UserError(
        f"processes of the cluster died again and again at {where} ({_first_line(error)}); whole shards are kept, run "
        "the same command again."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
