"""
Time train.py's own steps. train.py runs as it is, in this process, and is held after every optimizer step; so several
modes, and a nanoGPT checkout as peer, take turns step by step on the same card, and their ratios are those of pairs.

one mode, plain       python scripts/bench.py config/train_gpt2.py --batch_size=32
several, and a peer   python scripts/bench.py --modes=plain,ghost --peer=../nanoGPT config/train_gpt2.py
several processes     python scripts/bench.py --modes=plain,ddp,fsdp --nproc=2 config/train_gpt2.py
the best micro-batch  python scripts/bench.py --batch_sizes=12,32,60,120 config/train_gpt2.py
the loader alone      python scripts/bench.py --data

Modes: plain, ddp, fsdp, and each with +ghost; ghost alone is plain+ghost. All else goes to train.py, but weights are
always new ones (init_from=scratch), and nothing is evaluated or saved on the way.
Without --dataset the tokens are those of the config files' dataset if that is prepared; if not, random ones of GPT-2's
vocabulary: for a model with that vocabulary the time is the same, and the loss means nothing.

micro   ms of one micro-batch, forward and backward; with few samples, what the host takes to launch it
step    ms of one whole step: micro-batches, their data, the validation pass of ghost, clipping, optimizer
MFU     of the card's dense bfloat16 peak; n/a if that is unknown
peak    GiB of this mode alone, as PyTorch's allocator counts them; n/a on a CPU
first   seconds from train.py's start to the end of its first step: compilation, and the evaluation that comes first
data    share of the step in which the GPU (on a CPU: the program) waits for data
ratio   tokens/s over the first row's, step by step in turn; for ddp and fsdp, which run alone, per GPU and of medians
All but first and peak are medians over --steps steps, after a first and a warm-up step.

--data: train.py's own loader on a sparse train.bin of 20 GB (or --dataset), for each data_order
open    seconds from train.py's start to the end of its first step, on a tiny model and with all its imports made before
batch   us for one micro-batch (12 x 1024 unless set otherwise): the choice of its offsets, and reading
offsets us of it for the choice; both are medians of 10,000 batches
memory  MiB by which the process has grown after those batches; without psutil its peak, on Windows then n/a
"""
import argparse
import gc
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from types import SimpleNamespace

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import configure     # before torch: it makes Ctrl-C one line

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from data.bins import find_folder, made_folder
from data.corpus import folder_path
from scripts.common import (end_of_links, fail, make_out_folder, must_be_writable, note, one_line_parser, printing,
                            write_result)

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ['--use_fsdp=False', '--use_ghost=False']       # whatever a config file says
FLAGS = {'plain': PLAIN, 'ddp': PLAIN, 'fsdp': [*PLAIN, '--use_fsdp=True'], 'ghost': ['--use_ghost=True']}
FORCED = ['--init_from=scratch', '--eval_interval=1000000000', '--eval_iters=1', '--checkpoint_interval=0',
          '--max_iters=1000000000', '--log_interval=1000000000', '--wandb_log=False', '--eval_only=False']


# ---- taking turns: every runner is a thread that moves only when turn() lets it, up to its next optimizer step -------
class Stop(BaseException):
    """Ends a runner from within its optimizer."""


local, paused = threading.local(), threading.Semaphore(0)


def start(name, body, card):
    """A runner that will execute body(runner) and hold after each optimizer step in it; card: 'cuda:N', or None."""
    runner = SimpleNamespace(name=name, on_gpu=card is not None, go=threading.Semaphore(0), stop=False, over=False,
                             error=None, profile=None, space={}, steps=[], micros=[], waits=[], marks=[], fetches=[],
                             batches=[], used=[])

    def run():
        local.runner = runner
        if card:
            torch.cuda.set_device(card)
        runner.go.acquire()
        runner.began = clock(runner)
        try:
            body(runner)
        except BaseException as error:      # whatever ended it is for the main thread to judge
            light = isinstance(error, (Stop, torch.OutOfMemoryError))     # a traceback would keep the tensors alive
            runner.error = error.with_traceback(None) if light else error
        runner.over = True
        runner.space.clear()                # lets go of the GPU's memory
        paused.release()

    threading.Thread(target=run, daemon=True).start()
    return runner


