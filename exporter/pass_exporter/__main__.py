"""Starts the command line of `pass-export` and of `python -m pass_exporter`."""

from pass_runtime.commands.start import run


def main() -> None:
    run("pass_exporter.cli")


if __name__ == "__main__":
    main()
