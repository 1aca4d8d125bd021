"""Pre-training methods, each in one file: its settings, networks, views, losses and health.

Knows networks and lesions; knows no loop, no file and no command.
"""
