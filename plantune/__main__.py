"""`python -m plantune` is the command line."""

from plantune.cli import main

if __name__ == "__main__":
    main()
