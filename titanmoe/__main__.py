"""Command `python -m titanmoe`, which is the `titanmoe` command."""

from titanmoe.cli import command

if __name__ == "__main__":
    command()
