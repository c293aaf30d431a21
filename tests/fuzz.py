"""
Spoil sound files at random and read them: a reader refuses in one line, or gives a whole result; it never raises
anything else, and never hangs.

    python tests/fuzz.py [--seconds=N] [--seed=S] [--only=WORD]

seconds: 60 by default, shared by the readers; only: readers with this word in their name. By hand, not by pytest. Exit
code 1 if a reader failed; the spoilt file is kept.
"""
import copy
import io
import json
import pickle
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch

from conftest import ROOT, TINY, TRAIN, write_dataset
import modes_helper  # noqa: F401  lets the next ones be found
from checkpoint import choose_start, load_start
from data.bins import check_tokens, find_bin, load_meta, read_tokens
from model import GPT, GPTConfig
from scripts.common import find_tokenizer
from scripts.data_value import by_window, read_ghost
from scripts.export import export
from scripts.load_grads import find_keys, load_pairs, norm
from weights import read_checkpoint

VALUES = [None, True, -1, 0, 2**31, 2**70, 0.5, float('inf'), '', 'x', '../x', [], {}, [[]], {'a': 1}, b'x', (1,)]


def start(run):
    """As train.py does that resumes there, up to the first step."""
    config = {**json.loads((run / 'settings.json').read_text()), 'init_from': 'resume', 'out_dir': str(run)}
    found = choose_start(config, set(), load_meta(run.parent / 'data'))
    model = GPT(GPTConfig(**found['model_args']))
    optimizer = torch.optim.AdamW(model.param_groups(0.1), fused=True)
    load_start({**found, 'has_optimizer': bool(found.get('optimizer'))}, model, optimizer,
               torch.amp.GradScaler('cpu', enabled=True))


def use(path):
    ckpt = read_checkpoint(str(path))
    find_tokenizer(str(path), ckpt)
    GPT(GPTConfig(**ckpt['model_args'])).load_state_dict(ckpt['model'])


def read_dump(path):
    find_keys(path)
    for _, gradient in load_pairs(path):
        norm(gradient)


def read_bins(path):
    bin, meta = find_bin(str(path), 'train')
    check_tokens(bin, meta, 32, 64)
    read_tokens(bin, torch.tensor([0, 40]).numpy(), 33, 64)


READERS = {     # name: (the file to spoil, how it is read)
    'ckpt.pt': ('run/ckpt.pt', lambda top: start(top / 'run')),
    'a .pt file': ('run/ckpt.pt', lambda top: use(top / 'run/ckpt.pt')),
    'state.json': ('parts/ckpt_dcp/step_3/state.json', lambda top: start(top / 'parts')),
    '.metadata': ('parts/ckpt_dcp/step_3/.metadata', lambda top: start(top / 'parts')),
    'exported .metadata': ('parts/ckpt_dcp/step_3/.metadata', lambda top: use(top / 'parts/ckpt_dcp/step_3')),
    'config.json': ('hf/config.json', lambda top: use(top / 'hf')),
    'model.safetensors': ('hf/model.safetensors', lambda top: use(top / 'hf')),
    'dump .metadata': ('run/gradient_dumper/step0/sharded/.metadata',
                       lambda top: read_dump(top / 'run/gradient_dumper/step0')),
    'sampled dump': ('parts/gradient_dumper/step0/sampled/transformer.h.0.mlp.c_fc.weight_first2.safetensors',
                     lambda top: read_dump(top / 'parts/gradient_dumper/step0')),
    'ghost rows': ('run/grad_dotprods/iter_000003.safetensors', lambda top: by_window(read_ghost(top / 'run')[1])),
    'meta.json': ('data/meta.json', lambda top: read_bins(top / 'data')),
    'meta.pkl': ('old/meta.pkl', lambda top: read_bins(top / 'old')),
    'train.bin': ('data/train.bin', lambda top: read_bins(top / 'data')),
}


def inside(thing):
    """(container, key) of everything in nested dicts, lists and objects."""
    items = []
    if isinstance(thing, dict):
        items = list(thing.items())
    elif isinstance(thing, list):
        items = list(enumerate(thing))
    elif hasattr(thing, '__dict__') and not torch.is_tensor(thing):
        items, thing = list(vars(thing).items()), vars(thing)
    for key, value in items:
        yield thing, key
        yield from inside(value)


