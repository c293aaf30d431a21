"""README and docs/: links lead somewhere, and commands name scripts, config files and settings that exist."""
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [Path(ROOT, 'README.md'), *sorted(Path(ROOT, 'docs').glob('*.md'))]
PASS_ON = {'scripts/bench.py', 'scripts/find_noise.py', 'scripts/quickstart.sh', 'scripts/slurm.sh'}    # to train.py


def anchors(page):
    headings = re.findall(r'^#+ (.*)', page.read_text(encoding='utf-8'), re.M)
    return [re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings]


def commands(page):
    """The words of every command in the page's code; a setting may stand alone."""
    for block, span in re.findall(r'^```\n(.*?)^```|`([^`]+)`', page.read_text(encoding='utf-8'), re.M | re.S):
        for line in block.replace('\\\n', ' ').splitlines() or [span.replace('\n', ' ')]:
            line = re.sub(r'\$R\b|broken\.py', 'train.py', line)      # a run's command, and a copy that is broken
            if re.match(r'python |torchrun |sbatch |bash |sed |\$D |train\.py --|--\w', line):
                yield shlex.split(line, comments=True)


def test_readme_is_short():
    lines = PAGES[0].read_text(encoding='utf-8').splitlines()
    assert len(lines) <= 180 and any(line.startswith('torchrun') for line in lines[:50])    # 50: the first screen


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_links(page):
    text = page.read_text(encoding='utf-8')
    for target in re.findall(r'\]\((?!http)([^)]+)\)', text):
        path, _, anchor = target.partition('#')
        there = page.parent / path if path else page
        assert there.exists() and (not anchor or anchor in anchors(there)), target
    for path in re.findall(r'\b(?:config|data|scripts|tests)/[\w/]+\.(?:py|sh)\b', text):
        assert 'NAME' in path or Path(ROOT, path).is_file(), path


def test_commands(fork, tmp_path):
    helps, used = {}, []    # {script: its --help}, [(a setting, the scripts that might take it)]
    for page in PAGES:
        for words in commands(page):
            scripts = [word for word in words if re.fullmatch(r'(?!config/|NAME)[\w/]+\.(py|sh)', word)]
            settings = words        # `torchrun ... --setting` without a script is of torchrun too: left out
            if scripts:
                settings = words[words.index(scripts[0]):]
            elif words[0][:2] != '--':
                continue
            scripts += ['train.py'] if PASS_ON & set(scripts) else []
            used += [(word.partition('=')[0], scripts) for word in settings if word.startswith('--')]
            for script in set(scripts) - set(helps):
                helps[script] = ''
                if script.endswith('.py'):
                    told = fork(tmp_path, '--help', script=str(Path(ROOT, script)), tiny_args=False, warn=False)
                    helps[script] = told.out
    for name, scripts in used:      # a setting that stands alone may be of any script
        assert re.search(rf'{name}\b', ''.join(helps[script] for script in scripts or helps)), f'{scripts}: no {name}'


def test_quoted_code_stands_where_the_page_says():
    """modes.md quotes code, `Where (section 'model'): code, code`, of train.py, or `(checkpoint.py): code`."""
    page = ' '.join(Path(ROOT, 'docs', 'modes.md').read_text(encoding='utf-8').split())
    train = Path(ROOT, 'train.py').read_text(encoding='utf-8')
    places = {'checkpoint.py': ' '.join(Path(ROOT, 'checkpoint.py').read_text(encoding='utf-8').split())}
    for title, text in re.findall(r'^# ---- (.*?) -+$(.*?)(?=^# ----|\Z)', train, re.M | re.S):
        place = f"section '{title.partition(':')[0]}'"
        places[place] = places.get(place, '') + ' '.join(text.split())
    quotes = re.findall(r"\((section '[\w ]+'|\w+\.py)\): ((?:`[^`]+`,? ?)+)", page)
    assert page.count('Where (') == len(re.findall(r"Where \((?:section '[\w ]+'|\w+\.py)\): `", page)) >= 13
    for place, codes in quotes:
        for code in re.findall(r'`([^`]+)`', codes):
            assert code in places[place], f'{place}: {code}'
