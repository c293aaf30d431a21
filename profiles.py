"""
Where a run's time and memory go. Each rank writes files of its own into out_dir/profile:

rank0.json.gz       a trace of the profiled steps, for https://ui.perfetto.dev or chrome://tracing
rank0.txt           a table of the same: operators, kernels and exchanges between ranks, by the time each takes itself
rank0_memory.pickle a snapshot of the GPU's memory and of the allocations before, for https://pytorch.org/memory_viz
"""
import os
import sys
from pathlib import Path

import torch

from configurator import tell
from data.bins import write_file

WARM_UP = 2         # steps of a run before the first that is profiled: they compile, and make what is made once
EVENTS = 200_000    # allocations that are remembered, a few steps' worth
running = []        # the profiler, while it runs


def profile_step(say, out_dir, rank, done, steps, memory, last):
    """
    Call it after each step; done: how many this run has taken. After WARM_UP of them `steps` are profiled. Then, or if
    this is the run's last step, this rank writes its files, with `memory` also a snapshot, and says so by say(line).
    Returns whether it has written.
    """
    end = WARM_UP + max(steps, 1)
    if steps and done == WARM_UP and not last:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        running.append(torch.profiler.profile(activities=activities))
        running[0].start()
    if not (steps or memory) or done > end or (done < end and not last):
        return False
    written = []
    if running:
        profiler = running.pop()
        profiler.stop()
        written += write_profile(profiler, out_dir, rank)
    if memory:
        written.append(write_snapshot(out_dir, rank))
    if written:
        say(f'profiled: {", ".join(written)}')
    else:
        say(f'nothing is profiled: this run ends after {done} steps, and the first {WARM_UP} are left out')
    return bool(written)


def write_profile(profiler, out_dir, rank):
    """The trace and the table, each whole when its name appears; returns their paths."""
    folder = Path(out_dir, 'profile')
    folder.mkdir(parents=True, exist_ok=True)      # on another machine out_dir may be missing
    trace, table = str(folder / f'rank{rank}.json.gz'), str(folder / f'rank{rank}.txt')
    profiler.export_chrome_trace(str(folder / f'rank{rank}.tmp.json.gz'))
    os.replace(folder / f'rank{rank}.tmp.json.gz', trace)
    by = 'self_cuda_time_total' if torch.cuda.is_available() else 'self_cpu_time_total'
    text = profiler.key_averages().table(by, row_limit=-1, max_name_column_width=90)
    write_file(Path(table), text.encode())
    return [trace, table]


def record_memory(out_dir, rank):
    """From now on this rank's allocations on the GPU are recorded, and written should memory run out."""
    torch.cuda.memory._record_memory_history(max_entries=EVENTS)
    report = sys.excepthook

    def excepthook(kind, error, trace):
        if isinstance(error, torch.OutOfMemoryError):
            tell(f'wrote {write_snapshot(out_dir, rank)}', sys.stdout)
        report(kind, error, trace)
    sys.excepthook = excepthook


def write_snapshot(out_dir, rank):
    """The GPU's memory as it is and the allocations recorded before; returns the file's path."""
    path = Path(out_dir, 'profile', f'rank{rank}_memory.pickle')
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(f'{path}.tmp')
    os.replace(f'{path}.tmp', path)
    return str(path)
