"""docs/side_by_side: four short scripts, one text but for what each mode needs, give train.py's losses."""
import ast
import difflib
import re
from pathlib import Path

import pytest
from conftest import ROOT, log_of, record
from safetensors.torch import load_file

FOLDER = Path(ROOT, 'docs', 'side_by_side')
MODES = {'plain': (None, []), 'ddp': (2, []), 'fsdp': (2, ['--use_fsdp=True']), 'ghost': (None, ['--use_ghost=True'])}


@pytest.mark.parametrize('mode', MODES)
def test_gives_the_losses_of_train(fork, tiny, tmp_path, mode):
    nproc, flags = MODES[mode]
    fork(tmp_path, *flags, '--gradient_accumulation_steps=4', '--decay_lr=False', '--eval_interval=100',
         '--eval_iters=1', '--ghost_save_interval=20', nproc=nproc)
    done = fork(tmp_path, tiny, nproc=nproc, script=str(FOLDER / f'{mode}.py'), tiny_args=False)
    number = r'(-?\d[\d.e+-]*)'
    got = [[float(x) for x in row] for row in re.findall(rf'loss {number}, norm {number}', done.out)]
    want = [[r['loss'], r['grad_norm']] for r in log_of(tmp_path / 'out')[0].values()]
    assert len(got) == len(want) == 20
    worst = max(abs(a - b) / b for g, w in zip(got, want) for a, b in zip(g, w))
    assert record('short', f'{mode} loss', worst) < 2e-6
    if mode == 'ghost':
        dots = load_file(tmp_path / 'out' / 'grad_dotprods' / 'iter_000020.safetensors')['dot_product']
        for row, (low, high) in zip(dots, re.findall(rf'values {number} to {number}', done.out), strict=True):
            assert [float(low), float(high)] == pytest.approx([row.min().item(), row.max().item()], rel=1e-5, abs=1e-9)


def test_one_text_but_for_the_mode():
    plain = (FOLDER / 'plain.py').read_text(encoding='utf-8').splitlines()
    own = {path.stem for path in Path(ROOT).glob('*.py')} | {'data', 'scripts'}
    for mode in MODES:
        source = (FOLDER / f'{mode}.py').read_text(encoding='utf-8')
        lines = source.splitlines()
        changed = [line for line in difflib.ndiff(plain, lines) if line[0] in '+-']
        assert len(lines) <= 120 and len(changed) <= 45, mode
        imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)
                     for name in node.names}
        assert {name.partition('.')[0] for name in imported} & own == {'model'}, mode
