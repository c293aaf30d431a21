"""A short run of each mode, against plain training: what scripts/test.sh quick runs beside the tests without runs."""
import pytest
from conftest import log_of, record
from modes_helper import DUMP, GHOST, MODES, launch, read_dcp, read_dots, relative


@pytest.fixture(scope='module')
def plain(fork, tmp_path_factory):
    cwd = tmp_path_factory.mktemp('plain')
    launch(fork, cwd, 'plain', '--max_iters=4')
    return log_of(cwd / 'out')


@pytest.fixture(scope='module')
def both(fork, tmp_path_factory):
    cwd = tmp_path_factory.mktemp('both')
    launch(fork, cwd, 'plain', *GHOST, *DUMP, '--max_iters=4')
    return cwd / 'out'


def test_ghost_and_dumps_leave_training_as_it_was(plain, both):
    steps, _ = log_of(both)
    assert [steps[i]['loss'] for i in range(4)] == [plain[0][i]['loss'] for i in range(4)]


@pytest.mark.parametrize('mode', ['ddp2', 'fsdp2'])
def test_modes_train_as_plain(fork, tmp_path, plain, both, mode):
    assert MODES[mode][0] == 2
    launch(fork, tmp_path, mode, *GHOST, *DUMP, '--max_iters=4')
    (steps, evals), (steps1, evals1) = log_of(tmp_path / 'out'), plain
    assert steps.keys() == steps1.keys() == set(range(4)) and evals.keys() == evals1.keys() == {0, 4}
    worst = max(abs(steps[i][k] / steps1[i][k] - 1) for i in steps for k in ('loss', 'grad_norm'))
    assert record(mode, 'losses, norms', worst) < 2e-6
    dots, dots1 = (read_dots(out)['dot_product'] for out in (tmp_path / 'out', both))
    assert record(mode, 'ghost dots', ((dots - dots1).abs().max() / dots1.abs().max()).item()) < 1e-5
    gradients = [read_dcp(out / 'gradient_dumper' / 'step0' / 'sharded') for out in (tmp_path / 'out', both)]
    assert record(mode, 'gradients', relative(*gradients)) < 1e-6
