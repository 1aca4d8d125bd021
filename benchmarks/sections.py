"""The sections of docs/benchmarks.md in order: title and method of each. The numbers come from results.json."""

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
        "Structure and category loss of a batch, forward and backward. The plain loop computes one token at a time, "
        "as in the equations; it runs for a few positions and is scaled up to all. The best loop unbinds the tensors "
        "once and runs in full. The fastest run of each counts.",
    ),
    Section(
        "lesions",
        "Lesions against NumPy",
        "CPU time of one thread to draw all lesions of a batch at once, compared with the usual implementations of the "
        "same lesions; and their share of a ViT-tiny training step with a small decoder, in wall-clock time.",
    ),
    Section(
        "loader",
        "Packed films against decoding",
        "Random batches of 224 px from a pack and from the original JPEG files of 256 px, in alternation; median of "
        "the ratios. The films are phantoms.",
    ),
    Section(
        "step",
        "A step against its bare networks",
        "Whole: lesions, student, teacher, Sinkhorn, prototypes, losses, backward, AdamW, EMA. Bare: only the forward "
        "passes of the same networks, the student's backward pass and AdamW. In alternation; median of the ratios.",
    ),
    Section(
        "methods",
        "A step of every method against its bare networks",
        "Preset `small`, 32 films. Whole: views, networks, losses, backward, AdamW, and updates after the step. Bare: "
        "the same networks on views drawn beforehand, backward from the mean of their outputs, AdamW. In alternation; "
        "median of the ratios.",
    ),
    Section(
        "utilisation",
        "FLOP/s against the peak",
        "ViT-B/16 at 224 px in fp32 on all threads. *Encoder* is forward, backward, clipping and AdamW; *pre-training "
        "step* is the complete step. FLOPs are counted during the run, fused attention by formula; recomputation does "
        "not count. The peak is the fastest matrix product measured in the same run, before or after the networks, "
        "among square products and those of ViT-B.",
    ),
    Section(
        "overheads",
        "What usually slows a step down",
        "Common overheads compared with afire's implementation, at the size of ViT-B: optimiser, teacher's EMA, and "
        "attention on views of one product or on contiguous copies. In alternation, the fastest of each; attention is "
        "one of 20 blocks, forward and backward. Then memory management in complete steps: the default compared with "
        "keeping freed memory and using huge pages, as the command line does; medians of three processes each.",
    ),
    Section(
        "scaling",
        "The command against its step, and processes",
        "`afire pretrain` as a user runs it (pack, journal, checkpoint, summary), compared with its step on a batch in "
        "memory. Then, with `torch.distributed.run` and gloo, two processes of one thread compared with one. The batch "
        "per process and the number of steps stay the same, so two processes see twice as many films. Two independent "
        "bare steps at once show the limit of the machine. Three alternating rounds, the fastest of each, because "
        "this machine slows down for minutes at a time. The reference (the bare step, one process) is measured once "
        "before and once after, and the two measurements are combined into one value.",
    ),
    Section(
        "throughput",
        "Images/s against the batch size",
        "Complete pre-training steps on images in memory, all batch sizes in alternation; the fastest of each.",
    ),
    Section(
        "memory",
        "Peak memory against the batch size",
        "Each batch size in its own process: peak resident memory during two steps, minus that of the process with the "
        "model before the first step. This includes gradients and AdamW's moments, which do not grow with the batch.",
    ),
    Section(
        "detect",
        "`afire detect run` against the forward passes",
        "A detector with random weights whose score needs every network. Bare: teacher, student, head and decoder on "
        "images in memory. Run: JPEG files are listed, decoded, resized, checked, scored and recorded. With pictures, "
        "each film's pictures are written too; the film itself is copied without its metadata, like every grey JPEG of "
        "at most 512 px, while other files are encoded. Files are in memory (/dev/shm) if there is space. Wall-clock "
        "time, medians of the ratios of five rounds (ViT-B: two). Files of 256 px, and except with ViT-B also of 512 "
        "px. The built-in detector is measured unchanged; bare is its single network.",
    ),
    Section(
        "startup",
        "Start of the command line",
        "Complete processes, in alternation; medians.",
    ),
)
NAMES = tuple(section.name for section in SECTIONS)