def spoil(path, draw):
    """Change a file: of a JSON file, a pickle or a checkpoint also a value in it."""
    content = bytearray(path.read_bytes())
    if draw.random() < 0.6 and path.suffix in ('.json', '.pkl', '.pt', '') and path.name != 'train.bin':
        if path.suffix == '.json':
            thing, write = json.loads(content), lambda thing: path.write_text(json.dumps(thing, default=str))
        elif path.suffix == '.pt':
            thing, write = torch.load(path, weights_only=True), lambda thing: torch.save(thing, path)
        else:
            thing, write = pickle.loads(bytes(content)), lambda thing: path.write_bytes(pickle.dumps(thing))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            places = list(inside(thing))
            if places:
                container, key = draw.choice(places)
                if draw.random() < 0.2 and isinstance(container, (dict, list)):
                    del container[key]
                else:
                    container[key] = copy.deepcopy(draw.choice(VALUES))
        try:
            return write(thing)
        except Exception:       # such a thing cannot be written
            path.write_bytes(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        # of a large file what counts stands at its beginning and end
        i = draw.choice((draw.randrange(len(content)), draw.randrange(min(900, len(content))), -draw.randint(1, 900)))
        i %= len(content)
        kind = draw.randrange(5)
        if kind == 0:
            content[i] = draw.randrange(256)
        elif kind == 1:
            content[i] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del content[i:i + draw.choice((1, 4, 100))]
        elif kind == 3:
            content[i:i] = content[i:i + draw.choice((1, 8, 50))] * draw.choice((1, 1, 500))
        else:
            del content[i:]
        content = content or bytearray(b'\0')
    path.write_bytes(content)


class Late(BaseException):
    """A reader took too long: nothing in it may catch this, and it is no Ctrl-C."""


def late(*_):
    raise Late('more than 20 s')


def main():
    if '--help' in sys.argv:
        sys.exit(print(__doc__))
    given = dict(argument.lstrip('-').split('=') for argument in sys.argv[1:])
    seconds, only = float(given.get('seconds', 60)), given.get('only', '')
    draw = random.Random(int(given.get('seed', 1)))
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    top = Path(tempfile.mkdtemp(prefix='fuzz'))
    write_dataset(top / 'data', ''.join(draw.choices('abcdefgh ,.\n', k=9000)))
    (top / 'old').mkdir()
    shutil.copy(top / 'data/train.bin', top / 'old')
    itos = dict(enumerate(json.loads((top / 'data/meta.json').read_text())['tokenizer']['itos']))
    (top / 'old/meta.pkl').write_bytes(pickle.dumps({'vocab_size': len(itos), 'itos': itos, 'stoi': {}}))
    for name, args in (('run', ['--use_ghost=True']),
                       ('parts', ['--checkpoint_format=sharded', '--grad_dump_save_first_n=2'])):
        sys.path[0], sys.argv = ROOT, [TRAIN, *TINY, f'--dataset={top / "data"}', f'--out_dir={top / name}',
                                       '--max_iters=3', '--grad_dump=True', '--grad_dump_end_step=0', '--n_embd=16',
                                       *args]
        with redirect_stdout(io.StringIO()):
            settings = runpy.run_path(TRAIN, run_name='__main__')['config']
        (top / name / 'settings.json').write_text(json.dumps(settings))
    export(str(top / 'run'), str(top / 'hf'), 'hf')
    signal.signal(signal.SIGALRM, late)
    readers = {name: reader for name, reader in READERS.items() if only in name}
    failures = set()        # each told once
    print(f'{"file":20} spoilt refused  read')
    for name, (file, read) in readers.items():
        path, counts = top / file, [0, 0]
        sound, end = path.read_bytes(), time.monotonic() + seconds / len(readers)
        read(top)
        while time.monotonic() < end:
            spoil(path, draw)
            failure = None
            signal.alarm(20)
            try:
                read(top)
                counts[1] += 1
            except ValueError as error:
                counts[0] += 1
                if '\n' in str(error).strip() or not any(part in str(error) for part in (str(top), 'vocabulary')):
                    failure = f'{name}: an error of another form: {error}'
            except (Exception, Late) as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                failure = f'{name}: {type(error).__name__} at {where.filename}:{where.lineno}: {str(error)[:150]}'
            signal.alarm(0)
            if failure and failure.partition(': ')[2][:60] not in failures:
                failures.add(failure.partition(': ')[2][:60])
                shutil.copy(path, top / f'failed{len(failures)}{path.suffix}')
                print(f'{failure}; {top / f"failed{len(failures)}{path.suffix}"}', flush=True)
            path.write_bytes(sound)
        print(f'{name:20} {sum(counts):6} {counts[0]:7} {counts[1]:5}', flush=True)
    if not failures:
        shutil.rmtree(top)
    return int(bool(failures))


if __name__ == '__main__':
    sys.exit(main())