def turn(runner):
    """Let the runner go on to the end of its next optimizer step, or to its own end."""
    runner.allocated = torch.cuda.memory_allocated() if runner.on_gpu else 0
    if runner.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runner.go.release()
    paused.acquire()


def clock(runner):
    """Seconds, once the GPU has done all it was given."""
    if runner.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def mark(runner):
    """This point in the GPU's queue; on a CPU, in time."""
    if not runner.on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    """Milliseconds from mark a to mark b."""
    return (b - a) * 1e3 if isinstance(a, float) else a.elapsed_time(b)


def before_update(optimizer, args, kwargs):
    local.runner.marks.append(mark(local.runner))       # ends the last micro-batch; clipping is in it, 0.1% of a step


def after_update(optimizer, args, kwargs):
    runner = local.runner
    seconds = clock(runner) - runner.began
    if runner.profile:
        runner.profile.stop()
    if not runner.steps:
        runner.first_seconds = seconds
        runner.own = torch.cuda.memory_allocated() - runner.allocated if runner.on_gpu else 0
    elif runner.on_gpu:     # what others hold meanwhile is not this mode's
        runner.peak = (torch.cuda.max_memory_allocated() - runner.allocated + runner.own) / 2**30
    n = runner.space['micro_batches']
    marks = runner.marks[-n - 1:]                       # those before belong to ghost's validation pass
    runner.steps.append(seconds)
    runner.micros.append([between(a, b) for a, b in zip(marks, marks[1:])])
    runner.waits.append(sum(between(a, b) for a, b in runner.fetches) / 1e3 / seconds)
    runner.used = [(X.contiguous(), Y.contiguous()) for X, Y in runner.batches[:n]]     # as nanoGPT's batches are
    runner.batches, runner.marks, runner.fetches = runner.batches[n:], [], []
    if len(runner.steps) == 1:
        watch(runner)
    paused.release()
    runner.go.acquire()
    if runner.stop:
        raise Stop
    if runner.profile:
        runner.profile.start()
    runner.began = clock(runner)


def watch(runner):
    """From its second step on, train.py's own functions tell when a micro-batch begins and when it waits for data."""
    fetch, sync = runner.space.get('train_batch'), runner.space.get('sync_gradients')
    if fetch is None:       # the peer, which tells by itself
        return

    def train_batch(*args):
        begin = mark(runner)
        X, Y = fetch(*args)[:2]
        runner.fetches.append((begin, mark(runner)))
        runner.batches.append((X, Y))
        return X, Y

    def sync_gradients(last):
        runner.marks.append(mark(runner))
        sync(last)

    runner.batches = [(runner.space['X'], runner.space['Y'])]       # the next step's first, fetched ahead
    runner.space.update(train_batch=train_batch, sync_gradients=sync_gradients)


def train(settings, folder):
    """A runner's body: train.py with these arguments."""
    def body(runner):
        path = str(ROOT / 'train.py')
        sys.argv = [path, *settings, *FORCED, f'--out_dir={tempfile.mkdtemp(dir=folder)}']
        runner.space.update(__name__='__main__', __file__=path)
        exec(compile(Path(path).read_text(encoding='utf-8'), path, 'exec'), runner.space)
    return body


