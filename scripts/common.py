"""What the commands share: lines for the user, arguments, runs that are done again, devices and ranks, pictures."""
import argparse
import csv
import errno
import hashlib
import io
import math
import os
import signal
import sys
import tempfile
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from configurator import broken, fail, mute, tell, under_torchrun
from data.bins import (find_bin, find_folder, fingerprint, leads_nowhere, load_meta, made_folder, no_pipe, said,
                       write_file)
from data.corpus import get_tokenizer


def note(message):
    """One line on stderr, since standard output is for results."""
    tell(f'{os.path.basename(sys.argv[0])}: {message}', sys.stderr)


def one_line_parser(doc, usage):
    """An argparse parser whose errors are one line; `usage` is what follows the script's name."""
    parser = argparse.ArgumentParser(description=doc, usage=f'%(prog)s {usage}', allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f'{message}; usage: {parser.prog} {usage}')
    return parser


def must_be_one_process():
    """End with one line under torchrun, whose processes would all write the same files."""
    if under_torchrun():
        fail('takes one process: start it with python, not with torchrun')


def flush_results():
    """An OSError names standard output, which of itself it does not."""
    try:
        print(end='', flush=True)
    except OSError as error:
        error.filename = 'standard output'
        raise


@contextmanager
def printing():
    """Around all that a command does. A ValueError or an OSError ends it with one line and exit code 1. Characters that
    stdout cannot encode come out as escapes. Where its reader has gone, as in `... | head -1`, the command ends quietly
    with exit code 1. SIGTERM and SIGHUP end it as an error does, so that it takes its temporary folders and its child
    processes with it."""
    for name in ('SIGTERM', 'SIGHUP'):      # Windows lacks the second, nohup has it ignored
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))
    is_file = isinstance(sys.stdout, io.TextIOWrapper)  # and not a notebook's cell
    if is_file:
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        try:
            yield
        finally:
            flush_results()
    except OSError as error:
        if is_file:
            mute(sys.stdout)
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        fail(f'{error.filename}: {error.strerror}' if error.filename else said(error), code=1)
    except ValueError as error:
        fail(error, code=1)


def end_of_links(path):
    """The path to write to instead of `path`: what a link leads to, so that the link stays. OSError if links lead in a
    circle, or to a process's open file, as /dev/stdout does: another file would take its place."""
    end = os.path.abspath(path)
    for _ in range(40):
        folder = os.path.realpath(os.path.dirname(end))
        if folder.startswith('/proc/'):
            raise OSError(errno.EINVAL, 'an open file of a process; name a file', os.fspath(path))
        if not os.path.islink(end):
            return end
        end = os.path.join(folder, os.readlink(end))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


def temporary_ending():
    """What write_result adds to a name while it writes. Of each process another, so that two commands that write the
    same file at once don't disturb each other: the last one's stays."""
    return f'.{os.getpid()}.tmp'


def must_be_writable(path, new=False):
    """End with one line, before any work, if no file can be written to `path`; or, if it is to be new, one exists."""
    if not path:
        fail('the name of a file to write is empty')
    if os.path.isdir(path) or new and os.path.lexists(path):
        fail(f'{path}: exists; choose another FILE or move it away')
    try:
        no_pipe(path)       # write_file would put a file in its place, even of /dev/null
        temporary = end_of_links(path) + temporary_ending()
        open(temporary, 'wb').close()
        os.remove(temporary)
    except OSError as error:
        link = ''
        if os.path.islink(path):
            link = f'; it is a link to {os.readlink(path)}: mend that, or name another file'
        fail(f'{path}: cannot be written: {error.strerror}{link}')


def is_there(path):
    """Whether anything has this name in its folder, be it a link that leads nowhere or what can't be read. OSError if
    that can't be known, as where the folder is such a link."""
    folder = os.path.dirname(path)
    if leads_nowhere(folder):
        raise OSError(errno.ENOENT, 'a link that leads nowhere: mend that, or move it away', folder)
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def make_out_folder(path, option='--out'):
    """Make the folder that the results go into; end with one line, before any work, if they can't be written there."""
    try:
        with made_folder(path):
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f'{option}={path}: {error.strerror}: name a folder that can be written')


