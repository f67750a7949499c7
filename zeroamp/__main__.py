"""`python -m zeroamp`, and the entry point `zeroamp`: the command line, or how to install it."""

import sys


def main() -> None:
    """Run the command line. Without typer, print how to install it and exit with code 1."""
    try:
        from zeroamp.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("The command line of zeroamp needs typer: pip install 'zeroamp[cli]'")
    app()


if __name__ == "__main__":
    main()
