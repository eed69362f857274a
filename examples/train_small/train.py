"""Train one of the small models that ship with Mosaic, from nothing, in under ten minutes on one GPU.

`python examples/train_small/train.py --family llada --out DIRECTORY --seconds 560`; the other family is `sdar`. With
`--from CHECKPOINT` a training goes on from it and adds the tasks with long answers. The schedule is in shares of the
wall time, so that a slower card trains on less data and still ends with a decayed learning rate and a saved checkpoint.
`--toy` is the same recipe for a CPU, small enough to watch; `--dry-run` measures only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from attention import BlockDiffusion, bidirectional, doubled_mask, masked
from checkpoint import restore, save
from data import Batch, Loader, Stage
from decode import evaluate
from model import SIZES, Attend, Transformer, rotary_tables
from optimizer import Muon
from torch import Tensor

from benchmarks.bench.environment import environment
from benchmarks.quality.evaluation import evaluation_set
from benchmarks.quality.items import LONG_TASKS, TASKS
from benchmarks.quality.scoring import summary

STAGES = (
    Stage(share=0.22, lengths={128: 0.4, 256: 0.6}, whole=0.25),
    Stage(share=0.18, lengths={128: 0.25, 256: 0.25, 1024: 0.5}, whole=0.1),
    Stage(share=0.20, lengths={128: 0.25, 256: 0.15, 512: 0.1, 2048: 0.3, 4096: 0.2}, whole=0.05),
    Stage(share=0.40, lengths={128: 0.3, 256: 0.15, 1024: 0.1, 2048: 0.1, 4096: 0.1, 8192: 0.25}),
)
LONG = {256: 0.7, 512: 0.75, 1024: 0.8, 2048: 0.75, 4096: 0.7, 8192: 0.7}
OTHERS = {128: 0.9, 256: 0.35, 512: 0.1}
CONTINUED = (
    Stage(share=0.4, lengths={128: 0.1, 256: 0.2, 512: 0.3, 1024: 0.3, 2048: 0.1}, tasks=OTHERS, long=LONG),
    Stage(
        share=0.6, lengths={128: 0.1, 256: 0.1, 512: 0.15, 1024: 0.2, 2048: 0.2, 4096: 0.15, 8192: 0.1}, tasks=OTHERS,
        long=LONG,
    ),
)  # fmt: skip
"""What follows on the shipped checkpoint: tasks with long answers, and a share of everything that it knows."""
LAST = (
    Stage(
        share=1.0, lengths={128: 0.35, 256: 0.2, 512: 0.15, 1024: 0.15, 2048: 0.1, 8192: 0.05},
        tasks={128: 1.0, 256: 0.35, 512: 0.1}, long=LONG, stories=0.6,
    ),
)  # fmt: skip
"""A short end on all tasks after that, in which stories count more: among long answers they suffer most."""
TOY_STAGES = (
    Stage(share=0.7, lengths={64: 1.0}, tasks={}, whole=0.1),
    Stage(share=0.3, lengths={64: 0.3, 128: 0.7}, tasks={}),
)
TOY_CONTINUED = (Stage(share=1.0, lengths={64: 0.3, 256: 0.7}, tasks={}, long={256: 0.8}),)
RATES = {"first": 2e-3, "long": 1e-3, "last": 3e-4}  # peaks
WARMUP, DECAY_FROM = 0.02, 0.6  # shares of the training time
LOG_EVERY = 50


@dataclass(kw_only=True)
class Settings:
    """What the command line says."""

    family: str
    out: Path
    seconds: float = 560.0
    reserve: float = 45.0
    tokens: int = 65_536
    rate: float = RATES["first"]
    start: Path | None = None
    stages: str = "first"
    optimizer: str = "muon"
    seed: int = 0
    workers: int = 14
    toy: bool = False
    dry_run: bool = False
    compile: bool = True


def parse(arguments: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(SIZES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and curves.json")
    parser.add_argument("--seconds", type=float, default=560.0, help="wall time of everything")
    parser.add_argument("--reserve", type=float, default=45.0, help="of it, for the last evaluation and saving")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a batch")
    parser.add_argument("--rate", type=float, help=f"peak learning rate; by --stages {RATES}")
    parser.add_argument(
        "--from", dest="start", type=Path, help="checkpoint to go on from; adds tasks with long answers"
    )
    parser.add_argument("--stages", choices=("first", "long", "last"), help="first, and long with --from")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="of the layers' matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(14, max(1, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--toy", action="store_true", help="tiny sizes and short rows, for a CPU")
    parser.add_argument("--dry-run", action="store_true", help="measure every row length for a few steps and stop")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    found = vars(parser.parse_args(arguments))
    found["stages"] = found["stages"] or ("long" if found["start"] else "first")
    found["rate"] = found["rate"] or RATES[found["stages"]]
    return Settings(**found)


def learning_rate(progress: float, peak: float) -> float:
    """Warm up, hold, then go down to zero on a straight line."""
    if progress < WARMUP:
        return peak * max(progress, 1e-3) / WARMUP
    return peak * min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


def optimizers(model: Transformer, name: str) -> list[torch.optim.Optimizer]:
    """Muon or AdamW for the layers' matrices, AdamW for the rest; norms do not decay."""
    layers = [p for p in model.layers.parameters() if p.ndim == 2]
    tables = [model.embedding, model.head]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    if name == "adamw":
        groups.append({"params": layers, "weight_decay": 0.05})
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=True)
    return [adamw] if name == "adamw" else [adamw, Muon(layers, weight_decay=0.1)]