def must_have_memory(size, what):
    """End with one line, before any work, if `what` needs so many bytes, more than this machine has."""
    if 'SC_PHYS_PAGES' in getattr(os, 'sysconf_names', ()):     # not on Windows
        memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        if size > memory:
            fail(f'{what} needs {size // 2**30:,} GiB of memory, and this machine has {memory // 2**30:,}: a smaller '
                 'number')


def record_of_part(meta):
    """A dataset's record, for one that has a part of it, or a part changed: without what is of the whole alone."""
    return {name: value for name, value in meta.items() if name not in ('bytes', 'documents', 'prepared_from')}


def write_result(path, data):
    """data.bins.write_file, of a link to what it leads to; its errors name the file: ValueError (one line)."""
    try:
        write_file(end_of_links(path), data, temporary_ending())
    except OSError as error:
        raise ValueError(f'{path}: cannot be written: {error.strerror}') from None


def write_csv(path, head, rows):
    """write_result of a table."""
    text = io.StringIO(newline='')
    csv.writer(text, lineterminator='\n').writerows([head, *rows])
    write_result(path, text.getvalue().encode())


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

def run_tokens(config, meta):
    """The train.bin of a run as find_bin has it, (path, dtype, tokens), and its record. config and meta: those of its
    checkpoint. ValueError (one line) if the tokens there are not what the run saw."""
    train, record = find_bin(config['dataset'], 'train')
    seen = (meta or {}).get('fingerprint')      # older runs lack it
    if seen and seen != fingerprint(train[0], record):
        raise ValueError(f'{train[0]} was prepared anew since the run: other text under the same offsets')
    return train, record


def without(tokens, dropped, block_size):
    """The tokens without the windows (windows,) that are dropped. The rest moves up, so the last target of a window
    before a gap becomes the first token behind it; what follows the last window stays."""
    end = len(dropped) * block_size
    body = np.asarray(tokens[:end]).reshape(len(dropped), block_size)
    return np.concatenate([body[~dropped].ravel(), tokens[end:]])


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
    decay = config.get('decay', 'cosine')       # older runs lack the setting
    if decay == 'cosine':
        height = (1 + math.cos(math.pi * way)) / 2
    elif decay == 'wsd':
        height = min(1, (1 - way) / 0.4)
    else:
        raise ValueError(f'decay={decay!r} is not known to lr_at in scripts/common.py: give it a branch there')
    return lowest + (highest - lowest) * height


def ranks(x):
    """The ranks of x (..., n) along its last axis, from 0; equal values share the mean of theirs. float64."""
    def of_row(row):
        ordered = np.sort(row)
        return (np.searchsorted(ordered, row, 'left') + np.searchsorted(ordered, row, 'right') - 1) / 2
    return np.apply_along_axis(of_row, -1, x)


def spearman(x, y):
    """Spearman's correlation of the last axes of x (..., n) and y (..., n): that of their ranks. NaN where all values
    are equal."""
    x, y = (r - r.mean(-1, keepdims=True) for r in (ranks(x), ranks(y)))
    with np.errstate(invalid='ignore'):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def bootstrap(sums, losses, first, draws):
    """
    95% intervals, over the halves, of the linear datamodeling score (LDS) of each kind of value, and of its difference
    to the kind `first`: two arrays (2, kinds) of lower and upper ends. The LDS is Spearman's correlation over a run's
    halves of sums (runs, kinds, halves), the summed values of what a half leaves out, with losses (runs, halves), and
    of several runs the mean. Halves are drawn with replacement, for all kinds the same.
    """
    generator, found = np.random.default_rng(0), []
    while len(found) < draws:
        drawn = [generator.integers(len(its), size=len(its)) for its in losses]
        if all(np.ptp(some) > 0 for some in drawn):     # one half alone, again and again, has no correlation
            found.append(np.mean([spearman(s[:, some], its[some]) for s, its, some in zip(sums, losses, drawn)], 0))
    found = np.array(found)                                                     # (draws, kinds)
    differences = found - found[:, first, None]
    return np.percentile(found, (2.5, 97.5), 0), np.percentile(differences, (2.5, 97.5), 0)


