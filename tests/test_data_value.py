"""scripts/data_value.py adds up the values of windows and domains: known numbers, a run, damaged folders."""
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file

import modes_helper  # noqa: F401  lets the next ones be found
from data.bins import find_bin, load_meta
from scripts import data_value as script
from scripts.data_value import find_domains, sum_domains

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / 'scripts' / 'data_value.py')
TEXT = 'abcd' * 8 + 'wxyz' * 8 + '!'      # 65 characters: domain letters up to 32, then tail
ITOS = sorted(set(TEXT))
LR, CLIP = np.float32([0.5, 0.25, 0.125]), np.float32([1, 0.5, 1])
OFFSETS = [[0, 8], [40, 0], [8, 40]]
DOTS = [[4.0, -2.0], [16.0, 8.0], [-8.0, 0.0]]
# lr * clip_coef * dot / 2 by hand: step 0: 1, -0.5; step 1: 1, 0.5; step 2: -0.5, 0
VALUES, VISITS = {0: 1.5, 8: -1.0, 40: 1.0}, {0: 2, 8: 2, 40: 2}


# the picture takes most of a start's time
WITHOUT_PICTURE = """
import runpy, sys
sys.modules['matplotlib'] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def data_value(*args, rc=0, cwd=None, env=None, picture=False):
    code = [] if picture or rc else ['-c', WITHOUT_PICTURE]
    done = subprocess.run([sys.executable, '-W', 'error', *code, SCRIPT, *map(str, args)], cwd=cwd,
                          env={**os.environ, **(env or {})}, capture_output=True, text=True, encoding='utf-8')
    assert done.returncode == rc, done.stderr
    if rc:
        assert done.stdout == '' and done.stderr.startswith('data_value.py: '), done.stderr
        assert done.stderr.count('\n') == 1, done.stderr
    return done


def make_run(tmp_path, domains=True):
    """A prepared dataset and an out_dir as train.py leaves it after 3 steps of 2 samples, in two files."""
    data, run = tmp_path / 'data', tmp_path / 'run'
    data.mkdir(), (run / 'grad_dotprods').mkdir(parents=True)
    np.array([ITOS.index(c) for c in TEXT], '<u2').tofile(data / 'train.bin')
    meta = dict(vocab_size=len(ITOS), dtype='uint16', tokenizer=dict(type='char', itos=ITOS),
                splits=dict(train=dict(tokens=len(TEXT)), val=dict(tokens=0)))
    if domains:
        meta['domains'] = [dict(name='letters', start=0, end=32), dict(name='tail', start=32, end=65)]
    (data / 'meta.json').write_text(json.dumps(meta))
    (run / 'config.json').write_text(json.dumps(dict(dataset=str(data), block_size=8)))
    for steps, rows in ((2, slice(0, 2)), (3, slice(2, 3))):
        columns = dict(dot_product=np.float32(DOTS), offset=np.int64(OFFSETS), iter=np.arange(3), lr=LR,
                       loss=np.float32([[1, 2], [3, 4], [5, 6]]), clip_coef=CLIP, val_loss=np.float32([3, 2.5, 2]),
                       grad_norm=np.float32([1, 2, 1]))
        save_file({k: v[rows] for k, v in columns.items()}, run / 'grad_dotprods' / f'iter_{steps:06d}.safetensors')
    return run


def read(folder):
    """({offset: row} of windows.csv, {name: row} of domains.csv, objects of windows.jsonl)"""
    tables = []
    for name, key in (('windows', 'offset'), ('domains', 'domain')):
        with open(folder / f'{name}.csv', newline='') as file:
            tables.append({row[key]: row for row in csv.DictReader(file)})
    return *tables, [json.loads(line) for line in (folder / 'windows.jsonl').read_text(encoding='utf-8').splitlines()]


def test_known_numbers(tmp_path):
    run = make_run(tmp_path)
    done = data_value(run.name, '--top=2', cwd=tmp_path)
    windows, domains, lines = read(run / 'data_value')
    assert {int(o): float(row['value']) for o, row in windows.items()} == VALUES
    assert {int(o): int(row['visits']) for o, row in windows.items()} == VISITS
    assert {o: float(row['loss']) for o, row in windows.items()} == {'0': 2.5, '8': 3.5, '40': 4.5}
    assert [int(o) for o in windows] == [line['offset'] for line in lines] == [0, 40, 8]   # the best first
    keys = 'value', 'windows', 'value_per_visit'
    numbers = {name: tuple(float(row[key]) for key in keys) for name, row in domains.items()}
    assert numbers == {'letters': (0.5, 2, 0.125), 'tail': (1.0, 1, 0.5)}
    # 1.96 * sqrt(2 * 3.125) = 4.9, of the mean of 4 visits 1.225; of one window nothing is known
    ends = 'value_low', 'value_high', 'value_per_visit_low', 'value_per_visit_high'
    assert [float(domains['letters'][end]) for end in ends] == pytest.approx([-4.4, 5.4, -1.1, 1.35])
    assert domains['tail']['value_low'] == 'nan' and '-4.4 to 5.4 ' in done.stdout and 'nan to nan' in done.stdout
    assert [line['text'] for line in lines] == ['abcdabcd', 'wxyzwxyz', 'abcdabcd']
    assert 'sum of values 1.5 nats/token; the validation loss fell by 1 ' in done.stdout
    best, worst = done.stdout.split('\nbest')[1].split('\nworst')
    assert [int(line.split()[1]) for line in best.splitlines()[1:3]] == [0, 40] and 'wxyzwxyz' in best
    assert [int(line.split()[1]) for line in worst.splitlines()[1:3]] == [8, 40]


def test_intervals_are_those_of_all_bootstrap_samples():
    offset, domain = np.array([0, 8, 24, 40, 64]), np.zeros(5, int)
    value, visits = np.array([3.0, -1.0, 0.5, 2.0, 1.0]), np.array([3, 2, 3, 2, 3])
    row, = sum_domains(offset, value, visits, domain, ['a'], 8)
    total, each, low, high, each_low, each_high = row[3:]
    drawn = np.array(list(itertools.product(range(5), repeat=5)))       # (3125, 5)
    totals, ratios = value[drawn].sum(1), value[drawn].sum(1) / visits[drawn].sum(1)
    assert (total, each) == (5.5, 5.5 / 13)
    assert (high - low) / 2 == pytest.approx(1.96 * totals.std() * (5 / 4) ** 0.5)
    assert (each_high - each_low) / 2 == pytest.approx(1.96 * ratios.std() * (5 / 4) ** 0.5, rel=0.1)
    # the same text in overlapping windows: a piece that begins within block_size tokens counts once
    offset, domain = np.array([0, 3, 8, 24, 40, 41, 64]), np.zeros(7, int)
    value, visits = np.array([1.0, 2, -1, 0.5, 5, -3, 1]), np.array([1, 2, 2, 3, 1, 1, 3])
    assert sum_domains(offset, value, visits, domain, ['a'], 8)[0][3:] == pytest.approx(row[3:])


def test_intervals_cover_the_truth():
    """Windows of one text have values of their own at all visits: each has a mean, and a third as much per visit."""
    draw, n, mean, trials = np.random.default_rng(0), 80, 0.3, 500
    hits = np.zeros(2)
    for _ in range(trials):
        visits = draw.integers(1, 5, n)
        value = visits * draw.gamma(2, mean / 2, n) + draw.normal(size=n) * np.sqrt(visits) * mean / 3
        row, = sum_domains(np.arange(n) * 8, value, visits, np.zeros(n, int), ['a'], 8)
        low, high, each_low, each_high = row[5:]
        hits += low < n * 2.5 * mean < high, each_low < mean < each_high
    assert (np.abs(hits / trials - 0.95) < 0.03).all(), hits / trials


def test_the_same_thing_is_drawn_on_one_axis(tmp_path, monkeypatch):
    """Three axes, none on top of another; real and predicted decrease before each step, in nats."""
    pytest.importorskip('matplotlib')
    drawn = []
    monkeypatch.setattr(script, 'write_picture', lambda figure, path: drawn.append(figure))
    steps, samples = script.read_ghost(make_run(tmp_path))
    offset, value, _, _ = script.by_window(samples)
    names, domain_of = find_domains([dict(name='letters', start=0, end=32), dict(name='tail', start=32, end=65)])
    script.draw('x.png', steps, samples, value, names, domain_of(samples['offset']))
    left, middle, right = drawn[0].axes
    assert [line.get_ydata().tolist() for line in right.lines] == [[0, 0.5, 1], [0, 0.5, 2]]
    assert [line.get_ydata().tolist() for line in middle.lines] == [[0, 0.5, 1], [0, 0, 1]]
    assert len(right.get_legend().get_texts()) == 2


def test_half_of_a_negative_sum(tmp_path):
    """Steps add -0.5, -1.5 and 0.5 to -1.5: half of it is passed with the second."""
    run = make_run(tmp_path)
    for path in (run / 'grad_dotprods').iterdir():
        columns = load_file(path)
        save_file({**columns, 'dot_product': -columns['dot_product']}, path)
    assert 'half of the sum was reached at step 1\n' in data_value(run).stdout


def test_dataset_is_a_path_from_here(tmp_path):
    run = make_run(tmp_path)
    (run / 'config.json').write_text('{"dataset": "data", "block_size": 8}')
    data_value(run, cwd=tmp_path)
    assert [line['text'] for line in read(run / 'data_value')[2]] == ['abcdabcd', 'wxyzwxyz', 'abcdabcd']


def test_picture(tmp_path):
    pytest.importorskip('matplotlib')
    run = make_run(tmp_path)
    data_value(run, f'--out={tmp_path / "elsewhere"}', picture=True)
    assert (tmp_path / 'elsewhere' / 'data_value.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    written = ['data_value.png', 'domains.csv', 'windows.csv', 'windows.jsonl']
    assert sorted(os.listdir(tmp_path / 'elsewhere')) == written
    assert not (run / 'data_value').exists()


def test_works_without_domains_text_and_matplotlib(tmp_path):
    run = make_run(tmp_path, domains=False)
    (tmp_path / 'block').mkdir(), (tmp_path / 'block' / 'matplotlib.py').write_text('raise ImportError("none")')
    done = data_value(run, env={'PYTHONPATH': str(tmp_path / 'block')}, picture=True)
    assert 'pip install matplotlib' in done.stderr and set(read(run / 'data_value')[1]) == {'all'}
    assert not (run / 'data_value' / 'data_value.png').exists()
    (tmp_path / 'data').rename(tmp_path / 'moved')
    done = data_value(run)
    windows, _, lines = read(run / 'data_value')
    assert 'no text: ' in done.stderr and {int(o): float(row['value']) for o, row in windows.items()} == VALUES
    assert all(line['text'] == '' for line in lines)


def test_other_tokens_than_the_run_saw_are_not_shown(tmp_path):
    run = make_run(tmp_path)
    np.zeros(20, '<u2').tofile(tmp_path / 'data' / 'train.bin')
    done = data_value(run)
    assert 'prepared anew' in done.stderr and all(line['text'] == '' for line in read(run / 'data_value')[2])


@pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
def test_of_two_shuffles_with_the_same_counts_no_text_is_shown(fork, tmp_path):
    """The run's checkpoint records the sha256 of the tokens that it saw."""
    run = make_run(tmp_path)
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    meta['splits']['train']['sha256'] = 'a' * 64
    folder = run / 'ckpt_dcp' / 'step_3'
    dcp.save({'model': {'w': torch.zeros(2)}}, checkpoint_id=folder, no_dist=True)
    (folder / 'state.json').write_text(json.dumps(dict(meta=meta, model_args={'n_layer': 1}, iter_num=3,
                                                         param_groups=[])))
    for sha256, known in (('a' * 64, True), ('b' * 64, False)):
        meta['splits']['train']['sha256'] = sha256
        (tmp_path / 'data' / 'meta.json').write_text(json.dumps({**meta, 'domains': []}))
        done = fork(tmp_path, run, script=SCRIPT, tiny_args=False, notes=int(not known))
        windows, domains, lines = read(run / 'data_value')
        assert [line['text'] for line in lines] == (['abcdabcd', 'wxyzwxyz', 'abcdabcd'] if known else [''] * 3)
        assert {int(o): float(row['value']) for o, row in windows.items()} == VALUES
        assert set(domains) == {'letters', 'tail'}      # those of the run
        assert ('prepared anew' in done.err) == (not known)


