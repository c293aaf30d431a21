"""A tiny dataset, and three ways to run train.py on it: as a user does, by torchrun, and by a quick fork."""
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

torch.set_num_threads(1)        # a core for each of two processes
signal.signal(signal.SIGINT, signal.default_int_handler)     # ignored in a shell's background, also by children
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')      # read when triton is imported, by whichever test comes first

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, 'train.py')
UNSET = 'WANDB', 'TORCH_', 'PYTHONUNBUFFERED'       # unbuffered, two ranks' lines would mix
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith(UNSET)}, 'OMP_NUM_THREADS': '1',
       'PYTHONDONTWRITEBYTECODE': '1', 'CUDA_VISIBLE_DEVICES': '', 'OBJC_DISABLE_INITIALIZE_FORK_SAFETY': 'YES'}
TINY = ('--device=cpu --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=4 '
        '--gradient_accumulation_steps=2 --max_iters=20 --warmup_iters=4 --lr_decay_iters=20 '
        '--learning_rate=1e-3 --min_lr=1e-4 --eval_interval=10 --eval_iters=3').split()

# Importing torch takes seconds, so one process does it once, and each job is a fork of it that becomes the script.
SERVER = r'''
import gc, json, os, runpy, signal, sys, time, warnings
import numpy, torch, torch._dynamo, torch.distributed.checkpoint.state_dict, safetensors.torch
import codecs, collections, concurrent.futures, ctypes.util, getpass, hmac, http.client, multiprocessing, tempfile
import urllib.request, zipfile
sys.path[0] = sys.argv[1]
import kernels      # its operators take longer than a short run
job, child, replies = None, False, os.dup(1)
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    ranks = {}
    for rank in range(job['nproc'] or 1):
        if (pid := os.fork()) == 0:
            child = True
            break
        ranks[pid] = None
    else:
        deadline = time.monotonic() + 120   # against a hang
        while None in ranks.values():
            for pid in [p for p, rc in ranks.items() if rc is None]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ranks[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline or any(ranks.values()) and not job['patient']:
                for pid in [p for p, rc in ranks.items() if rc is None]:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        os.write(replies, (json.dumps(list(ranks.values())) + '\n').encode())
        continue
    break
if child:
    signal.alarm(150)   # ends it even if nobody is left to do so
    for number, name in ((0, os.devnull), (1, job['stdout']), (2, job['stderr'])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.close(replies)
    os.chdir(job['cwd'])
    os.environ.update(job['env'])
    if job['nproc']:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job['nproc']), MASTER_PORT=job['port'],
                          LOCAL_WORLD_SIZE=str(job['nproc']), MASTER_ADDR='127.0.0.1')
    script, sys.argv = job['argv'][0], job['argv']
    sys.path[0], sys.pycache_prefix, sys.dont_write_bytecode = os.path.dirname(script), job['cache'], False
    exec(job['before'])
    if job['warn']:
        warnings.simplefilter('error')
    code = 0
    try:
        g = runpy.run_path(script, run_name='__main__')
        exec(job['after'])
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())     # train.py has its own
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)      # taking torch down orderly takes as long as the whole run
'''


WORKER = int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])      # pytest-xdist's processes: gw0 and gw1
_ports = itertools.cycle(range(20000 + WORKER % 2 * 5000, 25000 + WORKER % 2 * 5000))
for _ in range(os.getpid() * 100 % 5000):       # test runs side by side
    next(_ports)


def free_port():
    """A port nobody listens on, of those that no system gives to outgoing connections, each once: it stays free."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(('127.0.0.1', port))
            return str(port)


# code for fork(before=...): the same in the script's process
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


@contextlib.contextmanager
def full_disk(size):
    """No file grows beyond so many bytes: to whoever writes, a full disk."""
    resource = pytest.importorskip('resource')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree(folder):
    """{path: (size, mtime, inode)} of everything below: equal if nothing has been written there."""
    found = {}
    for here, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(here, name)
            s = os.stat(path, follow_symlinks=os.path.exists(path))     # a link may lead nowhere
            found[os.path.relpath(path, folder)] = s.st_size, s.st_mtime_ns, s.st_ino
    return found


def judged(argv, rc, codes, out, err, before, cwd, script='train.py'):
    """The run's output after the checks that hold for every run."""
    told = f'{" ".join(argv)}\n{out}\n{err}'
    assert rc is None or (rc in codes if rc else not any(codes)), f'exit codes {codes}, not {rc}: {told}'
    if rc == 2:     # a fault found before the start: one line, and nothing written
        own = [line for line in err.splitlines() if line.startswith(f'{script}: ')]
        assert len(own) == 1 and 'Traceback (most recent' not in own[0], told
        assert tree(cwd) == before, told
        return own[0]
    return SimpleNamespace(out=out, err=err, codes=codes)


