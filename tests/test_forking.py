"""docs: the lists of edits that delete a mode from train.py. What is left trains as before, bit for bit."""
import ast
import builtins
import dis
import itertools
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TRAIN, ckpt_of, log_of
from modes_helper import same

PAGE = Path(ROOT, 'docs', 'forking.md')
MENTIONS = {'ghost': 'ghost', 'FSDP': 'fsdp|hsdp', 'gradient dumps': 'grad_dump|dump_gradients|save_gradients'}
RUNS = {'plain': (None, []), 'DDP': (2, []), 'FSDP': (2, ['--use_fsdp=True']), 'ghost': (2, ['--use_ghost=True'])}


def read_recipes():
    """{mode: [(section, kind of edit, text)]} of the page's section."""
    part = PAGE.read_text(encoding='utf-8').split('## Deleting a mode\n')[1].split('\n## ')[0]
    recipes = {}
    for title, block in re.findall(r'^### ([^\n]+)\n(?:(?!###)[^\n]*\n)*?```\n(.*?)```', part, re.M | re.S):
        edits = [re.fullmatch(r'(.+?)  +(section|block|line|words)(?: +`(.+)`)?', row) for row in block.splitlines()]
        assert all(edits), block
        recipes[title] = [edit.groups() for edit in edits]
    return recipes


RECIPES = read_recipes()


def if_statement(lines, begin):
    """The end of the `if` statement that begins there: its last line's number + 1."""
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    end = begin + 1
    for i in range(begin + 1, len(lines)):
        text = lines[i].lstrip()
        inside = len(lines[i]) - len(text) > indent or text.startswith(('else:', 'elif '))
        if text and not inside:
            break
        if text:        # blank lines after it stay
            end = i + 1
    return end


def edited(lines, section, kind, text):
    """The lines after one edit of a recipe, at the first place that fits."""
    rules = [i for i, line in enumerate(lines) if line.startswith('# ----')]
    for begin, end in itertools.pairwise([0, *rules, len(lines)]):
        title = lines[begin].strip('# -').split(':')[0] if begin else 'top'
        if title != section:
            continue
        if kind == 'section':
            return lines[:begin] + lines[end:]
        for i in range(begin, end):
            if kind == 'block' and lines[i].lstrip().startswith(text):
                return lines[:i] + lines[if_statement(lines, i):]
            if kind == 'line' and text in lines[i]:
                return lines[:i] + lines[i + 1:]
            if kind == 'words' and text in lines[i]:
                return lines[:i] + [lines[i].replace(text, '', 1)] + lines[i + 1:]
    pytest.fail(f'train.py has no place for this edit: {section}, {kind}, {text}')


def without(*modes):
    """train.py's source after the recipes of these modes, in this order."""
    lines = Path(TRAIN).read_text(encoding='utf-8').split('\n')
    for edit in itertools.chain(*(RECIPES[mode] for mode in modes)):
        lines = edited(lines, *edit)
    return '\n'.join(lines)


def names_of(code, operations):
    """Module-level names on which these operations work in a code object and those inside it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    return found.union(*(names_of(c, operations) for c in code.co_consts if hasattr(c, 'co_code')))


def check_names(source):
    """Every name that is used is defined, also where none of the runs here comes, and every import is used."""
    code = compile(source, 'train.py', 'exec')
    used = names_of(code, ('LOAD_NAME', 'LOAD_GLOBAL'))
    defined = names_of(code, ('STORE_NAME', 'STORE_GLOBAL'))
    assert used - defined - set(dir(builtins)) == set()
    imports = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {(name.asname or name.name).split('.')[0] for node in imports for name in node.names}
    assert imported - used == set()


def train(fork, cwd, script, run):
    """cwd/out by one of RUNS."""
    nproc, args = RUNS[run]
    cwd.mkdir()
    fork(cwd, '--max_iters=3', '--eval_iters=1', *args, nproc=nproc, script=str(script))


def outcome(out):
    """(losses and gradient norms, weights, the bytes of what ghost writes) of a run's out_dir."""
    steps, evals = log_of(out)
    assert steps.keys() == {0, 1, 2} and evals.keys() == {0, 3}
    numbers = [(r['loss'], r['grad_norm']) for r in steps.values()]
    numbers += [(r['train_loss'], r['val_loss']) for r in evals.values()]
    return numbers, ckpt_of(out)['model'], {path.name: path.read_bytes() for path in out.glob('grad_dotprods/*')}


@pytest.fixture(scope='module')
def unedited(fork, tmp_path_factory):
    """A folder with what the train.py of this repository gives, run/out for each of RUNS."""
    folder = tmp_path_factory.mktemp('unedited')
    for run in RUNS:
        if run in ('plain', 'DDP', *RECIPES):
            train(fork, folder / run, TRAIN, run)
    return folder


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    """A folder with all that train.py imports."""
    folder = tmp_path_factory.mktemp('copy')
    (folder / 'data').mkdir()
    for path in [*Path(ROOT).glob('*.py'), *Path(ROOT, 'data').glob('*.py')]:
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def check_training(fork, tmp_path, copy, source, runs, unedited):
    """The copy with this source as its train.py gives bit for bit what the unedited one gives."""
    (copy / 'train.py').write_text(source, encoding='utf-8')
    for run in runs:
        train(fork, tmp_path / run, copy / 'train.py', run)
        (numbers, model, dots), expected = outcome(tmp_path / run / 'out'), outcome(unedited / run / 'out')
        assert numbers == expected[0] and same(model, expected[1]) and dots == expected[2], run


@pytest.mark.parametrize('mode', RECIPES)
def test_a_mode_is_deleted_by_its_recipe(fork, tmp_path, copy, unedited, mode):
    source = without(mode)
    print(f'without {mode}: {len(RECIPES[mode])} edits, {len(source.splitlines())} lines remain')
    assert len(RECIPES[mode]) <= 12
    assert [line for line in source.splitlines() if re.search(MENTIONS[mode], line, re.I)] == []
    check_names(source)
    other = {'ghost': 'FSDP', 'FSDP': 'ghost'}.get(mode)
    runs = ['plain', 'DDP', other] if other in RECIPES else ['plain', 'DDP']
    check_training(fork, tmp_path, copy, source, runs, unedited)


def test_all_modes_are_deleted_in_any_order(fork, tmp_path, copy, unedited):
    source = without(*RECIPES)
    print(f'without {", ".join(RECIPES)}: {len(source.splitlines())} lines remain')
    assert {without(*modes) for modes in itertools.permutations(RECIPES)} == {source}
    check_names(source)
    check_training(fork, tmp_path, copy, source, ['plain', 'DDP'], unedited)
    # an older checkpoint goes on, though its config has settings that are no more
    shutil.copytree(unedited / 'DDP', tmp_path / 'old')
    fork(tmp_path / 'old', '--max_iters=4', '--init_from=resume', script=str(copy / 'train.py'))
    assert 3 in log_of(tmp_path / 'old' / 'out')[0]
