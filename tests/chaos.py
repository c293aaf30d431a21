"""
Kill runs at random moments, start them again, and compare what they leave with unbroken runs, bit for bit.

    python tests/chaos.py [--kills=N] [--seed=S] [--only=WORD]
    python tests/chaos.py --exits=N [--leave=False]

kills: of every form, 2 by default; seed: of their moments; only: forms with this word in their name. By hand, not by
pytest: it takes some minutes. Exit code 1 if a run did not recover; its folder is kept.

exits: instead, so many short FSDP runs of two ranks come to their end, with gloo's threads slowed down, and how they
ended is counted; leave=False: without checkpoint.leave, and then some of them abort (-6).
"""
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import torch._dynamo                        # here once, not in every life: it takes seconds
import torch.distributed.fsdp  # noqa: F401

from conftest import ROOT, TINY, TRAIN, free_port, write_dataset
from modes_helper import read_dcp, read_dots  # and lets the next one be found
import checkpoint
from weights import read_checkpoint

STEPS = 60
MODES = {'plain': [], 'ddp2': [], 'fsdp2': ['--use_fsdp=True']}
FORMATS = {'full': [], 'sharded': ['--checkpoint_format=sharded'],
           'async': ['--checkpoint_format=sharded', '--checkpoint_async=True']}
EXTRAS = {'bare': [], 'ghost': ['--use_ghost=True', '--ghost_per_param=True', '--ghost_save_interval=4'],
          'dumps': ['--grad_dump=True', '--grad_dump_step_interval=7']}
TIMES = ('ms', 'tokens_per_s', 'mfu', 'memory_gib')     # in log.jsonl


def become_rank(argv, rank, ranks, port, told, ends):
    """In a fork: run train.py to its end, as this rank; what it prints goes to a file. ends: let Python end, too."""
    code = 1
    try:
        file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_PORT=port,
                              LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1')
        sys.path[0], sys.argv = ROOT, [TRAIN, *argv]
        runpy.run_path(TRAIN, run_name='__main__')
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    if ends:
        sys.exit(code)
    os._exit(code)      # taking torch down takes as long as the run