def auc(better, worse):
    """Probability that one of `better` (n,) exceeds one of `worse` (m,), from ranks (Mann-Whitney); ties count half."""
    n, m = len(better), len(worse)
    return (ranks(np.concatenate([better, worse]))[:n].sum() - n * (n - 1) / 2) / (n * m)


def choose_device(device, dtype):
    """The device type, cuda, mps or cpu, and the dtype, with 'auto' replaced by this machine's best; one line if it has
    not what is named."""
    import torch
    has = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    if device == 'auto':
        device = next(kind for kind in has if has[kind])
    if not has.get(device):
        fail(f'device={device}: expected auto or one of {", ".join(kind for kind in has if has[kind])}')
    if device == 'mps' and under_torchrun():
        fail('mps takes one process; use --device=cpu for several')
    on_gpu_with_it = device == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == 'auto':
        dtype = 'bfloat16' if on_gpu_with_it else 'float32'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        fail(f'dtype={dtype}: expected float32, bfloat16 or float16')
    if dtype == 'bfloat16' and device != 'cpu' and not on_gpu_with_it:
        fail(f'{device} has no bfloat16: --dtype=float16 or float32')
    if dtype == 'float16' and device == 'mps':
        fail('dtype=float16 does not train on mps: --dtype=float32')
    return device, dtype


def join_ranks(device, timeout_minutes):
    """Connect this process with the others that torchrun has started; each takes a GPU if device is 'cuda'. One that
    waits for another gives up after so many minutes. Returns (rank, this rank's device, 'cpu' or 'cuda:0', the
    timeout)."""
    import torch

    from checkpoint import connect
    rank, local_rank = int(os.environ['RANK']), int(os.environ['LOCAL_RANK'])
    backend, device_id = 'gloo', None
    if device == 'cuda':
        gpus = torch.cuda.device_count()
        if int(os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)) > gpus:
            fail(f'device=cuda: this machine has {gpus} GPUs: --nproc_per_node={gpus}, or --device=cpu')
        backend = 'cpu:gloo,cuda:nccl'      # gloo carries what is in host memory: checkpoints
        device = f'cuda:{local_rank}'
        device_id = torch.device(device)
        torch.cuda.set_device(device_id)
    return rank, device, connect(backend, timeout_minutes, device_id)


def peak_memory(device):
    """GiB of GPU memory that the rank which needs most has needed, None on a CPU; all ranks participate."""
    import torch
    import torch.distributed as dist
    if device == 'cpu':
        return None
    most = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def log_step(path, **record):
    """A training step as a line on stdout, and as one of the log.jsonl at path; what is None is n/a."""
    from checkpoint import log_record
    mfu, memory = record['mfu'], record['memory_gib']
    tell(f'step {record["iter"]}: loss {record["loss"]:.4f}, lr {record["lr"]:.2e}, norm {record["grad_norm"]:.3f}, '
         f'{record["ms"]:.1f} ms, {record["tokens_per_s"]:,.0f} tokens/s, MFU {f"{mfu:.1%}" if mfu else "n/a"}, '
         f'peak memory {f"{memory:.1f} GiB" if memory else "n/a"}', sys.stdout)
    log_record(path, record)


