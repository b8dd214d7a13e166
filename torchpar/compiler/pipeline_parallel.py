"""Pipeline parallelism by placements: torch-compiler rejects it. DTensor has no shift along a split dim.

A pipeline would be an x_S (S, ...) that is split over pp along dim 0. Each of S ranks has the microbatch of
its stage. A tick computes all stages and shifts their outputs by one; one microbatch enters and one leaves.
Autograd makes the backward pipeline, in reverse: GPipe. XLA compiles such a shift to a message to the next
rank (`jaxpar/compiler`). DTensor can only split another dim, roll, and split the stages again. These are two
all-to-alls, which are gathers on a CPU, so that every rank would receive the outputs of all stages.
"""
