"""The entry point of `pass-run` and of `python -m pass_runtime`."""

from pass_runtime.commands.start import run


def main() -> None:
    run("pass_runtime.cli.main")


if __name__ == "__main__":
    main()