def find_classifier(config, given, rows):
    """
    Where a run of classify.py starts: the dict that checkpoint.load_start takes, of a checkpoint of ours or of the
    weights to begin with, its labels and meta, and what to tell the user. All ranks participate, rank 0 alone looks at
    the disk.

    config: the settings, whose shape of the model and tokenizer become those of the weights; given: which of them the
    user has set; rows: what read_dataset gives, or None: nothing is trained, and out_dir's best.pt is taken.
    ValueError (one line) if there is none, or it does not fit.
    """
    from checkpoint import OF_A_RUN, SHAPE, changes, choose_start, from_rank0, must_fit, on_rank0, shape_of
    from weights import complete, read_checkpoint, read_full
    settings, source, out_dir = {**config, 'new_tokenizer': False}, config['init_from'], Path(config['out_dir'])
    record = {}     # what tells today's rows from others
    if rows:
        sums = {split: hashlib.sha256(repr(rows[split][1:3]).encode()).hexdigest() for split in ('train', 'val')}
        record = {'rows': sums, 'num_rows': len(rows['train'][1])}

    def same_tokenizer(path, spec):
        kind = spec if isinstance(spec, str) else spec['type']
        if 'tokenizer' in given and config['tokenizer'] != kind:
            raise ValueError(f'{path} has the tokenizer {kind!r}: leave out --tokenizer={config["tokenizer"]}')

    def go_on(path, start):
        """Checks that training goes on as if there had been no stop; told: what has changed all the same."""
        then, meta = start['config'], start['meta']
        told = changes(start, {name: config[name] for name in config if name != 'tokenizer'}, start['meta'])
        a_step, now = (c['gradient_accumulation_steps'] * c['batch_size'] for c in (then, config))
        num_rows = meta.get('num_rows', record['num_rows'])     # an older checkpoint does not know
        for what, old, new in [('rows a step', a_step, now), ('rows in train', num_rows, record['num_rows'])]:
            if old != new:
                raise ValueError(f'{path} is of a run with {old:,} {what}, now it would be {new:,}, and rows would be '
                                 'left out or come twice: keep that, or begin a new run in another out_dir')
        if not (out_dir / 'best.pt').exists():
            raise ValueError(f'{out_dir}/best.pt is missing, with which a run ends: put it back, or a copy of ckpt.pt')
        read_full(out_dir / 'best.pt')      # it must load
        for split, value in record['rows'].items():
            if meta.get('rows', record['rows'])[split] != value:
                told.append(f'the rows of {split}')
                if split == 'val':      # its losses do not compare with the earlier ones
                    start['best_val_loss'] = math.inf
        return told

    def find():
        path = Path(out_dir, 'ckpt.pt' if rows else 'best.pt')
        if not rows or source == 'resume' or (source == 'auto' and os.path.lexists(path)):
            start = read_full(path)
            if 'labels' not in start:
                raise ValueError(f'{path} is not a checkpoint of classify.py')
            start['model_args'] = shape_of(complete(start['model_args']))       # an older one lacks the newer names
            must_fit(path, start, settings, given.intersection(SHAPE), start['meta'])
            get_tokenizer(start['meta']['tokenizer'])   # where it is not to be had, this is the place to say so
            same_tokenizer(path, start['meta']['tokenizer'])
            told = [f'from {path}']
            if rows:
                told += go_on(path, start)
            meta = {**start['meta'], **record}
            return {**start, 'meta': meta, 'resumed_from': str(path), 'leftovers': [], 'passed_over': {}, 'told': told}
        path, names, texts, _ = rows['train']
        if source in ('scratch', 'auto'):
            if source == 'auto':    # a run that died before its first checkpoint leaves a log.jsonl alone
                others = [name for name in OF_A_RUN if name != 'log.jsonl' and os.path.lexists(Path(out_dir, name))]
                if others and not config['overwrite']:
                    raise ValueError(f'{out_dir} holds {" and ".join(others)}, but no ckpt.pt to go on from: another '
                                     '--out_dir, or delete the earlier run by --overwrite=True')
                settings.update(init_from='scratch', overwrite=True)
            spec = config['tokenizer']
            if spec == 'char':
                spec = {'type': 'char', 'itos': sorted(set(''.join(texts)))}
            tokenizer = get_tokenizer(spec)
        else:
            for place in (Path(source), Path(source, 'ckpt.pt'), Path(source, 'best.pt')):
                is_ours = False
                with suppress(ValueError):      # read_checkpoint says what is wrong, or takes another
                    is_ours = place.is_file() and 'labels' in read_full(place)
                if is_ours:
                    raise ValueError(f'{place} is a classifier of classify.py: --init_from=resume goes on with one, '
                                     'and a new run starts from gpt2, a Hugging Face folder or a run of train.py')
            ckpt = read_checkpoint(source)
            tokenizer = find_tokenizer(source, ckpt)
            same_tokenizer(source, tokenizer.spec)
            if 'block_size' not in given:
                settings['block_size'] = min(config['block_size'], ckpt['model_args']['block_size'])
        meta = {'tokenizer': tokenizer.spec, 'vocab_size': tokenizer.vocab_size, **record}
        start, told = choose_start(settings, given, meta), [f'from {source}']
        if start['leftovers']:
            told.append(f'starts anew, and deletes {", ".join(start["leftovers"])} in {out_dir}')
        return {**start, 'meta': meta, 'labels': sorted(set(names)), 'told': told}
    start = on_rank0(find) or {}
    tensors = {name: start.pop(name, {}) for name in ('model', 'optimizer')}    # stay on rank 0
    start = from_rank0(start)
    config.update({name: start['model_args'][name] for name in SHAPE})
    spec = start['meta']['tokenizer']
    config['tokenizer'] = spec if isinstance(spec, str) else spec['type']
    return {**start, **tensors, 'sharded': False, 'has_optimizer': start['resumed_from'] is not None}


