"""`effllm`, and `python -m effllm`."""

import gc

INTERRUPTED = 130  # as in cli/errors.py, which is among what may not have been imported yet
NEW_OBJECTS = 50_000  # between two looks for garbage: a start makes hundreds of thousands that stay, and 700 would be a tenth of its time


def main() -> int:
    """The program. Ctrl-C while its first parts are still imported ends it as quietly as later."""
    gc.set_threshold(NEW_OBJECTS, 10, 10)
    try:
        from .cli.app import main as program
    except KeyboardInterrupt:
        return INTERRUPTED
    code = program()
    gc.freeze()  # the process ends: nothing has to be told apart any more
    return code


if __name__ == "__main__":
    raise SystemExit(main())
