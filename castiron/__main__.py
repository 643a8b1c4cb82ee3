"""``python -m castiron`` is the command line, as the script ``castiron`` is."""

from castiron.interrupts import at_start


def start() -> None:
    """Run the command line with Ctrl-C taken over before anything large is imported."""
    at_start()
    from castiron.cli import main

    main()


if __name__ == "__main__":
    start()