def peer(model_file, ours):
    """A runner's body: a nanoGPT model in nanoGPT's loop, on the batches that the runner `ours` has just used."""
    def body(runner):
        spec = importlib.util.spec_from_file_location('peer_model', model_file)
        module = sys.modules['peer_model'] = importlib.util.module_from_spec(spec)      # dataclasses look it up there
        spec.loader.exec_module(module)
        c = SimpleNamespace(**{k: v for k, v in ours.space.items() if not k.startswith('__')})
        if ours.over:
            return
        shape = {name: c.shape[name] for name in ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias')}
        model = module.GPT(module.GPTConfig(vocab_size=c.vocab_size, dropout=c.dropout, **shape)).to(c.device)
        optimizer = model.configure_optimizers(c.weight_decay, c.learning_rate, (c.beta1, c.beta2), c.device_type)
        model = torch.compile(model) if c.compile else model
        runner.space.update({k: ours.space[k] for k in ('micro_batches', 'batch_size', 'tokens_per_step',
                                                        'flops_per_step', 'peak')})
        while True:
            for X, Y in ours.used:
                runner.marks.append(mark(runner))
                with torch.autocast(c.device_type, getattr(torch, c.dtype), enabled=c.dtype != 'float32'):
                    loss = model(X, Y)[1] / len(ours.used)
                loss.backward()
            if c.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return body


def raise_error(runner):
    """What has ended a runner ends the benchmark; but for a lack of memory, which is a result."""
    if isinstance(runner.error, SystemExit):    # train.py has said why
        sys.exit(runner.error.code)
    if runner.error and not isinstance(runner.error, (Stop, torch.OutOfMemoryError)):
        raise runner.error


def profile_step(runner, folder):
    """One more step, its trace and its table of kernels as files in `folder`. All ranks take it, rank 0 writes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if runner.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = runner.profile = torch.profiler.profile(activities=activities)
    turn(runner)
    raise_error(runner)
    runner.profile = None
    if runner.over or os.environ.get('RANK', '0') != '0':
        return
    path = str(Path(folder, f'{runner.name.replace("+", "_")}_{runner.space["batch_size"]}'))
    for ending in ('.json', '.txt'):
        must_be_writable(f'{path}{ending}')
    profile.export_chrome_trace(end_of_links(f'{path}.json'))       # which would put a file in a link's place
    by = f'self_{"cuda" if runner.on_gpu else "cpu"}_time_total'
    table = profile.key_averages().table(by, row_limit=40, max_name_column_width=90)
    write_result(f'{path}.txt', table.encode())


def contest(runners, steps, profile):
    """First step, warm-up, then `steps` rounds in turn. Returns a row of figures for each runner."""
    for runner in runners:
        turn(runner)
        if not runner.over:
            turn(runner)
    for _ in range(steps):
        for runner in runners:
            if not runner.over:
                turn(runner)
    rows = []
    for runner in runners:
        raise_error(runner)
        if runner.error:
            rows.append({'name': runner.name, 'error': 'out of memory'})
        elif not runner.steps:      # the peer of one that ran out of memory
            rows.append({'name': runner.name, 'error': 'no batches to run on'})
        else:
            rows.append(figures(runner, runners[0]))
    for runner in runners:
        if profile and not runner.over:
            profile_step(runner, profile)
    for runner in runners:
        if not runner.over:
            runner.stop = True
            turn(runner)
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def figures(runner, first):
    space, seconds = runner.space, median(runner.steps[2:])
    world = space.get('world_size', 1)
    pairs = [] if first.over else [a / b * space['tokens_per_step'] / first.space['tokens_per_step']
                                   for a, b in zip(first.steps[2:], runner.steps[2:])]
    return dict(name=runner.name, batch_size=space['batch_size'], micro_batches=space['micro_batches'],
                world_size=world,
                micro_ms=median(m for step in runner.micros[2:] for m in step), step_ms=seconds * 1e3,
                tokens_per_s=space['tokens_per_step'] / seconds,
                mfu=space['flops_per_step'] / seconds / space['peak'] / world if space['peak'] else None,
                peak_gib=getattr(runner, 'peak', None), first_s=runner.first_seconds,
                data_share=None if runner.name == 'peer' else median(runner.waits[2:]),
                ratio=median(pairs) if pairs else None, ratios=pairs, steps_ms=[s * 1e3 for s in runner.steps[2:]])


def show(rows):
    def cell(row, key, form, times=1):
        return 'n/a' if row.get(key) is None else format(row[key] * times, form)
    print(f'{"mode":12}{"batch":>6}{"micro ms":>10}{"step ms":>10}{"tokens/s":>12}{"MFU":>8}{"peak GiB":>10}'
          f'{"first s":>9}{"data":>7}{"ratio":>8}')
    for row in rows:
        if 'error' in row:
            print(f'{row["name"]:12}{row["batch_size"]:6}  {row["error"]}')
            continue
        print(f'{row["name"]:12}{row["batch_size"]:6}{cell(row, "micro_ms", "10.2f")}{cell(row, "step_ms", "10.1f")}'
              f'{cell(row, "tokens_per_s", "12,.0f")}{cell(row, "mfu", ".1%"):>8}{cell(row, "peak_gib", ".2f"):>10}'
              f'{cell(row, "first_s", "9.1f")}{cell(row, "data_share", ".1%"):>7}{cell(row, "ratio", ".3f"):>8}',
              flush=True)


# ---- the loader alone ------------------------------------------------------------------------------------------------
def resident():
    """Bytes of memory that this process holds, or held at most; None where neither is known."""
    try:
        return importlib.import_module('psutil').Process().memory_info().rss
    except Exception:       # missing or broken
        pass
    try:
        usage = importlib.import_module('resource')
    except ImportError:
        return None
    return usage.getrusage(usage.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def load(settings, folder, card):
    """A row of figures for each data_order, of a train.py held after its first step."""
    rows = []
    for order in 'imports', 'random', 'epoch':
        tiny = ['--n_layer=1', '--n_head=1', '--n_embd=8', '--compile=False', '--gradient_accumulation_steps=1',
                f'--data_order={"random" if order == "imports" else order}']
        runner = start(order, train(settings + tiny, folder), card)
        with open(os.devnull, 'w') as silence, redirect_stdout(silence):
            turn(runner)
        raise_error(runner)
        if order != 'imports':
            rows.append(time_batches(runner, order))
        runner.stop = True
        turn(runner)
    return rows


def time_batches(runner, order):
    offsets_of, read, samples = (runner.space[k] for k in ('train_offsets', 'read_windows', 'batch_size'))
    times = []
    for i in range(10100):
        if i == 100:        # by now all that is allocated once has been
            before = resident()
        begin = time.perf_counter()
        offsets = offsets_of(i, np.arange(samples))
        chosen = time.perf_counter()
        read('train', offsets)
        times.append((chosen - begin, clock(runner) - begin))
    after = resident()
    choice, whole = np.median(times[100:], 0) * 1e6
    grown = None if after is None else (after - before) / 2**20
    return dict(order=order, open_s=runner.first_seconds, batch_us=whole, offsets_us=choice, grown_mib=grown)


def show_loader(rows):
    print(f'{"order":10}{"open s":>8}{"batch us":>10}{"offsets us":>12}{"memory MiB":>12}')
    for row in rows:
        grown = 'n/a' if row['grown_mib'] is None else f'{row["grown_mib"]:.1f}'
        print(f'{row["order"]:10}{row["open_s"]:8.2f}{row["batch_us"]:10.0f}{row["offsets_us"]:12.0f}{grown:>12}')


# ---- what to run -----------------------------------------------------------------------------------------------------
def parse():
    """(arguments, those for train.py, modes, micro-batches to compare); one line and the end if something is wrong."""
    parser = one_line_parser(__doc__, '[options] [config.py ...] [--name=value ...]')
    parser.add_argument('--modes', default='plain', help='comma-separated')
    parser.add_argument('--peer', metavar='DIR', help='a nanoGPT checkout, or a folder with its model.py; needs plain')
    parser.add_argument('--steps', type=int, default=5, help='timed steps of each mode')
    parser.add_argument('--nproc', type=int, default=2, help='processes for ddp and fsdp')
    parser.add_argument('--batch_sizes', help='comma-separated micro-batches to compare; a step keeps its --samples')
    parser.add_argument('--samples', type=int, default=480, help='samples per step, with --batch_sizes')
    parser.add_argument('--data', action='store_true', help='the loader alone, see above')
    parser.add_argument('--profile', metavar='DIR', type=folder_path,
                        help='one step more: a trace for chrome://tracing, and a table')
    parser.add_argument('--json', metavar='FILE', help='all figures')
    parser.add_argument('--child', help=argparse.SUPPRESS)      # set for the processes that torchrun starts
    args, settings = parser.parse_known_args()
    modes = ['plain+ghost' if mode == 'ghost' else mode for mode in args.modes.split(',')]
    for mode in modes:
        base, *extra = mode.split('+')
        if base not in ('plain', 'ddp', 'fsdp') or extra not in ([], ['ghost']):
            fail(f'--modes: {mode!r} is none of plain, ddp, fsdp, ghost, ddp+ghost, fsdp+ghost')
    for name in 'steps', 'nproc', 'samples':
        if vars(args)[name] < 1:
            fail(f'--{name}={vars(args)[name]}: must be at least 1')
    if args.nproc > 1024:
        fail(f'--nproc={args.nproc}: must be at most 1024')
    if args.peer and 'plain' not in modes:
        fail('--peer runs on the batches of plain: name plain among the --modes')
    if args.peer and not Path(args.peer, 'model.py').is_file():
        fail(f'--peer: no model.py in {args.peer}')
    sizes = [None]
    if args.batch_sizes:
        try:
            sizes = [int(size) for size in args.batch_sizes.split(',')]
        except ValueError:
            fail(f'--batch_sizes={args.batch_sizes}: expected numbers, comma-separated')
        if args.data:
            fail('--data takes one --batch_size, no --batch_sizes')
        for size in sizes:
            if size < 1 or args.samples % size:
                fail(f'--batch_sizes: {args.samples} samples per step (--samples) are no multiple of {size}')
    if args.json is not None:
        with made_folder(Path(args.json).parent):
            must_be_writable(args.json)
    if args.profile:
        make_out_folder(args.profile, '--profile')
    return args, settings, modes, sizes


def read_config(settings):
    """{name: value} of all settings of a train.py that is started with these arguments."""
    path = ROOT / 'train.py'
    text = path.read_text(encoding='utf-8')
    space = {'__file__': str(path)}
    exec(text[:text.index('configure(globals())')].rpartition('\n')[0], space)      # imports and defaults
    return configure(space, settings)[0]


def make_data(args, config, folder):
    """The dataset to run on: the one of the settings if it is prepared, else a made-up one in `folder`."""
    name = config['dataset']
    if args.data:
        for split, size in ('train', 20 * 10**9), ('val', 2**20):
            try:
                with open(Path(folder, f'{split}.bin'), 'wb') as file:
                    file.truncate(size)     # all zeros, which take no room on most file systems
            except OSError as error:
                fail(f'--data: {error.strerror} for 20 GB in {folder}: name a better place, TMPDIR=...')
        Path(folder, 'meta.json').write_text('{"vocab_size": 64}')      # logits of 50,257 would need 2.5 GB
        return folder
    if all(os.path.lexists(find_folder(name) / f'{split}.bin') for split in ('train', 'val')):
        return name
    note(f"dataset {name} is not prepared: random tokens of GPT-2's vocabulary instead")
    for split in 'train', 'val':
        tokens = np.random.default_rng(0).integers(0, 50257, 2**20).astype('<u2')
        write_result(Path(folder, f'{split}.bin'), tokens.tobytes())
    return folder


def run_here(args, settings, modes, card, folder):
    """Rows of the modes that run in this process, and of the peer, in turn."""
    runners = []
    for mode in modes:
        flags = [flag for part in mode.split('+') for flag in FLAGS[part]]
        runners.append(start(mode, train(settings + flags, folder), card))
        if mode == 'plain' and args.peer:
            runners.append(start('peer', peer(Path(args.peer, 'model.py'), runners[-1]), card))
    argv, said = sys.argv, io.StringIO()        # train.py has arguments of its own
    try:
        with redirect_stdout(said):
            return contest(runners, args.steps, args.profile)
    except SystemExit as end:
        sys.argv = argv
        if end.code == 1:       # a step that was not finite: train.py says so on standard output
            note(said.getvalue().splitlines()[-1])
        raise
    finally:
        sys.argv = argv


def run_by_torchrun(args, settings, mode, folder):
    """The row of a mode of several processes, which run this script as torchrun's children."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={args.nproc}',
               __file__, f'--child={folder}/rows.json', f'--modes={mode}', f'--steps={args.steps}', *settings]
    if args.profile:
        command.append(f'--profile={args.profile}')
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors='replace') as torchrun:
        try:
            _, stderr = torchrun.communicate()
        except BaseException:       # Ctrl-C or SIGTERM: it is to end its processes
            torchrun.terminate()
            raise
    if torchrun.returncode:
        lines = [line for line in stderr.splitlines() if line.startswith(('train.py: ', 'bench.py: '))]
        if lines:
            fail(lines[0].removeprefix('bench.py: '))
        print(stderr[-3000:], file=sys.stderr)
        fail(f'{mode} failed, as its processes say above', code=1)
    row, = json.loads(Path(folder, 'rows.json').read_text())
    return row


