"""`python -m anesurgery` is the command line."""

from anesurgery.commands.app import main

if __name__ == "__main__":
    main()
