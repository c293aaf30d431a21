"""scripts/plot.py draws the logs of one run or several, without a display, whatever state the log is in."""
import json
import math
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, ROOT)
from scripts.plot import curve, read_log  # noqa: E402

SCRIPT = os.path.join(ROOT, 'scripts', 'plot.py')
ENV = {name: value for name, value in os.environ.items() if name not in ('DISPLAY', 'MPLBACKEND')}


def plot(*args, rc=0, cwd=None, env=ENV):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, args)], cwd=cwd, env=env,
                          capture_output=True, text=True)
    assert done.returncode == rc, done.stderr
    if rc:
        assert done.stdout == '' and done.stderr.count('\n') == 1 and done.stderr.startswith('plot.py: ')
    return done.stderr


def write_log(folder, steps=40, tail=''):
    """A run's log.jsonl as train.py writes it: a training line a step, an eval line every 10 steps."""
    folder.mkdir()
    with open(folder / 'log.jsonl', 'w') as file:
        for i in range(steps):
            row = dict(iter=i, tokens=i * 512, loss=4 - i / 20, lr=1e-3 * (i + 1) / steps, grad_norm=1 + math.sin(i),
                       ms=5.0, tokens_per_s=1e5 + i, mfu=None, memory_gib=None)
            file.write(json.dumps(row) + '\n')
            if i % 10 == 0:
                row = dict(iter=i, tokens=i * 512, train_loss=4 - i / 20, val_loss=4.1 - i / 20)
                file.write(json.dumps(row) + '\n')
        file.write(tail)
    return folder


def texts(path):
    """The words drawn into an SVG (matplotlib notes each text in a comment) and the number of val markers."""
    svg = path.read_text()
    return re.findall('<!-- (.*?) -->', svg), len(re.findall('<use ', svg))


def test_png_of_one_run(tmp_path):
    pytest.importorskip('matplotlib')
    run = write_log(tmp_path / 'run', tail='{"iter": 40, "los')  # killed while writing
    assert plot(run.name, cwd=tmp_path) == ''
    assert (run / 'plot.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    assert sorted(os.listdir(run)) == ['log.jsonl', 'plot.png']


def test_overlay_with_legend(tmp_path):
    pytest.importorskip('matplotlib')
    one, two = write_log(tmp_path / 'one'), write_log(tmp_path / 'two', steps=20)
    plot(one, f'--out={tmp_path / "a.svg"}')
    plot(one, two, f'--out={tmp_path / "b.svg"}')
    (words_a, marks_a), (words_b, marks_b) = texts(tmp_path / 'a.svg'), texts(tmp_path / 'b.svg')
    assert {'one', 'learning rate', 'tokens/s'} < set(words_a) and 'two' not in words_a
    assert {'one', 'two'} < set(words_b) and any('val' in word for word in words_b)
    assert marks_b - marks_a >= 2  # the second run's two evals
    assert not (one / 'plot.png').exists()


def test_same_folder_name_keeps_runs_apart(tmp_path):
    pytest.importorskip('matplotlib')
    (tmp_path / 'x').mkdir()
    write_log(tmp_path / 'run'), write_log(tmp_path / 'x' / 'run')
    plot('run', 'x/run', '--out=c.svg', cwd=tmp_path)
    assert {'run', 'x/run'} < set(texts(tmp_path / 'c.svg')[0])


def test_names_are_drawn_as_they_are(tmp_path):
    """In matplotlib's labels a $ begins a formula, and a leading _ hides a line from the legend."""
    pytest.importorskip('matplotlib')
    names = '$x_1$', '_old', 'cost$', r'a\$b$'
    for name in names:
        write_log(tmp_path / name)
    assert plot(*names, '--out=d.svg', cwd=tmp_path) == ''
    assert set(names) < {text.strip() for text in texts(tmp_path / 'd.svg')[0]}


def test_repeated_steps_nulls_and_torn_lines_within(tmp_path):
    """A resumed run logs some steps again and may follow a torn line: later rows are drawn, the torn one is named."""
    pytest.importorskip('matplotlib')
    run = write_log(tmp_path / 'run', steps=3, tail='{"iter": 3, "lo\n{"iter": 2, "loss": 9.5, "lr": null}\n7\n')
    train, evals = read_log(run / 'log.jsonl')
    assert curve(train, 'loss') == ([0, 1, 2], [4.0, 3.95, 9.5]) and curve(train, 'lr')[0] == [0, 1]
    assert curve(evals, 'val_loss') == ([0], [4.1])
    note = plot(run)
    assert 'skipped 2 unreadable lines, first: 5' in note and note.count('\n') == 1


def test_a_reader_that_has_gone(tmp_path):
    pytest.importorskip('matplotlib')
    run = write_log(tmp_path / 'run')
    r, w = os.pipe()
    os.close(r)
    with open(w, 'w') as pipe:
        done = subprocess.run([sys.executable, SCRIPT, run], stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b'') and (run / 'plot.png').exists()


def test_errors_are_one_line(tmp_path):
    run, empty = write_log(tmp_path / 'run'), write_log(tmp_path / 'empty', steps=0, tail='{"it')
    assert 'OUT_DIR' in plot(rc=2) and '--outt=x' in plot(run, '--outt=x', rc=2)
    assert 'nowhere' in plot(tmp_path / 'nowhere', rc=1) and 'no logged step' in plot(empty, rc=1)
    assert 'cannot be written' in plot(run, f'--out={tmp_path / "no" / "x.png"}', rc=2)
    (tmp_path / 'block').mkdir(), (tmp_path / 'block' / 'matplotlib.py').write_text('raise ImportError("none")')
    assert 'pip install matplotlib' in plot(run, rc=1, env={**ENV, 'PYTHONPATH': str(tmp_path / 'block')})
    pytest.importorskip('matplotlib')
    assert 'must end in one of' in plot(run, f'--out={tmp_path / "x.doc"}', rc=2)
    assert os.listdir(run) == ['log.jsonl']