def test_samples_per_step_change_in_mid_run(tmp_path):
    """A third step of 4 samples, lr * clip_coef * dot / 4 each: 1/8 of -8, 0, 16 and 32 / 4."""
    run = make_run(tmp_path)
    path = run / 'grad_dotprods' / 'iter_000003.safetensors'
    columns = load_file(path)
    columns.update(dot_product=np.float32([[-8, 0, 16, 32]]), offset=np.int64([[8, 40, 0, 48]]),
                   loss=np.float32([[5, 6, 7, 8]]))
    save_file(columns, path)
    done = data_value(run, '--top=4')
    windows, domains, _ = read(run / 'data_value')
    assert {int(o): float(row['value']) for o, row in windows.items()} == {0: 2.0, 8: -0.75, 40: 1.0, 48: 1.0}
    assert {int(o): int(row['visits']) for o, row in windows.items()} == {0: 3, 8: 2, 40: 2, 48: 1}
    assert float(domains['letters']['value']) == 1.25 and float(domains['tail']['value']) == 2
    assert '8 samples, 4 windows' in done.stdout and 'sum of values 3.25 nats/token' in done.stdout


def test_any_name_of_a_domain_is_drawn(tmp_path):
    """In matplotlib's labels a $ begins a formula, and a leading _ hides a line from the legend."""
    pytest.importorskip('matplotlib')
    run, names = make_run(tmp_path), {'$x_1$', '_a$b'}
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    for domain, name in zip(meta['domains'], names):
        domain['name'] = name
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    assert data_value(run, picture=True).stderr == '' and set(read(run / 'data_value')[1]) == names


