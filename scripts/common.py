"""What the commands share: notes and errors of one line, arguments, and pictures."""
import argparse
import io
import math
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from configurator import fail
from data.bins import find_folder, fingerprint, load_meta, write_file
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


# ---- runs, done again ------------------------------------------------------------------------------------------------

def lr_at(config, step):
    """The learning rate of a step of the run with this config, as train.py's lr_at."""
    factor = config['gradient_accumulation_steps'] if config['scale_lr'] else 1
    highest, lowest = config['learning_rate'] * factor, config['min_lr'] * factor
    warmup, end = config['warmup_iters'], config['lr_decay_iters']
    if not config['decay_lr']:
        return highest
    if step < warmup:
        return highest * (step + 1) / warmup
    if step >= end:
        return lowest
    way = (step - warmup) / (end - warmup)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * way)) / 2


def ranks(x):
    """The ranks of x (..., n) along its last axis, from 0; equal values share the mean of theirs. float64."""
    x = np.asarray(x)
    order, place = np.argsort(x, -1), np.arange(x.shape[-1])
    ordered = np.take_along_axis(x, order, -1)
    differs = ordered[..., 1:] != ordered[..., :-1]
    end = np.ones((*x.shape[:-1], 1), bool)
    first = np.where(np.concatenate([end, differs], -1), place, 0)      # where a group of equal values begins
    last = np.where(np.concatenate([differs, end], -1), place, place[-1])
    first = np.maximum.accumulate(first, -1)
    last = np.minimum.accumulate(last[..., ::-1], -1)[..., ::-1]
    found = np.empty(x.shape)
    np.put_along_axis(found, order, (first + last) / 2, -1)
    return found


def spearman(x, y):
    """Spearman's correlation of the last axes of x (..., n) and y (..., n): that of their ranks. NaN where all values
    are equal."""
    x, y = (r - r.mean(-1, keepdims=True) for r in (ranks(x), ranks(y)))
    with np.errstate(invalid='ignore'):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def choose_device(device, dtype):
    """The device type, cuda, mps or cpu, and the dtype, with 'auto' replaced by this machine's best; one line if it has
    not what is named."""
    import torch
    has = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    if device == 'auto':
        device = next(kind for kind in has if has[kind])
    if not has.get(device):
        fail(f'device={device}: expected auto or one of {", ".join(kind for kind in has if has[kind])}')
    if dtype == 'auto' and device == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = 'bfloat16'
    elif dtype == 'auto':
        dtype = 'float32'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        fail(f'dtype={dtype}: expected float32, bfloat16 or float16')
    return device, dtype


def find_classifier(config, given, train):
    """
    Where a run of classify.py starts: the dict that checkpoint.load_start takes, of a checkpoint of ours or of the
    weights to begin with, and its labels and meta. All ranks participate, rank 0 alone looks at the disk.

    config: the settings, whose shape of the model becomes that of the weights; given: which of them the user has set;
    train: the rows to train on, (path, labels, texts, lines), or None: nothing is trained, and out_dir's best.pt is
    taken. ValueError (one line) if there is none, or it does not fit.
    """
    from checkpoint import choose_start, from_rank0, must_fit, on_rank0
    from weights import complete, read_checkpoint, read_full
    shape = 'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'rope', 'qk_norm'
    settings, source = {**config, 'new_tokenizer': False}, config['init_from']

    def find():
        path = Path(config['out_dir'], 'ckpt.pt' if train else 'best.pt')
        if not train or source == 'resume' or (source == 'auto' and path.exists()):
            start = read_full(path)
            if 'labels' not in start:
                raise ValueError(f'{path} is not a checkpoint of classify.py')
            args = complete(start['model_args'])        # an older one lacks the newer names
            start['model_args'] = {name: args[name] for name in (*shape, 'vocab_size', 'gelu')}
            must_fit(path, start, settings, given.intersection(shape), start['meta'])
            get_tokenizer(start['meta']['tokenizer'])   # where it is not to be had, this is the place to say so
            return {**start, 'resumed_from': str(path), 'leftovers': [], 'passed_over': {}}
        path, names, texts, _ = train
        if source in ('scratch', 'auto'):
            if source == 'auto':    # what is there is of a run that died before its first ckpt.pt
                settings.update(init_from='scratch', overwrite=True)
            spec = config['tokenizer']
            if spec == 'char':
                spec = {'type': 'char', 'itos': sorted(set(''.join(texts)))}
            tokenizer = get_tokenizer(spec)
        else:
            ckpt = read_checkpoint(source)
            tokenizer = find_tokenizer(source, ckpt)
            if 'block_size' not in given:
                settings['block_size'] = min(config['block_size'], ckpt['model_args']['block_size'])
        meta = {'tokenizer': tokenizer.spec, 'vocab_size': tokenizer.vocab_size, 'fingerprint': fingerprint(path, {})}
        return {**choose_start(settings, given, meta, shape), 'meta': meta, 'labels': sorted(set(names))}
    start = on_rank0(find) or {}
    tensors = {name: start.pop(name, {}) for name in ('model', 'optimizer')}    # stay on rank 0
    start = from_rank0(start)
    config.update({name: start['model_args'][name] for name in shape})
    return {**start, **tensors, 'sharded': False, 'has_optimizer': start['resumed_from'] is not None}


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
    with warnings.catch_warnings():     # a letter that the font does not have is drawn as a box
        warnings.filterwarnings('ignore', message='Glyph .* missing from')
        write_result(path, lambda file: figure.savefig(file, format=kind, dpi=120))


def confusion(table, labels, path, title):
    """
    table (classes, classes): how many rows of a label, down, were given which, across. Returns a text with each label's
    precision and recall, nan where the label was never given or has no rows; and draws the table into the file `path`,
    None: nowhere, if matplotlib is there.
    """
    lines = [f'{"label":<20} {"rows":>7} {"precision":>10} {"recall":>10}']
    for label, right, given, there in zip(labels, table.diagonal(), table.sum(0), table.sum(1)):
        precision, recall = right / given if given else math.nan, right / there if there else math.nan
        lines.append(f'{label:<20} {there:>7,} {precision:>10.2%} {recall:>10.2%}')
    plt = None
    if path is not None:
        plt = load_pyplot(path, required=False)
    if plt:
        names, size = [literal(label) for label in labels], min(12, 2 + len(labels))
        figure, ax = plt.subplots(figsize=(size + 0.5, size), layout='constrained')
        shares = table / table.sum(1, keepdims=True).clip(min=1)    # of the label's rows: the colour
        ax.imshow(shares, cmap='Blues', vmin=0, vmax=1)
        for (i, j), count in np.ndenumerate(table):
            ax.text(j, i, f'{count:,}', ha='center', va='center', color='white' if shares[i, j] > 0.5 else 'black')
        ax.set(title=title, xlabel='label given', ylabel='label of the row')
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
        write_picture(figure, path)
    return '\n'.join(lines)
