"""configurator.py, through a small script that is run as a user runs it."""
import io
import json
import os
import random
import shlex
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = '''"""Train a thing.

python demo.py config/a.py"""
import sys
from math import pi

sys.path.insert(0, sys.argv.pop(1))
from configurator import configure

# ---- output ----
out_dir = 'out'   # where files go
compile = True    # a name that is also a builtin
# ---- data ----
# this line is a remark
batch_size = 12   # rows per micro-batch
                  # on each rank
accumulation = 5 * 8
seed = start = 0
# ---- optimizer ----
grad_clip = 1.0   # '#' is no comment in a string; 0 disables
mark = '#'        # after a hash
checkpointing = False  # False | 'full' | "selective"
end_step = None   # None: to the end
reshard = None    # None | True | False | 'auto'
dtype = 'auto'    # 'auto' (None of your business) | 'float32'
fuse = 'auto'     # 'auto' | True | False
_hidden = 3
pair = (1, 2)
left, right = 1, 2
# ---- end ----
config, given = configure(globals())
later = 5

def unused():
    # a comment that belongs to no setting
    return later  # nor does this

import json
assert all(globals()[name] == value for name, value in config.items())
print(json.dumps([list(config.items()), sorted(given)]))
'''
NAMES = ('out_dir compile batch_size accumulation seed start grad_clip mark checkpointing end_step reshard '
         'dtype fuse').split()


@pytest.fixture
def demo(tmp_path):
    """run(*args, rc=0) -> (config dict, given) or, where rc is not 0, the one line on stderr."""
    (tmp_path / 'demo.py').write_text(SCRIPT)

    def run(*args, rc=0, cwd=tmp_path, raw=False):
        done = subprocess.run([sys.executable, '-W', 'error', str(tmp_path / 'demo.py'), ROOT, *args], cwd=cwd,
                              capture_output=True, text=True)
        assert done.returncode == rc, done.stderr
        if rc:
            assert done.stdout == '' and done.stderr.count('\n') == 1 and 'Traceback' not in done.stderr
            return done.stderr
        assert done.stderr == ''
        if raw:
            return done.stdout
        items, given = json.loads(done.stdout)
        return dict(items), given
    return run


def test_defaults_in_source_order(demo):
    config, given = demo()
    assert list(config) == NAMES and given == []
    assert config['accumulation'] == 40 and config['out_dir'] == 'out' and config['end_step'] is None


def test_command_line_values(demo):
    for args, name, value in [
        (['--batch_size=4'], 'batch_size', 4), (['--batch_size=-4'], 'batch_size', -4),
        (['--batch_size=4', '--batch_size=5'], 'batch_size', 5),
        (['--batch_size=1e3'], 'batch_size', 1000), (['--batch_size=-2.0'], 'batch_size', -2),
        (['--end_step=1e4'], 'end_step', 10000), (['--batch-size=4'], 'batch_size', 4),
        (['--batch_size', '4'], 'batch_size', 4), (['--batch-size', '-4'], 'batch_size', -4),
        (['--out_dir', 'a b=c'], 'out_dir', 'a b=c'), (['--out_dir', 'x.py'], 'out_dir', 'x.py'),
        (['--out_dir', ''], 'out_dir', ''), (['--out-dir=a-b'], 'out_dir', 'a-b'),
        (['--compile', 'False'], 'compile', False), (['--compile', '0'], 'compile', False),
        (['--compile'], 'compile', True),
        (['--fuse'], 'fuse', True), (['--fuse', 'auto'], 'fuse', 'auto'), (['--reshard'], 'reshard', True),
        (['--checkpointing'], 'checkpointing', 'full'), (['--checkpointing=True'], 'checkpointing', 'full'),
        (['--checkpointing=1'], 'checkpointing', 'full'), (['--checkpointing=0'], 'checkpointing', False),
        (['--checkpointing', 'selective'], 'checkpointing', 'selective'),
        (['--checkpointing', '0'], 'checkpointing', False),
        (['--grad_clip=1'], 'grad_clip', 1.0), (['--grad_clip=3e-4'], 'grad_clip', 3e-4),
        (['--start=0'], 'start', 0), (['--out_dir=0'], 'out_dir', '0'), (['--out_dir=a=b'], 'out_dir', 'a=b'),
        (['--out_dir='], 'out_dir', ''), (['--out_dir=--x.py'], 'out_dir', '--x.py'),
        (['--out_dir=None'], 'out_dir', 'None'),
        (['--out_dir=two words'], 'out_dir', 'two words'), (['--out_dir="q"'], 'out_dir', '"q"'),
        (['--compile=False'], 'compile', False), (['--compile=false'], 'compile', False),
        (['--compile=0'], 'compile', False),
        (['--compile=True'], 'compile', True), (['--compile=1'], 'compile', True),
        (['--checkpointing=full'], 'checkpointing', 'full'),
        (['--checkpointing=selective'], 'checkpointing', 'selective'),
        (['--checkpointing=False'], 'checkpointing', False),
        (['--end_step=7'], 'end_step', 7), (['--end_step=None'], 'end_step', None),
        (['--reshard=True'], 'reshard', True), (['--reshard=auto'], 'reshard', 'auto'), (['--reshard=8'], 'reshard', 8),
        (['--dtype=float32'], 'dtype', 'float32'), (['--dtype=None'], 'dtype', 'None'), (['--dtype=1'], 'dtype', '1'),
        (['--fuse=False'], 'fuse', False), (['--fuse=true'], 'fuse', True), (['--fuse=1'], 'fuse', True),
        (['--fuse=auto'], 'fuse', 'auto'), (['--fuse=None'], 'fuse', 'None'),
    ]:
        config, given = demo(*args)
        assert config[name] == value and type(config[name]) is type(value), args
        assert given == [name]