def live(argv, ranks, told, number=None, due=None, ends=False):
    """One life of a run; all ranks get signal `number` when due(), a function, says so. Returns their exit codes, and
    whether the signal came before the end."""
    port, pids, codes = free_port(), [], {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(argv, rank, ranks, port, told, ends)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    began = time.monotonic()
    killed, give_up_at = False, began + 300
    try:
        while len(codes) < ranks:
            for pid in set(pids) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if number and not killed and not codes and due():
                os.killpg(pids[0], number)
                killed = True
            if any(codes.values()):         # as torchrun does: a rank that has failed ends the others
                give_up_at = min(give_up_at, time.monotonic() + 10)
            if len(codes) < ranks and time.monotonic() > give_up_at:
                os.killpg(pids[0], signal.SIGKILL)
            time.sleep(0.002)
    finally:            # also after Ctrl-C, which reaches this process alone
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
    return list(codes.values()), killed


def remains(out):
    """{name: tensor or text} of what a run has left."""
    newest = read_checkpoint(str(out))
    found = {f'model.{name}': tensor for name, tensor in newest['model'].items()}
    for name, state in newest['optimizer']['state'].items():
        found.update({f'optimizer.{name}.{key}': value for key, value in state.items()})
    if (out / 'grad_dotprods').is_dir():
        found.update({f'ghost.{column}': rows for column, rows in read_dots(out).items()})
    for folder in (out / 'gradient_dumper').glob('*'):
        found.update({f'{folder.name}.{name}': tensor for name, tensor in read_dcp(folder / 'sharded').items()})
    for number, line in enumerate((out / 'log.jsonl').read_text().splitlines()):
        words = {key: value for key, value in json.loads(line).items() if key not in TIMES}
        found[f'log.jsonl line {number}'] = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
    return found


def last_logged(out):
    """The last step in log.jsonl; -1 before the first."""
    try:
        return json.loads((out / 'log.jsonl').read_text().splitlines()[-1])['iter']
    except (OSError, ValueError, LookupError):      # it may be being written
        return -1


def chaos(folder, argv, ranks, kills, draw):
    """(kills, what went wrong or '') of a run that is killed so often, beside an unbroken one; both in `folder`."""
    began = time.monotonic()
    codes, _ = live([*argv, f'--out_dir={folder / "unbroken"}'], ranks, folder / 'unbroken.txt')
    length, done = time.monotonic() - began, 0
    if any(codes):
        return done, f'the unbroken run: exit codes {codes}'
    steps = sorted(draw.sample(range(STEPS - 4), kills))        # at which it is killed
    while True:
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]) if done < kills else None
        moment = time.monotonic() + draw.uniform(0, length / 2)
        if draw.random() < 0.25:        # most likely before the first step
            def due():
                return time.monotonic() > moment
        else:
            def due():
                return last_logged(folder / 'killed') > steps[done]
        codes, killed = live([*argv, f'--out_dir={folder / "killed"}', '--init_from=auto'], ranks,
                             folder / f'killed{done}.txt', number, due)
        if not any(codes):
            break
        if not killed or (number == signal.SIGKILL and set(codes) != {-signal.SIGKILL}):
            return done, f'life {done}: exit codes {codes}'
        done += 1
    a, b = remains(folder / 'unbroken'), remains(folder / 'killed')
    differ = [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
    return done, f'{len(differ)} things differ: {", ".join(differ[:3])}' if differ else ''


def slow_gloo():
    """Let gloo's threads of this process run only where the core has nothing else to do."""
    for thread in os.listdir('/proc/self/task'):
        if 'gloo' in Path('/proc/self/task', thread, 'comm').read_text():
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def exits(number, leave, top, argv):
    """Count how the ranks of so many runs end; 1 if not all by exit code 0."""
    save, ended = checkpoint.save_checkpoint, Counter()

    def slow_down_and_save(*args):
        slow_gloo()
        save(*args)

    checkpoint.save_checkpoint = slow_down_and_save
    if not leave:
        checkpoint.leave = int      # does nothing
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    for _ in range(number):
        ended.update(live([*argv, f'--out_dir={top / "out"}', '--overwrite=True'], 2, top / 'told.txt', ends=True)[0])
    print('  '.join(f'exit code {code}: {ended[code]} ranks' for code in sorted(ended)))
    shutil.rmtree(top)
    return int(set(ended) != {0})


def main():
    if '--help' in sys.argv:
        sys.exit(print(__doc__))
    given = dict(argument.lstrip('-').split('=') for argument in sys.argv[1:])
    kills, seed, only = int(given.get('kills', 2)), int(given.get('seed', 1)), given.get('only', '')
    torch.set_num_threads(1)
    top, draw, recovered, forms = Path(tempfile.mkdtemp(prefix='chaos')), random.Random(seed), 0, 0
    data = write_dataset(top / 'data', ''.join(draw.choices('abcdefgh ,.\n', k=20000)))
    if 'exits' in given:
        argv = [f'--dataset={data}', *TINY, '--use_fsdp=True', '--max_iters=1', '--eval_iters=1']
        return exits(int(given['exits']), given.get('leave') != 'False', top, argv)
    print(f'{"form":22} kills  recovered')
    for format, mode, extra in product(FORMATS, MODES, EXTRAS):
        form = f'{format} {mode} {extra}'
        if only not in form:
            continue
        folder = top / form.replace(' ', '_')
        folder.mkdir()
        argv = [f'--dataset={data}', *TINY, f'--max_iters={STEPS}', f'--lr_decay_iters={STEPS}',
                '--checkpoint_interval=3', '--keep_checkpoints=2', *FORMATS[format], *MODES[mode], *EXTRAS[extra]]
        done, problem = chaos(folder, argv, 1 if mode == 'plain' else 2, kills, random.Random(f'{seed} {form}'))
        print(f'{form:22} {done:5}  {"no: " + problem if problem else "yes"}', flush=True)
        forms += 1
        if not problem:
            recovered += 1
            shutil.rmtree(folder)
    if recovered < forms:
        print(f'{forms - recovered} of {forms} have not recovered: {top}')
        return 1
    shutil.rmtree(top)
    return 0


if __name__ == '__main__':
    sys.exit(main())
