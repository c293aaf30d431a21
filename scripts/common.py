"""What the scripts share: printing that never ends in a traceback, and files that appear whole."""
import io
import os
import sys
from contextlib import contextmanager

from safetensors import SafetensorError

from checkpoint import why


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


def obstacle(path, new):
    """Why no file can be put at `path`, one line, or None; if it is to be new, an existing one is in the way too."""
    if os.path.isdir(path) or new and os.path.exists(path):
        return f'{path}: exists; choose another FILE or move it away'
    try:
        open(f'{path}.{os.getpid()}.tmp', 'wb').close()
        os.remove(f'{path}.{os.getpid()}.tmp')
    except OSError as error:
        return f'{path}: cannot be written: {error.strerror}'


def replace_file(path, write):
    """write(temporary path), then give it its name: the file appears whole or not at all. ValueError if it cannot."""
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        write(temporary)
        with open(temporary, 'rb+') as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f'{path}: cannot be written: {why(error)}') from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    print(f'wrote {path}')
