"""The parts of docs/benchmarks.md in their order: title and how each is measured. Numbers come from results.json."""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    """``name`` is the module that measures it."""

    name: str
    title: str
    how: str


SECTIONS = (
    Section(
        "losses",
        "Losses against loops",
        "Structure and category loss of a batch, forward and backward. The plain loop takes one token after the "
        "other, as the equations read, over a few positions and scaled up to all; the best loop takes the tensors "
        "apart once and runs in full. Fastest of each.",
    ),
    Section(
        "lesions",
        "Lesions against NumPy",
        "All lesions of a batch at once, in CPU time of one thread, against the usual ways, which paint the same "
        "lesions. Below it, their share of a ViT-tiny training step with a small decoder, by the clock.",
    ),
    Section(
        "loader",
        "Packed films against decoding",
        "Random batches of 224 px from a pack, and from the JPEG files of 256 px it was made of, in turns; the "
        "median of the ratios. The films are phantoms.",
    ),
    Section(
        "step",
        "A step against its bare networks",
        "Whole: lesions, student, teacher, Sinkhorn, prototypes, losses, backward, AdamW, EMA. Bare: the same "
        "networks forward, and backward for the student, and AdamW. In turns; the median of the ratios.",
    ),
    Section(
        "utilisation",
        "FLOP/s against the peak",
        "ViT-B/16 at 224 px in fp32 on all threads. *Encoder* is its forward, backward, clipping and AdamW, *pre- "
        "training step* all of afire's step. FLOPs are counted on the run, fused attention by formula; what a "
        "kernel computes twice counts once. The peak is the fastest matrix product of the same run, before or "
        "after the networks, among squares and the products that ViT-B consists of.",
    ),
    Section(
        "overheads",
        "What usually slows a step down",
        "The ways that are known to cost time, each against afire's, at the size of ViT-B: the optimiser, the "
        "teacher's EMA, and attention on views of one product against contiguous copies. In turns, the fastest of "
        "each; attention is one of 20 blocks, forward and backward. Then the memory of whole steps: freed memory kept "
        "and huge pages, as the command line has it, against the default, medians of three processes each.",
    ),
    Section(
        "scaling",
        "The command against its step, and processes",
        "`afire pretrain` as a user starts it (pack, journal, checkpoint, summary) against its step on a batch "
        "that lies in memory; then with `torch.distributed.run` and gloo, two processes of one thread against "
        "one. The batch of a process and the number of steps stay the same, so two processes get twice the films. Two "
        "bare steps at once that exchange nothing show what the machine itself allows. Three rounds in turns, the "
        "fastest of each: this machine slows down for minutes at a time.",
    ),
    Section(
        "throughput",
        "Images/s against the batch size",
        "Whole pre-training steps on films that lie in memory, all sizes in turns, the fastest of each.",
    ),
    Section(
        "memory",
        "Peak memory against the batch size",
        "Each size in a process of its own: the most resident memory during two steps, less that of the process "
        "with the model made and no step taken. That includes gradients and AdamW's moments, which do not grow "
        "with the batch.",
    ),
    Section(
        "detect",
        "`afire detect run` against the forward passes",
        "A detector of random weights whose score needs every network. Bare: teacher, student, head and decoder "
        "on films that lie in memory. Run: JPEG files listed, decoded, resized, judged, scored and journalled, "
        "with pictures also three files written for each film. Files lie in memory (/dev/shm) where there is room. The "
        "clock of the wall, medians of the ratios of five rounds, three with ViT-B.",
    ),
    Section(
        "startup",
        "Start of the command line",
        "Whole processes, in turns, medians.",
    ),
)
NAMES = tuple(section.name for section in SECTIONS)
