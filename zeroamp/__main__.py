"""`python -m zeroamp`, and the entry point `zeroamp`: the command line."""

from zeroamp.cli.app import main

if __name__ == "__main__":
    main()
