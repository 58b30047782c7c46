"""`effllm`, and `python -m effllm`."""

INTERRUPTED = 130  # as in cli/errors.py, which is among what may not have been imported yet


def main() -> int:
    """The program. Ctrl-C while its first parts are still imported ends it as quietly as later."""
    try:
        from .cli.app import main as program
    except KeyboardInterrupt:
        return INTERRUPTED
    return program()


if __name__ == "__main__":
    raise SystemExit(main())