# ---- pictures --------------------------------------------------------------------------------------------------------

def load_pyplot(path, required=True):
    """matplotlib.pyplot, to draw a picture into the file `path`, with or without a display. Where matplotlib is
    missing or broken, a command ends with one line; or goes on, with None and a note, if the picture is not required.
    """
    try:
        import matplotlib
        from matplotlib.backend_bases import FigureCanvasBase
    except Exception as error:
        if required:
            fail(f'plots need matplotlib: pip install matplotlib{broken(error)}', code=1)
        note(f'no picture: it needs matplotlib (pip install matplotlib){broken(error)}')
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


def confusion(table, labels):
    """table (classes, classes): how many rows of a label, down, were given which, across. Returns a text with each
    label's precision and recall, nan where the label was never given or has no rows."""
    lines = [f'{"label":<20} {"rows":>7} {"precision":>10} {"recall":>10}']
    for label, right, given, there in zip(labels, table.diagonal(), table.sum(0), table.sum(1)):
        precision = right / given if given else math.nan
        recall = right / there if there else math.nan
        lines.append(f'{label:<20} {there:>7,} {precision:>10.2%} {recall:>10.2%}')
    return '\n'.join(lines)


def draw_confusion(table, labels, path, title):
    """confusion's table as a picture in the file `path`, if matplotlib is there; a note if it can not be written."""
    plt = load_pyplot(path, required=False)
    if not plt:
        return
    names, size = [literal(label) for label in labels], min(12, 2 + len(labels))
    figure, ax = plt.subplots(figsize=(size + 0.5, size), layout='constrained')
    shares = table / table.sum(1, keepdims=True).clip(min=1)    # of the label's rows: the colour
    ax.imshow(shares, cmap='Blues', vmin=0, vmax=1)
    ax.set(title=title, xlabel='label given', ylabel='label of the row')
    if len(labels) <= 20:       # of more, neither numbers nor names could be read
        for (i, j), count in np.ndenumerate(table):
            ax.text(j, i, f'{count:,}', ha='center', va='center', color='white' if shares[i, j] > 0.5 else 'black')
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
    try:
        write_picture(figure, path)
    except ValueError as error:
        note(f'no picture: {error}')
