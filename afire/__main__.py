"""``python -m afire``: the same door as the ``afire`` command, and what ``torchrun -m afire`` starts."""

from afire.cli import main

if __name__ == "__main__":
    main()
