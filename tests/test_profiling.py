"""Where time and memory go, and what log.jsonl and config.json say of a run's ranks and origin."""
import gzip
import json
import subprocess
import sys

import pytest
import torch
from conftest import ENV, ROOT, log_of

sys.path.insert(0, ROOT)
from checkpoint import git_commit  # noqa: E402


@pytest.fixture(scope='module')
def profiled(fork, tmp_path_factory):
    """(what it prints, out_dir) of five steps by two ranks under DDP, two of them profiled."""
    cwd = tmp_path_factory.mktemp('profiled')
    done = fork(cwd, '--max_iters=5', '--eval_iters=1', '--profile_steps=2', nproc=2, warn=False)
    return done.out, cwd / 'out'


def test_traces_and_tables_show_exchanges(profiled):
    printed, out = profiled
    assert sorted(path.name for path in (out / 'profile').iterdir()) == [
        f'rank{rank}.{kind}' for rank in (0, 1) for kind in ('json.gz', 'txt')]
    assert printed.count('profiled: ') == 1 and 'rank0.json.gz' in printed
    for rank in 0, 1:
        with gzip.open(out / 'profile' / f'rank{rank}.json.gz') as file:
            names = [event.get('name', '') for event in json.load(file)['traceEvents']]
        assert sum(name.startswith('Optimizer.step') for name in names) == 2
        assert 'gloo:all_reduce' in names
        assert 'gloo:all_reduce' in (out / 'profile' / f'rank{rank}.txt').read_text()


def test_largest_loss_of_a_rank(profiled):
    steps, _ = log_of(profiled[1])
    assert len(steps) == 5
    for record in steps.values():       # two ranks, whose mean is the loss: they read other samples
        assert record['loss'] < record['loss_max'] < 1.03 * record['loss'] and record['alloc_retries'] is None


def test_config_tells_the_origin(profiled):
    config = json.loads((profiled[1] / 'config.json').read_text())
    assert config['torch_version'] == torch.__version__ and config['world_size'] == 2
    assert config['command_line'].endswith('--max_iters=5 --eval_iters=1 --profile_steps=2')
    assert config['git_commit'] == git_commit(ROOT) and config['max_iters'] == 5


def test_profiling_changes_nothing_and_a_resumed_run_goes_on(profiled, fork, tmp_path):
    done = fork(tmp_path, '--max_iters=2', '--eval_iters=1', '--profile_steps=1', '--gradient_accumulation_steps=2')
    assert 'nothing is profiled: this run ends after 2 steps' in done.out
    done = fork(tmp_path, '--max_iters=5', '--eval_iters=1', '--init_from=resume')
    a, b = log_of(profiled[1])[0], log_of(tmp_path / 'out')[0]
    assert all(a[i]['loss'] == pytest.approx(b[i]['loss'], rel=2e-6) and b[i]['loss_max'] == b[i]['loss'] for i in b)
    assert 'git_commit' not in done.out and 'command_line' not in done.out      # no setting that has changed


def test_a_profiled_run_goes_on(profiled, fork):
    cwd = profiled[1].parent
    done = fork(cwd, '--init_from=resume', '--max_iters=6', '--eval_iters=1', nproc=2, warn=False)
    assert 'resuming from' in done.out


def test_memory_needs_a_gpu(fork, tmp_path):
    line = fork(tmp_path, '--profile_memory=True', rc=2)
    assert "profile_memory=True records a GPU's allocations, and device is cpu" in line


def test_git_commit_is_read_from_the_files(tmp_path):
    def git(*args):
        done = subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=b', *args], cwd=tmp_path / 'repo', env={
            **ENV, 'GIT_CONFIG_GLOBAL': '/dev/null'}, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    assert git_commit(tmp_path) is None
    (tmp_path / 'repo').mkdir()
    try:
        git('init', '-q')
    except OSError:
        pytest.skip('no git')
    assert git_commit(tmp_path / 'repo') is None        # no commit yet
    git('commit', '-q', '--allow-empty', '-m', 'a')
    commit = git('rev-parse', 'HEAD')
    git('worktree', 'add', '-q', '../other')
    assert git_commit(tmp_path / 'repo') == git_commit(tmp_path / 'other') == commit
    git('pack-refs', '--all')
    assert git_commit(tmp_path / 'repo') == git_commit(tmp_path / 'other') == commit
    git('checkout', '-q', '--detach')
    assert git_commit(tmp_path / 'repo') == commit
    (tmp_path / 'repo' / '.git' / 'HEAD').write_bytes(b'\xff\0')
    assert git_commit(tmp_path / 'repo') is None
