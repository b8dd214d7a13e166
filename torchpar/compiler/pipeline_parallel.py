"""Pipeline parallelism by placements: torch-compiler refuses it, for DTensor has no shift along a split dim.

It would be so: an x_S (S, ...) is split over pp by its first dim, each of S ranks with the microbatch of its
stage. A tick computes all stages and shifts the results by one: a new microbatch enters, one leaves. Autograd
makes the backward pipeline, in reverse: GPipe. Of such a shift XLA makes a message to the next rank
(`jaxpar/compiler`). DTensor (2.13) can only split another dim, roll, and split the stages again: two
all-to-alls, which on a CPU it makes of gathers, so that every rank receives the results of all stages.
"""