def test_a_step_in_two_files_counts_once(tmp_path):
    run = make_run(tmp_path)
    file = run / 'grad_dotprods' / 'iter_000003.safetensors'
    save_file(load_file(file), file.with_name('iter_000004.safetensors'))
    data_value(run)
    assert {int(o): int(row['visits']) for o, row in read(run / 'data_value')[0].items()} == VISITS


def test_any_stdout_will_do(tmp_path):
    run = make_run(tmp_path)
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    meta['domains'][0]['name'] = 'l\u00e9ttres'
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    assert 'l\\xe9ttres ' in data_value(run, env={'PYTHONIOENCODING': 'ascii'}).stdout
    shutil.rmtree(run / 'data_value')
    r, w = os.pipe()
    os.close(r)     # a reader that has gone
    with open(w, 'w') as pipe:
        done = subprocess.run([sys.executable, ROOT / 'scripts' / 'data_value.py', run, '--top=1000'], stdout=pipe,
                              stderr=subprocess.PIPE, env={**os.environ, 'PYTHONUNBUFFERED': '1'})
    assert (done.returncode, done.stderr) == (1, b'') and len(read(run / 'data_value')[2]) == 3


def test_errors_are_one_line(tmp_path):
    run = make_run(tmp_path)
    files = sorted((run / 'grad_dotprods').iterdir())
    assert 'OUT_DIR' in data_value(rc=2).stderr and '--topp=3' in data_value(run, '--topp=3', rc=2).stderr
    assert all('usage' in data_value(run, f'--top={top}', rc=2).stderr for top in ('x', 0, -1))
    assert 'usage' in data_value(run, run, rc=2).stderr
    (tmp_path / 'file').write_text('')
    assert '--out=' in data_value(run, f'--out={tmp_path / "file"}', rc=2).stderr
    config = (run / 'config.json').read_text()
    (run / 'config.json').write_text('{"dataset": ')
    assert 'config.json' in data_value(run, rc=1).stderr
    (run / 'config.json').write_text(config)
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-5])
    assert files[1].name in (line := data_value(run, rc=1).stderr) and 'move it away' in line
    for file in files:
        file.unlink()
    assert 'use_ghost=True' in data_value(run, rc=1).stderr
    assert 'use_ghost=True' in data_value(tmp_path / 'nowhere', rc=1).stderr
    assert sorted(os.listdir(run)) == ['config.json', 'grad_dotprods']     # nothing was written


