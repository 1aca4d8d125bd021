"""The tables of docs/cluster.md, from the stored results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- written by benchmarks/cluster.py -->", "<!-- end of what benchmarks/cluster.py writes -->"


def fill_in(text: str, results: Mapping[str, Any]) -> str:
    """The page with the tables of ``results`` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}"


def tables(results: Mapping[str, Any]) -> str:
    parts = []
    if "drills" in results:
        parts.append(_drills(results["drills"]))
    if "costs" in results:
        parts += _costs(results["costs"])
    if "real" in results:
        parts.append(_real(results["real"]))
    if "where" in results:
        where = results["where"]
        packages = ", ".join(f"{name} {number}" for name, number in where["packages"].items())
        parts.append(f"Measured on {where['cores']} cores ({where['cpu']}) at a load of {where['load']}; {packages}.")
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], numbers: int) -> str:
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


def _drills(drills: Mapping[str, Any]) -> str:
    rows = []
    for name, one in drills.items():
        seen = ", ".join(f"{key}: {value}" for key, value in one["seen"].items())
        rows.append((name, seen or "-", one["shards"], f"{one['identical']} of {one['times']}", one["seconds"]))
    return _table(("drill", "seen", "shards", "bit-identical", "seconds"), rows, 3)


def _costs(costs: Mapping[str, Any]) -> list[str]:
    ray, vit = costs["ray, seconds"], costs["ViT-B"]
    share = 100 * costs["share of Ray in a shard of 1,000 films"]
    with_start = 100 * costs["share of Ray with its start in a shard of 1,000 films"]
    rows = [(name, f"{seconds:.4f}") for name, seconds in ray.items()]
    rows.append((f"ViT-B, a film of {vit['size']} px, one core, forward pass alone", f"{vit['seconds a film']:.3f}"))
    rows.append(("the finish, a film", f"{costs['finish, seconds a film']:.6f}"))
    met = "met" if share <= 5 else "**MISSED**"
    said = (
        f"Of a shard of 1,000 films that ViT-B looks at, Ray takes {share:.4f} % (goal: at most 5 %: {met}), and "
        f"{with_start:.2f} % if a whole Ray and an actor are started for that one shard. The forward pass is the least "
        "that scoring costs, so the share is the most that Ray can take."
    )
    predicted = [
        (row["nodes"], row["processes"], row["hours"], row["of it scoring"], row["of it Ray"], row["of it the finish"])
        for row in costs["prediction"]
    ]
    head = ("nodes", "processes", "hours", "scoring", "Ray", "finish")
    note = (
        "A **prediction**, not a measurement, for a million films in 1,000 shards: the parts above added up, for "
        "machines like this one, as busy as it was, each with a process a core, and a file system that keeps up."
    )
    return [_table(("part", "seconds"), rows, 1), said, note, _table(head, predicted, 6)]


def _real(real: Mapping[str, Any]) -> str:
    rows = [(name, seconds) for name, seconds in real["seconds"].items()]
    return (
        f"**One real set** (Shenzhen, {real['films']} films, 128 px, {real['shards']} shards): over two raylets, "
        f"`afire data pack` gives the {real['files of the pack']} files that one process gives, and the array of a "
        f"pack that is not in shards; `afire detect run --data` the {real['files of detect run']} files, pictures and "
        "page included; `afire embed` the file. All byte for byte.\n\n" + _table(("command", "seconds"), rows, 1)
    )