@pytest.fixture(scope='session')
def fork_server(tmp_path_factory):
    if not hasattr(os, 'fork'):
        pytest.skip('needs os.fork')
    server = subprocess.Popen([sys.executable, '-c', SERVER, ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env=ENV)
    yield server, tmp_path_factory.mktemp('output')
    server.stdin.close()
    server.wait()
    server.stdout.close()


@pytest.fixture(scope='session')
def fork(fork_server, tiny):
    """fork(cwd, *args, rc=0, nproc=None, before='', after='', env={}, patient=False): train.py at TINY's settings
    within half a second, every warning an error. before and after: code around it, g are its globals. Returns its
    output and .codes by rank; for rc=2 the one line of its message. A rank that fails ends the others unless patient.
    notes: how many lines a script that succeeds has to say on stderr."""
    server, folder = fork_server

    def run(cwd, *args, rc=0, nproc=None, before='', after='', env={}, patient=False, script=TRAIN, tiny_args=True,
            warn=True, stdout=None, notes=0):
        for name in ('stdout', 'stderr'):
            (folder / name).unlink(missing_ok=True)
        argv = [script, *([f'--dataset={tiny}', *TINY] if tiny_args else []), *map(str, args)]
        there = tree(cwd)
        if rc == 2 and patient:     # configurator.fail: the ranks that are silent wait 5 s for the one that speaks
            before = 'import time; sleep = time.sleep; time.sleep = lambda s: sleep(s / 10)\n' + before
        server.stdin.write(json.dumps(dict(argv=argv, cwd=str(cwd), nproc=nproc, port=free_port(), before=before,
                                           after=after, env=env, patient=patient, warn=warn,
                                           stdout=stdout or str(folder / 'stdout'), stderr=str(folder / 'stderr'),
                                           cache=str(folder / 'cache'))) + '\n')
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        out, err = [(folder / n).read_text() if (folder / n).exists() else '' for n in ('stdout', 'stderr')]
        assert rc not in (2, 130, 143) or 'Traceback (most recent' not in err, err
        name = os.path.basename(script)
        assert rc != 0 or not warn or [line.partition(': ')[0] for line in err.splitlines()] == [name] * notes, err
        return judged(argv, rc, codes, out, err, there, cwd, name)
    return run


@pytest.fixture(scope='session')
def train(tiny):
    """train(cwd, *args, rc=0, nproc=None, env={}): train.py at TINY's settings by a process of its own, or torchrun."""
    def run(cwd, *args, rc=0, nproc=None, env={}, script=TRAIN):
        argv = [sys.executable, '-W', 'error', script]
        if nproc:
            argv = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}', script]
        argv += [f'--dataset={tiny}', *TINY, *map(str, args)]
        there = tree(cwd)
        done = subprocess.run(argv, cwd=cwd, env={**ENV, **env}, capture_output=True, text=True, timeout=300)
        return judged(argv, rc, [done.returncode], done.stdout, done.stderr, there, cwd)
    return run


def write_dataset(folder, text):
    """train.bin, val.bin and meta.json of a text's characters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'input.txt').write_text(text)
    script = os.path.join(ROOT, 'data', 'shakespeare_char', 'prepare.py')
    subprocess.run([sys.executable, script, f'--input={folder / "input.txt"}', f'--out_dir={folder}'], check=True,
                   capture_output=True)
    return folder


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """A folder with about 18,000 tokens for training and 2,000 for validation: nonsense, one token per character."""
    draw = random.Random(1)
    words = [''.join(draw.choices('abcdefghijklmnopqrstuvwxyz', k=draw.randint(1, 8))) for _ in range(300)]
    text = ''
    while len(text) < 20000:
        text += ' '.join(draw.choices(words, k=draw.randint(3, 9))).capitalize() + draw.choice('.,!?\n') + '\n'
    return write_dataset(tmp_path_factory.mktemp('data') / 'tiny', text[:20000])


def log_of(out):
    """(steps, evaluations) of out_dir's log.jsonl, each {iter: record}."""
    records = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    steps, evals = [r for r in records if 'loss' in r], [r for r in records if 'val_loss' in r]
    assert len(steps) == len({r['iter'] for r in steps}) and len(evals) == len({r['iter'] for r in evals}), 'repeated'
    return {r['iter']: r for r in steps}, {r['iter']: r for r in evals}


WORST = {}      # {(mode, what): the largest difference that the tests of this session have measured}


def record(mode, what, difference):
    """Note a difference of a mode from plain training, or from plain autograd, for the table at the session's end."""
    WORST[mode, what] = max(difference, WORST.get((mode, what), 0.0))
    return difference


def pytest_sessionfinish(session):
    if hasattr(session.config, 'workeroutput'):     # one of two processes: what it has measured goes to the first
        session.config.workeroutput['worst'] = [[*key, value] for key, value in WORST.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for mode, what, difference in getattr(node, 'workeroutput', {}).get('worst', []):
        record(mode, what, difference)


def pytest_terminal_summary(terminalreporter):
    modes, kinds = ([*dict.fromkeys(key[i] for key in WORST)] for i in (0, 1))
    if WORST:
        terminalreporter.section('worst differences from plain training and plain autograd')
        terminalreporter.line(' ' * 8 + ''.join(f'{kind:>16}' for kind in kinds))
    for mode in modes:
        cells = [f'{WORST[mode, kind]:.1e}' if (mode, kind) in WORST else '' for kind in kinds]
        terminalreporter.line(f'{mode:8}' + ''.join(f'{cell:>16}' for cell in cells))


def ckpt_of(out, name='ckpt.pt'):
    return torch.load(out / name, map_location='cpu', weights_only=True)


SLOW = ['test_data', 'test_resume', 'test_faults', 'test_train', 'test_modes', 'test_ghost', 'test_data_slow',
        'test_bench', 'test_ddp', 'test_dumps', 'test_data_value', 'test_parallel', 'test_muon', 'test_classify',
        'test_retrain', 'test_find_noise']


def pytest_collection_modifyitems(items):
    """The quick files first, so that a fault shows early; then the longest first: two processes end together."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else -1)