@pytest.fixture
def command(monkeypatch, capsys):
    """command(run, *args): data_value.py in this process, without a picture; returns the one line of its error."""
    monkeypatch.setitem(sys.modules, 'matplotlib', None)

    def run_it(run, *args):
        monkeypatch.setattr(sys, 'argv', ['data_value.py', str(run), *map(str, args)])
        capsys.readouterr()
        try:
            script.main()
        except ValueError as error:
            return str(error)
        except SystemExit:
            return capsys.readouterr().err
        return ''
    return run_it


def change(run, function, names=(), of='train_bin'):
    """Apply function to the columns of each file of values; names: what their metadata's `of` is, in their order."""
    for path, name in itertools.zip_longest(sorted((run / 'grad_dotprods').iterdir()), names):
        columns = load_file(path)
        function(columns)
        save_file(columns, path, {of: name} if name else None)


def test_drop_checks_all_before_it_writes(tmp_path, command):
    run, data = make_run(tmp_path), tmp_path / 'data'
    np.zeros(20, '<u2').tofile(data / 'val.bin')
    meta = json.loads((data / 'meta.json').read_text())
    meta['splits']['val']['tokens'] = 20
    (data / 'meta.json').write_text(json.dumps(meta))
    config, new = json.loads((run / 'config.json').read_text()), tmp_path / 'new'
    (tmp_path / 'file').write_text('')
    os.symlink(tmp_path / 'nowhere', tmp_path / 'link')
    before = sorted(tmp_path.rglob('*'))

    def refuses(*words, drop=0.5, to=new):
        line = command(run, f'--drop={drop}', f'--to={to}')
        assert all(word in line for word in words) and line.strip().count('\n') == 0, line
        assert sorted(tmp_path.rglob('*')) == before

    for order in ('random', None):
        (run / 'config.json').write_text(json.dumps({**config, 'data_order': order}))
        refuses('--data_order=epoch')
    (run / 'config.json').write_text(json.dumps({**config, 'data_order': 'epoch'}))
    for share in (0, 1, 'nan', -1, 'inf', 'x', ''):
        refuses('--drop', 'usage', drop=share)
    refuses('less than one', drop=1e-9)
    refuses('--to=', 'usage', to='')
    for there in (data, run, tmp_path, '.', '..', tmp_path / 'link'):
        refuses('is there already', to=there)
    assert 'lies in --to' in command(run, '--drop=0.5', f'--to={new}', f'--out={new / "values"}')
    os.symlink(tmp_path / 'data', tmp_path / '.new.tmp')
    assert 'is a link, where a folder' in command(run, '--drop=0.5', f'--to={new}')
    os.remove(tmp_path / '.new.tmp')
    assert sorted(tmp_path.rglob('*')) == before
    for wrong, what in ((-8, 'iter_000002'), (3, 'between multiples'), (64, 'no window at')):
        change(run, lambda columns: columns['offset'].put(0, wrong))
        refuses(what)
        change(run, lambda columns: columns['offset'].put(0, OFFSETS[0][0] if len(columns['iter']) == 2 else 8))
    for names, of, what in ((['one', 'two'], 'val_bin', '2 different val.bin'),
                            (['one', 'two'], 'train_bin', '2 different train.bin'),
                            (['one', 'one'], 'train_bin', 'prepared anew')):
        change(run, lambda columns: None, names, of)
        refuses(what)
    change(run, lambda columns: columns['dot_product'].fill(np.inf))
    refuses('no scored sample')
    change(run, lambda columns: columns.update(dot_product=columns['dot_product'][:, :1]))
    refuses('iter_000002', 'not of the same samples')


