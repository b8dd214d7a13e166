"""nanogpt-loop-compiled: nanoGPT's loop with nanoGPT's `compile = True`."""

import functools

from torchpar.peers import nanogpt_loop

train = functools.partial(nanogpt_loop.train, compiled=True)
