"""`python -m anesurgery`, and the script `anesurgery`: the command line."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C ends it at once until the imports are done (`commands.waiting`)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from anesurgery.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
