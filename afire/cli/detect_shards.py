"""``afire detect run --data PACK``: the films of a pack, in shards, by this process or by a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afire.cluster.shards import Shard
    from afire.cluster.work import Do, Where
    from afire.detect.base import AnomalyDetector
    from afire.detect.findings import FilmResult
    from afire.detect.packed import PackedRun


@dataclass(frozen=True)
class PackOptions:
    """The options of `afire detect run` with a pack."""

    model: Path
    data: Path
    out: Path
    pictures: bool
    batch: int
    workers: int | None
    device: str


def open_run(options: PackOptions, detector: AnomalyDetector | None = None) -> PackedRun:
    """The run, with detector and films open."""
    from functools import partial

    from afire.data.pack import PackedFilms
    from afire.detect.base import detector_folder, load_detector
    from afire.detect.packed import PackedRun
    from afire.detect.run import detector_hash
    from afire.report.detect_pictures import Painter
    from afire.weights import pick_device

    folder = detector_folder(options.model)
    if detector is None:
        detector = load_detector(folder).to(pick_device(options.device))
    return PackedRun(
        detector=detector,
        model_hash=detector_hash(folder),
        films=PackedFilms(options.data),
        out=options.out,
        # A packed film is square, whatever made it so.
        draw_in=partial(Painter, scale=detector.scale, fit="squash") if options.pictures else None,
        restore=options.pictures,
        picture_settings=f"pictures {options.pictures}",
        batch=options.batch,
        workers=options.workers,
    )


def run_pack(
    options: PackOptions,
    detector: AnomalyDetector,
    shard_choice: tuple[int | None, Shard | None],
    where: Where,
    finish: bool,
    force: bool,
) -> list[FilmResult] | None:
    """Score all shards, or one, or none; the results of all films, or None for a single shard."""
    from afire.cli.options import print_line
    from afire.cluster.engine import do_shards
    from afire.cluster.shards import all_shards
    from afire.cluster.work import Work
    from afire.detect.base import detector_folder
    from afire.detect.findings import JOURNAL
    from afire.detect.packed import begun_run, check_out, finish_run, score_shard, shards_of
    from afire.files import require_own

    count, single = shard_choice
    require_own(options.out, JOURNAL)
    check_out(options.out, force and single is None and not finish)
    run = open_run(options, detector)
    count = shards_of(len(run.films), count) if count is not None or not finish else begun_run(options.out)

    def here(_: Mapping[str, Any]) -> Do:
        return lambda shard, _: score_shard(run, shard)

    if not finish:
        on_ray = where.engine == "ray"
        paths = {"model": detector_folder(options.model), "data": options.data, "out": options.out}
        absolute_paths = {name: path.absolute() for name, path in paths.items()}
        settings = {**vars(options), **absolute_paths, "workers": 1} if on_ray else {}
        work = Work("detecting", scorer if on_ray else here, settings, keeps=True, gpus=int(options.device == "cuda"))
        scored = do_shards(work, [single] if single is not None else all_shards(count), where)
    if single is not None:
        print_line(f"shard {single}: {f'{scored:,} films scored' if scored else 'nothing to do'}: {options.out}")
        return None
    return finish_run(run, count)


def scorer(settings: Mapping[str, Any]) -> Do:
    """The function that scores a shard on another machine, with detector and films open."""
    from afire.detect.packed import score_shard

    run = open_run(PackOptions(**settings))
    return lambda shard, _: score_shard(run, shard)
