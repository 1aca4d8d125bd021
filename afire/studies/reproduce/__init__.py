"""The paper's tables and figures end to end: recipes of named steps, each an ``afire`` command, and what they gave.

Knows commands and the files they leave; knows no network.
"""
