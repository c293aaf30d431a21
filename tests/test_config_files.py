"""Every file in config/ is one that train.py takes and adds up; scripts/slurm.sh starts torchrun as it says."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.name for path in (ROOT / 'config').glob('*.py'))
PARAMETERS = {'train_gpt2.py': 124.4e6, 'train_gpt2_ghost.py': 124.4e6, 'train_pile_ghost.py': 124.4e6,
              'train_gpt2_medium.py': 354.6e6,
              'train_gpt2_large.py': 773.6e6, 'train_gpt2_xl.py': 1556.8e6}


def settings(*args):
    """train.py's settings with these arguments, by its own defaults and configurator; SystemExit if it refuses them."""
    sys.path.insert(0, str(ROOT))
    try:
        from configurator import configure
    finally:
        sys.path.pop(0)
    source = (ROOT / 'train.py').read_text(encoding='utf-8')
    defaults = source[source.index('# ---- run'):source.index('config, given = configure')]
    namespace = {'__file__': str(ROOT / 'train.py')}
    exec(defaults, namespace)
    return configure(namespace, list(args))[0]


@pytest.mark.parametrize('name', CONFIGS)
def test_config_is_taken(name):
    config = settings(f'config/{name}')
    assert config['n_embd'] % config['n_head'] == 0
    if name.startswith('train_'):
        assert config['warmup_iters'] < config['lr_decay_iters'] == config['max_iters']
        assert 0 < config['min_lr'] < config['learning_rate']
    if config['use_ghost']:
        assert config['ghost_val_batch_size'] % 8 == 0 and config['data_order'] == 'epoch'


@pytest.mark.parametrize('theirs, ours', [
    ('method', 'use_ghost'), ('val_batch_size', 'ghost_val_batch_size'), ('architecture', 'n_layer'),
    ('dot_prod_save_interval', 'ghost_save_interval'), ('max_steps', 'max_iters'), ('num_train_epochs', 'max_iters'),
    ('lr', 'learning_rate'), ('per-device-train-batch-size', 'batch_size'), ('warmup_steps', 'warmup_iters'),
    ('bf16', 'dtype'), ('fp16', 'dtype'),
    ('warmup_step', 'warmup_iters'), ('trainer.callbacks.grad_dump.start_step', 'grad_dump_start_step'),
    ('trainer.callbacks.grad_dump.save_first_n', 'grad_dump_save_first_n'), ('num_hidden_layers', 'n_layer'),
    ('total_epochs', 'max_iters'),
    ('output_dir', 'out_dir'), ('save_steps', 'checkpoint_interval'), ('eval_steps', 'eval_interval'),
    ('logging_steps', 'log_interval'), ('Learning_Rate', 'learning_rate'), ('n_layers', 'n_layer')])
def test_names_of_other_trainers(capsys, theirs, ours):
    with pytest.raises(SystemExit):
        settings(f'--{theirs}=1')
    assert capsys.readouterr().err.endswith(f'; nearest name: {ours}\n')


def test_every_suggested_name_is_one_of_ours():
    config = settings('--seed=1')
    from configurator import ELSEWHERE
    assert set(ELSEWHERE.values()) <= set(config) and not set(ELSEWHERE) & set(config)


@pytest.mark.parametrize('name', PARAMETERS)
def test_gpt2_sizes(name):
    """On 8 GPUs half a million tokens per step, and the number of parameters in the file's comment."""
    c = settings(f'config/{name}')
    assert c['gradient_accumulation_steps'] % 8 == 0
    assert 0.45e6 < c['batch_size'] * c['block_size'] * c['gradient_accumulation_steps'] < 0.55e6
    d = c['n_embd']
    parameters = (50304 + c['block_size']) * d + c['n_layer'] * (12 * d * d + 2 * d) + d
    assert parameters == pytest.approx(PARAMETERS[name], rel=5e-4)


def test_slurm_starts_torchrun_on_each_node(tmp_path):
    if not shutil.which('bash'):
        pytest.skip('no bash')
    fakes = tmp_path / 'bin'
    fakes.mkdir()
    for name, body in (('scontrol', 'echo first; echo second'), ('srun', 'printf "%s\\n" $OMP_NUM_THREADS "$@"')):
        (fakes / name).write_text(f'#!/bin/sh\n{body}\n'), (fakes / name).chmod(0o755)
    env = {**os.environ, 'PATH': f'{fakes}{os.pathsep}{os.environ["PATH"]}', 'SLURM_SUBMIT_DIR': str(ROOT),
           'SLURM_JOB_ID': '123456', 'SLURM_JOB_NODELIST': 'x', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_GPUS_ON_NODE': '4',
           'SLURM_CPUS_PER_TASK': '32'}
    command = ['bash', str(ROOT / 'scripts' / 'slurm.sh'), 'config/train_gpt2.py', '--out_dir=with space']
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    threads, *words = done.stdout.splitlines()
    assert threads == '8'
    assert {'--nnodes=2', '--nproc_per_node=4', '--rdzv-endpoint=first:23456', '--rdzv-backend=c10d'} < set(words)
    assert words[-4:] == ['train.py', '--init_from=auto', 'config/train_gpt2.py', '--out_dir=with space']
    done = subprocess.run(command, env={**env, 'SLURM_SUBMIT_DIR': str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'train.py' in done.stderr


@pytest.mark.parametrize('argument', ['--out_dir=mine', '--out-dir=mine', '--out_dir mine', '--out-dir mine', ''])
def test_quickstart_overwrites_its_own_folder_only(tmp_path, argument):
    """However the folder is named: another one may hold a run that is dear."""
    fake = tmp_path / 'python'
    fake.write_text(f'#!/bin/sh\ncase $1 in -m) cat >/dev/null ;; *.py) echo "$@" >> {tmp_path}/calls ;; esac\n')
    fake.chmod(0o755)
    subprocess.run(['bash', str(ROOT / 'scripts' / 'quickstart.sh'), *argument.split(), '--max_iters', '3'], check=True,
                   env={**os.environ, 'PYTHON': str(fake)}, stdin=subprocess.DEVNULL)
    train, sample = (tmp_path / 'calls').read_text().splitlines()[-2:]
    own = argument == ''
    assert f'--overwrite={own}' in train
    assert f'--out_dir={"out-quickstart" if own else "mine"}' in sample
