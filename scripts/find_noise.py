"""Does the value of a training window tell bad data from good? Hides noise in Shakespeare and finds it again.

python scripts/find_noise.py [--input=FILE] [--out=FOLDER] [--name=value ...]     FOLDER default: out-find-noise

Every fifth window of the training set, at random places, is replaced by random characters; train.py takes 500 steps on
it with use_ghost=True; the windows are then ranked by scripts/data_value.py's value. Prints the AUC: the probability
that a window of text is worth more than one of noise, 0.5 by guessing and 1 at best. Writes find_noise.png; the run is
in FOLDER/run, its data in FOLDER/data. About a minute on two CPU cores. FILE: a text to use instead of tiny
Shakespeare. Other --name=value go to train.py.
"""
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from data.bins import load_meta
from data.corpus import folder_path
from scripts.common import (auc, fail, load_pyplot, make_out_folder, must_be_one_process, one_line_parser, printing,
                            record_of_part, write_picture, write_result)
from scripts.data_value import by_window, read_ghost

ROOT = Path(__file__).resolve().parents[1]
BLOCK, WINDOWS, STEPS, SEED = 128, 500, 500, 0
SETTINGS = dict(device='cpu', compile=False, use_ghost=True, ghost_val_batch_size=32, ghost_save_interval=50,
                data_order='epoch',     # windows begin at multiples of block_size: each is all text or all noise
                n_layer=1, n_head=2, n_embd=64, block_size=BLOCK, batch_size=8, gradient_accumulation_steps=1,
                learning_rate=2e-3, min_lr=1e-4, warmup_iters=100, max_iters=STEPS, lr_decay_iters=STEPS, beta2=0.99,
                eval_interval=STEPS, eval_iters=5, log_interval=50)


def add_noise(source, folder):
    """Of a prepared folder of characters, the first WINDOWS windows with noise in place of one in five -> folder.

    Returns bool (windows,): which are noise. The validation split stays as it is."""
    meta = record_of_part(load_meta(source))
    tokens, val = (np.fromfile(source / f'{split}.bin', meta['dtype']).astype(int) for split in ('train', 'val'))
    windows = min(WINDOWS, (len(tokens) - 1) // BLOCK)
    if windows < 50 or len(val) <= BLOCK:
        fail(f'{len(tokens):,} and {len(val):,} characters for training and validation are too few')
    tokens = tokens[:windows * BLOCK + 1]       # one more: the target of the last input
    generator = np.random.default_rng(SEED)
    noise = generator.permutation(windows) < windows // 5
    tokens[:-1].reshape(windows, BLOCK)[noise] = generator.integers(0, meta['vocab_size'], (noise.sum(), BLOCK))
    for split, ids in (('train', tokens), ('val', val)):
        content = ids.astype(meta['dtype']).tobytes()
        meta['splits'][split] = {'tokens': len(ids), 'sha256': hashlib.sha256(content).hexdigest()}
        write_result(folder / f'{split}.bin', content)
    write_result(folder / 'meta.json', json.dumps(meta).encode())
    return noise


def draw(path, value, noise, steps, auc_at_step, final):
    """Two panels: how the values of text and of noise are spread; the AUC up to each step."""
    plt = load_pyplot(path, required=False)
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout='constrained')
    bins = np.linspace(value.min(), value.max(), 60)
    left.ticklabel_format(axis='x', style='sci', scilimits=(0, 0))
    left.hist(value[~noise], bins, alpha=0.7, label=f'{(~noise).sum()} windows of text')
    left.hist(value[noise], bins, alpha=0.7, label=f'{noise.sum()} windows of random characters')
    left.set(title=f'values after {steps[-1]} steps: AUC {final:.4f}', xlabel='value (nats/token)', ylabel='windows')
    left.margins(y=0.35)    # room for the legend
    left.legend()
    right.plot(steps, auc_at_step)
    right.axhline(0.5, color='gray', linestyle=':', label='guessing')
    lowest = min(0.45, min(auc_at_step) - 0.02)
    right.set(title='AUC of the values summed up to a step', xlabel='step', ylim=(lowest, 1.02))
    right.legend()
    for ax in (left, right):
        ax.grid(alpha=0.3)
    write_picture(figure, path)
    print(f'wrote {path}')