@pytest.mark.parametrize('args, words', [
    (['--batch_size'], ['--batch_size: needs a value: --batch_size=12']),
    (['--batch_size', '--seed=1'], ['--batch_size: needs a value']), (['--out_dir', '--seed=1'], ['--out_dir: needs']),
    (['--batch_size', 'x'], ['--batch_size x: batch_size takes an int', "'x'"]),
    (['--batch_size', '4', '5'], ['demo.py: 5: not understood']),
    (['--compile', 'maybe'], ['--compile maybe:', 'True or False']), (['--batch-sise=4'], ['nearest name: batch_size']),
    (['stray'], ['stray', '--name=value', '.py', 'nearest name: start']),
    (['out/dir'], ['out/dir: not understood', 'config file (.py)\n']),
    (['4'], ['demo.py: 4:', '--name=value', '.py']),
    (['batch_size=4'], ['batch_size=4', '--name=value', 'nearest name: batch_size']),
    (['-batch_size=4'], ['-batch_size=4', '--name=value', 'nearest name: batch_size']),
    (['--batch_sise=4'], ['--batch_sise=4', "'batch_sise'", 'nearest name: batch_size']),
    (['--Batch-Size=4'], ['--Batch-Size=4', 'nearest name: batch_size']),
    (['--'], ['--:', '--name=value']), ([''], ['--name=value']), (['--=3'], ['--=3', '--name=value']),
    (['a\nb'], ['a b', '--name=value']),
    (['--later=4'], ['later', 'nearest name']), (['--_hidden=4'], ['_hidden', 'nearest name']),
    (['--pi=3'], ["'pi'", 'nearest name']), (['--left=3'], ["'left'", 'nearest name']),
    (['--batch_size=x'], ['--batch_size=x', 'an int', "'x'"]), (['--batch_size=1.5'], ['an int', '1.5']),
    (['--batch_size='], ['--batch_size=:', 'an int']), (['--batch_size=True'], ['an int', 'True']),
    (['--batch_size=None'], ['an int', 'None']),
    (['--grad_clip=big'], ['number', "'big'"]), (['--grad_clip=nan'], ['number', 'nan']),
    (['--grad_clip=1e999'], ['number', 'inf']), (['--grad_clip=True'], ['number', 'True']),
    (['--compile=yes'], ['True or False', "'yes'"]), (['--compile=2'], ['True or False', '2']),
    (['--checkpointing=ful'], ["'full'", "'selective'", 'False', "'ful'"]),
    (['--checkpointing=2'], ["False or 'full' or 'selective', not 2"]),
    (['--batch_size=' + '9' * 30], ['an int below 2**63', '9' * 30]),
    (['--batch_size=' + '9' * 9999], ['an int', 'inf']), (['--grad_clip=' + '9' * 9999], ['number', 'inf']),
    (['--batch_size=1e300'], ['an int below 2**63', '1e+300']), (['--batch_size=inf'], ['an int', 'inf']),
    (['--seed=\x1b[2J'], ['\\x1b[2J', 'an int']),
    (['--end_step=1.5'], ['int', 'None', '1.5']), (['--end_step=False'], ['int', 'None', 'False']),
    (['--reshard=aut'], ["'auto'", 'None', 'True']),
    (['config/train_gpt3.py'], ['config/train_gpt3.py', 'no such config file', 'file: config/train_gpt2.py']),
    (['config/train_gpt2'], ['not understood', 'nearest config file: config/train_gpt2.py']),
    (['confg/train_gtp2'], ['not understood', 'nearest config file: config/train_gpt2.py']),
    (['mine/zzz.py'], ['no such config file', 'config/ has eval_gpt2.py, finetune_shakespeare.py']),
    (['none.py'], ['none.py', 'no such config file']), (['--x=1', 'none.py'], ["'x'"]),
])
def test_bad_argument(demo, args, words):
    line = demo(*args, rc=2)
    assert line.startswith('demo.py: ') and all(word in line for word in words), line


