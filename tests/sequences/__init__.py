"""Random walks over the commands: what the README promises must hold after any sequence of them.

A walk is a seed: it draws films, settings and commands, does damage in between, and checks after every step.
"""
