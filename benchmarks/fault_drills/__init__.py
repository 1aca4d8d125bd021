"""The drills of ``benchmarks/faults.py``: kills, a full disk, mutated files."""