def test_config_files(demo, tmp_path):
    (tmp_path / 'a.py').write_text('# settings computed as people do\nimport time\nfrom math import sqrt\n'
                                   'out_dir = "ft-" + str(time.time())[:1]\nbatch_size = 6 * 2\n_n = 2\n'
                                   'seed = batch_size + _n\n'
                                   'grad_clip = 2\ndef f(): return accumulation\nstart = f()\n'
                                   'if compile: end_step = 9\nfuse = not compile\n')
    (tmp_path / 'b.py').write_text('seed += 1\ncheckpointing = "full"')
    config, given = demo('a.py', 'b.py')
    assert given == ['batch_size', 'checkpointing', 'end_step', 'fuse', 'grad_clip', 'out_dir', 'seed', 'start']
    assert config['fuse'] is False and list(config) == NAMES
    assert config['grad_clip'] == 2.0 and type(config['grad_clip']) is float
    assert (config['seed'], config['start'], config['end_step'], config['out_dir'][:3]) == (15, 40, 9, 'ft-')
    assert demo('b.py', 'a.py')[0]['seed'] == 14  # in the order given
    assert demo('--seed=3', 'a.py', 'b.py')[0]['seed'] == 3  # the command line wins wherever it stands
    assert demo(str(tmp_path / 'a.py'), cwd=ROOT)[0]['seed'] == 14


@pytest.mark.parametrize('text, name, value', [
    ('batch_size = 1e6', 'batch_size', 1000000), ('end_step = 2.0', 'end_step', 2), ('grad_clip = 3', 'grad_clip', 3.0),
    ('checkpointing = True', 'checkpointing', 'full'), ('checkpointing = False', 'checkpointing', False),
    ('import numpy as np\nbatch_size = np.int64(4)', 'batch_size', 4),
    ('import numpy as np\nbatch_size = np.float64(4)', 'batch_size', 4),
    ('import numpy as np\nbatch_size = np.prod([2, 3])', 'batch_size', 6),
    ('import numpy as np\ngrad_clip = np.float32(0.5)', 'grad_clip', 0.5),
    ('import numpy as np\ngrad_clip = np.int8(2)', 'grad_clip', 2.0),
    ('from numpy import sqrt\ngrad_clip = sqrt(4.0)', 'grad_clip', 2.0),
    ('import numpy as np\ncompile = np.bool_(False)', 'compile', False),
    ('import numpy as np\ncheckpointing = np.bool_(True)', 'checkpointing', 'full'),
    ('import numpy as np\nout_dir = np.str_("x")', 'out_dir', 'x'),
    ('globals()[3] = 4\nseed = 5', 'seed', 5),
    ('\ufeffseed = 3\r\n\r\nbatch_size = 4\r\n', 'batch_size', 4),
])
def test_config_values(demo, tmp_path, text, name, value):
    (tmp_path / 'good.py').write_bytes(text.encode())
    config, _ = demo('good.py')
    assert config[name] == value and type(config[name]) is type(value)


def test_switch_before_a_config_file(demo, tmp_path):
    (tmp_path / 'a.py').write_text('seed = 5')
    config, given = demo('--compile', 'a.py', '--fuse', '--batch_size', '3')
    assert given == ['batch_size', 'compile', 'fuse', 'seed'] and config['seed'] == 5
    assert (config['compile'], config['fuse'], config['batch_size']) == (True, True, 3)
    assert 'no such config file' in demo('a.py', 'folder.py', rc=2)
    (tmp_path / 'folder.py').mkdir()
    assert 'no such config file' in demo('a.py', 'folder.py', rc=2)