class Trainer:
    """Model, optimizer and the shapes that they work on."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        sizes = SIZES[settings.family].toy() if settings.toy else SIZES[settings.family]
        torch.manual_seed(settings.seed)
        self.model = Transformer(sizes, compiled=self.cuda and settings.compile)
        if settings.start:
            restore(self.model, settings.start)
        self.model.to(device)
        self.optimizers = optimizers(self.model, settings.optimizer)
        self._shapes: dict[int, tuple[Tensor, Tensor]] = {}
        self._flex = (
            BlockDiffusion(settings.tokens, sizes.block, device, compiled=settings.compile)
            if sizes.block and self.cuda
            else None
        )

    def attend(self, rows: int, length: int) -> Attend:
        """Who sees whom in this batch."""
        block = self.model.sizes.block
        if not block:
            return bidirectional(rows)
        return self._flex.rows_of(length) if self._flex else masked(rows, doubled_mask(length, block, self.device))

    def tables(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of a batch."""
        if length not in self._shapes:
            position = torch.arange(length, device=self.device)
            if self.model.sizes.block:
                position = position.repeat(2)
            self._shapes[length] = rotary_tables(self.model.sizes, position.repeat(rows))
        return self._shapes[length]

    def step(self, batch: Batch, rate: float) -> Tensor:
        """One step of the optimizer; the loss stays on the device."""
        rows, length = batch.tokens.shape
        tokens, noisy, weights = (self._move(x) for x in (batch.tokens, batch.noisy, batch.weights))
        tokens, noisy = tokens.long(), noisy.long()
        block = self.model.sizes.block
        ids = torch.cat([noisy, tokens], dim=1) if block else noisy
        x_TD = self.model.hidden(ids.flatten(), *self.tables(rows, length), self.attend(rows, length), self.dtype)
        if block:
            x_TD = x_TD.unflatten(0, (rows, 2 * length))[:, :length].flatten(0, 1)
        loss, _ = self.model.loss(x_TD, tokens.flatten(), weights.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _move(self, array: Any) -> Tensor:
        """To the device; through pinned memory, since the slot is filled again soon."""
        tensor = torch.from_numpy(array.astype("int32") if array.dtype == "uint16" else array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Record:
    """Curves and evaluations, kept on disk at all times."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.values: dict[str, Any] = {**facts, "curve": [], "evaluations": []}

    def write(self, **more: Any) -> None:
        self.values |= more
        self.path.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def small_sets(settings: Settings, stage: Stage) -> list[Any]:
    """Items to watch a stage by: retrieval at its row lengths, everything else, and long answers if it has them."""
    if settings.toy:
        return evaluation_set(seed=1, tasks=("retrieval", "pair"), lengths=(128,), per_cell=1)
    if settings.stages == "last":  # a minute of training
        return evaluation_set(seed=1, tasks=(*TASKS, "frequent"), lengths=(1024,), per_cell=1, per_task=24)
    lengths = [length for length in stage.lengths if length >= 256]
    items = evaluation_set(seed=1, tasks=TASKS, lengths=lengths, per_cell=2, per_task=24)
    if stage.long:  # at one length: an answer takes as many passes over its context as it has tokens
        longest = max(length for length in lengths if length <= 2048)
        items += evaluation_set(seed=1, tasks=LONG_TASKS, lengths=(longest,), per_cell=1)
    return items


def train(settings: Settings, started: float, stages: Sequence[Stage]) -> None:
    """Train to the end of the time, evaluate, save."""
    settings.out.mkdir(parents=True, exist_ok=True)
    cpu = settings.toy or not torch.cuda.is_available()
    block = SIZES[settings.family].block
    loader = Loader(settings.seed, stages, settings.tokens, block, settings.workers)
    trainer = Trainer(settings, torch.device("cpu" if cpu else "cuda"))
    record = Record(
        settings.out / "curves.json",
        {
            "environment": environment(shlex.join(["python", *sys.argv])), "card": device_name(cpu),
            "family": settings.family, "model": trainer.model.describe(), "tokens_per_step": settings.tokens,
            "peak_learning_rate": settings.rate, "from": str(settings.start or ""), "stage": settings.stages, "seed": settings.seed,
            "stages": [asdict(stage) for stage in stages],
        },
    )  # fmt: skip
    say(f"{settings.family}: {trainer.model.num_parameters:,} parameters on {record.values['card']}")
    end = settings.seconds - settings.reserve
    step, tokens, bounds = 0, 0, _bounds(stages)
    losses: dict[int, list[Tensor]] = defaultdict(list)
    begun: float | None = None
    stage_index = logged = 0
    idle = excluded = 0.0
    while True:
        now = time.monotonic() - started
        origin = begun if begun is not None else now
        progress = (now - origin) / max(1.0, end - origin)
        if progress >= 1:
            break
        if progress >= bounds[stage_index]:
            watched = time.monotonic()
            watch(trainer, record, settings, stages[stage_index], step, now)
            save(trainer.model, settings.out)  # should the machine go away before the end
            excluded += time.monotonic() - watched
            stage_index = next(i for i, bound in enumerate(bounds) if progress < bound)
        batch = loader.next(stage_index)
        rate = learning_rate(progress, settings.rate)
        losses[batch.tokens.shape[1]].append(trainer.step(batch, rate))
        step, tokens = step + 1, tokens + batch.tokens.size
        if step == 3:
            trainer.synchronize()
            begun = time.monotonic() - started  # compiled by now: the schedule counts from here
        if step % LOG_EVERY == 0:
            means = {length: float(torch.stack(values).mean()) for length, values in sorted(losses.items())}
            losses.clear()
            now = time.monotonic() - started
            record.values["curve"].append(
                {"step": step, "seconds": round(now, 2), "stage": stage_index, "tokens": tokens, "learning_rate": rate,
                 "loss": means}
            )  # fmt: skip
            if now - logged >= 10 or step == LOG_EVERY:
                shown = " ".join(f"{length}:{value:.3f}" for length, value in means.items())
                speed = tokens / (now - (begun or 0.0) + 1e-9)
                say(f"{now:6.1f} s step {step} stage {stage_index} {speed / 1e6:.2f}M tok/s "
                    f"idle {loader.waited_s - idle:.1f} s  {shown}")  # fmt: skip
                idle, logged = loader.waited_s, now
                record.write()
    if not math.isfinite(sum(means.values()) if step >= LOG_EVERY else 0.0):
        raise SystemExit("train: the loss is not finite; nothing was saved.")
    loader.close()
    save(trainer.model, settings.out)
    record.write(steps=step, tokens=tokens, training_s=time.monotonic() - started)
    watch(trainer, record, settings, stages[-1], step, time.monotonic() - started)
    record.write(wall_s=time.monotonic() - started, evaluation_s=excluded, loader_idle_s=loader.waited_s)
    say(f"saved after {step} steps, {tokens:,} tokens, {time.monotonic() - started:.1f} s")


def device_name(cpu: bool) -> str:
    """What the training runs on."""
    return "cpu" if cpu else torch.cuda.get_device_name()


def _bounds(stages: Sequence[Stage]) -> list[float]:
    """Where each stage ends, as a share of the training time."""
    total = sum(stage.share for stage in stages)
    return [sum(stage.share for stage in stages[: i + 1]) / total for i in range(len(stages))]


def watch(trainer: Trainer, record: Record, settings: Settings, stage: Stage, step: int, now: float) -> None:
    """Decode a few held-out items, print and keep the shares."""
    before = time.monotonic()
    budget = 4_096 if settings.toy else 131_072
    scores = evaluate(trainer.model, small_sets(settings, stage), dtype=trainer.dtype, batch_tokens=budget)
    found = summary(scores)
    tasks = " ".join(
        f"{task} {value['exact']:.0%}" + (f" ({value['tokens']:.0%} of tokens)" if task in LONG_TASKS else "")
        for task, value in found["by_task"].items()
    )
    lengths = " ".join(
        f"{length}:{value['exact']:.0%}" for length, value in found["by_length"].get("retrieval", {}).items()
    )
    wrong = next((s for s in scores if not s.exact), None)
    took = time.monotonic() - before
    say(f"{now:6.1f} s evaluation ({took:.1f} s): {tasks} | retrieval {lengths}")
    if wrong:
        say(
            f"         wrong: {wrong.item.prompt[-60:]!r} -> {wrong.text[:120]!r}, expected {wrong.item.answer[:120]!r}"
        )
    record.values["evaluations"].append({"step": step, "seconds": round(now, 2), "took_s": round(took, 2), **found})
    record.write()


def dry_run(settings: Settings, stages: Sequence[Stage]) -> None:
    """Steps per second at every row length, without and with the loader."""
    block = SIZES[settings.family].block
    lengths = sorted({length for stage in stages for length in stage.lengths})
    single = [Stage(share=1.0, lengths={length: 1.0}) for length in lengths]
    loader = Loader(settings.seed, single, settings.tokens, block, settings.workers)
    trainer = Trainer(settings, torch.device("cpu" if settings.toy else "cuda"))
    for index, length in enumerate(lengths):
        compiled = time.monotonic()
        batch = loader.next(index)
        for _ in range(3):
            trainer.step(batch, 1e-4)
        trainer.synchronize()
        compiled = time.monotonic() - compiled
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < 1.0:
            trainer.step(batch, 1e-4)
            trainer.synchronize()
            count += 1
        alone = (time.monotonic() - begun) / count
        begun, waited = time.monotonic(), loader.waited_s
        for _ in range(count):
            trainer.step(loader.next(index), 1e-4)
        trainer.synchronize()
        fed = (time.monotonic() - begun) / count
        peak = 0 if settings.toy else torch.cuda.max_memory_allocated() / 2**30
        say(
            f"{length:5d}: {alone * 1e3:.1f} ms a step, {settings.tokens / alone / 1e6:.2f}M tok/s; fed by "
            f"{settings.workers} workers {fed * 1e3:.1f} ms, of which idle {(loader.waited_s - waited) / count * 1e3:.1f} ms; "
            f"first steps {compiled:.1f} s; peak {peak:.1f} GiB"
        )
    loader.close()


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str]) -> None:
    started = time.monotonic()
    settings = parse(arguments)
    full = {"first": STAGES, "long": CONTINUED, "last": LAST}
    toy = {"first": TOY_STAGES, "long": TOY_CONTINUED, "last": TOY_CONTINUED}
    stages = (toy if settings.toy else full)[settings.stages]
    run: Callable[[], None] = (
        (lambda: dry_run(settings, stages)) if settings.dry_run else (lambda: train(settings, started, stages))
    )
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