def run(command, stdout=None):
    """A script of ours; if it fails, its own line is the error and its exit code ours."""
    done = subprocess.run([str(part) for part in command], stdout=stdout)
    if done.returncode:
        sys.exit(done.returncode)


def train(out, text, options):
    """Prepare the data with noise in it and train on them; returns bool (windows,): which are noise."""
    with tempfile.TemporaryDirectory() as folder:
        prepare = [sys.executable, ROOT / 'data' / 'shakespeare_char' / 'prepare.py', f'--out_dir={folder}']
        if text is not None:
            prepare.append(f'--input={text}')
        run(prepare, stdout=subprocess.DEVNULL)
        noise = add_noise(Path(folder), out / 'data')
    settings = SETTINGS | options | dict(dataset=(out / 'data').resolve(), out_dir=out / 'run')
    run([sys.executable, ROOT / 'train.py', *(f'--{name}={value}' for name, value in settings.items())])
    return noise


def main():
    must_be_one_process()
    parser = one_line_parser(__doc__, '[--input=FILE] [--out=FOLDER] [--name=value ...]')
    parser.add_argument('--input', metavar='FILE')
    parser.add_argument('--out', metavar='FOLDER', default='out-find-noise', type=folder_path)
    args, settings = parser.parse_known_args()
    bad = [setting for setting in settings if not setting.startswith('--') or '=' not in setting]
    if bad:
        parser.error(bad[0])
    options = {}
    for setting in settings:
        name, _, value = setting[2:].partition('=')
        options[name.replace('-', '_')] = value     # as train.py takes them
    fixed = {'dataset', 'out_dir', 'block_size', 'data_order', 'use_ghost', 'ghost_interval'} & set(options)
    if fixed:
        fail(f'--{min(fixed)}: the experiment sets it itself')
    with suppress(ValueError):      # no number: train.py says so
        if float(options.get('max_iters', STEPS)) < 10:
            fail(f'--max_iters={options["max_iters"]}: at least 10')
    out = args.out
    if out.is_dir() and any(out.iterdir()):
        fail(f'--out={out}: is there already; choose another or delete it')
    made = [out / 'data', out / 'run', *(folder for folder in (out, *out.absolute().parents) if not folder.exists())]
    make_out_folder(out)
    try:
        (out / 'data').mkdir()      # of two at once the second ends here
    except FileExistsError:
        fail(f'--out={out}: is there already; choose another or delete it')

    try:
        noise = train(out, args.input, options)
    except SystemExit as end:
        if end.code == 2:       # a wrong argument: the same command with the right one would find them in the way
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        raise
    steps, samples = read_ghost(out / 'run')
    scored = len(steps['iter'])
    if scored < 10:
        fail(f'{scored} scored steps are too few: --max_iters=500')
    counts, auc_at_step = np.arange(10, scored + 1, 10), []
    for count in counts:
        offset, value, _, _ = by_window({name: array[samples['step'] < count] for name, array in samples.items()})
        bad = noise[offset // BLOCK]
        auc_at_step.append(auc(value[~bad], value[bad]))
    offset, value, _, _ = by_window(samples)
    bad = noise[offset // BLOCK]
    final = auc(value[~bad], value[bad])
    draw(out / 'find_noise.png', value, bad, counts, auc_at_step, final)
    lowest = np.argsort(value, kind='stable')[:bad.sum()]
    print(f'{bad.sum()} of {len(bad)} windows are noise; {bad[lowest].sum()} of the {bad.sum()} of lowest value are')
    print(f'AUC {final:.4f}')


if __name__ == '__main__':
    with printing():
        main()
