"""Slow and obvious versions that the fast code is measured against and tested with."""
