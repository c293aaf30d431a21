"""What the commands share: notes and errors of one line, arguments, and pictures."""
import argparse
import io
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from configurator import fail
from data.bins import find_folder, load_meta, write_file
from data.corpus import get_tokenizer


def note(message):
    """One line on stderr, since standard output is for results."""
    print(f'{os.path.basename(sys.argv[0])}: {message}', file=sys.stderr)


def one_line_parser(doc, usage):
    """An argparse parser whose errors are one line; `usage` is what follows the script's name."""
    parser = argparse.ArgumentParser(description=doc, usage=f'%(prog)s {usage}', allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f'{message}; usage: {parser.prog} {usage}')
    return parser


@contextmanager
def printing():
    """Around all that a command does. A ValueError or an OSError ends it with one line and exit code 1. Characters that
    stdout cannot encode come out as escapes. Where its reader has gone, as in `... | head -1`, the command ends quietly
    with exit code 1."""
    is_file = isinstance(sys.stdout, io.TextIOWrapper)  # and not a notebook's cell
    if is_file:
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        try:
            yield
        finally:
            print(end='', flush=True)
    except OSError as error:
        if is_file:  # Python flushes it once more at its end, which must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        fail(f'{error.filename}: {error.strerror}' if error.filename else error, code=1)
    except ValueError as error:
        fail(error, code=1)


def must_be_writable(path, new=False):
    """End with one line, before any work, if no file can be written to `path`; or, if it is to be new, one exists."""
    if os.path.isdir(path) or new and os.path.exists(path):
        fail(f'{path}: exists; choose another FILE or move it away')
    try:
        open(f'{path}.tmp', 'wb').close()
        os.remove(f'{path}.tmp')
    except OSError as error:
        fail(f'{path}: cannot be written: {error.strerror}')


def write_result(path, data):
    """data.bins.write_file, whose errors name the file: ValueError (one line)."""
    try:
        write_file(path, data)
    except OSError as error:
        raise ValueError(f'{path}: cannot be written: {error.strerror}') from None


def find_tokenizer(source, checkpoint):
    """The tokenizer of a checkpoint, the dict of weights.read_checkpoint(source). One that does not name it, as
    nanoGPT's, has that of the dataset it was trained on, or else GPT-2's. ValueError (one line) if none fits its ids;
    OSError if GPT-2's cannot be had."""
    ids, meta, dataset = checkpoint['model_args']['vocab_size'], checkpoint['meta'], checkpoint['config'].get('dataset')
    whose = 'its tokenizer'
    if not meta and dataset:
        meta, whose = load_meta(find_folder(dataset)), f'the tokens in {find_folder(dataset)}'
    spec = (meta or {}).get('tokenizer')
    if spec is None:
        if ids not in (50257, 50304):
            told = f'nor does its dataset, {dataset}: is that missing here?' if dataset else 'only its ckpt.pt could'
            raise ValueError(f'{source} has {ids} token ids and does not say what text they mean; {told}')
        spec = 'gpt2'
    try:
        tokenizer = get_tokenizer(spec)
    except ValueError as error:
        raise ValueError(f'{source}: {error}') from None
    if ids not in (tokenizer.vocab_size, math.ceil(tokenizer.vocab_size / 64) * 64):    # padded, for a GPU's sake
        raise ValueError(f'{source} has {ids} token ids and {whose} {tokenizer.vocab_size}: not made for each other')
    return tokenizer


# ---- pictures --------------------------------------------------------------------------------------------------------

def load_pyplot(path, required=True):
    """matplotlib.pyplot, to draw a picture into the file `path`, with or without a display. Where matplotlib is
    missing, a command ends with one line; or goes on, with None and a note, if the picture is not required."""
    try:
        import matplotlib
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        if required:
            fail('plots need matplotlib: pip install matplotlib', code=1)
        note('no picture: it needs matplotlib (pip install matplotlib)')
        return None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        fail(f'{path}: the name must end in one of {", ".join(kinds)}')
    matplotlib.use('Agg')
    import matplotlib.pyplot
    return matplotlib.pyplot


def literal(name):
    """`name` as matplotlib shows it unchanged: in a label $ begins a formula, and one that begins with _ is hidden."""
    name = name.replace('$', r'\$')
    return f' {name}' if name.startswith('_') else name


def write_picture(figure, path):
    """Write a matplotlib figure to the file `path`, which appears whole, in the form that the name's end says."""
    kind = Path(path).suffix[1:].lower()
    write_result(path, lambda file: figure.savefig(file, format=kind, dpi=120))