def test_drop(tmp_path, command, capsys, monkeypatch):
    """uint32 tokens in parts, domains with a gap; one value is not finite; a try before this one was killed."""
    run, data, new = make_run(tmp_path), tmp_path / 'data', tmp_path / 'new'
    (run / 'config.json').write_text(json.dumps(dict(dataset=str(data), block_size=8, data_order='epoch')))
    tokens = np.fromfile(data / 'train.bin', '<u2').astype('<u4')
    tokens.tofile(data / 'train.bin'), tokens[:20].tofile(data / 'val.bin')
    meta = json.loads((data / 'meta.json').read_text())
    meta.update(dtype='uint32', splits=dict(train=dict(tokens=65), val=dict(tokens=20)),
                domains=[dict(name=name, start=a, end=b) for name, a, b in (('a', 4, 10), ('b', 8, 16), ('c', 40, 65))])
    (data / 'meta.json').write_text(json.dumps(meta))
    change(run, lambda columns: columns['dot_product'].put(0, np.nan))      # of offset 0 and, in the second file, of 8
    (tmp_path / '.new.tmp' / 'data').mkdir(parents=True), (tmp_path / '.new.tmp' / 'data' / 'torn').write_text('x')
    monkeypatch.setattr(script, 'PART', 2)

    def full_disk(path, *_):
        if path.name == 'dropped.csv':
            raise ValueError('no space left')
    with monkeypatch.context() as broken:
        broken.setattr(script, 'write_csv', full_disk)
        assert command(run, '--drop=0.67', f'--to={new}') == 'no space left'
    assert not new.exists() and not (tmp_path / '.new.tmp').exists()

    line = []

    def while_another(path, *args):
        if path.name == 'dropped.csv':
            line.append(command(run, '--drop=0.67', f'--to={new}').splitlines()[-1])
        write_csv(path, *args)
    write_csv = script.write_csv
    with monkeypatch.context() as patch:
        patch.setattr(script, 'write_csv', while_another)
        command(run, '--drop=0.67', f'--to={new}')
    assert len(line) == 1 and '.new.tmp: another command is at work in it; wait' in line[0]
    shutil.rmtree(new)
    command(run, '--drop=0.67', f'--to={new}')
    told = capsys.readouterr()
    assert 'left out 2 of 6 samples' in told.err
    assert told.out.endswith(f'wrote {new}: without 2 of 8 windows of 8 tokens\n')
    assert (new / 'dropped.csv').read_text() == 'offset,value\n8,-0.5\n0,0.5\n'      # 40 has 1
    kept, there = find_bin(str(new), 'train')
    assert kept[1:] == (np.dtype('<u4'), 49) and np.fromfile(*kept[:2]).tolist() == tokens[16:].tolist()
    assert (new / 'val.bin').read_bytes() == (data / 'val.bin').read_bytes() and load_meta(new) == there
    assert there['domains'] == [dict(name='c', start=24, end=49)] and there['dropped']['windows'] == 2
    assert not (tmp_path / '.new.tmp').exists()


