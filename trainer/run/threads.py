"""Set how many threads torch uses on a CPU: as asked for, as in the resumed run, or by a trial."""

from __future__ import annotations

import os
import time

import torch

from retrieval.resources import allowed, faster_threads, told_allowed, told_threads
from trainer.run.device import to_input
from trainer.run.scoring import Embeds, embed

CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # whoever sets them has decided
PIXELS = 16 * 64 * 64  # of all images of a trial: a fraction of a second for a ResNet-50


def use_threads(network: Embeds, size: int, wanted: int = 0, before: int = 0) -> str:
    """Set the threads of torch; return a note for the user, or nothing.

    size: sides of the images. wanted: by the user, 0: not said. before: those of a run that is
    resumed; others would change the last bits of its result.
    """
    if wanted:
        torch.set_num_threads(allowed(wanted))
        return told_allowed(wanted)
    if before:
        torch.set_num_threads(allowed(before))
        return ""
    if any(os.environ.get(name) for name in CHOSEN):
        return ""
    most = allowed(torch.get_num_threads())
    device = torch.device("cpu")
    images = torch.zeros(max(2, PIXELS // size**2), 3, size, size, dtype=torch.uint8)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        embed(network, [images], lambda batch: to_input(batch, device))
        return time.perf_counter() - began

    if most > 1:
        seconds(most)  # the first run allocates
    threads, gain = faster_threads(seconds, most)
    torch.set_num_threads(threads)
    return told_threads(threads, gain, most) if most > 1 else ""
