"""What can happen to shards on a cluster, made to happen: see benchmarks/cluster.py."""
