"""Record a step of torch's DistributedDataParallel and one of fddp, and draw both as an SVG.

Two ranks run on this machine, each with one thread. Steps take turns, and the median step of each
is drawn: `python docs/images/timelines.py docs/images/timelines.svg`.
"""

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fddp
from fddp.core.timeline import BucketTimes, StepTimes, Timeline
from fddp.viz import plot_timeline

CAP_MB = 4.0


class RecordedDDP:
    """torch's DDP on a module, with the times of its last step.

    A communication hook does what DDP does without one, and notes when each bucket is launched and
    done. Backward ends with the last gradient: DDP then waits for its buckets.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = module
        self._ddp = DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
        self._ddp.register_comm_hook(group, self._reduce)
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self._note_gradient)
        self._launched: list[tuple[int, int, float]] = []
        self._done_s: dict[int, float] = {}
        self._gradient_s = 0.0

    def step(self, x: Tensor) -> StepTimes:
        self._module.zero_grad()
        self._launched, self._done_s = [], {}
        loss = self._ddp(x).square().mean()
        begun_s = time.perf_counter()
        loss.backward()
        end_s = time.perf_counter()
        buckets = tuple(
            BucketTimes(number, nbytes, launch_s, launch_s, self._done_s[number])
            for number, nbytes, launch_s in self._launched
        )
        return StepTimes(buckets, begun_s, min(self._gradient_s, end_s), end_s)

    def _note_gradient(self, param: Tensor) -> None:
        self._gradient_s = time.perf_counter()

    def _reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        number, buffer = bucket.index(), bucket.buffer().div_(group.size())
        # The gradient that fills a bucket arrives just before, and its own hook runs after DDP's.
        self._gradient_s = time.perf_counter()
        self._launched.append((number, buffer.nbytes, self._gradient_s))

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._done_s[number] = time.perf_counter()
            return future.value()[0]

        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(done)


def fddp_step(sync: fddp.GradSync, module: nn.Module) -> Callable[[Tensor], StepTimes]:
    apply, params, buffers = fddp.functionalize(module)
    step = sync.value_and_grad(
        lambda params, x: apply(params, buffers, x)[0].square().mean(), with_info=True
    )
    return lambda x: step(params, x)[-1].timeline


def record(path: Path, steps: int, width: int) -> None:
    """Run on each rank; rank 0 writes the median step of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    module = nn.Sequential(*layers)
    x = torch.randn(128, width)
    sync = fddp.GradSync(dict(module.named_parameters()), bucket_cap_mb=CAP_MB)
    ddp = RecordedDDP(module, dist.group.WORLD)
    runs = {
        "torch DDP over gloo": ddp.step,
        f"fddp over {'shared memory' if sync.transport == 'shm' else sync.transport}": fddp_step(
            sync, module
        ),
    }
    taken: dict[str, list[StepTimes]] = {name: [] for name in runs}
    for number in range(steps + 3):
        for name, run in runs.items():
            dist.barrier()
            times = run(x)
            if number >= 3:  # buckets are rebuilt after the first
                taken[name].append(times)
    if dist.get_rank() == 0:
        median = {
            name: sorted(each, key=lambda times: times.end_s - times.backward_start_s)[steps // 2]
            for name, each in taken.items()
        }
        path.write_bytes(pickle.dumps(median))
    sync.close()
    dist.barrier()
    dist.destroy_process_group()


def draw(steps: dict[str, Timeline], out: Path) -> None:
    """Draw the steps below each other, on one scale."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.6 * len(steps)), layout="constrained")
    axes = figure.subplots(len(steps), 1, sharex=True)
    longest_ms = 0.0
    for ax, (name, timeline) in zip(axes, steps.items(), strict=True):
        plot_timeline(timeline, ax)
        ax.set_title("")
        ax.set_title(
            f"{name}: {timeline.step_s * 1e3:.1f} ms, of which {timeline.exposed_s * 1e3:.1f} ms "
            f"after backward",
            loc="left",
            fontsize=9.5,
        )
        ax.set_yticks([0, 1], ["backward", "all-reduces"])
        longest_ms = max(longest_ms, timeline.step_s * 1e3)
    for label in axes[-1].get_legend().get_texts():
        if label.get_text() == "exposed":  # one word for another figure in the tables of the docs
            label.set_text("after backward")
    for ax in axes[:-1]:
        ax.set_xlabel("")
        ax.get_legend().remove()
    axes[-1].set_xlabel("ms since the start of backward")
    axes[-1].set_xlim(0.0, 1.02 * longest_ms)
    # Text stays text; names within the file do not change from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fddp"}):
        figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="SVG to write")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024, help="width of the eight layers")
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        record(args.out, args.steps, args.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options = ["--steps", str(args.steps), "--width", str(args.width), "--record"]
        subprocess.run([sys.executable, *launcher, __file__, str(path), *options], check=True)
        recorded: dict[str, StepTimes] = pickle.loads(path.read_bytes())
        draw({name: times.to_timeline() for name, times in recorded.items()}, args.out)


if __name__ == "__main__":
    main()
