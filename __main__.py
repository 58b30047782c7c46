"""`effllm`, and `python -m effllm`."""

import gc

INTERRUPTED = 130  # as in cli/errors.py, which may not be imported yet
# Allocations between two garbage collections. Starting creates hundreds of thousands of lasting objects: with Python's 700, collections
# would take a tenth of the start-up time.
GC_THRESHOLD = 50_000


def main() -> int:
    """Run the program. Ctrl-C during the first imports ends it as quietly as later."""
    gc.set_threshold(GC_THRESHOLD, 10, 10)
    try:
        from .cli.app import main as program
    except KeyboardInterrupt:
        return INTERRUPTED
    code = program()
    gc.freeze()  # the process ends: no final collection is needed
    return code


if __name__ == "__main__":
    raise SystemExit(main())