@pytest.mark.parametrize('locale', [dict(LC_ALL='C', PYTHONCOERCECLOCALE='0', PYTHONUTF8='0'), dict(LC_ALL='C.UTF-8'),
                                    dict(PYTHONIOENCODING='ascii')])
def test_letters_beyond_ascii(tmp_path, locale):
    """A value is kept byte by byte; what cannot be printed is escaped, in errors and in --help."""
    script = SCRIPT.replace('Train a thing', 'Ein Übel').replace('where files go', 'Größe — wo')
    script += 'import os\nprint(os.fsencode(out_dir))\n'
    (tmp_path / 'demo.py').write_text(script, encoding='utf-8')

    def run(*args):
        return subprocess.run([sys.executable, '-W', 'error', str(tmp_path / 'demo.py'), ROOT, *args], cwd=tmp_path,
                              env={**os.environ, **locale}, capture_output=True)
    word = b'Gr\xc3\xb6\xc3\x9fe\xff'     # the last byte is no UTF-8
    done = run(b'--out_dir=' + word)
    assert done.returncode == 0 and eval(done.stdout.splitlines()[-1]) == word, done.stderr
    for arg in (b'--seed=' + word, word, word + b'.py', b'--' + word + b'=1'):
        done = run(arg)
        assert done.returncode == 2 and done.stderr.count(b'\n') == 1, done.stderr
        assert done.stderr.startswith(b'demo.py: ') and b'Gr' in done.stderr and b'Traceback' not in done.stderr
    done = run('--help')
    assert done.returncode == 0 and b'Ein ' in done.stdout and done.stderr == b''


def test_one_line_under_torchrun(fork, tmp_path):
    """Two ranks find the same fault, and after it is told none goes on."""
    script = SCRIPT.replace('sys.argv.pop(1)', repr(ROOT))
    demo = tmp_path / 'demo.py'
    demo.write_text(script + (
        'import torch.distributed as dist\nfrom configurator import fail\ndist.init_process_group("gloo")\n'
        'if seed == 1 and dist.get_rank() == 1:\n    fail("mine", 1, every_rank=True)\n'
        'if seed == 1:\n    dist.barrier()\n'
        'fail("both")\n'))
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
                           str(demo)], env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if 'demo.py: ' in line and 'FAILED' not in line] == \
        ['demo.py: both']
    ranks = dict(script=str(demo), tiny_args=False, nproc=2, warn=False)
    assert fork(tmp_path, '--batch_sise=4', rc=2, patient=True, **ranks).endswith('nearest name: batch_size')
    done = fork(tmp_path, '--seed=1', rc=1, **ranks)
    assert [line for line in done.err.splitlines() if line.startswith('demo.py: ')] == ['demo.py: mine']


@pytest.mark.parametrize('rank, local_rank, world_size, port', [
    ('1', '0', '1', '29500'), ('0', '0', '0', '29500'), ('0', '0', '1', '99999'), ('0', '1', '2', '29500')])
def test_ranks_that_cannot_be(monkeypatch, capsys, rank, local_rank, world_size, port):
    """What a job's script has set wrongly would make a rank wait for ever."""
    from configurator import under_torchrun
    names = dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=world_size, MASTER_PORT=port, MASTER_ADDR='localhost')
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        under_torchrun()
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and f'RANK={rank}' in error and port in error


def test_ranks_by_hand_speak_each_for_itself(monkeypatch, capsys):
    """torchrun says how many it starts on a machine; without that, the one that speaks may be elsewhere."""
    from configurator import fail
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT'):
        monkeypatch.setenv(name, '1' if 'RANK' in name else '2')
    monkeypatch.setenv('MASTER_ADDR', 'localhost')
    for local_world_size, told in [(None, 1), ('2', 0)]:
        if local_world_size:
            monkeypatch.setenv('LOCAL_WORLD_SIZE', local_world_size)
        with pytest.raises(SystemExit):
            fail('wrong')
        assert capsys.readouterr().err.count('wrong') == told


def test_a_terminal_s_passing_line_gives_way(capsys):
    from configurator import tell
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    tell('step 1', terminal, passing=True)
    tell('warning\x1b', terminal)
    assert terminal.getvalue() == '\r\x1b[Kstep 1\r\x1b[Kwarning\\x1b\n'
    tell('nowhere', None)
    assert capsys.readouterr() == ('', '')


