"""Let the programs of one launch wait for each other."""

import triton
import triton.language as tl


@triton.jit
def wait(counter, target):
    """Wait until programs have arrived here `target` times in all; what they wrote is then seen.

    All of them must run at the same time: no more than the device has multiprocessors, and nothing else that waits.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.load(counter, volatile=True)
    tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


__all__ = ["wait"]
