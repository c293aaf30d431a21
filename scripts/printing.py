"""What the scripts share: printing that never ends in a traceback."""
import io
import os
import sys
from contextlib import contextmanager


@contextmanager
def printing():
    """Around all that prints: characters that stdout cannot encode come out as escapes, as on stderr. Where its reader
    has gone, as in `... | head -1`, the script ends quietly, after any other OSError with one line; exit code 1."""
    plain = isinstance(sys.stdout, io.TextIOWrapper)  # not a notebook's
    if plain:
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        try:
            yield
        finally:
            print(end='', flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(' '.join(f'{os.path.basename(sys.argv[0])}: {error}'.split()), file=sys.stderr)
        if plain:  # Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