def test_fuzz(tmp_path, monkeypatch, capsys):
    """Whatever the words are: they are taken, or there is one line."""
    monkeypatch.syspath_prepend(ROOT)
    from configurator import configure
    (tmp_path / 'demo.py').write_text(SCRIPT)
    (tmp_path / 'a.py').write_text('seed = 3'), (tmp_path / 'd.py').mkdir()
    monkeypatch.chdir(tmp_path)
    space = {'__file__': str(tmp_path / 'demo.py'), '__doc__': None}
    exec(SCRIPT[SCRIPT.index('# ---- output'):SCRIPT.index('# ---- end')], space)
    draw = random.Random(0)
    parts = ['--', '-', '=', '==', '', ' ', 'a.py', 'd.py', '.py', '\n', '\0', '\udcff', 'é', '\x1b[0m', '1', '1e9',
             '9' * 5000, '-1', '0', 'True', 'None', 'nan', '1_0',
             '٣', "'", '"', '\\', '{}', '%s', '*', 'x' * 300, '/', '..', *NAMES]
    taken = 0
    for _ in range(3000):
        argv = [''.join(draw.choices(parts, k=draw.randint(0, 3))) for _ in range(draw.randint(1, 2))]
        if draw.random() < 0.7:
            argv[0] = f'--{draw.choice(NAMES)}={draw.choice(parts)}'
        try:
            configure(dict(space), argv)
            taken += 1
        except SystemExit as stop:
            out, err = capsys.readouterr()
            assert stop.code == 2 and err.count('\n') == 1 and out == '' and len(err) < 20000, (argv, err)
    assert 300 < taken < 2000


@pytest.mark.parametrize('text, words', [
    ('seed = 1\nbatch_sise = 4\n', ['bad.py:2:', "'batch_sise'", 'nearest name: batch_size']),
    ('seed = 1\n\nbatch_size = "4"\n', ['bad.py:3:', 'batch_size', 'an int', "'4'"]),
    ('compile = 1\n', ['bad.py:1:', 'compile', 'True or False']),
    ('batch_size = 1.5\n', ['bad.py:1:', 'batch_size', 'an int']),
    ('batch_size = float("inf")', ['an int, not inf']), ('batch_size = 10**6000', ['an int below 2**63, not this int']),
    ('grad_clip = 2**1024 - 1', ['a finite number']), ('out_dir = 10**6000', ['a string, not this int']),
    ('out_dir = "a\\0b"', ["a string, not 'a\\x00b'"]), ('seed = list(range(9999))', ['an int, not [0, 1,', '...\n']),
    ('class A:\n    def __repr__(self): return 1 / 0\nseed = A()', ['bad.py:3:', 'an int, not this A']),
    ('class E(BaseException):\n    def __str__(self): return 1 / 0\nraise E', ['bad.py:3:', 'E: this E']),
    ('checkpointing = 1', ["False or 'full' or 'selective', not 1"]),
    ('import numpy as np\nseed = np.float32(1.5)', ['bad.py:2:', 'an int', '1.5']),
    ('import numpy as np\nseed = np.arange(2)', ['bad.py:2:', 'an int']),
    ('a' * 3000 + ' = ', ['bad.py:1:', 'SyntaxError']), ('(' * 3000, ['bad.py:1:']),
    ('\ufeff\ufeffseed = 1', ['bad.py:1:']),
    ('out_dir = 3\n', ['bad.py:1:', 'out_dir', 'a string']),
    ('fuse = 3\n', ['fuse takes a string or True or False, not 3']),
    ('dtype = None\n', ['dtype takes a string, not None']), ('out_dir = None\n', ['a string']),
    ('grad_clip = float("nan")\n', ['grad_clip', 'number']),
    ('checkpointing = "half"\n', ['checkpointing', "'full'", "'half'"]),
    ('import os\nseed = os\n', ['bad.py:2:', 'seed', 'an int']),
    ('seed = [1]\n', ['seed', 'an int']),
    ('seed = 1\nbatch_size = = 4\n', ['bad.py:2:', 'SyntaxError']),
    ('seed = 1\nseed = nowhere\n', ['bad.py:2:', 'NameError', 'nowhere']),
    ('def f():\n    return 1 / 0\nseed = f()\n', ['bad.py:2:', 'ZeroDivisionError']),
    ('seed = 1\nraise ValueError("two\\nlines")', ['bad.py:2:', 'two lines']),
    ('import sys\nsys.exit("stop")', ['bad.py:2:', 'SystemExit', 'stop']),
    ('seed = "\0"', ['bad.py:1:']),
    ('from math import pi\n', ['bad.py:1:', "'pi'"]),
])
def test_bad_config_file(demo, tmp_path, text, words):
    (tmp_path / 'bad.py').write_text(text)
    line = demo('bad.py', rc=2)
    assert line.startswith('demo.py: ') and all(word in line for word in words), line


