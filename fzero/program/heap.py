"""Memory that a step frees stays with the process, for the next step.

[Note: pages that come and go] A step's activations come and go. glibc gives what is free at the end
of its heap back to the system once that is more than a threshold, and the system clears each page
anew when it is asked for again: 1,900 pages in a step of two million parameters, a tenth of its
processor time. The threshold is twice the largest block that was mapped and freed so far, up to 64
MiB (mallopt(3), M_MMAP_THRESHOLD). So one block of the largest size that counts is taken and freed;
none of its pages is ever touched. Who has set a threshold by hand (MALLOC_TRIM_THRESHOLD_) keeps
it, larger programs know the size of their memory better than this, and other allocators take no
notice.
"""

import torch


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB of freed memory; what it does not free stays as it is."""
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")  # and freed: nothing holds it


# glibc's DEFAULT_MMAP_THRESHOLD_MAX, less what an allocation has beside it
_LARGEST = 2**25 - 2**16