def test_of_a_run(fork, tmp_path):
    """train.py with ghost: the values are lr * clip_coef * dot / B of its files, the texts the data's."""
    text = ''.join(f'{i} sheep, ' for i in range(700))
    itos = sorted(set(text))
    ids = np.array([itos.index(c) for c in text], '<u2')
    data = tmp_path / 'sheep'
    data.mkdir()
    ids.tofile(data / 'train.bin'), ids[:500].tofile(data / 'val.bin')
    (data / 'meta.json').write_text(json.dumps(dict(
        vocab_size=len(itos), dtype='uint16', tokenizer=dict(type='char', itos=itos),
        splits=dict(train=dict(tokens=len(ids)), val=dict(tokens=500)),
        domains=[dict(name='sheep', start=0, end=len(ids))])))
    settings = dict(dataset=data, out_dir=tmp_path / 'run', device='cpu', use_ghost=True, ghost_save_interval=4,
                    max_iters=6, eval_interval=6, eval_iters=1,
                    n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4,
                    gradient_accumulation_steps=2, compile=False, warmup_iters=2, lr_decay_iters=6,
                    learning_rate=1e-2, grad_clip=0.5, data_order='epoch')
    fork(tmp_path, *(f'--{k}={v}' for k, v in settings.items()), tiny_args=False)
    fork(tmp_path, 'run', script=SCRIPT, tiny_args=False)
    windows, domains, lines = read(tmp_path / 'run' / 'data_value')
    want, total = {}, 0
    for path in sorted((tmp_path / 'run' / 'grad_dotprods').glob('iter_*.safetensors')):
        file = load_file(path)
        for s in range(len(file['iter'])):
            for offset, dot in zip(file['offset'][s].tolist(), file['dot_product'][s].tolist()):
                value = float(file['lr'][s]) * float(file['clip_coef'][s]) * dot / 8
                want[offset], total = want.get(offset, 0) + value, total + value
    got = {int(o): float(row['value']) for o, row in windows.items()}
    assert len(want) == 48 and got == pytest.approx(want, rel=1e-12, abs=1e-15)
    assert float(domains['sheep']['value']) == pytest.approx(total, rel=1e-12) and total > 0
    assert all(line['text'] == text[line['offset']:line['offset'] + 16] for line in lines)


def test_tokens_without_a_record_are_told_apart_too(fork, tiny, tmp_path):
    """Of a folder without counts and checksums the run's own files say which tokens it saw."""
    (tmp_path / 'bins').mkdir()
    for split in ('train', 'val'):
        (tmp_path / 'bins' / f'{split}.bin').write_bytes((tiny / f'{split}.bin').read_bytes())
    meta = json.loads((tiny / 'meta.json').read_text())
    (tmp_path / 'bins' / 'meta.json').write_text(json.dumps({k: meta[k] for k in ('vocab_size', 'tokenizer', 'dtype')}))
    fork(tmp_path, f'--dataset={tmp_path / "bins"}', '--use_ghost=True', '--max_iters=2')
    for shuffled in (False, True):
        if shuffled:
            tokens = np.fromfile(tmp_path / 'bins' / 'train.bin', '<u2')
            tokens[::-1].tofile(tmp_path / 'bins' / 'train.bin')
        done = fork(tmp_path, 'out', script=SCRIPT, tiny_args=False, notes=int(shuffled))
        lines = read(tmp_path / 'out' / 'data_value')[2]
        assert ('prepared anew' in done.err) == shuffled
        assert all((line['text'] == '') == shuffled for line in lines)