def test_config_is_looked_up_beside_configurator(tmp_path):
    """config/x.py works from any directory: the working directory comes first, then the configurator's own folder."""
    repo, away = tmp_path / 'repo', tmp_path / 'away'
    (repo / 'config').mkdir(parents=True), away.mkdir()
    (repo / 'configurator.py').write_bytes(open(os.path.join(ROOT, 'configurator.py'), 'rb').read())
    (repo / 'run.py').write_text('from configurator import configure\nsize = 1\nconfigure(globals())\nprint(size)\n')
    (repo / 'config' / 'x.py').write_text('size = 2')

    def size():
        return subprocess.run([sys.executable, str(repo / 'run.py'), 'config/x.py'], cwd=away, capture_output=True,
                              text=True, check=True).stdout
    assert size() == '2\n'
    (away / 'config').mkdir(), (away / 'config' / 'x.py').write_text('size = 3')
    assert size() == '3\n'


@pytest.mark.parametrize('args', [['--help'], ['-h'], ['--seed=1', 'nothing.py', '--help']])
def test_help(demo, args):
    text = demo(*args, raw=True)
    lines = text.splitlines()
    assert text.startswith('Train a thing.') and 'usage: python demo.py [config.py ...] [--name=value ...]' in lines
    order = [lines.index(title) for title in ('output:', 'data:', 'optimizer:')]
    assert order == sorted(order) and 'end:' not in lines and 'remark' not in text
    rows = {line.split('=')[0].strip(): (i, line) for i, line in enumerate(lines) if line.startswith('  --')}
    assert list(rows) == ['--' + name for name in NAMES]
    assert order[1] < rows['--batch_size'][0] < order[2] < rows['--grad_clip'][0]
    assert rows['--batch_size'][1].split(None, 1) == ['--batch_size=12', 'rows per micro-batch on each rank']
    assert rows['--mark'][1].split(None, 1) == ["--mark='#'", 'after a hash']
    assert rows['--grad_clip'][1].endswith("'#' is no comment in a string; 0 disables")
    assert rows['--reshard'][1].endswith("None | True | False | 'auto'")
    assert 'belongs' not in text and 'nor does' not in text
    assert max(map(len, lines)) <= 120


def test_help_with_plain_section_comments(tmp_path):
    (tmp_path / 'run.py').write_text(
        f'import sys\nsys.path.insert(0, {ROOT!r})\nfrom configurator import configure\n# ' + '-' * 77 +
        '\n# defaults for a small run\n# data\nsize = 1  # ' + 'word ' * 40 +
        '\n# model\nwide = 2\n# ' + '-' * 77 + '\nconfigure(globals())\n')
    env = {**os.environ, 'COLUMNS': '80'}
    out = subprocess.run([sys.executable, str(tmp_path / 'run.py'), '--help'], env=env, capture_output=True, text=True,
                         check=True).stdout
    lines = out.splitlines()
    assert lines.index('data:') < lines.index('model:') and 'defaults' not in out
    assert max(map(len, lines)) <= 80 and out.count('word') == 40
    silent = subprocess.run([sys.executable, str(tmp_path / 'run.py'), '--help'], env={
        **env, 'RANK': '1', 'LOCAL_RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29999'},
                            capture_output=True, text=True, check=True)
    assert silent.stdout == silent.stderr == ''


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_full_and_closed_streams(tmp_path):
    """The exit code stays, and what belongs on stderr goes nowhere else."""
    (tmp_path / 'demo.py').write_text(SCRIPT)
    start = f'{shlex.quote(sys.executable)} demo.py {shlex.quote(ROOT)}'
    for command, code in [('--help >/dev/full', 0), ('--batch_sise=4 2>/dev/full', 2), ('--batch_sise=4 2>&-', 2)]:
        done = subprocess.run(f'{start} {command}', shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (code, '', ''), command


def test_help_whose_reader_has_gone(tmp_path):
    (tmp_path / 'demo.py').write_text(SCRIPT)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, str(tmp_path / 'demo.py'), ROOT, '--help'], stdout=writing,
                          stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 0 and done.stderr == ''