def compare(args, settings, modes, size, card, folder):
    """Rows of all modes at one micro-batch, None for that of the settings."""
    if size is not None:
        settings = [*settings, f'--batch_size={size}', f'--gradient_accumulation_steps={args.samples // size}']
    here = [mode for mode in modes if mode.startswith('plain') or args.child]
    rows = run_here(args, settings, here, card, folder) if here else []
    for mode in modes:
        if mode in here:
            continue
        row = run_by_torchrun(args, settings, mode, folder)
        first = rows[0] if rows else row
        if 'error' not in first and 'error' not in row:
            row['ratio'] = row['tokens_per_s'] / row['world_size'] / first['tokens_per_s'] * first['world_size']
        rows.append(row)
    for row in rows:
        row.setdefault('batch_size', size or 0)
    return rows


def main():
    args, settings, modes, sizes = parse()
    config = read_config(settings)
    card = None
    if torch.cuda.is_available() and not config['device'].startswith(('cpu', 'mps')):
        card = config['device'] if ':' in config['device'] else f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
        torch.cuda.set_device(card)
    if args.profile:
        with torch.profiler.profile():      # it wants the main thread for its first start
            pass
    register_optimizer_step_pre_hook(before_update)
    register_optimizer_step_post_hook(after_update)
    signal.signal = lambda *_: None     # train.py sets handlers, which a thread may not; Ctrl-C ends this anyway

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if not any(setting.startswith('--dataset=') for setting in settings):
            settings = [*settings, f'--dataset={make_data(args, config, folder)}']
        if args.data:
            rows = load(settings, folder, card)
            show_loader(rows)
        else:
            for size in sizes:
                of_size = compare(args, settings, modes, size, card, folder)
                if not args.child:
                    show(of_size)
                rows += of_size
    if args.child:
        if os.environ['RANK'] == '0':
            Path(args.child).write_text(json.dumps(rows))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os._exit(0)     # threads of the process group may still wait
    if args.json is not None:
        device = torch.cuda.get_device_name() if card else 'cpu'
        figures_of_all = dict(torch=torch.__version__, device=device, settings=settings, rows=rows)
        write_result(args.json, json.dumps(figures_of_all, indent=1).encode())
    if args.batch_sizes:
        done = [row for row in rows if row['name'] == modes[0] and 'error' not in row]
        if not done:
            print('best: none, all ran out of memory')
            return
        best = max(done, key=lambda row: row['tokens_per_s'])['batch_size']
        print(f'best: --batch_size={best} --gradient_accumulation_steps={args.samples // best}')


if __name__ == '__main__':
    with printing():
        main()
