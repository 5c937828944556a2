"""The entry point of `pass-train` and `python -m pass_trainer`."""

from pass_runtime.commands.start import run


def main() -> None:
    run("pass_trainer.cli")


if __name__ == "__main__":
    main()
